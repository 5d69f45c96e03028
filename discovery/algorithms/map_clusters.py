"""Clusters of a map: HDBSCAN, and what it leaves out.

Noise are the sparse rows, which are like nothing. What HDBSCAN leaves out of the others lies
between clusters: attention is a continuum, and such a row is a little of each. It joins the one
that most of its neighbours are in, with their share as its probability.
"""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Floats
from discovery.artifacts.schema import NOISE
from discovery.engines.protocol import Clustering, Engine

from .voting import vote

# HDBSCAN's min_samples where it is not given: this share of the rows, from the fewest to the most.
# With 10 for any number of rows one behaviour of 20,000 planted rows falls apart by chance.
SAMPLES_SHARE, LEAST_SAMPLES, MOST_SAMPLES = 0.005, 10, 30
# No cluster may hold more of the map than this: attention is a continuum, and HDBSCAN's most
# persistent answer to a continuum is one cluster.
LARGEST_CLUSTER = 0.5
# A row is noise if its tenth neighbour in PCA space is this many times as far as the median row's.
# UMAP evens out density: sparse rows become an island, or the rim of a behaviour. Of 6,000 and
# 20,000 planted rows the limit finds 92% and 99% of the noise, and costs 1% and 2% of the others.
SPARSE, SPARSE_NEIGHBOR = 3.0, 10
# Members of clusters that vote on a row between them.
VOTERS = 5


def default_samples(rows: int) -> int:
    """HDBSCAN's min_samples for so many rows."""
    return min(max(round(SAMPLES_SHARE * rows), LEAST_SAMPLES), MOST_SAMPLES)


def clusters_of_map(
    engine: Engine,
    projected: Floats,
    points: Floats,
    apart: Floats,
    size: int,
    min_samples: int,
) -> Clustering:
    """Clusters of n rows, those of no cluster -1.

    Args:
        projected: float32[n, d], the rows in PCA space; points: float32[n, 2], on the map.
        apart: float32[n], distance of each row to its `SPARSE_NEIGHBOR`th neighbour.
        size: fewest rows of a cluster.
        min_samples: HDBSCAN's.
    """
    # Exact duplicates, as a shared prompt makes them, are left out of the median distance.
    alone = apart[apart > 0]
    dense = apart <= SPARSE * (np.median(alone) if len(alone) else 0.0)
    labels = np.full(len(points), NOISE, np.int32)
    probabilities = np.zeros(len(points), np.float32)
    largest = max(size, int(LARGEST_CLUSTER * len(points)))
    found = engine.cluster(points[dense], size, min_samples, largest)
    labels[dense], probabilities[dense] = found.labels, found.probabilities
    members, between = np.flatnonzero(labels != NOISE), np.flatnonzero(dense & (labels == NOISE))
    if len(members) and len(between):
        voters = min(VOTERS, len(members))
        near, distances = engine.neighbors(projected[members], projected[between], voters)
        voting = members[near]
        votes = vote(distances, labels[voting], points[voting])
        labels[between] = votes.cluster
        probabilities[between] = votes.share * probabilities[voting].max(axis=1)
    return Clustering(labels, probabilities, found.persistence)
