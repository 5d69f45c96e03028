"""Clusters in parts: what trees agree on may hold several behaviours that touch.

Where many behaviours are close to each other, a group of several is found again more surely than
each of them, and is taken. So smaller groups of the same trees are looked at too, in each cluster:
those that rows lead over from one to the other are joined, and those with a valley between them
stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask

from .groups import agreement
from .partition import median_partition, numbered, rows_inside, without_small
from .valleys import valley

# Smaller and smaller groups, in turn: how much more a group must be worth than those in it. With
# these, of 34 planted data sets (the half to develop on, two thirds of them with other seeds) 13
# gained 0.01 to 0.46 of ARI, and 2 lost 0.03 and 0.05 (a trial that was not kept). With one detail
# alone, fewer gained.
DETAILS = (2.0, 3.0, 4.0)
# Parts are joined where the density between them is at least this share of the lower top.
VALLEY = 0.5
# Halves of the requests that must show a valley.
SEEN_BY = 4


class RowsOfLengths(NamedTuple):
    """Rows float32[n, d] that clusters are looked for parts in.

    near: int32[n, k], neighbours; atom: int64[n], of each; lengths: int64[n], of their contexts, as
    of `length_steps`; halves: bool[n] each, rows of half of the requests.
    """

    rows: Floats
    near: Int32s
    atom: Ints
    lengths: Ints
    halves: Sequence[Mask]


def divided_clusters(
    labels: Ints,
    taken: list[Floats],
    rows: RowsOfLengths,
    size: int,
    smaller: Callable[[float], list[Floats]],
) -> tuple[Ints, list[Floats]]:
    """The clusters int64[a], divided where there is a valley between two parts, and the groups
    taken of each tree.

    Args:
        taken: as of `agreement`; size: fewest rows of a cluster; smaller: the groups taken of each
            tree with another detail.
    """
    atoms, parts, groups = np.bincount(rows.atom, minlength=len(labels)), labels, taken
    for detail in DETAILS:
        groups = smaller(detail)
        parts = in_parts(parts, groups, rows, atoms, size)
    has_part = np.zeros((labels.max() + 1, parts.max() + 1), bool)
    has_part[labels, parts] = True
    divided = (has_part.sum(axis=1) > 1)[labels]
    return parts, groups_of_parts(taken, groups, divided, atoms) if divided.any() else taken


def in_parts(
    labels: Ints, groups: list[Floats], rows: RowsOfLengths, atoms: Ints, size: int
) -> Ints:
    """Clusters divided into what these groups of trees agree on, where there is a valley between:
    int64[a], of those int64[a].

    Args:
        groups, size: as `taken` and `size` of `divided_clusters`; atoms: int64[a], rows of each.
    """
    together, starts = agreement(groups)
    most = median_partition(together, atoms, starts)
    parts = numbered(labels * (most.max() + 1) + most)
    # A small part is joined to one of the same cluster.
    together += 2.0 * np.equal.outer(labels, labels)
    parts = without_small(
        parts, together, atoms, size, lambda of: rows_inside(of, atoms).sum(axis=1)
    )
    owner = np.zeros(parts.max() + 1, np.int64)
    owner[parts] = labels
    return numbered(joined(*valleys_of(parts, owner, rows))[parts])


def mean_valley(labels: Ints, rows: RowsOfLengths) -> float:
    """The valley between the clusters int64[a], on average over the rows that are neighbours of
    another cluster's; 1 where none are."""
    depth, touch = valleys_of(labels, np.zeros(labels.max() + 1, np.int64), rows)
    return float(np.average(depth, weights=touch)) if touch.any() else 1.0


def valleys_of(parts: Ints, owner: Ints, rows: RowsOfLengths) -> tuple[Doubles, Doubles]:
    """Of each two parts of a cluster: the valley between them, float64[p, p], and how many rows of
    one are neighbours of the other's, float64[p, p], 0 where nothing is compared.

    Args:
        parts: int64[a], the part of each atom; owner: int64[p], the cluster of each part.
    """
    count, part = len(owner), parts[rows.atom]
    pair = np.repeat(part, rows.near.shape[1]) * count + part[rows.near].ravel()
    touch = np.bincount(pair, minlength=count * count).reshape(count, count).astype(np.float64)
    touch = np.triu(touch + touch.T, 1) * np.equal.outer(owner, owner)
    members, depth = [np.flatnonzero(part == own) for own in range(count)], np.zeros_like(touch)
    for first, second in np.argwhere(touch):
        depth[first, second] = valley(
            rows.rows, rows.lengths, rows.halves[:SEEN_BY], members[first], members[second]
        )
    return depth + depth.T, touch + touch.T


def joined(depth: Doubles, touch: Doubles) -> Ints:
    """Parts joined, those with the shallowest valley first, as long as it is above `VALLEY`:
    int64[p]. The valley between parts that were joined is the mean of those between their parts, by
    how many rows are neighbours there (average linkage): the two ends of one behaviour lie apart.

    Args:
        depth, touch: float64[p, p], as of `valleys_of`.
    """
    name, sums, touch = np.arange(len(depth)), depth * touch, touch.copy()
    while True:
        mean = np.where(touch > 0, sums / np.maximum(touch, 1.0), -1.0)
        first, second = np.unravel_index(int(mean.argmax()), mean.shape)
        if mean[first, second] < VALLEY:
            return name
        for table in (sums, touch):
            table[first] += table[second]
            table[:, first] += table[:, second]
            table[second] = table[:, second] = table[first, first] = 0.0
        name[name == second] = first


def groups_of_parts(
    coarse: list[Floats], fine: list[Floats], divided: Mask, atoms: Ints
) -> list[Floats]:
    """The groups of each tree: in atoms of clusters that were divided the fine ones, elsewhere the
    coarse ones.

    Args:
        coarse, fine: float32[g, a] for each tree, how far each atom is in each group.
        divided: bool[a]; atoms: int64[a], rows of each.
    """
    found = []
    for large, small in zip(coarse, fine, strict=True):
        own = (small * divided) @ atoms > small @ atoms / 2.0
        rest = large * ~divided
        found.append(np.concatenate([rest[rest.any(axis=1)], small[own]]))
    return found
