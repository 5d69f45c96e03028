"""Engines: what runs a model and makes records of its attention."""
