"""How often a group of rows is found again, and which groups of a tree to take for that.

A group is found again in another tree as far as the likest group there is like it, by the share of
their rows that both have (Jaccard; Hennig 2007, Cluster-wise assessment of cluster stability).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    both = (first * weights) @ second.T
    both /= (first @ weights)[:, None] + second @ weights - both
    return both.max(axis=1).astype(np.float64)


def found_again(
    trees: Sequence[Tree], atoms: Ints, size: int, pool: ThreadPoolExecutor, at_once: int
) -> list[Doubles]:
    """For each tree, how far each of its groups is found again in the next `COMPARED` others, as
    the mean over them: float64[c + m] in [0, 1]. Groups of fewer than `size` rows are not looked
    for: 0.

    Args:
        at_once: trees of one task, only between which Python's lock is needed.
    """
    from .loops import likest_again

    compared, in_cells = min(COMPARED, len(trees) - 1), cells_and_merges(trees, atoms)
    groups, rows = begins(len(one.rows) for one in trees), np.concatenate([t.rows for t in trees])
    # Groups of less than half of `size` rows are not to be found.
    sought = np.where(rows >= size / 2, rows, np.inf).astype(np.float32)
    again = np.zeros(len(rows))

    def some(begin: int) -> None:
        end = min(begin + at_once, len(trees))
        likest_again(begin, end, compared, again, groups, sought, *in_cells)

    for _ in pool.map(some, range(0, len(trees), at_once)):
        pass
    again[rows < size] = 0.0
    return np.split(again, groups[1:-1])


def cells_and_merges(trees: Sequence[Tree], atoms: Ints) -> tuple[NDArray[Any], ...]:
    """The trees as `loops.likest_again` takes them, from `weights` to `merged`."""
    from .loops import cells_of_atoms

    cells = np.array([one.cells for one in trees])
    share = np.concatenate([one.share[: one.cells] for one in trees])
    count = np.count_nonzero(share)
    start = np.empty((len(trees), len(atoms) + 1), np.int64)
    cell, part = np.empty(count, np.int32), np.empty(count, np.float32)
    cells_of_atoms(share, begins(cells), start, cell, part)
    return (
        atoms.astype(np.float32),
        start,
        cell,
        part,
        cells,
        begins(len(one.merged) for one in trees),
        np.concatenate([one.merged for one in trees]),
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
    from .partition_loops import choose

    own = tree.rows * worth
    own[(tree.rows < least) | (tree.rows > most)] = 0.0
    chosen = np.empty(len(own), np.int64)
    return chosen[: choose(tree.cells, tree.merged, own, detail, chosen)]
