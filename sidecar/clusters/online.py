"""Online clusters: micro-clusters of recent rows, updated with every batch.

A row joins the nearest micro-cluster if it is within `threshold` times the cluster's radius (the
RMS distance of its rows from its centre). The others wait in a pool, and where enough of them lie
together a cluster is born. Weights halve every `half_life` seconds; clusters that come together
merge, and those that fade are given up. Distances are Hellinger's, between square-rooted vectors.

`benchmarks/online.py` compares river's DenStream, DBSTREAM and CluStream, which take one row at a
time, in rows a second and in ARI on planted streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Floats, Ints
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import DIMENSIONS
from discovery.artifacts.prototypes import CALLING_THREAD_PRODUCT, nearest_prototype
from sidecar.processed import Processed
from sidecar.serving import ServedRun

from .groups import Group, GroupChoice
from .live import GetServed, Known, LiveCluster, Prediction, group_of, in_words
from .micro import ROOTS, MicroClusters, with_roots

# Rows are worked through so many at a time, whatever the size of the batches they come in; rows
# that have waited for the others this long, in seconds, are worked through without them.
BLOCK_ROWS, MOST_WAIT = 1_024, 1.0
# Rows in no cluster that are kept until they are looked through for new clusters, and those of them
# that are kept after that.
POOL_ROWS, POOL_LEFT = 512, 128
# A cluster is born of at least so many rows, and of this share of the rows since the last search.
LEAST_BORN, BORN_SHARE = 20, 0.01
# The scale is the median distance from a row to this neighbour among SAMPLE_ROWS; measured after
# SAMPLE_ROWS rows, then after twice as many, at last every LONGEST_SAMPLING.
SAMPLE_ROWS, NEIGHBOR, LONGEST_SAMPLING = 512, 10, 65_536
# Hellinger distance that rounding alone may make.
LEAST_SCALE = 0.02
# Where a new cluster is looked for: rows within the first multiple of the scale are counted, and
# those within the second, of the threshold times the scale, become the cluster.
CROWD, SEED = 1.2, 0.8
# How often a new cluster's centre is moved to the mean of what lies around it.
REFINEMENTS = 3
# Rows between two looks for clusters that have come together or have faded.
MAINTAIN_ROWS = 8_192
# All pairs of clusters are compared when they are looked through.
MOST_CLUSTERS = 256
# Seconds over which the drift of a centroid is measured.
DRIFT_INTERVAL = 60.0
# Seconds for which an answer in words is given again.
WORDS_KEPT = 1.0


class Snapshot(NamedTuple):
    """What readers see, replaced as a whole after every block."""

    version: int
    group: Group | None
    ids: Ints
    centres: Floats
    reach: Floats
    known: list[Known]
    usual: Floats


NOTHING = Snapshot(
    0, None, np.empty(0, np.int64), np.empty((0, DIMENSIONS), np.float32), np.empty(0, np.float32),
    [], np.zeros(DIMENSIONS, np.float32),
)  # fmt: skip


class OnlineClusters:
    """Observer of processed batches that keeps micro-clusters of one group of rows.

    Called in the ingest thread; `clusters`, `predict` and `status` may be called from any other,
    and do not wait for it.

    Args:
        threshold: a row is within a cluster's reach up to this times the cluster's radius.
        max_clusters: the most there may be. With as many, a new one replaces the lightest if it is
            heavier, and is not made if it is not.
        half_life: seconds after which a row counts half.
        served: gives the served run; its group is the one that is watched.
        clock: monotonic seconds, for decay: of arrival, so that no sender's clock and no change of
            the system's time matters. wall: seconds since 1970, for what is shown.

    Raises:
        OptionError: a threshold or half-life that is not above 0, or not 1 to 256 clusters.
    """

    def __init__(
        self,
        threshold: float = 2.0,
        max_clusters: int = 50,
        half_life: float = 600.0,
        *,
        served: GetServed = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < threshold < float("inf"):
            raise OptionError(f"--online-threshold must be above 0, got {threshold}")
        if not 1 <= max_clusters <= MOST_CLUSTERS:
            bounds = f"1 to {MOST_CLUSTERS}"
            raise OptionError(f"--online-max-clusters must be {bounds}, got {max_clusters}")
        if not 0 < half_life < float("inf"):
            raise OptionError(f"the half-life must be above 0 seconds, got {half_life}")
        self._threshold, self._max = threshold, max_clusters
        self._half_life, self._clock, self._wall = half_life, clock, wall
        self._served = served
        self._choice = GroupChoice(lambda: group_of(served()))
        self._lock = threading.Lock()
        self._pending = np.empty((BLOCK_ROWS, DIMENSIONS), np.float32)
        self._started = clock()
        self._snapshot = NOTHING
        # Version, clock and served run that the last answer was made of.
        self._words: tuple[int, float, ServedRun | None, list[LiveCluster]] = (0, -np.inf, None, [])
        self._counts = dict.fromkeys(("born", "merged", "faded", "replaced", "refused"), 0)
        self._reset(None, 0)

    def _reset(self, group: Group | None, next_id: int) -> None:
        """Forget all rows; ids go on, so that none is used twice."""
        self._group = group
        self._found = MicroClusters(next_id)
        self._waiting = 0
        self._waiting_since = self._decayed_at = self._interval_from = self._clock()
        self._pool = np.empty((0, 2 * DIMENSIONS), np.float32)
        self._sample = np.empty((0, DIMENSIONS), np.float32)
        self._sampling = SAMPLE_ROWS
        self._scale = 0.0  # not measured yet
        self._rows = self._searched_at = self._maintained_at = 0
        self._total = 0.0
        self._usual = np.zeros(DIMENSIONS)

    def __call__(self, processed: Processed) -> None:
        with self._lock:
            rows = self._choice.rows_of(processed)
            if self._choice.group != self._group:
                self._reset(self._choice.group, self._found.next_id)
                self._publish()
            self._add(rows)

    def _add(self, rows: Floats) -> None:
        self._flush_if_due()
        at = 0
        while at < len(rows):
            if not self._waiting:
                self._waiting_since = self._clock()
            taken = rows[at : at + BLOCK_ROWS - self._waiting]
            self._pending[self._waiting : self._waiting + len(taken)] = taken
            self._waiting += len(taken)
            at += len(taken)
            if self._waiting == BLOCK_ROWS:
                self._flush()

    def _flush_if_due(self) -> None:
        if self._waiting and self._clock() - self._waiting_since >= MOST_WAIT:
            self._flush()

    def _flush(self) -> None:
        block, self._waiting = self._pending[: self._waiting], 0
        self._update(block)
        self._publish()

    def _update(self, vectors: Floats) -> None:
        now, found = self._wall(), self._found
        self._decay()
        rows = with_roots(vectors)
        self._measure_scale(rows[:, ROOTS])
        self._rows += len(rows)
        self._usual += rows[:, :DIMENSIONS].sum(axis=0, dtype=np.float64)
        self._total += len(rows)
        outside = self._absorb(rows, now)
        while len(outside):
            room = POOL_ROWS - len(self._pool)
            self._pool, outside = np.concatenate([self._pool, outside[:room]]), outside[room:]
            # A full pool has seen enough rows for the first scale.
            if len(self._pool) == POOL_ROWS:
                self._search_pool(now)
                outside = self._absorb(outside, now)
        if self._rows - self._maintained_at >= MAINTAIN_ROWS:
            self._maintain()
        if self._clock() - self._interval_from >= DRIFT_INTERVAL:
            self._interval_from = self._clock()
            found.end_interval()

    def _decay(self) -> None:
        clock = self._clock()
        # A clock that goes back, which a monotonic one does not, decays nothing.
        factor = 0.5 ** (max(clock - self._decayed_at, 0.0) / self._half_life)
        self._decayed_at = clock
        self._found.decay(factor)
        self._total *= factor
        self._usual *= factor

    def _absorb(self, rows: Floats, now: float) -> Floats:
        """Add rows float32[n, 40] to the clusters that they are within; returns the others."""
        found = self._found
        if not len(found) or not len(rows):
            return rows
        near = nearest_prototype(rows[:, ROOTS], found.mean[:, ROOTS].astype(np.float32))
        reach = (self._threshold * found.radii(self._scale)).astype(np.float32)
        inside = near.distance < reach[near.row]
        found.absorb(rows[inside], near.row[inside], near.distance[inside], now)
        return rows[~inside]

    def _measure_scale(self, roots: Floats) -> None:
        """Take every so-manieth row into the sample, and measure the scale when it is full."""
        stride = self._sampling // SAMPLE_ROWS
        chosen = roots[-self._rows % stride :: stride]
        self._sample = np.concatenate([self._sample, chosen])[:SAMPLE_ROWS]
        if len(self._sample) < SAMPLE_ROWS:
            return
        apart = squared_distances(self._sample)
        nearest = np.partition(apart, NEIGHBOR, axis=1)[:, NEIGHBOR]
        scale = max(float(np.sqrt(np.median(nearest))), LEAST_SCALE)
        self._scale = float(np.sqrt(self._scale * scale)) if self._scale else scale
        self._sample = self._sample[:0]
        self._sampling = min(2 * self._sampling, LONGEST_SAMPLING)

    def _search_pool(self, now: float) -> None:
        """Make clusters of the rows in the pool that lie together."""
        pool = self._absorb(self._pool, now)
        if not len(pool):
            self._pool = pool
            return
        least = max(LEAST_BORN, BORN_SHARE * (self._rows - self._searched_at))
        self._searched_at = self._rows
        roots = pool[:, ROOTS]
        crowded = squared_distances(roots) < (CROWD * self._scale) ** 2
        reach = (SEED * self._threshold * self._scale) ** 2
        left = np.ones(len(pool), bool)
        while left.sum() >= least:
            neighbors = (crowded & left).sum(axis=1) * left
            own = crowded[neighbors.argmax()] & left
            for _ in range(REFINEMENTS):
                if own.sum() < least:
                    break
                centre = roots[own].mean(axis=0)
                own = left & (((roots - centre) ** 2).sum(axis=1) < reach)
            if own.sum() < least or not self._make_room(float(own.sum())):
                break
            self._found.add(pool[own], now)
            self._counts["born"] += 1
            left &= ~own
        self._pool = pool[left][-POOL_LEFT:]
        self._maintain()

    def _make_room(self, weight: float) -> bool:
        found = self._found
        if len(found) < self._max:
            return True
        lightest = int(found.weight.argmin())
        if found.weight[lightest] >= weight:
            self._counts["refused"] += 1
            return False
        found.keep(np.arange(len(found)) != lightest)
        self._counts["replaced"] += 1
        return True

    def _maintain(self) -> None:
        self._maintained_at = self._rows
        self._counts["merged"] += self._found.merge(self._scale)
        self._counts["faded"] += self._found.drop_light()

    def _publish(self) -> None:
        found, total = self._found, max(self._total, 1e-300)
        shares = found.weight / total
        means = found.mean[:, :DIMENSIONS].astype(np.float32)
        columns = (found.ids, found.weight, shares, found.created, found.updated, found.drift)
        ids, *numbers = (column.tolist() for column in columns)
        known = [Known(i, mean, *rest) for i, mean, *rest in zip(ids, means, *numbers, strict=True)]
        reach = self._threshold * found.radii(self._scale)
        usual = (self._usual / total).astype(np.float32)
        centres = found.mean[:, ROOTS].astype(np.float32)
        self._snapshot = Snapshot(
            self._snapshot.version + 1, self._group, found.ids.copy(), centres,
            reach.astype(np.float32), known, usual,
        )  # fmt: skip

    def _publish_due(self) -> Snapshot:
        """The newest state, with rows that have waited long enough; never waits for ingest."""
        if self._lock.acquire(blocking=False):
            try:
                self._flush_if_due()
            finally:
                self._lock.release()
        return self._snapshot

    def clusters(self) -> list[LiveCluster]:
        """The clusters of the moment, heaviest first; at most a second old."""
        seen, clock, served = self._publish_due(), self._clock(), self._served()
        version, made_at, made_beside, words = self._words
        same = version == seen.version or clock - made_at < WORDS_KEPT
        if (
            same
            and made_beside is served
            and {cluster.cluster_id for cluster in words} == set(seen.ids.tolist())
        ):
            return words
        known = sorted(seen.known, key=lambda cluster: (-cluster.size, cluster.cluster_id))
        words = in_words(known, seen.usual, seen.group, served) if seen.group else []
        self._words = seen.version, clock, served, words
        return words

    def predict(self, vectors: Floats) -> Prediction:
        """The nearest cluster of each vector float32[n, 20] of the group, Hellinger distance."""
        seen = self._snapshot
        if not len(seen.ids):
            return Prediction.none(len(vectors))
        near = nearest_prototype(with_roots(vectors)[:, ROOTS], seen.centres)
        ids = seen.ids[near.row].astype(np.int32)
        return Prediction(ids, near.distance, near.distance < seen.reach[near.row])

    def trigger(self) -> dict[str, Any]:
        """What POST /recluster answers: {"started": False, "reason": why not}."""
        return {"started": False, "reason": "--online clusters are updated with every batch"}

    def status(self) -> dict[str, Any]:
        """The parameters, the state and what has happened to clusters, for /stats."""
        seen = self._publish_due()
        group = seen.group
        return {
            "mode": "online",
            "threshold": self._threshold,
            "max_clusters": self._max,
            "half_life_seconds": self._half_life,
            "clusters": len(seen.ids),
            "rows": self._rows,
            "other_rows": self._choice.other_rows,
            "pending_rows": self._waiting,
            "scale": round(self._scale, 6),
            "clustered_share": round(sum(cluster.share for cluster in seen.known), 6),
            "group": group._asdict() if group else None,
            **self._counts,
        }


def squared_distances(points: Floats) -> Floats:
    """float32[n, n] between points float32[n, d], n > 0."""
    norms = (points * points).sum(axis=1)
    # Small products, which stay on the calling thread.
    step = max(1, CALLING_THREAD_PRODUCT // max(points.size, 1))
    blocks = [points[start : start + step] @ points.T for start in range(0, len(points), step)]
    return np.maximum(norms[:, None] + norms - 2.0 * np.concatenate(blocks), 0.0)
