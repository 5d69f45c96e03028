"""The web page: its files, what it begins with, and the relay to the engine.

Nothing of it is loaded by a sidecar without --page.
"""
