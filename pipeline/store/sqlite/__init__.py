"""The store in one SQLite file.

May import `pipeline.store.base`, `columns` and `pipeline.record`.
"""
