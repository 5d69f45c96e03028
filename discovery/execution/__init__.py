"""Where chunks are computed, and within which memory and time.

May import `discovery.engines`, `discovery.options` and `discovery.algorithms`.
"""
