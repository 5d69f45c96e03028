"""Damaged files and stores: one clear error, or counts that add up; never a traceback, and never a
store that cannot be pruned."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fuzzing import Door, fuzz, some_mutated
from fuzzing import mutated as mutated_bytes
from planted import planted, planted_batch
from shared import START

from capture_kernels.errors import AttnError
from pipeline.store.base import Selection, Store
from pipeline.store.open import open_store
from pipeline.store.transfer import Imported, export_file, import_file

ROWS = 40
# Later than any record.
THE_END = datetime(2100, 1, 1, tzinfo=UTC)


def exported(folder: Path, kind: str, rows: int = ROWS) -> bytes:
    """A file of planted rows."""
    with open_store(folder / "whole.db", create=True) as whole:
        whole.append(planted_batch(planted(rows, 0)[0], START, rows_per_request=5))
        export_file(whole, folder / f"whole.{kind}")
    return (folder / f"whole.{kind}").read_bytes()


def keys(store: Store) -> set[tuple[str, int]]:
    return {
        (row["request_id"], row["position"])
        for batch in store.scan(columns=["request_id", "position"])
        for row in batch.to_pylist()
    }


def check_counts(found: Imported, sink: Store) -> None:
    """Every row was stored, a duplicate, or rejected; the store is good, and can be emptied."""
    rejected = sum(found.rejected.values())
    assert found.rows == found.inserted + found.duplicates + rejected
    assert sink.counts().rows == found.inserted
    assert sink.verify().is_good
    assert sink.prune(THE_END) == found.inserted


def lines_in(data: bytes) -> int:
    return sum(bool(line.strip()) for line in data.split(b"\n"))


def importing(folder: Path, kind: str) -> Door:
    """Import of a mutated file, whose counts add up."""
    data = exported(folder, kind)
    sink = open_store(folder / "sink.db", create=True)

    def try_one(rng: random.Random) -> int:
        bad = mutated_bytes(data, rng)
        (folder / f"bad.{kind}").write_bytes(bad)
        imported = Imported()
        try:
            import_file(sink.append, folder / f"bad.{kind}", imported=imported)
            # A compressed file has a checksum: what is read to its end is whole.
            assert imported.rows == (lines_in(bad) if kind == "jsonl" else ROWS)
        finally:
            check_counts(imported, sink)
        return 1

    return try_one


def importing_lines(folder: Path) -> Door:
    """Import of JSON lines of which half are mutated: the others are stored."""
    lines = exported(folder, "jsonl", 200).splitlines()
    with open_store(folder / "whole.db") as whole:
        key_of = [
            (row["request_id"], row["position"]) for b in whole.scan() for row in b.to_pylist()
        ]
    sink = open_store(folder / "sink.db", create=True)

    def try_one(rng: random.Random) -> int:
        some, intact = some_mutated(lines, rng)
        bad = b"\n".join(some)
        (folder / "bad.jsonl").write_bytes(bad)
        found = import_file(sink.append, folder / "bad.jsonl")
        assert found.rows == lines_in(bad)
        assert keys(sink) >= {key_of[i] for i in intact}
        check_counts(found, sink)
        return len(lines) - len(intact)

    return try_one


def using_a_store(folder: Path, name: str) -> Door:
    """A store with one mutated file is listed, scanned, verified and pruned; what cannot be used is
    repaired, and can be used then."""
    whole = folder / f"whole-{name}"
    with open_store(whole, create=True) as store:
        store.append(planted_batch(planted(ROWS, 0)[0], START, rows_per_request=5))
    path = folder / name

    def read_and_prune() -> None:
        with open_store(path) as store:
            store.counts(), store.groups(Selection(end=THE_END))
            assert sum(batch.num_rows for batch in store.scan()) <= ROWS
            store.verify()
            store.prune(THE_END)

    def try_one(rng: random.Random) -> int:
        for old in folder.glob(f"{name}*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        if whole.is_dir():
            shutil.copytree(whole, path)
            victim = rng.choice(sorted(p for p in path.rglob("*") if p.is_file()))
        else:
            victim = Path(shutil.copy(whole, path))
        victim.write_bytes(mutated_bytes(victim.read_bytes(), rng))
        try:
            read_and_prune()
        except AttnError as error:
            assert "\n" not in str(error)
            if told := re.search("or write ({.*}) into it", str(error)):
                victim.write_text(told[1])
            with open_store(path) as store:
                for step in store.repair():
                    assert "\n" not in step
                left = store.verify()
            # Of a damaged SQLite file `sqlite3` saves what is left, as every message says.
            if whole.is_dir() or left.is_good:
                assert left.is_good
                read_and_prune()
        return 1

    return try_one


DOORS: dict[str, Callable[[Path], Door]] = {
    "import of JSON lines": lambda folder: importing(folder, "jsonl"),
    "import of compressed JSON lines": lambda folder: importing(folder, "jsonl.gz"),
    "import of mutated lines": importing_lines,
    "import of Parquet": lambda folder: importing(folder, "parquet"),
    "a SQLite store": lambda folder: using_a_store(folder, "store.db"),
    "a Parquet store": lambda folder: using_a_store(folder, "store"),
}
# In `make test-all`; `make test` has 20 of each.
MANY = {"import of mutated lines": 6_000}


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("door", DOORS)
def test_damaged_input_is_one_error_or_counted(tmp_path, monkeypatch, door, many):
    # Nobody else writes, who would need these pauses between two transactions.
    monkeypatch.setattr("pipeline.store.sqlite.store.PAUSE_S", 0)
    fuzz(DOORS[door](tmp_path), MANY.get(door, 1_000) if many else 20)
