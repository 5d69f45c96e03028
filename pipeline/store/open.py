"""`open_store`: which kind of store a path names."""

from __future__ import annotations

import re
from pathlib import Path

from capture_kernels.errors import StoreError

from .base import BUSY_TIMEOUT_S, Store
from .refusals import os_errors

SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
# `Path` joins the slashes of a URL: s3://bucket/key becomes s3:/bucket/key.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)


def open_store(
    url: str | Path,
    *,
    create: bool = False,
    read_only: bool = False,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
) -> Store:
    """The store at a path: SQLite for a file, or a name that ends in .db, .sqlite or .sqlite3; a
    Parquet folder otherwise.

    Args:
        create: make an empty store if there is none.
        read_only: never write; needs no write permission.
        busy_timeout_s: how long to wait for another process that is writing.

    Raises:
        StoreError: missing, not ours, damaged, of a newer version, locked, not permitted, or a URL
            (object storage has no locks and no rename, which both stores need).
    """
    if scheme := _URL.match(str(url)):
        raise StoreError(f"object storage ({scheme[1]}://) is not supported: give a local path")
    path = Path(url)
    with os_errors(path):
        if path.is_file() or (path.suffix in SQLITE_SUFFIXES and not path.is_dir()):
            from .sqlite.store import SqliteStore

            return SqliteStore(
                path, create=create, read_only=read_only, busy_timeout_s=busy_timeout_s
            )
        from .parquet.store import ParquetStore

        return ParquetStore(path, create=create, read_only=read_only, busy_timeout_s=busy_timeout_s)
