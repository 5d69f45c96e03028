"""Cells of PCA space, and the tree of groups that they merge into.

Real attention is a continuum with dense regions, and a clustering of single rows cuts it where
chance puts a gap. A cell is a few dozen rows: the number of neighbours that two cells share is a
mean over all of them, and is hardly moved by chance.

The compiled loops are imported where they are called: numba takes 60 MB, and the workers of a run
import this module without clustering anything.
"""

from __future__ import annotations

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
    """

    cells: int
    merged: Ints

    def groups(self, of_cells: Doubles) -> Doubles:
        """The sums over the cells of each group: float64[c + m, a] of float64[c, a]."""
        found = np.empty((self.cells + len(self.merged), of_cells.shape[1]))
        found[: self.cells] = of_cells
        for number, (first, second) in enumerate(self.merged, self.cells):
            np.add(found[first], found[second], out=found[number])
        return found


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


def shared_neighbors(cell: Ints, near: Int32s, taken: Mask, count: int) -> Doubles:
    """How many rows of one cell have a row of the other among their neighbours, both ways, and both
    rows taken: symmetric float64[count, count].

    Args:
        cell: int64[n]; near: int32[n, k], the neighbours of each row; taken: bool[n].
    """
    from .loops import count_shared

    found = np.zeros((count, count), np.int64)
    count_shared(cell, near, taken, found)
    return (found + found.T) / 2.0


def merge_cells(shared: Doubles, sizes: Ints, least: float) -> Tree:
    """The tree of cells, by the neighbours float64[c, c] that they share.

    Groups of fewer than `least` rows merge before all others.

    Args:
        sizes: int64[c], rows of each cell.
    """
    from .loops import merge

    merged = np.empty((max(len(shared) - 1, 0), 2), np.int64)
    done = merge(shared.copy(), sizes.astype(np.float64), float(least), POWER, merged)
    return Tree(len(shared), merged[:done])
