"""Drift of live traffic is that of the gate, in constant memory, whatever the traffic does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from processed_batches import classifier, golden, processed, sample, with_column

from capture_kernels.errors import ArtifactError, OptionError
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.drift import drift
from discovery.algorithms.shares import shares_of
from discovery.artifacts.read import Artifacts
from discovery.gate import GateRules
from sidecar.watch import drift as live
from sidecar.watch import window_shares as window
from sidecar.watch.request_table import RequestTable

HOUR = 3_600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched(clock: Clock) -> live.DriftWindow:
    found = live.DriftWindow(clock=clock)
    found.serve(golden())
    return found


def in_zone(zone: str, rows: int, requests: int, prefix: str = "r"):
    """Rows of the sample that are all in one zone, of as many requests."""
    found = classifier().classify(np.stack(sample().column("vector").to_numpy(False)))
    chosen = np.flatnonzero(found.zone == ZONES.index(zone))
    batch = sample().take(pa.array(np.resize(chosen, rows)))
    return with_column(batch, "request_id", [f"{prefix}{i % requests}" for i in range(rows)])


def test_the_limits_are_those_of_the_gate() -> None:
    rules = GateRules()
    assert rules.zone_drift == rules.cluster_drift == live.LIMIT
    gate = golden().manifest["quality"]["gate"]["rules"]
    limits = {"zones": gate["zone_drift"], "clusters": gate["cluster_drift"]}
    assert live.read_baseline(golden()).limits == limits


def test_the_report_is_what_the_gate_would_measure(watched: live.DriftWindow) -> None:
    """Of whole requests that are shorter than the run's limit, whatever the batches."""
    limit = golden().manifest["parameters"]["max_per_request"]
    names = np.array(sample().column("request_id").to_pylist())
    distinct, code, sizes = np.unique(names, return_inverse=True, return_counts=True)
    rows = sample().filter(pa.array(sizes[code] <= limit))
    for start in range(0, rows.num_rows, 777):
        watched(processed(rows.slice(start, 777)))
    watched.refresh()
    report = watched.report()
    assert report["requests"] == (sizes <= limit).sum() > 60
    assert report["rows"] == rows.num_rows
    found = processed(rows).classified
    baseline = live.read_baseline(golden())
    of_rows = code[(sizes <= limit)[code]]
    for kind, category, count in (
        ("zones", found.zone, len(ZONES)),
        ("clusters", baseline.cluster_index(found.cluster_id), len(baseline.ids) + 1),
    ):
        counts = np.zeros((len(distinct), count))
        np.add.at(counts, (of_rows, category), 1)
        exact = drift(getattr(baseline, kind), shares_of(counts), list(report[kind]["shares"]), 0)
        assert report[kind]["shares"] == exact["shares"]
        # Requests that share a bucket make the interval a little different, not the shares.
        for name in ("psi", "low", "high"):
            assert report[kind][name] == pytest.approx(exact[name], abs=0.1)


def test_the_same_traffic_is_steady_and_another_drifts(watched: live.DriftWindow) -> None:
    assert watched.report()["state"] == "too few rows"
    watched(processed(in_zone("semantic_bridge", 20_000, 500)))
    watched.refresh()
    report = watched.report()
    assert report["state"] == "drifting" and "zones drifted" in report["reason"]
    assert report["zones"]["low"] > report["limits"]["zones"]

    shares = golden().manifest["stages"]["zones"]["shares"]
    steady = live.DriftWindow()
    steady.serve(golden())
    for zone, share in shares.items():
        if share:
            steady(processed(in_zone(zone, round(20_000 * share), 500)))
    steady.refresh()
    assert steady.report()["zones"]["psi"] < 0.05
    assert not live.past_limit({"zones": steady.report()["zones"], "clusters": {"low": 0}},
                               steady.report()["limits"])  # fmt: skip


def test_few_requests_are_too_few_however_many_rows(watched: live.DriftWindow) -> None:
    watched(processed(in_zone("semantic_bridge", 20_000, live.LEAST_REQUESTS - 1)))
    watched.refresh()
    report = watched.report()
    assert report["state"] == "too few rows" and report["zones"] is None
    assert "59 requests in the window, 60 are needed" in report["reason"]
    watched(processed(in_zone("semantic_bridge", 100, 1, prefix="one more")))
    watched.refresh()
    assert watched.report()["state"] == "drifting"


