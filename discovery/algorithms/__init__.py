"""Algorithms on arrays: sampling, voting, prototypes, metrics, drift, lineage matching.

May import `discovery.artifacts` and `discovery.engines.protocol`; reads and writes no files.
"""
