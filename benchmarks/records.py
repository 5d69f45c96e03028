"""How fast rows that no capture can have recorded are found, beside a plain loop over the rows.

    python benchmarks/records.py [--rows 1000000] [--json PATH]

Rates of `record.impossible_rows`, and of `record.conform`, which every append goes through, on one
core: rows by the CPU seconds of all threads, the best of five rounds over batches of 50,000 rows.
Of the rows all are records, or every other one is broken in one of nine ways. Each answer is
checked: how many rows are rejected for which reason, and that the others are kept bit for bit.
Floor: five million rows a second. Exits 1 when an answer is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from benchmarks.store import BATCH_ROWS, make_batches
from capture_kernels.fingerprint.vector import ROUNDING
from pipeline import record

ROUNDS = 5
FLOOR_PER_SECOND = 5_000_000
# Rows that the plain loop looks at.
PEER_ROWS = 20_000
# What is put where of every other row, in turn, and why it is rejected then. None: a half more or
# less than there is.
VECTOR_FAULTS: tuple[tuple[int, float | None, str], ...] = (
    (5, math.nan, "NaN or infinity"),
    (2, math.inf, "NaN or infinity"),
    (0, -0.5, "share outside 0 to 1"),
    (3, 1.5, "entropy outside 0 to 1"),
    (1, None, "bands differ from the histogram"),
)
COLUMN_FAULTS: tuple[tuple[str, Any, str], ...] = (
    ("position", -1, "negative position"),
    ("layout", 7, "unknown layout"),
    ("phase", "dream", "unknown phase"),
    ("request_id", "r" * 1_025, "request_id: longer than 1,024 bytes"),
)
FAULTS = len(VECTOR_FAULTS) + len(COLUMN_FAULTS)


def half_broken(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[str, int]]:
    """A batch with every other row broken, and how many rows are by the reason."""
    columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names}
    vectors = record.vectors(batch).copy()
    turn = np.where(np.arange(len(vectors)) % 2, np.arange(len(vectors)) // 2 % FAULTS, -1)
    reasons: Counter[str] = Counter()
    for number, (at, value, reason) in enumerate(VECTOR_FAULTS):
        rows = turn == number
        vectors[rows, at] = (vectors[rows, at] + 0.5) % 1 if value is None else value
        reasons[reason] += int(rows.sum())
    columns["vector"] = vectors
    for number, (name, value, reason) in enumerate(COLUMN_FAULTS, start=len(VECTOR_FAULTS)):
        rows = turn == number
        values = np.array(columns[name].to_pylist(), dtype=object)
        values[rows] = value
        columns[name] = pa.array(values.tolist(), batch.schema.field(name).type)
        reasons[reason] += int(rows.sum())
    return record.make_batch(columns, batch.num_rows), dict(reasons)


def plain_reason(row: dict[str, Any]) -> str | None:
    """Why a row as a dictionary is not a record of the layout log16; None if it is."""
    vector = row["vector"]
    if not all(map(math.isfinite, vector)):
        return "NaN or infinity"
    if row["layout"] != 1:
        return "unknown layout"
    for index, value in enumerate(vector):
        if not -ROUNDING <= value <= 1 + ROUNDING:
            return f"{'entropy' if index == 3 else 'share'} outside 0 to 1"
    if abs(sum(vector[4:]) - 1) > ROUNDING:
        return "histogram does not sum to 1"
    for band, (first, end) in enumerate(((4, 7), (7, 12), (12, 20))):
        if abs(sum(vector[first:end]) - vector[band]) > ROUNDING:
            return "bands differ from the histogram"
    if row["phase"] not in record.PHASES:
        return "unknown phase"
    for name, (low, high, reason) in record.BOUNDS.items():
        value = row[name]
        if name == "captured_at":
            value = round(value.timestamp() * 1e6)
        if value is not None and not low <= value <= high:
            return reason
    for name in ("request_id", "session_id", "model", "capture_id"):
        if row[name] is not None and len(row[name].encode()) > record.TEXT_BYTES:
            return f"{name}: longer than {record.TEXT_BYTES:,} bytes"
    return None


def rate(rows: int, work: Callable[[], object]) -> float:
    """Rows by the fewest CPU seconds that `work` took."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return rows / min(seconds)


def measure_batches(batches: list[pa.RecordBatch], expected: dict[str, int]) -> dict[str, float]:
    """Rates, after the answers were checked.

    Args:
        expected: how many rows of all batches are rejected, by reason.
    """
    rows = sum(batch.num_rows for batch in batches)
    found: Counter[str] = Counter()
    for batch in batches:
        kept, rejected = record.conform(batch)
        found.update(rejected)
        good = slice(None, None, 2 if expected else 1)
        same = record.vectors(kept).view(np.uint32) == record.vectors(batch)[good].view(np.uint32)
        if not same.all():
            raise WrongAnswerError("other rows than the good ones were kept")
    if found != expected:
        raise WrongAnswerError(f"rejected {dict(found)}, not {expected}")
    columns = [
        {name: batch.column(name) for name in batch.schema.names}
        | {"vector": record.vectors(batch)}
        for batch in batches
    ]
    peer_rows = batches[0].slice(0, PEER_ROWS).to_pylist()
    start = time.process_time()
    plain = Counter(filter(None, map(plain_reason, peer_rows)))
    peer_seconds = time.process_time() - start
    if plain != Counter(record.conform(batches[0].slice(0, PEER_ROWS)).rejected):
        raise WrongAnswerError(f"the plain loop rejects {dict(plain)}")
    return {
        "impossible_rows": rate(rows, lambda: [record.impossible_rows(c) for c in columns]),
        "conform": rate(rows, lambda: [record.conform(batch) for batch in batches]),
        "plain loop": len(peer_rows) / peer_seconds,
    }


def measure(rows: int) -> dict[str, Any]:
    good = make_batches(rows)
    broken, reasons = [], Counter[str]()
    for batch in good:
        made, of_batch = half_broken(batch)
        broken.append(made)
        reasons.update(of_batch)
    rates = {
        "all good": measure_batches(good, {}),
        "half bad": measure_batches(broken, dict(reasons)),
    }
    return {"rows": rows, "batch_rows": BATCH_ROWS, "floor": FLOOR_PER_SECOND,
            "rows_per_second": rates}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.rows < 1:
        parser.error("--rows must be 1 or more")
    figures: dict[str, Any] = {}
    if code := common.exit_code(lambda: figures.update(measure(options.rows))):
        return code
    for name, rates in figures["rows_per_second"].items():
        for what in ("impossible_rows", "conform"):
            ratio = rates[what] / rates["plain loop"]
            met = "met" if rates[what] >= FLOOR_PER_SECOND else "not met"
            print(
                f"{what:<16} {name}: {rates[what] / 1e6:6.1f} million rows/s on one core "
                f"({ratio:.0f}x a plain loop); floor of {FLOOR_PER_SECOND:,}: {met}"
            )
    if options.json:
        common.write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
