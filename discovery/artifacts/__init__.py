"""Published artifacts: schema, verified reading and writing, projection, prototypes, classifier.

All that a service needs to load a run and classify with it. May import `pipeline.record`,
`pipeline.durable` and `capture_kernels`; no Dask, no UMAP, no HDBSCAN.
"""
