"""Drift of live traffic: zone and cluster shares of the last hour against those of the served run.

The measure is that of the gate (`discovery.algorithms.drift`): PSI with its 95% interval, of rows
that are labelled by the same prototypes on both sides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.arrays import Ints
from capture_kernels.errors import ArtifactError, OptionError
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.drift import drift
from discovery.algorithms.shares import Shares
from discovery.artifacts.read import Artifacts
from discovery.artifacts.schema import NOISE
from discovery.runs.parent import index_of, saved_shares
from sidecar.processed import Processed
from sidecar.repeating import Repeating

from .window_shares import WindowShares

WINDOW_S = 3_600.0
# The report is computed again after this many seconds, if rows came.
REFRESH_S = 10.0
# `drift.drift` is measured on 200 requests and more; with fewer than this many its interval is too
# narrow where a rare category was missed by luck.
LEAST_REQUESTS = 60
# The limit of a run whose manifest does not say by which it was judged.
LIMIT = 0.25
KINDS = ("zones", "clusters")


class Baseline(NamedTuple):
    """What drift is measured from: a run's cluster ids int32[k], its shares of zones and of
    clusters (noise last), the rows that a request counts for at most, and the limit of each kind
    that the run was judged by."""

    run_id: str
    ids: NDArray[np.int32]
    zones: Shares
    clusters: Shares
    max_per_request: int
    limits: dict[str, float]

    @property
    def names(self) -> list[str]:
        """The clusters as the report names them: their ids, and -1 for noise."""
        return [str(i) for i in (*self.ids.tolist(), NOISE)]

    def cluster_index(self, cluster_id: NDArray[np.int32]) -> Ints:
        """Index of each row's cluster, that of noise being the number of clusters: int64[n]."""
        return index_of(self.ids, cluster_id) % (len(self.ids) + 1)

    def window(self, window_s: float) -> WindowShares:
        return WindowShares(len(self.ids), self.max_per_request, window_s)

    def against(self, zones: Shares, clusters: Shares, seed: int = 0) -> dict[str, Any]:
        """Drift of both kinds from this run, as the manifest has it."""
        return {
            "zones": drift(self.zones, zones, ZONES, seed),
            "clusters": drift(self.clusters, clusters, self.names, seed),
        }


def read_baseline(artifacts: Artifacts) -> Baseline:
    """The shares of a run.

    Raises:
        ArtifactError: shares.parquet is missing (a run of the first versions) or damaged.
    """
    try:
        return _baseline(artifacts)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # Its hash is right, and it is not the table of a run.
        raise ArtifactError(f"{artifacts.folder} has no shares: run attn discover again") from None


def _baseline(artifacts: Artifacts) -> Baseline:
    rows = artifacts.table("shares").to_pylist()
    if {row["kind"] for row in rows} != set(KINDS):
        raise ValueError
    manifest = artifacts.manifest
    names = [row["name"] for row in rows if row["kind"] == "clusters"]
    rules = manifest["quality"]["gate"].get("rules", {})
    return Baseline(
        artifacts.run_id,
        np.array(names[:-1], np.int32),
        *saved_shares(rows),
        int(manifest["parameters"].get("max_per_request", 0)),
        {kind: float(rules.get(f"{kind[:-1]}_drift", LIMIT)) for kind in KINDS},
    )


def spread_over(shares: Shares, ids: NDArray[np.int32], union: NDArray[np.int32]) -> Shares:
    """Shares of the clusters `ids`, and of noise last, as shares of more clusters."""
    at: Ints = np.append(np.searchsorted(union, ids), len(union))
    wide = np.zeros(len(union) + 1)
    covariance = np.zeros((len(wide), len(wide)))
    wide[at], covariance[np.ix_(at, at)] = shares.shares, shares.covariance
    return replace(shares, shares=wide, covariance=covariance)


