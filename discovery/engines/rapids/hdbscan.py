"""HDBSCAN* from its spanning tree: the condensed tree in one pass, and the clusters chosen from it.

Edges are taken by rising weight, which builds the hierarchy from its leaves. Groups below
`min_cluster_size` are only lists of points. Where two groups reach that size together a cluster
begins, and all their points leave it at that edge's lambda (1 / weight); what joins a cluster while
it is small leaves it there; and where two clusters meet, both are children of a new one. That is
the condensed tree (Campello, Moulavi & Sander 2013; McInnes & Healy 2017), whose nodes come out
with children before parents.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from capture_kernels.arrays import Doubles, Int32s, Ints, Mask
from discovery.engines.cpu import by_size
from discovery.engines.protocol import Clustering

NONE = -1


@njit(cache=True)
def _condense(low, high, weight, least, cluster, leaves, parent, born, size):  # type: ignore[no-untyped-def]
    """Fill the condensed tree of n points; returns how many clusters c there are.

    cluster int32[n]: the smallest cluster that each point is in (-1: none); leaves float64[n]: the
    lambda at which it leaves it. Of the clusters, children before parents: parent int32[c] (-1: the
    root), born float64[c], the lambda at which it split off its parent (0: the root), and size
    int64[c].
    """
    n = len(cluster)
    up = np.arange(n).astype(np.int32)
    count = np.ones(n, np.int32)
    # The points of a small group, in a ring.
    following = np.arange(n).astype(np.int32)
    own = np.full(n, NONE, np.int32)
    clusters = 0
    for edge in range(n - 1):
        a, b = low[edge], high[edge]
        while up[a] != a:
            up[a] = up[up[a]]
            a = up[a]
        while up[b] != b:
            up[b] = up[up[b]]
            b = up[b]
        if count[a] < count[b]:
            a, b = b, a
        at = 1.0 / weight[edge] if weight[edge] > 0.0 else np.inf
        total = count[a] + count[b]
        if own[a] != NONE and own[b] != NONE:
            for child in (own[a], own[b]):
                parent[child] = clusters
                born[child] = at
            own[a] = clusters
            clusters += 1
        elif own[a] != NONE or total >= least:
            begins = own[a] == NONE
            if begins:
                own[a] = clusters
                clusters += 1
            for first in (b, a):
                if first == a and not begins:
                    continue
                point = first
                while True:
                    cluster[point] = own[a]
                    leaves[point] = at
                    point = following[point]
                    if point == first:
                        break
        else:
            following[a], following[b] = following[b], following[a]
        up[b] = a
        count[a] = total
        if own[a] != NONE:
            size[own[a]] = total
    return clusters


def chosen_clusters(parent: Int32s, size: Ints, stability: Doubles, max_cluster_size: int) -> Mask:
    """The clusters of greatest excess of mass, bool[c]: none lies within another, none is the root,
    and none is above `max_cluster_size`."""
    c = len(stability)
    best, below = np.zeros(c), np.zeros(c)
    better = np.zeros(c, bool)
    for node, above in enumerate(parent.tolist()):
        better[node] = not (below[node] > stability[node] or size[node] > max_cluster_size)
        best[node] = stability[node] if better[node] else below[node]
        if above != NONE:
            below[above] += best[node]
    chosen, covered = np.zeros(c, bool), np.zeros(c, bool)
    for node in range(c - 2, -1, -1):  # the root is the last
        above = int(parent[node])
        covered[node] = covered[above] or chosen[above]
        chosen[node] = better[node] and not covered[node]
    return chosen


def clusters_of_tree(
    low: Int32s, high: Int32s, weight: Doubles, min_cluster_size: int, max_cluster_size: int
) -> Clustering:
    """HDBSCAN's clusters from the minimum spanning tree of mutual reachability distances, with the
    probabilities and persistences that hdbscan gives them.

    Args:
        low, high: int32[n - 1], the points at the ends of each edge.
        weight: float64[n - 1], rising.
        min_cluster_size: fewest points of a cluster, 2 or more.
        max_cluster_size: no cluster has more points.
    """
    n = len(low) + 1
    # Two clusters that meet make a third, so there are fewer than twice as many as leaves.
    most = 2 * (n // min_cluster_size) + 1
    cluster, leaves = np.full(n, NONE, np.int32), np.zeros(n)
    parent, born, size = np.full(most, NONE, np.int32), np.zeros(most), np.zeros(most, np.int64)
    c = _condense(low, high, weight, min_cluster_size, cluster, leaves, parent, born, size)
    parent, born, size = parent[:c], born[:c], size[:c]
    inside, split = cluster != NONE, parent != NONE
    # Excess of mass of each cluster: over its points the lambda at which each leaves it, or it
    # splits, less that at which it began.
    mass = np.bincount(cluster[inside], leaves[inside], c)
    mass += np.bincount(parent[split], born[split] * size[split], c)
    # Where everything is at infinity nothing is left: inf - inf is not a number.
    with np.errstate(invalid="ignore"):
        stability = mass - born * size
    chosen = chosen_clusters(parent, size, stability, max_cluster_size)
    number = np.where(chosen, np.cumsum(chosen) - 1, NONE)
    for node in range(c - 2, -1, -1):
        if number[node] == NONE:
            number[node] = number[parent[node]]
    # What is in no cluster is at the end.
    labels = np.append(number, NONE)[cluster]

    # A cluster lives until its last point leaves it, or it splits.
    death = np.zeros(c)
    np.maximum.at(death, cluster[inside], leaves[inside])
    np.maximum.at(death, parent[split], born[split])
    ends = np.append(death[chosen], 0.0)[labels]
    probabilities = np.ones(len(labels))
    usual = np.isfinite(leaves) & (ends > 0)
    probabilities[usual] = np.minimum(leaves[usual], ends[usual]) / ends[usual]
    probabilities[labels == NONE] = 0.0

    highest = max(float(leaves.max()), float(born.max(initial=0.0)))
    persistence = np.ones(int(chosen.sum()))
    if np.isfinite(highest) and highest > 0:
        sizes = np.bincount(labels[labels != NONE], minlength=len(persistence))
        persistence = stability[chosen] / (sizes * highest)
    return by_size(labels, probabilities, persistence)
