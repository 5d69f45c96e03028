"""Engines: PCA, neighbours, UMAP and HDBSCAN by the libraries of a CPU or of a GPU.

May import `capture_kernels`; a library is imported by the engine that needs it.
"""
