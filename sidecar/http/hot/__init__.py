"""The routes that carry the load, beside FastAPI: their bodies, and what they answer."""