def past_limit(found: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """The kinds of which the whole interval lies past the limit, as the gate has it."""
    return [kind for kind in KINDS if found[kind]["low"] > limits[kind]]


class DriftWindow:
    """Shares of the rows that came in the last hour, against the served run's.

    An observer of processed batches. Rows that the served run cannot classify are not counted.

    Args:
        window_s: length of the window, by arrival; it moves in steps of a 24th.
        limit: of PSI, for zones and clusters; by default those of the served run's gate.
        clock: seconds, which never go back.

    Raises:
        OptionError: a window or limit out of its range.
    """

    def __init__(
        self,
        window_s: float = WINDOW_S,
        limit: float | None = None,
        *,
        refresh_s: float = REFRESH_S,
        least_requests: int = LEAST_REQUESTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= window_s < np.inf:
            raise OptionError(f"a drift window must be a second or longer, got {window_s}")
        if limit is not None and not 0 <= limit <= 100:
            raise OptionError(f"a drift limit must lie between 0 and 100, got {limit}")
        self._window_s, self._limit, self._clock = window_s, limit, clock
        self._least = least_requests
        self._lock = threading.Lock()
        self._baseline: Baseline | None = None
        self._reason = "no run is served"
        self._window: WindowShares | None = None
        self._since = 0.0
        # How many rows were counted, and how many when the report was computed.
        self._rows = self._reported = 0
        self._report = self._without_artifacts()
        self._computed_at = clock()
        self._repeating = Repeating("drift", self.refresh_if_stale, refresh_s)

    def start(self) -> None:
        """Keep the report fresh in a thread."""
        self._repeating.start()

    def close(self) -> None:
        self._repeating.close()

    def serve(self, artifacts: Artifacts | None) -> None:
        """Measure from another run's shares from now on; what was counted is forgotten.

        Reads a file: not for the event loop. A run without readable shares is reported as the state
        'no artifacts', with the reason.
        """
        baseline, reason = None, "no run is served"
        if artifacts is not None:
            try:
                baseline = read_baseline(artifacts)
            except ArtifactError as error:
                reason = str(error)
        with self._lock:
            if baseline and self._baseline and baseline.run_id == self._baseline.run_id:
                return
            self._baseline, self._reason = baseline, reason
            self._window = baseline.window(self._window_s) if baseline else None
            self._since, self._rows, self._reported = self._clock(), 0, -1
        self.refresh()

    def __call__(self, processed: Processed) -> None:
        """Count the rows of a batch that the served run could classify."""
        found, use = processed.classified, processed.comparable
        # Without the lock: that of another run would be forgotten anyway.
        baseline = self._baseline
        if found is None or baseline is None or processed.run_id != baseline.run_id:
            return
        requests, zone, cluster_id = (
            processed.batch.column("request_id"),
            found.zone,
            found.cluster_id,
        )
        if not use.all():
            requests = requests.filter(pa.array(use))
            zone, cluster_id = zone[use], cluster_id[use]
        if not len(requests):
            return
        with self._lock:
            if self._window is None or baseline is not self._baseline:
                return
            cluster = baseline.cluster_index(cluster_id)
            self._window.add(requests, zone, cluster, self._clock())
            self._rows += len(requests)

    def report(self) -> dict[str, Any]:
        """What `/stats` says of drift, as it was last computed; never waits.

        Returns:
            state: 'steady', 'drifting' (the whole interval of zones or clusters is past its limit),
            'too few rows' or 'no artifacts'; reason: in words, None if steady; run_id; limits;
            window_seconds and covered_seconds, how much of it has passed since the run is served;
            requests and rows in the window, rows weighted as the run weights them; zones and
            clusters: as in the manifest (docs/formats.md), None without enough requests;
            age_seconds: how old this report is.
        """
        return {**self._report, "age_seconds": round(self._clock() - self._computed_at, 3)}

    def refresh_if_stale(self) -> None:
        """Compute the report again unless nothing changed: rows came, or rows left the window."""
        quiet = self._rows == self._reported
        if not quiet or self._clock() - self._computed_at > self._window_s / 24:
            self.refresh()

    def refresh(self) -> None:
        """Compute the report: some tenths of a second for 40 clusters, in the calling thread."""
        with self._lock:
            baseline, window, now = self._baseline, self._window, self._clock()
            counted = self._rows
            shares = window.shares(now) if window else None
        report = self._without_artifacts()
        if baseline is not None and shares is not None:
            report = self._of_window(baseline, *shares, now)
        with self._lock:
            if baseline is self._baseline:
                self._report, self._computed_at, self._reported = report, now, counted

    def _without_artifacts(self) -> dict[str, Any]:
        return {
            "state": "no artifacts",
            "reason": self._reason,
            "run_id": None,
            "limits": None,
            "window_seconds": self._window_s,
            "covered_seconds": 0.0,
            "requests": 0,
            "rows": 0,
            "zones": None,
            "clusters": None,
        }

    def _of_window(
        self, baseline: Baseline, zones: Shares, clusters: Shares, now: float
    ) -> dict[str, Any]:
        limits = baseline.limits
        if self._limit is not None:
            limits = dict.fromkeys(KINDS, self._limit)
        found: dict[str, Any] = dict.fromkeys(KINDS)
        state, reason = "steady", None
        if zones.requests < self._least:
            state = "too few rows"
            reason = f"{zones.requests} requests in the window, {self._least} are needed"
        else:
            found = baseline.against(zones, clusters)
            if past := past_limit(found, limits):
                state = "drifting"
                reason = "; ".join(in_words(kind, found[kind], limits[kind]) for kind in past)
        return {
            "state": state,
            "reason": reason,
            "run_id": baseline.run_id,
            "limits": limits,
            "window_seconds": self._window_s,
            "covered_seconds": round(min(now - self._since, self._window_s), 3),
            "requests": zones.requests,
            "rows": zones.rows,
            **found,
        }


def in_words(kind: str, found: dict[str, Any], limit: float) -> str:
    """`zones drifted: PSI 0.41 (0.33 to 0.50), limit 0.25`."""
    low, high = found["low"], found["high"]
    return f"{kind} drifted: PSI {found['psi']:.3f} ({low:.3f} to {high:.3f}), limit {limit:g}"
