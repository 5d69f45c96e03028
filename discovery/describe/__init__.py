"""Clusters in words: profiles, claims, labels, sentences, tokens, exemplars, axes, lineage.

May import `discovery.artifacts.schema`, `pipeline.token_text`, `pipeline.record` and
`capture_kernels`.
"""
