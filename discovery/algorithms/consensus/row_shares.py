"""How far rows belong to clusters, by what atoms, trees and neighbours say of them."""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints
from discovery.artifacts.memberships import Memberships

from .continued import Continued, counted


def row_shares(
    inside: Doubles, found: Continued, together: Doubles, atom: Ints, near: Int32s
) -> Doubles:
    """How far each row belongs to each cluster: float64[n, c], each row's sum is 1.

    An atom belongs to a cluster as often as it is together with its rows. A row belongs as its
    neighbours and itself do on average, so that clusters end where rows do and not where atoms do;
    one that is in a cluster of the parent's, for half to that.

    Args:
        inside: float64[c, a], rows of each cluster in each atom.
    """
    of_atom = (inside @ together).T / inside.sum(axis=1)
    total = of_atom.sum(axis=1, keepdims=True)
    # An atom that no tree has in a group belongs to what it was put to.
    put = (inside / inside.sum(axis=0)).T
    of_row = np.where(total > 0, of_atom / np.maximum(total, 1e-12), put)[atom]
    kept = np.flatnonzero(found.heir_of[found.labels] >= 0)
    of_row[kept] /= 2.0
    of_row[kept, found.labels[kept]] += 0.5
    shares = of_row.copy()
    for column in near.T:
        shares += of_row[column]
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def memberships(label: Int32s, taken: list[Floats], atom: Ints, near: Int32s) -> Memberships:
    """How far each row belongs to its cluster, and to the likeliest other: the mean of two shares,
    that of the trees that put it and its neighbours there, and that of its neighbours in there.

    A group of a tree, or a region of a half of the requests in the place of trees, counts for the
    cluster that most of its rows are in. How well this foretells
    the clusters of other requests is what `benchmarks/memberships.py` measures.

    Args:
        label: int32[n], the cluster of each row; taken: as of `agreement`; atom: int64[n], of each
            row; near: int32[n, k], numbers of its neighbours.
    """
    count, atoms = int(label.max()) + 1, taken[0].shape[1]
    inside = counted(label, atom, count, atoms)
    votes = np.zeros((atoms, count))
    for share in taken:
        if len(share):
            votes += share.T @ np.eye(count)[(share @ inside.T).argmax(axis=1)]
    total = votes.sum(axis=1, keepdims=True)
    # An atom that no tree has in a group belongs to what its rows were put to.
    put = (inside / inside.sum(axis=0)).T
    by_trees = np.where(total > 0, votes / np.maximum(total, 1e-12), put)[atom]
    shares, rows = by_trees.copy(), np.arange(len(label))
    shares[rows, label] += 1.0
    for column in near.T:
        shares += by_trees[column]
        shares[rows, label[column]] += 1.0
    shares /= 2.0 * (1 + near.shape[1])
    return Memberships.of_shares(label, shares)
