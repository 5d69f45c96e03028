"""What is wrong with the rows, pages and summaries of a SQLite store, and its repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from capture_kernels.arrays import Ints
from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import Verified
from pipeline.store.columns import integers
from pipeline.store.times import MICROS
from pipeline.store.verify import bad_rows, save_rejected

from .blocks import TIME, delete_from_block, read_block
from .file import Database
from .insert import BLOCK_BITS

_SUMMARY = (
    f"SELECT seq >> {BLOCK_BITS}, capture, count(*), min({TIME}), max({TIME})"
    " FROM fingerprints GROUP BY 1, 2"
)
_NEXT_SEQ = "SELECT value FROM totals WHERE name = 'next_seq'"
_MAX_SEQ = "SELECT coalesce(max(seq), 0) FROM fingerprints"


def verify(db: Database, progress: Callable[[int], None]) -> Verified:
    """See `Store.verify`."""
    rows, bad = 0, Counter[str]()
    problems: dict[str, None] = {}
    try:
        for (fault,) in db.rows("PRAGMA integrity_check(10)"):
            if fault != "ok":
                problems[f"SQLite's integrity check: {fault}"] = None
    except StoreError as error:
        problems[str(error)] = None
    try:
        for block in _blocks(db):
            try:
                batch, _, rejected = _rows(db, block)
            except StoreError as error:
                problems[str(error)] = None
                continue
            rows += batch.num_rows
            bad.update(rejected)
            progress(rows)
        with db.transaction(write=False):
            different = f"SELECT * FROM blocks EXCEPT {_SUMMARY}"
            missing = f"SELECT * FROM ({_SUMMARY}) EXCEPT SELECT * FROM blocks"
            if any(db.rows(f"{query} LIMIT 1") for query in (different, missing)):
                problems["the table blocks does not say what is in fingerprints"] = None
            if db.scalar(_NEXT_SEQ) <= db.scalar(_MAX_SEQ):
                problems["next_seq in the table totals is a number that is taken"] = None
    except StoreError as error:
        problems[str(error)] = None
    return Verified(rows, dict(bad), list(problems))


def take_out_bad_rows(db: Database, path: Path) -> tuple[Path, int] | None:
    """Move the rows that are not records to a file beside the store `path`.

    Returns:
        The file, and how many rows were deleted; None if there are none.
    """
    found: dict[int, Ints] = {}
    for block in _blocks(db):
        with suppress(StoreError):  # pages that cannot be read stay as they are
            _, seqs, rejected = _rows(db, block)
            if rejected:
                found[block] = seqs

    def tables() -> Iterator[pa.Table]:
        for block, seqs in found.items():
            marks = ", ".join(map(str, seqs.tolist()))
            rows = f"seq IN ({marks})"
            batch = read_block(db, block, MICROS[1], record.SCHEMA.names, True, rows)
            blobs = db.table(
                f"SELECT CAST(vector AS BLOB) AS vector FROM fingerprints WHERE {rows} ORDER BY seq"
            )
            # A vector of another length is NaN in the record.
            yield pa.Table.from_batches([batch]).append_column("stored_vector", blobs.column(0))

    if not found:
        return None
    saved = save_rejected(path, tables())
    deleted = 0
    for block, seqs in found.items():
        with db.transaction():
            deleted += delete_from_block(
                db, block, f"seq IN ({', '.join(map(str, seqs.tolist()))})", ()
            )
    return saved, deleted


def count_anew(db: Database) -> None:
    """Rebuild the indexes, and what the tables blocks and totals say of the fingerprints."""
    with suppress(StoreError):  # damaged pages: `verify` names them
        db.run("REINDEX")
    with db.transaction():
        db.run("DELETE FROM blocks")
        db.run(f"INSERT INTO blocks {_SUMMARY}")
        db.run(f"UPDATE totals SET value = max(value, ({_MAX_SEQ}) + 1) WHERE name = 'next_seq'")


def _blocks(db: Database) -> Iterator[int]:
    """The blocks that have rows, ascending."""
    low = MICROS[0]
    while low <= MICROS[1]:
        ((seq,),) = db.rows("SELECT min(seq) FROM fingerprints WHERE seq >= ?", (low,))
        if seq is None:
            return
        yield seq >> BLOCK_BITS
        low = (seq >> BLOCK_BITS) + 1 << BLOCK_BITS


def _rows(db: Database, block: int) -> tuple[pa.RecordBatch, Ints, dict[str, int]]:
    """The rows of a block, the sequence numbers of those that are not records, and the reasons."""
    low = block << BLOCK_BITS
    with db.transaction(write=False):
        batch = read_block(db, block, MICROS[1], record.SCHEMA.names, True)
        seqs = db.table(
            "SELECT seq FROM fingerprints WHERE seq BETWEEN ? AND ? ORDER BY seq",
            (low, low + (1 << BLOCK_BITS) - 1),
        )
    bad, rejected = bad_rows(batch)
    return batch, integers(seqs.column(0))[bad], rejected