def test_what_is_older_than_the_window_is_forgotten(
    watched: live.DriftWindow, clock: Clock
) -> None:
    watched(processed(in_zone("semantic_bridge", 20_000, 500)))
    for _ in range(30):
        clock.now += HOUR / 24
        watched(processed(in_zone("syntax_floor", 1_000, 100, prefix=f"at {clock.now} ")))
    watched.refresh()
    shares = watched.report()["zones"]["shares"]
    assert shares["semantic_bridge"] == 0 and shares["syntax_floor"] == 1
    clock.now += 2 * HOUR
    watched.refresh()
    assert watched.report()["state"] == "too few rows" and watched.report()["requests"] == 0


def test_a_clock_that_stands_still_or_leaps_breaks_nothing(
    watched: live.DriftWindow, clock: Clock
) -> None:
    for leap in (0.0, 1e-9, 1e9, 0.0, 1e12):
        clock.now += leap
        watched(processed(in_zone("syntax_floor", 1_000, 100)))
        watched.refresh()
        assert watched.report()["requests"] == 100


def test_rows_that_the_run_cannot_classify_are_not_counted(watched: live.DriftWindow) -> None:
    batch = in_zone("syntax_floor", 1_000, 100)
    every_other = np.arange(1_000) % 200 < 100
    watched(processed(batch, comparable=every_other))
    watched(processed(batch, classified=None, run_id=None))
    watched(processed(batch, run_id="2026-01-01T00-00-00"))
    watched(processed(batch, comparable=np.zeros(1_000, bool)))
    watched.refresh()
    assert watched.report()["rows"] == 500


def test_another_run_begins_anew_and_the_same_one_does_not(watched: live.DriftWindow) -> None:
    watched(processed(in_zone("semantic_bridge", 20_000, 500)))
    watched.serve(golden())
    watched.refresh()
    assert watched.report()["requests"] == 500
    other = Artifacts(golden().folder, {**golden().manifest, "run_id": "2026-11-24T00-00-00"})
    watched.serve(other)
    report = watched.report()
    assert report["run_id"] == other.run_id and report["requests"] == 0
    watched.serve(None)
    assert watched.report()["state"] == "no artifacts" and watched.report()["run_id"] is None


def test_a_run_without_shares_is_said_and_not_fatal(watched: live.DriftWindow) -> None:
    files = {n: f for n, f in golden().manifest["files"].items() if n != "shares.parquet"}
    old = Artifacts(golden().folder, {**golden().manifest, "files": files, "run_id": "old"})
    watched.serve(old)
    watched(processed(in_zone("syntax_floor", 100, 10)))
    report = watched.report()
    assert report["state"] == "no artifacts" and "shares.parquet" in report["reason"]
    with pytest.raises(ArtifactError):
        live.read_baseline(old)


def test_shares_that_are_no_runs_are_said_and_not_fatal(watched: live.DriftWindow) -> None:
    """Its hash is right: the run was published by something else, or by another version."""

    class Odd(Artifacts):
        def table(self, name: str, *_: object) -> pa.Table:
            columns = {"kind": ["zones", "clusters"], "name": ["x", "y"]}
            return pa.table(columns)

    watched.serve(Odd(golden().folder, {**golden().manifest, "run_id": "2026-01-12T00-00-00"}))
    report = watched.report()
    assert report["state"] == "no artifacts" and "run attn discover again" in report["reason"]


@pytest.mark.parametrize("options", [{"window_s": 0}, {"window_s": float("nan")}, {"limit": -1},
                                     {"window_s": float("inf")}])  # fmt: skip
def test_a_window_that_is_none_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        live.DriftWindow(**options)


def test_the_report_is_kept_fresh_by_a_thread_and_never_waits() -> None:
    watched = live.DriftWindow(refresh_s=0.01, limit=0.1)
    watched.serve(golden())
    watched.start()
    feeding = threading.Event()

    def feed() -> None:
        number = 0
        while not feeding.is_set():
            watched(processed(in_zone("semantic_bridge", 2_000, 200, prefix=f"{number} ")))
            number += 1

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        ends = time.monotonic() + 60
        while watched.report()["state"] != "drifting" and time.monotonic() < ends:
            time.sleep(0.01)
        assert watched.report()["limits"] == {"zones": 0.1, "clusters": 0.1}
    finally:
        feeding.set()
        feeder.join()
        watched.close()
    assert watched.report()["state"] == "drifting"


