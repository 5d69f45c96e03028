"""Damaged input at every door: one clear error, or counts that add up; never a traceback."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from planted import planted, planted_batch
from shared import NOW, REPO, START

from capture_kernels.errors import AttnError
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.runs.state import survey
from pipeline.store.base import Selection
from pipeline.store.open import open_store
from pipeline.store.transfer import export_file, import_file

ROWS = 40
VECTOR = [0.1875, 0.3125, 0.5, 0.5] + [0.0625] * 16
WORDS = (b"\xff" * 8, bytes(8), b"1e999   ", b"null    ", b"-1      ", b'"\\ud800"')
# No mutation of so few bytes may take longer.
PATIENCE_S = 20.0


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to five bits flipped, stretches cut out, put in or overwritten."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(4):
            case 0:
                made[at : at + 1] = bytes(b ^ (1 << rng.randrange(8)) for b in made[at : at + 1])
            case 1:
                del made[at : at + rng.choice([1, 4, 100])]
            case 2:
                made[at:at] = rng.randbytes(rng.choice([1, 4, 30]))
            case 3:
                made[at : at + 8] = rng.choice(WORDS)
    return bytes(made)


def importing(folder: Path, kind: str) -> Callable[[random.Random], None]:
    """Import of a mutated file: every row is stored, a duplicate, or rejected with a reason."""
    with open_store(folder / "whole.db", create=True) as whole:
        whole.append(planted_batch(planted(ROWS, 0)[0], START, rows_per_request=5))
        export_file(whole, folder / f"whole.{kind}")
    data = (folder / f"whole.{kind}").read_bytes()
    sink = open_store(folder / "sink.db", create=True)

    def try_one(rng: random.Random) -> None:
        (folder / f"bad.{kind}").write_bytes(mutated(data, rng))
        found = import_file(sink.append, folder / f"bad.{kind}")
        rejected = sum(found.rejected.values())
        assert found.rows == found.inserted + found.duplicates + rejected
        assert kind != "parquet" or found.rows == ROWS

    return try_one


def reading_a_run(folder: Path) -> Callable[[random.Random], None]:
    """A run with one mutated file is classified with, verified and listed."""
    golden = REPO / "tests" / "golden" / "run_v1"
    run = folder / open_artifacts(golden).manifest["run_id"]
    names = sorted(path.name for path in golden.iterdir())

    def try_one(rng: random.Random) -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(golden, run)
        name = rng.choice(names)
        (run / name).write_bytes(mutated((run / name).read_bytes(), rng))
        assert len(survey(folder)) <= 1
        Classifier.load(run).answer([VECTOR])
        open_artifacts(run).verify()

    return try_one


def using_a_store(folder: Path, name: str) -> Callable[[random.Random], None]:
    """A store with one mutated file is listed, scanned, verified and pruned."""
    whole = folder / f"whole-{name}"
    with open_store(whole, create=True) as store:
        store.append(planted_batch(planted(ROWS, 0)[0], START, rows_per_request=5))
    path = folder / name

    def try_one(rng: random.Random) -> None:
        if whole.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole, path)
            victim = rng.choice(sorted(p for p in path.rglob("*") if p.is_file()))
        else:
            for old in folder.glob(f"{name}*"):
                old.unlink()
            victim = Path(shutil.copy(whole, path))
        victim.write_bytes(mutated(victim.read_bytes(), rng))
        with open_store(path) as store:
            store.counts(), store.groups(Selection(end=NOW))
            assert sum(batch.num_rows for batch in store.scan()) <= ROWS
            store.verify()
            store.prune(NOW)

    return try_one


DOORS: dict[str, Callable[[Path], Callable[[random.Random], None]]] = {
    "import of JSON lines": lambda folder: importing(folder, "jsonl"),
    "import of Parquet": lambda folder: importing(folder, "parquet"),
    "a run": reading_a_run,
    "a SQLite store": lambda folder: using_a_store(folder, "store.db"),
    "a Parquet store": lambda folder: using_a_store(folder, "store"),
}


@pytest.mark.parametrize("times", [20, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("door", DOORS)
def test_damaged_input_is_one_error_or_counted(tmp_path, door, times):
    seed = random.SystemRandom().randrange(2**32)
    try_one = DOORS[door](tmp_path)
    for number in range(times):
        began = time.monotonic()
        where = f"mutation {number} of seed {seed}"
        try:
            try_one(random.Random(seed * 100_000 + number))
        except AttnError as error:
            assert "\n" not in str(error), (where, error)
        except Exception as error:
            raise AssertionError(where) from error
        assert time.monotonic() - began < PATIENCE_S, where
