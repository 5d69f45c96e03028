"""How often a group of rows is found again, and which groups of a tree to take for that.

A group is found again in another tree as far as the likest group there is like it, by the share of
their rows that both have (Jaccard; Hennig 2007, Cluster-wise assessment of cluster stability).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints

from .cell_tree import Tree

# A group that is found again by no more than this is worth nothing: the clusters of Dirichlet noise
# are found again by 0.22 to 0.39, because each is compared with the likest of many.
CHANCE = 0.3
# Trees that the groups of one are looked for in.
COMPARED = 30


class Halving(NamedTuple):
    """The tree of one half of the requests.

    share: float32[c + m, a], of each of `a` atoms' rows the share that is in each of its groups;
    rows: float64[c + m], rows of each group, of both halves.
    """

    tree: Tree
    share: Floats
    rows: Doubles


def likest(first: Floats, second: Floats, atoms: Ints) -> Doubles:
    """How like the likest group of another tree is to each group: float64[n], by the rows in both
    over the rows in either; 0 where the other has none.

    Args:
        first, second: float32[n, a] and float32[m, a], the shares of the atoms' rows in each group.
        atoms: int64[a], rows of each atom.
    """
    if not len(second):
        return np.zeros(len(first))
    weights = atoms.astype(np.float32)
    both = (first * weights) @ second.T
    both /= (first @ weights)[:, None] + second @ weights - both
    return both.max(axis=1).astype(np.float64)


def found_again(
    halvings: Sequence[Halving], atoms: Ints, size: int, pool: ThreadPoolExecutor
) -> list[Doubles]:
    """For each halving, how far each of its groups is found again in the next `COMPARED` others, as
    the mean over them: float64[c + m] in [0, 1]. Groups of fewer than `size` rows are not looked
    for: 0."""
    wide = [large_groups(one, size) for one in halvings]

    def of_one(number: int) -> Doubles:
        one = halvings[number]
        again, large = np.zeros(len(one.rows)), one.rows >= size
        others = [*wide[number + 1 :], *wide[:number]][:COMPARED]
        again[large] = np.mean([likest(one.share[large], other, atoms) for other in others], axis=0)
        return again

    return list(pool.map(of_one, range(len(halvings))))


def large_groups(halving: Halving, size: int) -> Floats:
    """Groups that a cluster of `size` rows or more may be like: float32[m, a]."""
    return halving.share[halving.rows >= size / 2]


def chosen_groups(
    halving: Halving, again: Doubles, least: float, most: float, detail: float
) -> Ints:
    """The groups of a tree, none within another, that are worth most together: int64[g].

    A group is worth its rows times what it is found again by above `CHANCE`. It is taken in the
    place of the groups in it if it is worth `detail` times as much: with more, groups are smaller.

    Args:
        again: float64[c + m]; least, most: rows of a group that may be taken.
    """
    cells, merged = halving.tree.cells, halving.tree.merged
    own = halving.rows * np.maximum(again - CHANCE, 0.0)
    own[(halving.rows < least) | (halving.rows > most)] = 0.0
    worth, taken = own.copy(), own > 0
    for number, pair in enumerate(merged, cells):
        within = worth[pair].sum()
        if not taken[number] or own[number] < detail * within:
            worth[number], taken[number] = within, False
    found: list[int] = []
    left = sorted(set(range(cells + len(merged))) - set(merged.ravel().tolist()))
    while left:
        group = left.pop()
        if taken[group]:
            found.append(group)
        elif group >= cells:
            left.extend(merged[group - cells].tolist())
    return np.array(found, np.int64)
