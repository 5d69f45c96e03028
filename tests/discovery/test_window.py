"""The rows of a run: none that is impossible, none twice, none lost because it came late."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted, planted_batch
from shared import NOW, START

from capture_kernels.errors import NewRunNeededError
from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.metrics import effective_rows
from discovery.algorithms.sampling import held_out
from discovery.artifacts.read import open_artifacts
from discovery.execution.request_limit import RequestLimit
from discovery.runs.checkpoint import StageCheckpoint
from discovery.stages.extract import first_pass, second_pass
from pipeline.store.open import open_store

PARQUET = ("embedding", "clusters", "landmarks", "projection", "references", "shares")
# What a program other than attn may have written, and the reason why a run leaves it out.
IMPOSSIBLE = {
    "vector = zeroblob(80)": "histogram does not sum to 1",
    "vector = x'00'": "NaN or infinity",
    "captured_at = -62135596800000000": "captured_at outside the years 2000 to 2099",
    "token_id = -5": "negative token_id",
    "phase = 7": "unknown phase",
    **{
        f"vector = x'{np.array([*[0] * at, size, *[0] * (19 - at)], '<f4').tobytes().hex()}'": why
        for at, size, why in [
            (0, 1e3, "share outside 0 to 1"),
            (6, 1e10, "share outside 0 to 1"),
            (3, 3.4e38, "entropy outside 0 to 1"),
            (19, -1.0, "share outside 0 to 1"),
            (9, np.nan, "NaN or infinity"),
        ]
    },
}


@pytest.mark.slow
def test_impossible_rows_of_an_old_store_change_nothing_and_are_reported(
    attn, planted_store, tmp_path
):
    clean = planted_store(1_500)
    bad = planted_store(1_500, name="bad.db")
    with open_store(bad) as store:
        extra = planted_batch(planted(len(IMPOSSIBLE), 9)[0], START, prefix="bad")
        store.append(extra)
    with sqlite3.connect(bad) as file:
        for row, change in enumerate(IMPOSSIBLE):
            file.execute(f"UPDATE fingerprints SET {change} WHERE seq = ?", (1_501 + row,))
    found = []
    for db in (clean, bad):
        output = tmp_path / f"{db.stem}-runs"
        done = attn("discover", "--db", db, "--output", output, "--hours", "0",
                    "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append((output / "latest", done.stderr))
    (clean_run, _), (bad_run, said) = found
    for name in PARQUET:
        file = f"{name}.parquet"
        assert (bad_run / file).read_bytes() == (clean_run / file).read_bytes(), name
    counts = open_artifacts(bad_run).manifest["counts"]
    reasons = list(IMPOSSIBLE.values())
    assert counts["impossible"] == {reason: reasons.count(reason) for reason in reasons}
    assert f"{len(reasons)} that no attention row can have left out" in said


def test_rows_that_come_late_are_in_the_next_run_once(attn, tmp_path):
    db, output = tmp_path / "f.db", tmp_path / "runs"

    def append(rows: int, at, name: str) -> None:
        with open_store(db, create=True) as store:
            vectors = planted(rows, len(name))[0]
            store.append(planted_batch(vectors, at, prefix=name, rows_per_request=20))

    def run(day: int) -> dict:
        now = NOW + timedelta(days=day)
        done = attn("discover", "--db", db, "--output", output, "--no-gate",
                    "--now", f"{now:%Y-%m-%dT%H:%M:%S}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        return open_artifacts(output / "latest").manifest["counts"]

    before = NOW - timedelta(hours=2)
    append(400, before, "first")
    assert (run(0)["rows"], run(0)["late"]) == (400, 0)
    append(60, before - timedelta(hours=1), "late")
    append(40, before - timedelta(days=9), "old")  # further back than --late-hours
    append(300, before + timedelta(days=1), "second")
    counts = run(1)
    assert (counts["rows"], counts["late"], counts["rows_in_window"]) == (360, 60, 300)
    append(300, before + timedelta(days=2), "third")
    counts = run(2)
    assert (counts["rows"], counts["late"]) == (300, 0)


def test_rows_that_vanish_between_the_two_passes_stop_the_run(planted_store, tmp_path):
    db = planted_store(500)
    with open_store(db) as store:
        identity = {"model": "planted-model", "layout": 1, "capture_id": "planted00000"}
        ends = {"start": None, "end": None, "late": None}
        context = SimpleNamespace(
            window={**identity, **ends, "snapshot": store.snapshot()}, layout=Layout.LOG16,
            checkpoint=StageCheckpoint(tmp_path / "parts", "key"),
            options=SimpleNamespace(seed=1, chunk_rows=128), stop_if_asked=lambda: None,
        )  # fmt: skip
        with RequestLimit(tmp_path / "hashes", 0, 500, 10**6) as limit:
            found = first_pass(context, store, limit)
        assert sum(batch.num_rows for batch in second_pass(context, store, found.digest)) == 500
        store.prune(START + timedelta(seconds=3))
        with pytest.raises(NewRunNeededError, match="while it read them"):
            list(second_pass(context, store, found.digest))


requests = st.lists(st.integers(0, 9), max_size=60).map(lambda made: np.array(made, np.uint64))


@given(requests=requests, share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_a_request_is_held_out_whole_or_not_at_all(requests, share, seed):
    held = held_out(requests, share, seed)
    assert held.sum() <= share * len(requests)
    assert set(requests[held]).isdisjoint(requests[~held])


def test_about_the_share_that_was_asked_for_is_held_out():
    many = np.repeat(np.arange(500, dtype=np.uint64), 20)
    assert 0.19 < held_out(many, 0.2, 3).mean() <= 0.2


@pytest.mark.parametrize("alike", [1, 5, 50])
def test_rows_of_a_request_that_are_alike_count_as_one(alike):
    rng = np.random.default_rng(alike)
    right = np.repeat(rng.random(400) < 0.9, alike)
    owners = np.repeat(np.arange(400, dtype=np.uint64), alike)
    assert effective_rows(right, owners) == pytest.approx(400, rel=0.01)
    apart = np.arange(len(right), dtype=np.uint64)
    assert effective_rows(right, apart) == pytest.approx(len(right), rel=0.01)


def test_a_share_without_variance_counts_requests():
    owners = np.repeat(np.arange(7, dtype=np.uint64), 3)
    assert effective_rows(np.ones(21, bool), owners) == 7
    assert effective_rows(np.ones(0, bool), owners[:0]) == 0
