"""The store in a folder of Parquet files.

May import `pipeline.store.base`, `columns`, `verify`, `pipeline.record`, `hashing` and `durable`.

Written by hand, after a trial of deltalake 1.6.6: its local store never calls fsync, and its rate
of 8,192-row commits falls with the length of the log (figures: docs/performance.md).
"""
