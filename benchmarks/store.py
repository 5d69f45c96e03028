"""How fast the stores append and scan, beside a plain SQLite table with a text key.

    python benchmarks/store.py [--rows 1000000] [--json PATH]

Every rate is the best of several runs, and every run checks what it read: the number of rows, and
sums over the vectors' bits, positions, layers and request ids. Exits 1 when one is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline import record
from pipeline.store.base import Store
from pipeline.store.open import open_store

BATCH_ROWS = 50_000
ROWS_PER_REQUEST = 256
START_US = 1_767_225_600_000_000
KEYS = [*record.KEY, "vector"]
Sums = tuple[int, ...]


class WrongAnswerError(Exception):
    """A store gave something else than was put into it."""


def make_batches(rows: int) -> list[pa.RecordBatch]:
    """`rows` records as a busy server makes them: 64 requests at a time, in turn, for a day."""
    rng = np.random.default_rng(0)
    batches = []
    for start in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - start)
        number = np.arange(start, start + count)
        turn, within = np.divmod(number, 64 * ROWS_PER_REQUEST)
        request = turn * 64 + within % 64
        hist = rng.dirichlet(np.full(16, 0.3), count)
        bands, entropy = np.add.reduceat(hist, [0, 3, 8], axis=1), rng.random((count, 1))
        vectors = np.hstack([bands, entropy, hist]).astype(np.float32)
        columns: dict[str, Any] = {
            "request_id": pa.array([f"chatcmpl-{r:032x}" for r in request.tolist()]),
            "session_id": pa.array([f"session-{r // 8}" for r in request.tolist()]),
            "position": (within // 64 + 500).astype(np.int32),
            "prompt_len": pa.array(np.full(count, 500, np.int32)),
            "layer": record.MEAN_LAYER,
            "captured_at": pa.array(
                START_US + number * (86_400_000_000 // rows), pa.timestamp("us", tz="UTC")
            ),
            "model": "Qwen/Qwen3-8B",
            "capture_id": "0123456789ab",
            "layout": 1,
            "phase": "output",
            "token_id": pa.array((number % 150_000).astype(np.int32)),
            "sink_mass": pa.array(vectors[:, 3].copy()),
            "vector": vectors,
        }
        batches.append(record.make_batch(columns, count))
    return batches


def sums(batch: pa.RecordBatch) -> Sums:
    """What must not change between append and scan, of the columns that there are."""
    found = [batch.num_rows]
    if "vector" in batch.schema.names:
        found.append(int(record.vectors(batch).view(np.uint32).sum(dtype=np.uint64)))
    if "request_id" in batch.schema.names:
        found += [
            int(pc.sum(batch.column("position")).as_py()),
            int(pc.sum(batch.column("layer")).as_py()),
            int(pc.sum(pc.binary_length(batch.column("request_id"))).as_py()),
        ]
    return tuple(found)


def total(parts: list[Sums]) -> Sums:
    return tuple(sum(values) for values in zip(*parts, strict=True))


def check(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise WrongAnswerError(f"{what}: expected {expected}, got {found}")


def best_of(runs: int, work: Callable[[], object]) -> float:
    """The fewest seconds that `work` took."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_store(kind: str, folder: Path, batches: list[pa.RecordBatch]) -> dict[str, float]:
    """Rows a second: append of new rows, of rows that are all there, and scans."""
    rows = sum(batch.num_rows for batch in batches)
    rates, append_s = {}, []
    for run in range(3):
        path = folder / (f"{run}.db" if kind == "sqlite" else f"{run}")
        with open_store(path, create=True) as store:
            start = time.perf_counter()
            inserted = sum(store.append(batch).inserted for batch in batches)
            append_s.append(time.perf_counter() - start)
            check(inserted, rows, f"{kind} append")
    rates["append"] = rows / min(append_s)
    with open_store(path) as store:
        for name, columns in (("scan vectors", ["vector"]), ("scan keys and vectors", KEYS)):
            expected = total([sums(batch.select(columns)) for batch in batches])
            rates[name] = rows / best_of(5, partial(scan, store, columns, expected))
        rates["scan all columns"] = rows / best_of(
            3, lambda: check(sum(b.num_rows for b in store.scan()), rows, f"{kind} scan")
        )
        again_s = best_of(2, lambda: [store.append(batch) for batch in batches])
        rates["append what is there"] = rows / again_s
        check(store.counts().rows, rows, f"{kind} after a second append")
        expected = total([sums(batch.select(KEYS)) for batch in batches])
        scan(store, KEYS, expected)
    return rates