# The counts ---------------------------------------------------------------------------------------

ROW = st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 3))


def exact_shares(
    rows: list[tuple[int, int, int]], limit: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shares of zones and clusters where a request counts as if `limit` of its rows were taken."""
    requests: dict[int, list[tuple[int, int]]] = {}
    for request, zone, cluster in rows:
        requests.setdefault(request, []).append((zone, cluster))
    counts = np.zeros(5), np.zeros(4)
    for own in requests.values():
        weight = min(1.0, limit / len(own)) if limit else 1.0
        for zone, cluster in own:
            counts[0][zone] += weight
            counts[1][cluster] += weight
    return tuple(one / max(one.sum(), 1e-9) for one in counts)


@given(st.lists(st.lists(ROW, min_size=1, max_size=60), min_size=1, max_size=8),
       st.sampled_from([0, 1, 3, 100]), st.sampled_from([np.inf, 1e9]))  # fmt: skip
def test_shares_do_not_depend_on_how_rows_come(
    batches: list[list[tuple[int, int, int]]], limit: int, length: float
) -> None:
    counted = window.WindowShares(3, limit, length)
    for now, rows in enumerate(batches):
        requests, zone, cluster = (np.array(column) for column in zip(*rows, strict=True))
        counted.add(pa.array([f"r{i}" for i in requests]), zone, cluster, float(now))
    every = [row for rows in batches for row in rows]
    for found, wanted in zip(counted.shares(len(batches)), exact_shares(every, limit), strict=True):
        assert found.shares == pytest.approx(wanted)
        assert found.requests == len({row[0] for row in every})


def test_more_requests_at_once_than_there_is_room_for_are_all_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "REQUESTS", 64)
    counted = window.WindowShares(3, 256, HOUR)
    rng = np.random.default_rng(0)
    for now in range(20):
        names = pa.array([f"r{i}" for i in rng.integers(0, 10**9, 500)])
        counted.add(names, np.full(500, 1), np.full(500, 2), float(now))
    zones, clusters = counted.shares(20.0)
    assert zones.rows == clusters.rows == zones.requests == 10_000
    assert zones.shares[1] == clusters.shares[2] == 1


def test_memory_does_not_grow_with_the_traffic(size_of: Callable[[object], int]) -> None:
    counted = window.WindowShares(40, 256, HOUR)
    sizes = []
    for now in range(12):
        names = pa.array([f"request {now} {i:030d}" for i in range(20_000)])
        counted.add(names, np.zeros(20_000, int), np.zeros(20_000, int), 600.0 * now)
        sizes.append(size_of(counted))
    assert max(sizes[2:]) <= 1.05 * sizes[1]


@pytest.fixture
def size_of() -> Callable[[object], int]:
    import sys

    def size(counted: object) -> int:
        own = vars(counted)
        table = vars(own["_table"])
        arrays = [v.nbytes for part in (own, table) for v in part.values()
                  if isinstance(v, np.ndarray)]  # fmt: skip
        return sum(arrays) + sys.getsizeof(table["_rows"]) + sum(map(sys.getsizeof, table["_rows"]))

    return size


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True), max_size=40))
def test_the_table_forgets_those_that_were_not_seen_for_the_longest_time(
    batches: list[list[int]],
) -> None:
    table, known, left = RequestTable(8), {}, []
    for number, keys in enumerate(batches):
        now = number // 3  # a clock may stand still
        gone: list[int] = []
        rows, new = table.rows(keys, now, lambda r, g=gone: g.extend(table.key(i) for i in r))
        left += gone
        assert len(set(rows.tolist())) == len(keys)
        assert [table.key(row) for row in rows.tolist()] == keys
        assert [key not in known for key in keys] == new.tolist()
        assert not {*gone} & {*keys}
        # Never one leaves that was seen later than one that stays.
        stays = {key: seen for key, seen in known.items() if key not in gone}
        assert all(known[key] <= min((s for k, s in stays.items() if k not in keys), default=now)
                   for key in gone)  # fmt: skip
        known = stays | dict.fromkeys(keys, now)
        assert len(table) == len(known) <= 8
    assert table.evicted == len(left)
