"""The loops over the groups of a tree that are chosen, and over the atoms of a partition, compiled.

As those of `loops`: outside of Python's lock, and with sums in one order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from discovery.engines.compiled import keep_compiled


@njit(nogil=True)
def choose(cells, merged, own, detail, chosen):  # type: ignore[no-untyped-def]
    """Choose the groups of a tree that are worth most together, none within another; returns how
    many.

    Args:
        cells: of the tree; merged: int64[m, 2].
        own: float64[c + m], what each group is worth, 0 for one that may not be taken.
        detail: how many times what the groups in it are worth a group must be, to be taken.
        chosen: int64[c + m], the first of which are filled.
    """
    groups = cells + len(merged)
    worth, taken, is_top = own.copy(), own > 0.0, np.ones(groups, np.bool_)
    for number in range(cells, groups):
        first, second = merged[number - cells]
        is_top[first] = is_top[second] = False
        within = worth[first] + worth[second]
        if not taken[number] or own[number] < detail * within:
            worth[number], taken[number] = within, False
    left, waiting, count = np.empty(groups, np.int64), 0, 0
    for number in range(groups):
        if is_top[number]:
            left[waiting] = number
            waiting += 1
    while waiting:
        waiting -= 1
        group = left[waiting]
        if taken[group]:
            chosen[count] = group
            count += 1
        elif group >= cells:
            left[waiting], left[waiting + 1] = merged[group - cells]
            waiting += 2
    return count


@njit(nogil=True)
def move_atoms(gain, to_cluster, labels, clusters, least):  # type: ignore[no-untyped-def]
    """Move each of `a` atoms, one after another, to the cluster where that gains most, and more
    than `least`: one of so many `clusters`, or one more, of it alone.

    Args:
        gain: float64[a, a], of each two atoms together.
        to_cluster: float64[a, clusters + 1 + a], of each atom in each cluster; the last ones are
            zeros. Changed, as are labels, int64[a], of each atom.
    """
    for atom in range(len(labels)):
        own, other = labels[atom], 0
        for cluster in range(1, clusters + 1):
            if to_cluster[atom, cluster] > to_cluster[atom, other]:
                other = cluster
        if to_cluster[atom, other] > to_cluster[atom, own] + least:
            for number in range(len(labels)):
                to_cluster[number, own] -= gain[atom, number]
                to_cluster[number, other] += gain[atom, number]
            labels[atom] = other
            clusters = max(clusters, other + 1)


for loop, signature in (
    (choose, "i8(i8, i8[:, ::1], f8[::1], f8, i8[::1])"),
    (move_atoms, "void(f8[:, ::1], f8[:, ::1], i8[::1], i8, f8)"),
):
    keep_compiled(loop)
    loop.compile(signature)
