"""Runs on disk: folders, state, checkpoints, parents, history and retention.

May import `discovery.artifacts` and `discovery.algorithms`.
"""
