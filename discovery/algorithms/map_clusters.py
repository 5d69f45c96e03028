"""Clusters of a map: HDBSCAN, and what it leaves out.

Noise are the sparse rows, which are like nothing. What HDBSCAN leaves out of the others lies
between clusters: attention is a continuum, and such a row is a little of each. It joins the one
that most of its neighbours are in, with their share as its probability. Of a large map HDBSCAN sees
a sample, and all others join.
"""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Floats
from discovery.artifacts.schema import NOISE
from discovery.engines.protocol import Clustering, Engine

from .voting import vote

# HDBSCAN sees at most so many rows, or as give the smallest cluster `SAMPLED_LEAST`.
# Its neighbours are then few enough to search for, and a large map has the clusters of a small one:
# the rows between two behaviours, ever more of them, would grow into a bridge.
SAMPLE_ROWS, SAMPLED_LEAST = 25_000, 20
# No cluster may hold more of the map than this: attention is a continuum, and HDBSCAN's most
# persistent answer to a continuum is one cluster.
LARGEST_CLUSTER = 0.5
# A row is noise if its tenth neighbour in PCA space is this many times as far as the median row's.
# UMAP evens out density: sparse rows become an island, or the rim of a behaviour. Of 6,000 and
# 20,000 planted rows the limit finds 92% and 99% of the noise, and costs 1% and 2% of the others.
SPARSE, SPARSE_NEIGHBOR = 3.0, 10
# Members of clusters that vote on a row between them.
VOTERS = 5


def clusters_of_map(
    engine: Engine,
    projected: Floats,
    points: Floats,
    apart: Floats,
    size: int,
    min_samples: int | None,
    seed: int,
) -> tuple[Clustering, int]:
    """Clusters of n rows, those of no cluster -1; and the min_samples that HDBSCAN had.

    Args:
        projected: float32[n, d], the rows in PCA space; points: float32[n, 2], on the map.
        apart: float32[n], distance of each row to its `SPARSE_NEIGHBOR`th neighbour.
        size: fewest rows of a cluster.
        min_samples: HDBSCAN's, of the rows that it sees; None: as many as the smallest cluster has,
            which is its own default.
        seed: of the sample of a large map.
    """
    # Exact duplicates, as a shared prompt makes them, are left out of the median distance.
    alone = apart[apart > 0]
    dense = np.flatnonzero(apart <= SPARSE * (np.median(alone) if len(alone) else 0.0))
    labels = np.full(len(points), NOISE, np.int32)
    probabilities = np.zeros(len(points), np.float32)
    rng = np.random.default_rng(seed)
    seen = np.sort(rng.choice(dense, seen_rows(len(dense), size), replace=False))
    share = len(seen) / max(len(dense), 1)
    least, most = round(size * share), int(LARGEST_CLUSTER * len(points) * share)
    min_samples = min_samples or least
    found = engine.cluster(points[seen], least, min_samples, max(least, most))
    labels[seen], probabilities[seen] = found.labels, found.probabilities
    members, others = np.flatnonzero(labels != NOISE), dense[labels[dense] == NOISE]
    if len(members) and len(others):
        voters = min(VOTERS, len(members))
        near, distances = engine.neighbors(projected[members], projected[others], voters)
        voting = engine.array(members)[engine.array(near)]
        votes = vote(
            engine.array(distances), engine.array(labels)[voting], engine.array(points)[voting]
        )
        sure = votes.share * engine.array(probabilities)[voting].max(axis=1)
        labels[others], probabilities[others] = engine.host(votes.cluster), engine.host(sure)
    return Clustering(labels, probabilities, found.persistence), min_samples


def seen_rows(rows: int, size: int) -> int:
    """How many of so many rows HDBSCAN sees, where a cluster has at least `size` of them."""
    return min(rows, max(SAMPLE_ROWS, -(-SAMPLED_LEAST * rows // size)))
