"""The parent run's clusters, as this run's rows have them, where the traffic is what it was.

Attention is a continuum, and two runs of the same traffic cut it in different places. So a run goes
on with its parent's clusters, except where its own rows say otherwise: where the parent had hardly
any rows, where the rows of a cluster are spread in another way than before, and where nearly all
trees agree on this run's own clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask

# Rows of a cluster are spread in another way if their distribution over the atoms differs from that
# of the parent's rows by more than so many times what halves of the requests differ by. When this
# was chosen, that was at most 1.8 in 14 runs of one traffic (benchmarks/real_nights.py, seed 3171),
# and 2.2 or more where planted behaviours split or merged (benchmarks/nights.py, seeds 0 to 2).
OTHERWISE = 2.0
# Clusters that the trees find again by more than this are taken as they are.
SURE = 0.9
# A cluster is new where the parent had less than this share of its rows.
NEW = 1 / 3
# A cluster is of at least so many requests, or of this share of all where they are few: what one
# request does is no behaviour of the traffic.
LEAST_REQUESTS, SHARE_OF_REQUESTS = 3.0, 0.1
# Divisions of the requests whose halves are compared.
COMPARED_HALVES = 30


class ParentClusters(NamedTuple):
    """The p clusters of the parent run.

    labels: int32[n], the one that each of this run's rows is in by the parent's prototypes, -1
    beyond their reach. references: float32[m, d], rows of the parent in this run's PCA space;
    reference_cluster: int64[m], of each; share: float64[p], of all rows of the parent.
    """

    labels: Int32s
    references: Floats
    reference_cluster: Ints
    share: Doubles


class Continued(NamedTuple):
    """labels: int64[n], the cluster of each row, numbered from 0. Of each cluster: heir_of
    int64[c], the one of the parent's that it is, -1 for those of this run alone; new bool[c],
    whether the parent had hardly any rows there."""

    labels: Ints
    heir_of: Ints
    new: Mask


def continued(
    parent: ParentClusters,
    labels: Ints,
    stability: Doubles,
    atom: Ints,
    reference_atom: Ints,
    halves: Sequence[Mask],
    size: int,
    may_be_new: Mask,
) -> Continued:
    """The parent's clusters where they go on, and this run's where they do not.

    Args:
        labels: int64[a], this run's cluster of each atom; stability: float64[c], of each.
        atom, reference_atom: int64[n] and int64[m], the atom of each row and reference.
        halves: bool[n] each, the rows of one half of the requests and of the other, in turn.
        size: fewest rows of a cluster.
        may_be_new: bool[c], whether a cluster is new if the parent had hardly any rows there.
    """
    known, atoms = len(parent.share), len(labels)
    rows = np.bincount(atom, minlength=atoms)
    here = counted(parent.labels, atom, known, atoms)
    # The parent's cluster of each atom, by most of its rows.
    home = np.where(here.any(axis=0), here.argmax(axis=0), -1) if known else np.full(atoms, -1)
    region = np.arange(known)[:, None] == home
    before = rows_before(parent, reference_atom, rows)

    pairs = islice(zip(halves[0::2], halves[1::2], strict=True), COMPARED_HALVES)
    # What halves differ by, over the divisions in which both have rows of the cluster.
    by_chance = np.ma.masked_invalid(
        [
            unlike(*(region * np.bincount(atom[half], minlength=atoms) for half in pair))
            for pair in pairs
        ]
    ).mean(axis=0)
    # Nothing can be said of rows of a single request, or where the parent has none.
    otherwise = (unlike(region * rows, region * before) > OTHERWISE * by_chance).filled(False)
    sure = region @ (rows * stability[labels]) > SURE * (region @ rows)
    new = may_be_new & is_new(labels, before, rows)
    free = (home < 0) | np.append(otherwise | sure, True)[home] | new[labels]

    found = home.copy()
    for cluster in range(len(stability)):
        inside = labels == cluster
        loose, rest = inside & free, inside & ~free
        if rest.any() and rows[loose].sum() < max(size / 2, rows[inside].sum() / 2):
            # The smaller part of it is left to what the larger part goes on as.
            found[loose] = np.bincount(home[rest], rows[rest]).argmax()
        else:
            found[loose] = known + cluster
    # Rows that the parent puts elsewhere than most of their atom go on as what it says, or small
    # clusters would be lost to their neighbours.
    goes_on = np.isin(np.arange(known), found)
    elsewhere = np.append(goes_on, False)[parent.labels] & ~free[atom]
    names, numbers = np.unique(np.where(elsewhere, parent.labels, found[atom]), return_inverse=True)
    own = names >= known
    return Continued(
        numbers.astype(np.int64),
        np.where(own, -1, names),
        own & new[np.where(own, names - known, 0)],
    )


def rows_before(parent: ParentClusters, reference_atom: Ints, rows: Ints) -> Doubles:
    """How many rows each atom would have, float64[a], had as many come as the parent's did: of its
    rows int64[a], and the atom int64[m] of each reference."""
    there = counted(parent.reference_cluster, reference_atom, len(parent.share), len(rows))
    shares: Doubles = (parent.share / np.maximum(there.sum(axis=1), 1)) @ there
    return shares * rows.sum()


def is_new(labels: Ints, before: Doubles, rows: Ints) -> Mask:
    """Whether the parent had hardly any rows of each cluster, bool[c]: of the cluster int64[a] of
    each atom, its rows as of `rows_before`, and its rows."""
    return np.asarray(np.bincount(labels, before) < NEW * np.bincount(labels, rows))


def counted(group: Ints | Int32s, cell: Ints, groups: int, cells: int) -> Doubles:
    """How many rows of each group are in each cell, those of none (-1) left out:
    float64[groups, cells]."""
    inside = group >= 0
    pair = group[inside].astype(np.int64) * cells + cell[inside]
    return np.bincount(pair, minlength=groups * cells).reshape(groups, cells).astype(np.float64)


def unlike(first: Doubles, second: Doubles) -> Doubles:
    """How far the rows of each cluster are spread over the atoms in another way: float64[c], the
    total variation of float64[c, a] and float64[c, a], NaN where one of them has none."""
    with np.errstate(invalid="ignore"):
        spread = [rows / rows.sum(axis=1, keepdims=True) for rows in (first, second)]
    return np.asarray(0.5 * np.abs(spread[0] - spread[1]).sum(axis=1))


def effective_requests(labels: Ints, requests: Ints) -> Doubles:
    """How many requests of equal size the rows of each cluster are worth: float64[c] of the cluster
    int64[n] and request int64[n] of each row. Source: Kish 1965, Survey Sampling."""
    counts = counted(labels, requests, labels.max() + 1, requests.max() + 1)
    return np.square(counts.sum(axis=1)) / np.maximum(np.square(counts).sum(axis=1), 1)


def least_requests(requests: Ints) -> float:
    """The fewest requests of a cluster, by the request int64[n] of each row."""
    everything = effective_requests(np.zeros(len(requests), np.int64), requests)
    return min(LEAST_REQUESTS, SHARE_OF_REQUESTS * float(everything[0]))
