"""The least time that each stage could take on a machine: what must move, over what it can move.

Every rate is measured in the same run, and is the best of three tries: writing 1 GB and syncing it,
reading it back from the disk and not from memory, copying from the host to the engine's device (on
the CPU engine: in memory), copying on the device, and multiplying float32 matrices.

A floor counts, for n rows of 80 bytes of which f are fitted, in d dimensions:

    extract                    the store's columns, read; the parts, written
    standardize, zones         80 n to the device; the parts, written
    lineage                    the same
    pca, cluster               the parts, written
    neighbors                  the same, and on a GPU 2 d operations for each row that each row is
                               compared with: f, or those in the lists that are looked through and
                               the centres of all lists
    umap                       28 bytes of each of f k edges on the device, 200 times: an index, a
                               weight and two places
    quality                    80 n to the device; 2 d f operations for each of 2,000 sampled rows
    publish                    the artifacts, written

Nothing else is in it: no hash of what is kept, no packing or unpacking of Parquet, no search of a
tree (which is how a CPU finds neighbours), no work on 2-D points. The parts of a floor are added up
as if they could not overlap, and a store that memory still keeps is read faster than from the disk.
So it is no bound in theory, but what is far above it has another cause.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from capture_kernels.arrays import array_module
from capture_kernels.fingerprint.vector import DIMENSIONS
from discovery.engines.protocol import Engine
from discovery.stages.extract import COLUMNS
from discovery.stages.quality import SAMPLE_ROWS

FILE_BYTES, BLOCK_BYTES, ARRAY_BYTES = 1_000_000_000, 1 << 24, 1 << 28
# Rows of the multiplied matrices: enough to keep each device busy.
MATRIX_ROWS = {True: 8_192, False: 2_048}
TRIES = 3
EPOCHS, EDGE_BYTES = 200, 28
ROW_BYTES = 4 * DIMENSIONS


class Rates(NamedTuple):
    """Bytes a second, and operations a second."""

    read: float
    write: float
    to_device: float
    on_device: float
    multiply: float


class Work(NamedTuple):
    """What a stage must do at least: bytes, and operations; in the order of `Rates`."""

    read: float = 0
    write: float = 0
    to_device: float = 0
    on_device: float = 0
    multiply: float = 0

    def seconds(self, rates: Rates) -> float:
        return sum(amount / rate for amount, rate in zip(self, rates, strict=True))


def measured_rates(folder: Path, engine: Engine) -> Rates:
    """The rates of the disk that holds `folder` and of the engine's device."""
    path = folder / "rate.bin"
    write = FILE_BYTES / best(lambda: write_file(path))
    read = FILE_BYTES / best(lambda: read_file(path))
    path.unlink()
    xp = array_module(engine.array(np.zeros(1, np.float32)))
    values = np.ones(ARRAY_BYTES // 4, np.float32)
    there = xp.array(values)
    rows = MATRIX_ROWS[xp is not np]
    matrix = xp.ones((rows, rows), np.float32)
    return Rates(
        read,
        write,
        # One element brought back: a device is done only when it answers.
        ARRAY_BYTES / best(lambda: float(xp.array(values)[-1])),
        2 * ARRAY_BYTES / best(lambda: float(there.copy()[-1])),
        2 * rows**3 / best(lambda: float((matrix @ matrix)[-1, -1])),
    )


def best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of some tries, after one that does not count."""
    work()
    seconds = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def write_file(path: Path) -> None:
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)
    with path.open("wb") as file:
        for start in range(0, FILE_BYTES, BLOCK_BYTES):
            file.write(block[: FILE_BYTES - start])
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        # What memory keeps of the file is given up, so that it comes from the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        block = bytearray(BLOCK_BYTES)
        while file.readinto(block):
            pass


def store_bytes(folder: Path) -> int:
    """Bytes that the columns of a run take in a Parquet folder."""
    total = 0
    for path in folder.glob("day=*/*.parquet"):
        metadata = pq.read_metadata(path)
        for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
            columns = (group.column(i) for i in range(group.num_columns))
            total += sum(
                c.total_compressed_size
                for c in columns
                if c.path_in_schema.split(".")[0] in COLUMNS
            )
    return total


def compared(manifest: dict[str, Any]) -> float:
    """Fit rows, and centres of lists, that each row is compared with; 0 for a search of a tree."""
    fit, method = manifest["counts"]["fit_rows"], manifest["stages"]["neighbors"]["method"]
    if found := re.search(r"(\d+) of ([\d,]+) lists", method):
        looked, lists = int(found[1]), int(found[2].replace(",", ""))
        return float(fit * looked / lists + lists)
    return float(fit) if manifest["engine"] == "rapids" else 0.0


def stage_work(db: Path, manifest: dict[str, Any], parts: dict[str, int]) -> dict[str, Work]:
    """What each stage of a finished run had to do at least, by its name.

    Args:
        db: the Parquet folder that it read.
        parts: bytes of the parts that each stage kept.
    """
    rows, fit = manifest["counts"]["rows"], manifest["counts"]["fit_rows"]
    neighbors, dimensions = manifest["stages"]["neighbors"], manifest["stages"]["pca"]["components"]
    vectors = {"to_device": ROW_BYTES * rows}
    special: dict[str, dict[str, float]] = {
        "extract": {"read": store_bytes(db)},
        "standardize": vectors,
        "neighbors": {**vectors, "multiply": 2 * dimensions * rows * compared(manifest)},
        "umap": {"on_device": EPOCHS * EDGE_BYTES * fit * neighbors["k"]},
        "zones": vectors,
        "lineage": vectors,
        "quality": {**vectors, "multiply": 2 * dimensions * fit * min(SAMPLE_ROWS, fit)},
        "publish": {"write": sum(facts["bytes"] for facts in manifest["files"].values())},
    }
    return {
        stage: Work(**{"write": parts.get(stage, 0), **special.get(stage, {})})
        for stage in manifest["stage_seconds"] | {"publish": 0}
    }
