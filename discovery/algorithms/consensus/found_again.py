"""How often a group of rows is found again, and which groups of a tree to take for that.

A group is found again in another tree as far as the likest group there is like it, by the share of
their rows that both have (Jaccard; Hennig 2007, Cluster-wise assessment of cluster stability).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints

from .cell_tree import Tree

# A group that is found again by no more than this is worth nothing: the clusters of Dirichlet noise
# are found again by 0.22 to 0.39, because each is compared with the likest of many.
CHANCE = 0.3
# Trees that the groups of one are looked for in.
COMPARED = 30


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
    like = likeness(first * weights, first @ weights, second, second @ weights)
    return like.max(axis=1).astype(np.float64)


def likeness(rows: Floats, size: Floats, others: Floats, sizes: Floats) -> Floats:
    """The rows in both over the rows in either, of each pair of groups: float32[n, m].

    Args:
        rows: float32[n, a], of each group in each atom; others: float32[m, a], the share of each
            atom's rows that is in each of the others; size, sizes: float32[n] and [m], their rows.
    """
    both = rows @ others.T
    both /= size[:, None] + sizes - both
    return both


def found_again(
    trees: Sequence[Tree], atoms: Ints, size: int, pool: ThreadPoolExecutor
) -> list[Doubles]:
    """For each tree, how far each of its groups is found again in the next `COMPARED` others, as
    the mean over them: float64[c + m] in [0, 1]. Groups of fewer than `size` rows are not looked
    for: 0."""
    # All others of a tree are compared at once. A group of no rows, which is like none, stands for
    # those of a tree that has none.
    nothing = np.zeros((1, len(atoms)), np.float32)
    wide = [np.concatenate([large_groups(one, size), nothing]) for one in trees]
    around = np.concatenate(wide * 2)
    begin = np.cumsum([0, *map(len, wide * 2)])
    weights = atoms.astype(np.float32)
    sizes = around @ weights

    def of_one(number: int) -> Doubles:
        one = trees[number]
        again, large = np.zeros(len(one.rows)), one.rows >= size
        first, last = number + 1, number + 1 + min(COMPARED, len(trees) - 1)
        others = slice(begin[first], begin[last])
        own = one.share[large]
        like = likeness(own * weights, own @ weights, around[others], sizes[others])
        likest = np.maximum.reduceat(like, begin[first:last] - begin[first], axis=1)
        again[large] = likest.mean(axis=1, dtype=np.float64)
        return again

    return list(pool.map(of_one, range(len(trees))))


def large_groups(tree: Tree, size: int) -> Floats:
    """Groups that a cluster of `size` rows or more may be like: float32[m, a]."""
    return tree.share[tree.rows >= size / 2]


def chosen_groups(tree: Tree, worth: Doubles, least: float, most: float, detail: float) -> Ints:
    """The groups of a tree, none within another, that are worth most together: int64[g].

    A group is taken in the place of the groups in it if it is worth `detail` times as much: with
    more, groups are smaller.

    Args:
        worth: float64[c + m], of each row of each group, such as what the group is found again by
            above `CHANCE`; least, most: rows of a group that may be taken.
    """
    cells, merged = tree.cells, tree.merged
    own = tree.rows * worth
    own[(tree.rows < least) | (tree.rows > most)] = 0.0
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
