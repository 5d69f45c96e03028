"""Stores of planted rows of any size, made by many processes, and the truth of them.

    python benchmarks/large.py --folder DIR --rows 100000000 [--store parquet] [--processes P]

Rows are drawn by tests/planted.py in chunks of 50,000, each the seed of its own rows, so that the
truth of any chunk can be made again without the others. Processes append 20 chunks at a time, all
to one Parquet folder: which append comes first is up to them, and so is the order of the rows;
with one process it is that of the chunks. A SQLite file is written by one.

A store is kept in --folder and found there by the next benchmark that wants the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from discovery.artifacts.read import open_artifacts
from pipeline.store.open import open_store
from tests.planted import planted, planted_batch

CHUNK_ROWS, ROWS_PER_REQUEST = 50_000, 100
# A million rows: 100 million are 100 appends, of two days each.
CHUNKS_AN_APPEND = 20
# Every chunk is the seed of its own rows, and begins so many hours before the end.
FIRST_SEED, SPREAD_HOURS = 1_000, 20.0

Chunk = tuple[NDArray[np.float32], NDArray[np.int64]]


def planted_folder(folder: Path, rows: int, processes: int) -> Path:
    """A Parquet store of so many planted rows, made where it is not there yet."""
    return planted_store(folder, "parquet", rows, processes)


def planted_store(folder: Path, kind: str, rows: int, processes: int = 1) -> Path:
    """A store of so many planted rows, made where it is not there yet; its path.

    Args:
        folder: where it is kept, as `planted-<rows>`.
        kind: "parquet" or "sqlite"; the latter is written by one process.

    Raises:
        WrongAnswerError: one is there that was not finished.
    """
    path = folder / (f"planted-{rows}" + (".db" if kind == "sqlite" else ""))
    whole = folder / f"{path.name}.made"
    if whole.exists():
        return path
    if path.exists():
        raise WrongAnswerError(f"{path} was not finished: delete it")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with open_store(path, create=True):
        pass
    starts = range(0, chunks_of(rows), CHUNKS_AN_APPEND)
    processes = 1 if kind == "sqlite" else min(processes, len(starts))
    append = partial(append_chunks, path, rows)
    if processes == 1:
        for start in starts:
            append(start)
    else:
        # Not forked: Arrow's threads would not be there in the child.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            # Read to the end, so that what a process raises is raised here.
            for _ in pool.map(append, starts):
                pass
    whole.touch()
    print(f"{path}: {rows:,} rows made in {time.perf_counter() - began:.1f} s", flush=True)
    return path


def append_chunks(path: Path, rows: int, start: int) -> None:
    """Append the chunks from number `start` on to a store that is to have `rows`, at once."""
    chunks = chunks_of(rows)
    batches = []
    for chunk in range(start, min(start + CHUNKS_AN_APPEND, chunks)):
        vectors, _ = chunk_rows(chunk, rows)
        moment = common.NOW - timedelta(hours=SPREAD_HOURS * (1 - chunk / chunks))
        batches.append(
            planted_batch(vectors, moment, f"c{chunk:05d}", rows_per_request=ROWS_PER_REQUEST)
        )
    with open_store(path) as store:
        store.append(pa.Table.from_batches(batches))


def chunks_of(rows: int) -> int:
    return -(-rows // CHUNK_ROWS)


def chunk_rows(chunk: int, rows: int) -> Chunk:
    """Vectors float32[n, 20] and true behaviours int64[n] of one chunk of a store of `rows`."""
    return planted(min(CHUNK_ROWS, rows - chunk * CHUNK_ROWS), FIRST_SEED + chunk)


def checked_chunks(rows: int, checked: int) -> list[int]:
    """Numbers of chunks that hold `checked` rows (or all), spread over a store of `rows`."""
    chunks = chunks_of(rows)
    wanted = min(chunks, -(-checked // CHUNK_ROWS))
    return [number * chunks // wanted for number in range(wanted)]


def agreement(folder: Path, rows: int, checked: int) -> dict[str, float | int]:
    """ARI of a run's clusters with the truth, on `checked` rows in chunks spread over the window.

    Args:
        folder: the run's, of a store of `rows`.

    Raises:
        WrongAnswerError: embedding.parquet does not hold each row once.
    """
    from sklearn.metrics import adjusted_rand_score

    truth = {chunk: chunk_rows(chunk, rows)[1] for chunk in checked_chunks(rows, checked)}
    found = {chunk: np.full(len(own), -2, np.int32) for chunk, own in truth.items()}
    total = 0
    with pq.ParquetFile(open_artifacts(folder).folder / "embedding.parquet") as file:
        for batch in file.iter_batches(columns=["request_id", "position", "cluster_id"]):
            total += batch.num_rows
            words = batch.column("request_id").dictionary_encode()
            names = words.dictionary.to_pylist()
            code = words.indices.to_numpy()
            chunk = np.array([int(name[1:6]) for name in names])[code]
            request = np.array([int(name[7:]) for name in names])[code]
            place = request * ROWS_PER_REQUEST + batch.column("position").to_numpy()
            cluster = batch.column("cluster_id").to_numpy()
            for one in set(np.unique(chunk).tolist()) & set(found):
                found[one][place[chunk == one]] = cluster[chunk == one]
    answers = np.concatenate(list(found.values()))
    if total != rows or (answers < -1).any():
        raise WrongAnswerError(f"embedding.parquet has {total:,} of {rows:,} rows, or others")
    ari = adjusted_rand_score(np.concatenate(list(truth.values())), answers)
    return {"rows": len(answers), "ari": float(ari)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="where the store is kept")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--store", choices=("parquet", "sqlite"), default="parquet")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.rows < 1 or options.processes < 1:
        parser.error("--rows and --processes must be 1 or more")
    try:
        planted_store(options.folder.resolve(), options.store, options.rows, options.processes)
    except WrongAnswerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
