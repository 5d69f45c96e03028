"""What the gate speaks: ASGI bodies, answers and CORS."""
