"""Real rows: the shipped sample in two halves of its requests, and captures of the demo model.

A request is of a half by the hash of its id, so that the halves share none. Fresh captures are made
once, by `attn capture` on prompts of other seeds than the sample's, and kept below `build/`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.common import REPO, SAMPLE, read_records
from capture_kernels.fingerprint.vector import Layout
from pipeline.record import vectors as record_vectors

from .kinds import HALVES, Half
from .rows import Codes, Rows, checked

KEPT = REPO / "build" / "judge"
# Seeds of the prompts; the sample's is 71.
PROMPT_SEEDS: dict[Half, int] = {"develop": 1171, "held_out": 2171}
# Prompts of each of nine kinds: 10,000 rows, as many as a half of the sample.
FRESH_EACH = 14
# The same, of runs of many requests, so that halves of these have many as well.
MANY_EACH = 224
# Octaves of context length that the tasks of `tied` are given, one each.
TIED_OCTAVES = (6, 7, 8, 9, 10)
# Of those with rows in each of these octaves; one of nine has to be in both.
TIED_TASKS: dict[Half, tuple[str, ...]] = {
    "develop": ("counting", "brackets", "think", "copy", "codename"),
    "held_out": ("table", "recall", "prose", "code", "counting"),
}


def rows_of(records: pa.Table) -> Rows:
    """Records of one layout as rows; a task is what a request id `<task>-NNNN` says."""
    requests = records.column("request_id").to_pylist()
    return checked(
        Rows(
            np.ascontiguousarray(record_vectors(records.combine_chunks()), np.float32),
            records.column("position").to_numpy().astype(np.int64),
            np.array(requests, str),
            Layout(records.column("layout")[0].as_py()),
            tasks=np.array([name.rpartition("-")[0] or name for name in requests], str),
        )
    )


def second_half(requests: NDArray[np.str_], salt: str) -> NDArray[np.bool_]:
    """Whether each row's request is of the second of two halves: bool[n], by the hash of its id."""
    names, of = np.unique(requests, return_inverse=True)
    odd = [hashlib.sha256(f"{salt}:{name}".encode()).digest()[0] & 1 for name in names.tolist()]
    return np.array(odd, bool)[of]


def sample_half(half: Half) -> Rows:
    """The rows of the shipped sample whose requests are of this half."""
    rows = whole_sample()
    return rows[second_half(rows.requests, "split") == bool(HALVES.index(half))]


def sample_records(half: Half) -> pa.Table:
    """Records of the shipped sample: all, or to develop on those of that half."""
    records = read_records(SAMPLE)
    if half == "held_out":
        return records
    held_out = second_half(np.array(records.column("request_id").to_pylist(), str), "split")
    return records.filter(pa.array(~held_out)).combine_chunks()


def whole_sample() -> Rows:
    return rows_of(read_records(SAMPLE))


def tied_lengths(rows: Rows, half: Half, rotation: int, seed: int) -> tuple[Rows, Rows]:
    """Five tasks, each at lengths of an octave of its own; and the same tasks with as many rows
    each, their lengths mixed over the five octaves.

    Args:
        rotation: which task has which octave: the same tasks, moved on by one.
    """
    rng = np.random.default_rng([seed, 2])
    octave = np.floor(rows.log2_position).astype(np.int64)
    tied, mixed = [], []
    for number, task in enumerate(TIED_TASKS[half]):
        of_task = rows.tasks == task if rows.tasks is not None else np.zeros(len(rows), bool)
        own = TIED_OCTAVES[(number + rotation) % len(TIED_OCTAVES)]
        chosen = np.flatnonzero(of_task & (octave == own))
        tied.append(chosen)
        mixed.append(_spread(np.flatnonzero(of_task), octave, len(chosen), rng))
    return rows[np.sort(np.concatenate(tied))], rows[np.sort(np.concatenate(mixed))]


def _spread(pool: Codes, octave: Codes, count: int, rng: np.random.Generator) -> Codes:
    """`count` of the pool's rows, as evenly over the octaves as they are there."""
    pool = rng.permutation(pool[np.isin(octave[pool], TIED_OCTAVES)])
    turn = np.empty(len(pool), np.int64)
    for one in TIED_OCTAVES:
        own = octave[pool] == one
        turn[own] = np.arange(own.sum())
    # The first row of each octave, the second of each, and so on.
    return pool[np.argsort(turn, kind="stable")[:count]]


def why_no_captures() -> str | None:
    """Why the demo model cannot be captured here; None if it can be."""
    needed = ("torch", "transformers", "tokenizers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed: pip install -e '.[capture]'" if missing else None


def fresh_captures(half: Half, each: int = FRESH_EACH, folder: Path = KEPT) -> Rows:
    """Captures of the demo model on prompts of the half's seed: made if they are not kept already.

    Raises:
        subprocess.CalledProcessError: a command failed; it has said why.
    """
    return rows_of(captured(folder / f"fresh-{half}-{each}.parquet", PROMPT_SEEDS[half], each))


def captured(kept: Path, seed: int, each: int) -> pa.Table:
    """Records of the demo model on `each` prompts of each of nine kinds, made if they are not kept
    already.

    Raises:
        subprocess.CalledProcessError: a command failed; it has said why.
    """
    if not kept.exists():
        _capture(kept, seed, each)
    return read_records(kept)


def _capture(kept: Path, seed: int, each: int) -> None:
    """What `make sample` does, with other prompts."""
    model = REPO / "examples" / "demo_model"
    prompts, db = kept.with_suffix(".jsonl"), kept.with_suffix(".db")
    kept.parent.mkdir(parents=True, exist_ok=True)
    for left in kept.parent.glob(f"{db.name}*"):
        left.unlink()
    unfinished = kept.with_name(f"unfinished-{kept.name}")
    attn = (sys.executable, "-m", "cli")
    commands: tuple[Sequence[str | Path], ...] = (
        (sys.executable, model / "prompts.py", "--out", prompts, "--each", str(each),
         "--seed", str(seed)),
        (*attn, "capture", "--model", model, "--prompts", prompts, "--db", db, "--layers", "auto",
         "--stride", "5", "--max-new-tokens", "64", "--think-tags", "--session-id", "fresh"),
        (*attn, "db", "export", unfinished, "--db", db),
    )  # fmt: skip
    for command in commands:
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        subprocess.run(
            [str(word) for word in command],
            check=True, cwd=REPO, env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    unfinished.replace(kept)
