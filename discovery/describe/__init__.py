"""Clusters in words: profiles, traits, labels, exemplars and PCA axes.

May import `pipeline.tokens`, `pipeline.record` and `capture_kernels`.
"""
