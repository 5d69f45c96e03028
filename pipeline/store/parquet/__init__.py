"""The store in a folder of Parquet files.

May import `pipeline.store.base`, `columns` and `pipeline.record`.
"""
