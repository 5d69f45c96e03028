"""Where fingerprints are kept: a SQLite file or a folder of Parquet files (DESIGN.md section 4)."""

from __future__ import annotations

from pathlib import Path

from pipeline.store.sqlite.file import BUSY_TIMEOUT_S

from .base import Appended, Counts, Group, Selection, Store

__all__ = ["Appended", "Counts", "Group", "Selection", "Store", "open_store"]

SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")


def open_store(
    url: str | Path,
    *,
    create: bool = False,
    read_only: bool = False,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
) -> Store:
    """The store at a path: SQLite for a file, or a name ending in .db, .sqlite or .sqlite3; a
    Parquet folder otherwise.

    Args:
        create: make an empty store where there is none.
        read_only: never write; needs no write permission.
        busy_timeout_s: how long to wait for another process that is writing.

    Raises:
        StoreError: missing, not ours, damaged, of a newer version, locked, or not permitted.
    """
    from pipeline.store.sqlite.store import SqliteStore

    path = Path(url)
    if path.is_file() or (path.suffix in SQLITE_SUFFIXES and not path.is_dir()):
        return SqliteStore(path, create=create, read_only=read_only, busy_timeout_s=busy_timeout_s)
    from pipeline.store.parquet.store import ParquetStore

    return ParquetStore(path, create=create, read_only=read_only, busy_timeout_s=busy_timeout_s)
