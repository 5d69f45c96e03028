"""The store in one SQLite file.

May import `pipeline.store.base`, `columns`, `verify` and `pipeline.record`.
"""
