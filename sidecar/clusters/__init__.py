"""Clusters of the rows of the moment: re-clustered every interval, or updated with every batch.

The answering process imports `discovery.artifacts`, `discovery.describe` and NumPy here; all that
needs scikit-learn, UMAP or HDBSCAN runs in `worker`, a process of its own.
"""
