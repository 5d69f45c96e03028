"""Cells of PCA space, and the tree of groups that they merge into.

Real attention is a continuum with dense regions, and a clustering of single rows cuts it where
chance puts a gap. A cell is a few dozen rows: the number of neighbours that two cells share is a
mean over all of them, and is hardly moved by chance.

The compiled loops are imported where they are called: numba takes 60 MB, and the workers of a run
import this module without clustering anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask

# Rounds of k-means that cells are made by. Cells need not be the best ones, only of like rows.
ROUNDS = 4
# Two groups merge by the neighbours that they share, over the product of all that each has to this
# power. At 1 (the pair sampling of Bonald et al. 2018) the smallest groups merge first, at 0.5 a
# large group takes all.
POWER = 0.75


class Tree(NamedTuple):
    """The merges of c cells, most alike first.

    merged: int64[m, 2], the two groups of each merge. Groups below c are the cells, c + i is the
    one that merge i made. m is below c - 1 where some groups share no neighbours.
    share: float32[c + m, a], of each of `a` atoms' rows the share that is in each group; rows:
    int64[c + m], rows of each group, of those that the tree was made of and of all others.
    """

    cells: int
    merged: Ints
    share: Floats
    rows: Ints


def cell_centres(rows: Floats, count: int, rng: np.random.Generator) -> Floats:
    """The centres of `count` cells of the rows float32[n, d]: float32[count, d].

    k-means from random rows. A cell that lost all its rows stays where it was.
    """
    from .loops import means

    centres = rows[rng.choice(len(rows), count, replace=False)]
    for _ in range(ROUNDS):
        means(rows, nearest_cells(rows, centres), centres)
    return centres


def nearest_cells(rows: Floats, centres: Floats) -> Ints:
    """The cell of each row, by its nearest centre: int64[n] of float32[n, d] and float32[c, d]."""
    from .loops import nearest

    cell = np.empty(len(rows), np.int64)
    nearest(rows, centres, cell)
    return cell


def trees_of(
    rows: Floats,
    near: Int32s,
    taken: Mask,
    starts: Sequence[Ints],
    least: Doubles,
    atom: Ints,
    atoms: Ints,
) -> list[Tree]:
    """The tree of each of t choices of the rows float32[n, d], outside of Python's lock.

    Two cells are alike by how many rows of one have a row of the other among their neighbours, both
    ways, and both rows taken.

    Args:
        near: int32[n, k], the neighbours of each row.
        taken: bool[t, n], the rows that each tree is made of.
        starts: int64[c] each, numbers among its rows of those that its cells' centres start at.
        least: float64[t], groups of fewer rows merge before all others.
        atom: int64[n], of each row; atoms: int64[a], rows of each.
    """
    from . import loops

    cells = np.array(list(map(len, starts)))
    most, count = int(cells.max()), len(cells)
    padded = np.zeros((count, most), np.int64)
    for own, start in zip(padded, starts, strict=True):
        own[: len(start)] = start
    merged, done = np.empty((count, max(most - 1, 0), 2), np.int64), np.empty(count, np.int64)
    share = np.empty((count, 2 * most - 1, len(atoms)), np.float32)
    size = np.zeros((count, 2 * most - 1), np.int64)
    loops.trees(
        rows, near, taken, padded, cells, ROUNDS, least, POWER, atom, atoms, merged, done, share,
        size,
    )  # fmt: skip
    found = zip(cells.tolist(), done.tolist(), merged, share, size, strict=True)
    return [
        Tree(c, pairs[:m].copy(), of_atoms[: c + m].copy(), of_all[: c + m].copy())
        for c, m, pairs, of_atoms, of_all in found
    ]
