"""Clusters of the fitted rows: by what many trees agree on, or by HDBSCAN of the map.

Noise are the sparse rows, which are like nothing. All others are in a cluster: attention is a
continuum, and a row between two clusters is a little of each. Of many rows a sample is clustered,
and the others join the cluster that most of their neighbours are in, with their share as their
probability; so do rows that HDBSCAN leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.schema import NOISE
from discovery.engines.protocol import Engine
from pipeline.hashing import Hashes

from .consensus.clusters import Clusters, stable_clusters
from .consensus.continued import ParentClusters
from .known_areas import InAreas
from .voting import memberships_by_vote

# At most so many rows are clustered, or as give the smallest cluster `SAMPLED_LEAST`. For HDBSCAN
# their neighbours are then few enough to search for, and a large map has the clusters of a small
# one: the rows between two behaviours, ever more of them, would grow into a bridge.
SAMPLE_ROWS, SAMPLED_LEAST = 25_000, 20
# HDBSCAN's most persistent answer to a continuum is one cluster, so none may hold more than this.
LARGEST_CLUSTER = 0.5
# A row is noise if its tenth neighbour in PCA space is this many times as far as the median row's.
# UMAP evens out density: sparse rows become an island, or the rim of a behaviour. Of 6,000 and
# 20,000 planted rows the limit finds 92% and 99% of the noise, and costs 1% and 2% of the others.
SPARSE, SPARSE_NEIGHBOR = 3.0, 10
# Members of clusters that vote on a row outside of them.
VOTERS = 5
# Neighbours by which cells are joined.
NEIGHBORS = 30


class FoundClusters(NamedTuple):
    """Clusters of n rows, numbered by falling size among those that were clustered.

    members: of the rows, by HDBSCAN without a second cluster but where neighbours voted; of each
    cluster, float64[c], how often trees of half of the requests have it (NaN by HDBSCAN), and
    HDBSCAN's persistence (NaN by trees); family int32[c], -1 by HDBSCAN; min_samples that HDBSCAN
    had, or has by default; heir_of int32[c], new bool[c], raw_stability float64[k], halves_agree,
    regions, by_requests as of `Clusters`: -1, False, none, NaN, False by HDBSCAN; area int32[n] and
    area_share float32[n] as of `InAreas`.
    """

    members: Memberships
    stability: Doubles
    persistence: Doubles
    family: Int32s
    min_samples: int
    heir_of: Int32s
    new: Mask
    raw_stability: Doubles
    halves_agree: float
    regions: bool
    by_requests: bool
    area: Int32s
    area_share: Floats

    @property
    def labels(self) -> Int32s:
        """int32[n], the cluster of each row, -1 for noise."""
        return self.members.label


class ClusteredRows(NamedTuple):
    """Those of n rows that trees are made of.

    dense: int64[m], the rows that are not sparse; seen: int64[s], those of them that are clustered.
    rows: float32[s, d], in PCA space; near: int32[s, k], their neighbours among them, none where
    there are too few to have clusters or all are alike; requests: int64[s], a number for each
    one's; octaves, lengths: int64[s], of the context of each, as of `stable_clusters`, None where
    they are not known; least: fewest rows of a cluster among them; seed: of trees; parent: labels
    of `seen`.
    """

    dense: Ints
    seen: Ints
    rows: Floats
    near: Int32s
    requests: Ints
    octaves: Ints | None
    lengths: Ints | None
    least: int
    seed: int
    parent: ParentClusters | None

    def clusters(
        self, check: Callable[[], None] = lambda: None, threads: int | None = None
    ) -> Clusters | None:
        """Their clusters, on the host alone; None where there can be none.

        Args:
            check: called often, in any thread; what it raises ends the search.
            threads: as of `stable_clusters`.
        """
        if not self.near.shape[1]:
            return None
        return stable_clusters(
            self.rows, self.near, self.requests, self.least, self.seed, self.parent, check,
            self.octaves, self.lengths, threads,
        )  # fmt: skip


def rows_to_cluster(
    engine: Engine,
    projected: Floats,
    apart: Floats,
    requests: Ints | Hashes,
    size: int,
    seed: int,
    parent: ParentClusters | None = None,
    octaves: Ints | None = None,
    lengths: Ints | None = None,
) -> ClusteredRows:
    """The rows that clusters are found of, and their neighbours.

    Args:
        projected: float32[n, d], the rows in PCA space.
        apart: float32[n], distance of each row to its `SPARSE_NEIGHBOR`th neighbour.
        requests: int64[n] or uint64[n], a number for the request of each.
        size: fewest rows of a cluster.
        seed: of the sample and of the trees.
        parent: clusters that go on where nothing has changed, with a label of each of the n rows.
        octaves, lengths: int64[n], of each row's context, as of `stable_clusters`.
    """
    dense = dense_rows(apart)
    seen = sample_of(dense, size, seed)
    rows, least = projected[seen], sampled_size(size, len(seen), len(dense))
    near = np.empty((len(seen), 0), np.int32)
    # Rows that are all alike have nothing to be told from.
    if len(seen) > max(least, 1) and (rows != rows[0]).any():
        found, _ = engine.neighbors(rows, rows, min(NEIGHBORS + 1, len(rows)))
        # A row's nearest is itself, or one like it.
        near = found[:, 1:]
    _, numbers = np.unique(requests[seen], return_inverse=True)
    known = parent and parent._replace(labels=parent.labels[seen])
    octaves, lengths = (own if own is None else own[seen] for own in (octaves, lengths))
    return ClusteredRows(dense, seen, rows, near, numbers, octaves, lengths, least, seed, known)


def clusters_of_rows(
    engine: Engine, projected: Floats, chosen: ClusteredRows, found: Clusters | None
) -> FoundClusters:
    """Clusters of the rows float32[n, d] that are found again in other requests: those `found` of
    the chosen rows, which the others join."""
    members = Memberships.none(len(projected))
    areas = InAreas.none(len(projected))
    if found is None:
        nothing, none = np.empty(0), np.empty(0, np.int32)
        return FoundClusters(
            members, nothing, nothing, none, chosen.least, none, np.empty(0, bool), nothing, np.nan,
            False, False, *areas,
        )  # fmt: skip
    members.put(chosen.seen, found.members)
    areas.area[chosen.seen], areas.share[chosen.seen] = found.areas
    join(engine, projected, chosen.dense, members)
    unknown = np.full(len(found.stability), np.nan)
    return FoundClusters(
        members, found.stability, unknown, found.family, chosen.least, found.heir_of, found.new,
        found.raw_stability, found.halves_agree, found.regions, found.by_requests, *areas,
    )  # fmt: skip


def clusters_of_map(
    engine: Engine,
    projected: Floats,
    points: Floats,
    apart: Floats,
    size: int,
    min_samples: int | None,
    seed: int,
) -> FoundClusters:
    """Clusters of n rows by HDBSCAN of their map.

    Args:
        projected: float32[n, d], the rows in PCA space; points: float32[n, 2], on the map.
        apart: float32[n], distance of each row to its `SPARSE_NEIGHBOR`th neighbour.
        size: fewest rows of a cluster.
        min_samples: HDBSCAN's, of the rows that it sees; None: as many as the smallest cluster has,
            which is its own default.
        seed: of the sample of a large map.
    """
    dense = dense_rows(apart)
    seen = sample_of(dense, size, seed)
    members = Memberships.none(len(points))
    least = sampled_size(size, len(seen), len(dense))
    most = int(LARGEST_CLUSTER * len(points) * len(seen) / max(len(dense), 1))
    min_samples = min_samples or least
    found = engine.cluster(points[seen], least, min_samples, max(least, most))
    members.label[seen], members.probability[seen] = found.labels, found.probabilities
    join(engine, projected, dense, members)
    clusters = len(found.persistence)
    none = np.full(clusters, NOISE, np.int32)
    return FoundClusters(
        members, np.full(clusters, np.nan), found.persistence, none, min_samples,
        none, np.zeros(clusters, bool), np.empty(0), np.nan, False, False,
        *InAreas.none(len(points)),
    )  # fmt: skip


def dense_rows(apart: Floats) -> Ints:
    """The rows that are not sparse, by the distance float32[n] to their `SPARSE_NEIGHBOR`th
    neighbour: int64[m]."""
    # Exact duplicates, as a shared prompt makes them, are left out of the median distance.
    alone = apart[apart > 0]
    return np.flatnonzero(apart <= SPARSE * (np.median(alone) if len(alone) else 0.0))


def sample_of(dense: Ints, size: int, seed: int) -> Ints:
    """Those of the rows int64[m] that are clustered, ascending."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(dense, seen_rows(len(dense), size), replace=False))


def sampled_size(size: int, seen: int, rows: int) -> int:
    """Fewest rows of a cluster among `seen` of so many rows."""
    return round(size * seen / max(rows, 1))


def join(engine: Engine, projected: Floats, dense: Ints, members: Memberships) -> None:
    """Put the rows `dense` that are in no cluster to the one that most of their neighbours in
    clusters are in. Changes the memberships of the n rows in place."""
    label = members.label
    inside, others = np.flatnonzero(label != NOISE), dense[label[dense] == NOISE]
    if not (len(inside) and len(others)):
        return
    near, distances = engine.neighbors(
        projected[inside], projected[others], min(VOTERS, len(inside))
    )
    voters = Memberships(*map(engine.array, members)).at(engine.array(inside[near]))
    voted = memberships_by_vote(engine.array(distances), voters)
    members.put(others, Memberships(*map(engine.host, voted)))


def seen_rows(rows: int, size: int) -> int:
    """How many of so many rows are clustered, where a cluster has at least `size` of them."""
    return min(rows, max(SAMPLE_ROWS, -(-SAMPLED_LEAST * rows // size)))