def scan(store: Store, columns: list[str], expected: Sums) -> None:
    check(total([sums(batch) for batch in store.scan(columns=columns)]), expected, store.url)


def measure_peer(folder: Path, batches: list[pa.RecordBatch]) -> dict[str, float]:
    """A table as one would write it: TEXT PRIMARY KEY "request|position|layer", executemany."""
    rows = sum(batch.num_rows for batch in batches)
    connection = sqlite3.connect(folder / "peer.sqlite3")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(
        "CREATE TABLE fingerprints (key TEXT PRIMARY KEY, session_id TEXT, prompt_len INTEGER,"
        " captured_at INTEGER, model TEXT, capture_id TEXT, layout INTEGER, phase TEXT,"
        " token_id INTEGER, sink_mass REAL, vector BLOB)"
    )
    names = ["session_id", "prompt_len", "captured_at", "model", "capture_id", "layout", "phase",
             "token_id", "sink_mass"]  # fmt: skip

    def append() -> None:
        for batch in batches:
            columns = [
                (batch.column(n).cast(pa.int64()) if n == "captured_at" else batch.column(n))
                .to_pylist() for n in names
            ]  # fmt: skip
            ids, positions, layers = (batch.column(n).to_pylist() for n in record.KEY)
            keys = [f"{r}|{p}|{x}" for r, p, x in zip(ids, positions, layers, strict=True)]
            blobs = [row.tobytes() for row in record.vectors(batch)]
            with connection:
                connection.executemany(
                    f"INSERT OR IGNORE INTO fingerprints VALUES ({', '.join('?' * 11)})",
                    zip(keys, *columns, blobs, strict=True),
                )

    def fetch(columns: str, with_keys: bool) -> None:
        found = connection.execute(f"SELECT {columns} FROM fingerprints").fetchall()
        joined = np.frombuffer(b"".join(row[0] for row in found), np.uint32)
        expected = total([sums(batch.select(KEYS if with_keys else ["vector"]))
                          for batch in batches])  # fmt: skip
        check((len(found), int(joined.sum(dtype=np.uint64))), expected[:2], "peer scan")
        if with_keys:
            split = [row[1].split("|") for row in found]
            check(sum(int(parts[1]) for parts in split), expected[2], "peer positions")

    rates = {"append": rows / best_of(1, append)}
    rates["scan vectors"] = rows / best_of(3, lambda: fetch("vector", False))
    rates["scan keys and vectors"] = rows / best_of(3, lambda: fetch("vector, key", True))
    rates["append what is there"] = rows / best_of(1, append)
    connection.close()
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.rows < 1:
        parser.error("--rows must be 1 or more")
    batches = make_batches(options.rows)
    results: dict[str, dict[str, float]] = {}
    try:
        with tempfile.TemporaryDirectory() as made:
            results["text key"] = measure_peer(Path(made), batches)
            for kind in ("sqlite", "parquet"):
                results[kind] = measure_store(kind, Path(made), batches)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.rows:,} rows, batches of {BATCH_ROWS:,}, {os.cpu_count()} cores; rows a second"
    )
    for name in results["sqlite"]:
        cells = []
        for kind, rates in results.items():
            peer = results["text key"].get(name)
            ratio = f" ({rates[name] / peer:4.1f}x)" if peer and kind != "text key" else ""
            cells.append(f"{kind} {rates[name]:>12,.0f}{ratio}" if name in rates else "")
        print(f"{name:<22} " + "   ".join(cell for cell in cells if cell))
    if options.json:
        figures = {"rows": options.rows, "batch_rows": BATCH_ROWS, "cores": os.cpu_count(),
                   "rows_per_second": results}  # fmt: skip
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
