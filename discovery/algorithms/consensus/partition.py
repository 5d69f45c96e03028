"""One partition of what many clusterings agree on, and the families above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from capture_kernels.arrays import Doubles, Ints

# Two atoms belong together where more than this share of the clusterings has them together: then
# the partition is the median one, which disagrees with the fewest (Filkov & Skiena 2004).
TOGETHER = 0.5
# Two clusters are of one family where more than this share has their rows together. Behaviours that
# are apart have hardly any in common; those that grow into each other, a third and more.
RELATED = 0.35
# Clusterings that the search starts from; of what it ends in the best is taken.
STARTS = 12


def median_partition(together: Doubles, atoms: Ints, starts: Sequence[Ints]) -> Ints:
    """The partition that most agree with, by local search: int64[a], numbered from 0.

    Args:
        together: float64[a, a], how often each two atoms are in one cluster.
        atoms: int64[a], rows of each; starts: partitions int64[a] to begin with.
    """
    gain = (together - TOGETHER) * np.outer(atoms, atoms)
    np.fill_diagonal(gain, 0.0)
    best, most = np.zeros(len(atoms), np.int64), -np.inf
    for start in starts[:STARTS]:
        found = improved(gain, numbered(start))
        reached = float(gain[found[:, None] == found].sum())
        if reached > most:
            best, most = found, reached
    return best


def improved(gain: Doubles, labels: Ints) -> Ints:
    """Atoms moved one by one, and clusters joined, as long as that gains: int64[a]."""
    from .partition_loops import move_atoms

    # Below that a gain is rounding, and atoms would go to and fro.
    least = 1e-9 * float(np.abs(gain).sum())
    while True:
        before, clusters = labels.copy(), int(labels.max()) + 1
        # Columns for atoms that are best alone.
        to_cluster = np.zeros((len(labels), clusters + 1 + len(labels)))
        to_cluster[:, :clusters] = gain @ np.eye(clusters)[labels]
        move_atoms(gain, to_cluster, labels, clusters, least)
        labels = joined(gain, numbered(labels), least)
        if np.array_equal(labels, before):
            return labels


def joined(gain: Doubles, labels: Ints, least: float) -> Ints:
    """Clusters joined in pairs, those that gain most first, and more than `least`."""
    inside = np.eye(labels.max() + 1)[labels]
    between = inside.T @ gain @ inside
    name = np.arange(len(between))
    np.fill_diagonal(between, -np.inf)
    while between.size and between.max() > least:
        first, second = np.unravel_index(int(between.argmax()), between.shape)
        between[first] += between[second]
        between[:, first] += between[:, second]
        between[second] = between[:, second] = between[first, first] = -np.inf
        name[name == second] = first
    return numbered(name[labels])


def without_small(
    labels: Ints, together: Doubles, atoms: Ints, least: float, size_of: Callable[[Ints], Doubles]
) -> Ints:
    """Clusters of a size below `least`, the smallest first, put to the one that most agree they
    belong to: int64[a].

    Args:
        size_of: the size float64[c] of each cluster of a partition int64[a].
    """
    while True:
        labels = numbered(labels)
        inside, sizes = rows_inside(labels, atoms), size_of(labels)
        small = int(sizes.argmin())
        if sizes[small] >= least or len(sizes) == 1:
            return labels
        share = inside[small] @ together @ inside.T / inside.sum(axis=1)
        share[small] = -1.0
        labels = np.where(labels == small, int(share.argmax()), labels)


def agreement_of_halves(partitions: list[Ints], atoms: Ints) -> float:
    """The mean adjusted Rand index of what one half of the requests and the other make of the
    atoms, whose partitions int64[a] follow each other. Fewer than two groups agree on nothing.

    Args:
        atoms: int64[a], rows of each.
    """
    found = []
    for one, other in zip(partitions[0::2], partitions[1::2], strict=True):
        nothing = one.max() == 0 or other.max() == 0
        found.append(0.0 if nothing else adjusted_rand(one, other, atoms))
    return float(np.mean(found))


def families_of(inside: Doubles, together: Doubles) -> Ints:
    """The family of each cluster, by average linkage as long as more than `RELATED` of the
    clusterings have two together: int64[clusters].

    Args:
        inside: float64[c, a], rows of each cluster in each atom; together: float64[a, a], as above.
    """
    rows = inside.sum(axis=1)
    sums = inside @ together @ inside.T
    family = np.arange(len(rows))
    while len(rows) > 1:
        share = sums / np.outer(rows, rows)
        np.fill_diagonal(share, -1.0)
        first, second = sorted(np.unravel_index(int(share.argmax()), share.shape))
        if share[first, second] <= RELATED:
            break
        for table in (sums, sums.T):
            table[first] += table[second]
        rows[first] += rows[second]
        sums = np.delete(np.delete(sums, second, axis=0), second, axis=1)
        rows = np.delete(rows, second)
        family = np.where(family == second, first, family - (family > second))
    return numbered(family)


def adjusted_rand(first: Ints, second: Ints, atoms: Ints) -> float:
    """The adjusted Rand index of two partitions int64[a] of atoms with so many rows, int64[a]: 1
    for the same one, 0 for chance. Source: Hubert & Arabie 1985."""
    shared = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(shared, (first, second), atoms)

    def pairs(rows: Doubles) -> float:
        return float((rows * (rows - 1.0)).sum() / 2.0)

    each = pairs(shared.sum(axis=1)), pairs(shared.sum(axis=0))
    by_chance = each[0] * each[1] / max(pairs(shared.sum(keepdims=True)), 1.0)
    most = sum(each) / 2.0
    # Two partitions into one cluster, or into single rows, are the same one.
    return 1.0 if most == by_chance else (pairs(shared) - by_chance) / (most - by_chance)


def rows_inside(labels: Ints, atoms: Ints) -> Doubles:
    """Rows of each cluster in each atom: float64[c, a] of the cluster int64[a] of each atom."""
    return np.asarray((np.eye(labels.max() + 1)[labels] * atoms[:, None]).T)


def numbered(labels: Ints) -> Ints:
    """The same partition with the numbers 0, 1, 2: int64[a]."""
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
