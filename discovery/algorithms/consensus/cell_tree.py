"""Cells of PCA space, and the tree of groups that they merge into.

Real attention is a continuum with dense regions, and a clustering of single rows cuts it where
chance puts a gap. A cell is a few dozen rows: the number of neighbours that two cells share is a
mean over all of them, and is hardly moved by chance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask
from discovery.artifacts.prototypes import nearest_prototype

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
    centres = rows[rng.choice(len(rows), count, replace=False)]
    for _ in range(ROUNDS):
        cell = nearest_prototype(rows, centres).row
        sizes = np.bincount(cell, minlength=count)[:, None]
        sums = np.stack([np.bincount(cell, column, count) for column in rows.T], axis=1)
        centres = np.where(sizes > 0, sums / np.maximum(sizes, 1), centres).astype(np.float32)
    return centres


def shared_neighbors(cell: Ints, near: Int32s, taken: Mask, count: int) -> Doubles:
    """How many rows of one cell have a row of the other among their neighbours, both ways, and both
    rows taken: symmetric float64[count, count].

    Args:
        cell: int64[n]; near: int32[n, k], the neighbours of each row; taken: bool[n].
    """
    own = near[taken]
    ours, theirs = np.repeat(cell[taken], near.shape[1]), cell[own.ravel()]
    pairs = (ours * count + theirs)[taken[own.ravel()]]
    found = np.bincount(pairs, minlength=count * count).reshape(count, count)
    return (found + found.T) / 2.0


def merge_cells(shared: Doubles, sizes: Ints, least: float) -> Tree:
    """The tree of cells, by the neighbours float64[c, c] that they share.

    Groups of fewer than `least` rows merge before all others.

    Args:
        sizes: int64[c], rows of each cell.
    """
    count = len(shared)
    shared, size = shared.copy(), sizes.astype(np.float64)
    # Halves of numbers; a cell that shares nothing is like no other.
    volume = np.maximum(shared.sum(axis=1), 0.5)
    np.fill_diagonal(shared, 0.0)
    group = np.arange(count)
    merged: list[tuple[int, int]] = []
    alike = likeness(shared, volume[:, None], volume, (size < least)[:, None] | (size < least))
    while True:
        first, second = divmod(int(alike.argmax()), count)
        if alike[first, second] <= 0:
            return Tree(count, np.array(merged, np.int64).reshape(-1, 2))
        merged.append((group[first], group[second]))
        group[first] = count + len(merged) - 1
        for sums in (shared, shared.T):
            sums[first] += sums[second]
            sums[second] = 0.0
        shared[first, first] = 0.0
        volume[first] += volume[second]
        size[first] += size[second]
        row = likeness(shared[first], volume[first], volume, (size < least) | (size[first] < least))
        alike[second] = alike[:, second] = 0.0
        alike[first] = alike[:, first] = row


def likeness(shared: Doubles, volume: Any, volumes: Doubles, first: Mask) -> Doubles:
    """How alike groups are; those of `first` that share anything come before all others."""
    alike: Doubles = shared / (volume * volumes) ** POWER
    # No other likeness reaches 2: it is at most 1 / sqrt(volume), of volumes of 0.5 at least.
    return alike + np.where(first & (shared > 0), 2.0, 0.0)
