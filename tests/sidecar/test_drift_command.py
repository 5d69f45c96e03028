"""`attn drift` between runs and windows, by the command line alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from processed_batches import classifier, golden, golden_copy, sample, with_column
from shared import AttnCommand

from discovery.artifacts.write import write_parquet
from discovery.runs.parent import shares_table
from pipeline.durable import write_json
from pipeline.store.open import open_store
from sidecar.watch.drift import read_baseline

A, B = golden().run_id, "2026-11-24T00-00-00"
MIDDAY = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    golden_copy(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def second(output: Path) -> Callable[..., None]:
    """Add a run with other shares of zones, or other cluster ids, or another manifest."""

    def make(zones: list[float] | None = None, moved_ids: int = 0, **manifest: Any) -> None:
        folder = golden_copy(output, B)
        own = read_baseline(golden())
        shares = replace(own.zones, shares=np.array(zones)) if zones else own.zones
        table = shares_table(shares, own.clusters, own.ids + moved_ids)
        files = {**golden().manifest["files"]}
        files["shares.parquet"] = write_parquet(folder / "shares.parquet", table)
        new = {**golden().manifest, "run_id": B, "parent_run": None, "files": files, **manifest}
        write_json(folder / "manifest.json", new)

    return make


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample as captured in 12 hours, first the zone syntax_floor and then the others."""
    path = tmp_path_factory.mktemp("store") / "fingerprints.db"
    found = classifier().classify(np.stack(sample().column("vector").to_numpy(False)))
    order = np.argsort(found.zone != 0, kind="stable")
    rows = sample().take(pa.array(order))
    # All of one zone is in the first six hours.
    hours = np.where(found.zone[order] == 0, 3, 9)
    times = np.datetime64(MIDDAY.replace(tzinfo=None), "us") + hours.astype("timedelta64[h]")
    rows = with_column(
        rows, "captured_at", pa.array(times.astype("datetime64[us]"), pa.timestamp("us", "UTC"))
    )
    with open_store(path, create=True) as opened:
        opened.append(rows)
    return path


def at(hours: float) -> str:
    return f"{MIDDAY + timedelta(hours=hours):%Y-%m-%dT%H:%M:%S}"


def test_a_run_has_not_drifted_from_itself(attn: AttnCommand, output: Path) -> None:
    done = attn("drift", A, A, "--output", output, "--json", "--fail-above", 0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["zones"]["psi"] == found["clusters"]["psi"] == 0
    assert found["past_limit"] == []


def test_another_zone_mix_is_drift_and_can_fail_a_script(
    attn: AttnCommand, output: Path, second: Callable[..., None]
) -> None:
    second([0.0, 0.0, 1.0, 0.0, 0.0])
    done = attn("drift", A, B, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "long_range" in done.stdout and "+100.0" in done.stdout
    failed = attn("drift", A, B, "--output", output, "--fail-above", 0.25, "--json")
    assert failed.returncode == 3
    found = json.loads(failed.stdout)
    assert found["past_limit"] == ["zones"] and found["zones"]["low"] > 0.25
    assert "PAST the limit" in attn("drift", A, B, "--output", output, "--fail-above", 0.25).stdout


def test_the_drift_that_a_gate_judged_is_shown_as_it_was(
    attn: AttnCommand, output: Path, second: Callable[..., None]
) -> None:
    own = read_baseline(golden())
    judged = own.against(own.zones, own.clusters)
    judged["clusters"]["psi"] = 0.123456
    quality = {**golden().manifest["quality"], "drift": judged}
    second(parent_run=A, quality=quality)
    found = json.loads(attn("drift", A, B, "--output", output, "--json").stdout)
    assert found["clusters"] == judged["clusters"]
    assert found["matched"] == f"labelled by {A} in both"


def test_clusters_of_unrelated_runs_are_matched_by_id_or_not_at_all(
    attn: AttnCommand, output: Path, second: Callable[..., None]
) -> None:
    count = len(read_baseline(golden()).ids)
    second(moved_ids=count - 1)  # one id in common
    found = json.loads(attn("drift", A, B, "--output", output, "--json").stdout)
    assert len(found["clusters"]["shares"]) == 2 * count - 1 + 1  # and noise
    assert found["clusters"]["psi"] > 1


def test_runs_without_a_cluster_in_common_are_compared_by_zones(
    attn: AttnCommand, output: Path, second: Callable[..., None]
) -> None:
    second(moved_ids=100)
    done = attn("drift", A, B, "--output", output)
    assert done.returncode == 0
    assert "clusters: not measured, no cluster is in both" in done.stdout


def test_a_window_of_a_store_against_a_run(attn: AttnCommand, output: Path, store: Path) -> None:
    done = attn("drift", "latest" if (output / "latest").exists() else A, "--output", output,
                "--db", store, "--hours", 0, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["zones"]["requests"] == 252 and found["left_out"] == 0
    early = attn("drift", A, "--output", output, "--db", store, "--hours", 6, "--now", at(6),
                 "--json", "--fail-above", 0.25)  # fmt: skip
    assert early.returncode == 3
    assert json.loads(early.stdout)["zones"]["shares"]["syntax_floor"] == 1


def test_two_windows_of_a_store(attn: AttnCommand, output: Path, store: Path) -> None:
    done = attn("drift", A, "--output", output, "--db", store, "--hours", 6, "--earlier-hours", 6,
                "--now", at(12), "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    zones = json.loads(done.stdout)["zones"]
    assert zones["parent_shares"]["syntax_floor"] == 1 and zones["shares"]["syntax_floor"] == 0
    assert zones["low"] > 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((A,), "give two runs, or one run and --db"),
        ((A, A, "--db", "x.db"), "not both"),
        ((A, A, "--earlier-hours", "1"), "--earlier-hours needs --db"),
        ((A, "--db", "missing.db"), "missing.db"),
        ((A, "--db", "STORE", "--hours", "-1"), "--hours must be 0 or more"),
        ((A, "--db", "STORE", "--hours", "0", "--earlier-hours", "1"), "--earlier-hours must be"),
        ((A, "--db", "STORE", "--hours", "1", "--now", "2020-01-01"), "choose --hours and --now"),
        (("2020-01-01T00-00-00", A), "no run 2020-01-01T00-00-00"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(
    attn: AttnCommand, output: Path, store: Path, arguments: tuple[str, ...], says: str
) -> None:
    given = [store if word == "STORE" else word for word in arguments]
    done = attn("drift", *given, "--output", output)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_runs_of_different_captures_are_not_compared(
    attn: AttnCommand, output: Path, second: Callable[..., None]
) -> None:
    second(capture_id="other0000000")
    done = attn("drift", A, B, "--output", output)
    assert done.returncode == 2 and "capture_id 0ee5e517b008" in done.stderr
    assert "other0000000" in done.stderr


def test_rows_of_another_capture_are_named(attn: AttnCommand, output: Path, tmp_path: Path) -> None:
    db = tmp_path / "other.db"
    rows = with_column(
        sample().slice(0, 100), "capture_id", pa.array(["other"] * 100).dictionary_encode()
    )
    with open_store(db, create=True) as opened:
        opened.append(rows)
    done = attn("drift", A, "--output", output, "--db", db, "--hours", 0)
    assert done.returncode == 2 and "capture other" in done.stderr
