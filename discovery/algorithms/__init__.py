"""Algorithms on arrays: sampling, voting, prototypes, metrics, shares, drift, lineage matching.

May import `discovery.artifacts`, `discovery.engines.protocol`, `pipeline.hashing` and
`capture_kernels`; reads and writes no files.
"""
