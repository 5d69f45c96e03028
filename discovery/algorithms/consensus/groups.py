"""The groups that are taken of trees, what they agree on, and how far clusters are among them."""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints

from .cell_tree import Tree
from .found_again import CHANCE, chosen_groups, likest
from .lengths import kept_within

# No cluster holds more of the rows than this: that is what attention has in common.
LARGEST = 0.5
# How much more a group must be worth than the groups in it, to be taken in their place.
DETAIL = 1.15


def groups_taken(
    trees: list[Tree],
    again: list[Doubles],
    size: int,
    rows: int,
    linked: Floats | None = None,
    detail: float = DETAIL,
) -> list[Floats]:
    """The groups taken of each tree, as how far each atom is in each: float32[g, a].

    Args:
        again: float64[c + m] each, how far each group is found again; size: fewest rows of a
            cluster; rows: how many are clustered.
        linked: float32[a, a], links of atoms over octaves of context: a group that they lead out of
            is worth less.
        detail: how much more a group must be worth than those in it.
    """
    taken = []
    for one, own in zip(trees, again, strict=True):
        within = 1.0 if linked is None else kept_within(one.share, one.rows, linked)
        worth = np.maximum(own - CHANCE, 0.0) * within
        taken.append(one.share[chosen_groups(one, worth, size, LARGEST * rows, detail)])
    return taken


def agreement(taken: list[Floats]) -> tuple[Doubles, list[Ints]]:
    """How often two atoms are together in the groups of the trees: float64[a, a]; and the
    partitions int64[a] that these are.

    Args:
        taken: for each tree float32[g, a], how far each atom is in each of the groups taken of it.
    """
    count = taken[0].shape[1]
    together = np.zeros((count, count))
    partitions = []
    for share in taken:
        together += share.T @ share
        partitions.append(share.argmax(axis=0) if len(share) else np.zeros(count, np.int64))
    return together / len(taken), partitions


def stability_of(inside: Doubles, groups: list[Floats], atoms: Ints) -> Doubles:
    """How far each cluster is found again, as the mean over what halves of the requests have:
    float64[c] of the rows float64[c, a] of each cluster in each atom.

    Args:
        groups: float32[g, a] each, the shares of the atoms' rows in each group of a half.
    """
    own = (inside / atoms).astype(np.float32)
    return np.asarray(np.mean([likest(own, one, atoms) for one in groups], axis=0))
