"""Where fingerprints are kept: a SQLite file or a folder of Parquet files (DESIGN.md section 4).

`open` opens either; `base` has the interface. May import `capture_kernels` and `pipeline.record`,
`durable`, `hashing`, `progress`.
"""
