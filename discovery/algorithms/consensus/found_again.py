"""How often a group of rows is found again, and which groups of a tree to take for that.

A group is found again in another tree as far as the likest group there is like it, by the share of
their rows that both have (Jaccard; Hennig 2007, Cluster-wise assessment of cluster stability).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints

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
    both = (first * weights) @ second.T
    both /= (first @ weights)[:, None] + second @ weights - both
    return both.max(axis=1).astype(np.float64)


def found_again(
    trees: Sequence[Tree], atoms: Ints, size: int, pool: ThreadPoolExecutor
) -> list[Doubles]:
    """For each tree, how far each of its groups is found again in the next `COMPARED` others, as
    the mean over them: float64[c + m] in [0, 1]. Groups of fewer than `size` rows are not looked
    for: 0."""
    from .loops import likest_again

    in_cells = CellsOfTrees.of(trees, atoms, size)

    def of_one(number: int) -> Doubles:
        others = np.arange(number + 1, number + 1 + min(COMPARED, len(trees) - 1)) % len(trees)
        again = np.zeros(len(trees[number].rows))
        likest_again(number, others, *in_cells, again)
        return np.where(trees[number].rows >= size, again / len(others), 0.0)

    return list(pool.map(of_one, range(len(trees))))


class CellsOfTrees(NamedTuple):
    """The trees as arrays, as `loops.likest_again` takes them."""

    weights: Floats
    start: Ints
    cell: Int32s
    part: Floats
    cells: Ints
    merges: Ints
    merged: Ints
    groups: Ints
    size: Floats

    @classmethod
    def of(cls, trees: Sequence[Tree], atoms: Ints, size: int) -> CellsOfTrees:
        """Groups of less than half of `size` rows are not to be found."""
        weights = atoms.astype(np.float32)
        counts, cell, part, sizes = [], [], [], []
        for one in trees:
            of_atoms = one.share[: one.cells].T
            inside = of_atoms > 0
            counts.append(inside.sum(axis=1))
            cell.append(np.nonzero(inside)[1].astype(np.int32))
            part.append(of_atoms[inside])
            sizes.append(np.where(one.rows >= size / 2, one.share @ weights, np.inf))
        ends = np.cumsum(counts).reshape(len(trees), len(atoms))
        # Where an atom begins, the one before it ends.
        first = np.concatenate([[0], ends[:-1, -1]])
        return cls(
            weights,
            np.column_stack([first, ends]),
            np.concatenate(cell),
            np.concatenate(part),
            np.array([one.cells for one in trees]),
            begins(len(one.merged) for one in trees),
            np.concatenate([one.merged for one in trees]),
            begins(len(one.rows) for one in trees),
            np.concatenate(sizes).astype(np.float32),
        )


def begins(lengths: Iterable[int]) -> Ints:
    """Where each of some lists begins in all of them one after another, and where the last ends."""
    return np.cumsum([0, *lengths])


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
