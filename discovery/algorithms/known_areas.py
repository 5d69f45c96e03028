"""Areas of an earlier run (`consensus.areas`), and which of them a later run has no more.

Clusters do not follow areas, so what a task did may be parts of several of them. Where that task
comes no more they go on with the rest; what says so is an area that is gone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask
from discovery.artifacts.schema import NOISE

# Neighbours among other rows that say of a row which of their areas it is in. A row is in the core
# of an area where at least this share of them is in that area: rows between areas come and go.
VOTERS, CORE = 10, 0.8
# An area is gone where its core has less than this share of the rows that it had, if those were
# more than this share of all, and worth so many equal requests: what one or two requests do comes
# and goes. Chosen with benchmarks/gone_areas.py, seed 3171.
GONE, LEAST_SHARE, LEAST_REQUESTS = 0.25, 0.01, 3.5


class InAreas(NamedTuple):
    """Of n rows: area int32[n], the one that each is in, -1 for none; share float32[n], how many of
    the rows about it, of other requests or of another run, are in that area."""

    area: Int32s
    share: Floats

    @classmethod
    def none(cls, rows: int) -> InAreas:
        return cls(np.full(rows, NOISE, np.int32), np.zeros(rows, np.float32))

    @classmethod
    def by_vote(cls, areas: Ints | Int32s, near: Int32s, votes: Mask | None = None) -> InAreas:
        """The area that most of its neighbours are in, of each row.

        Args:
            areas: int32[m] or int64[m], of the rows that vote; near: int32[n, k], neighbours.
            votes: bool[n, k], which of them vote; None: all.
        """
        rows = np.arange(len(near))
        found = np.zeros((len(near), int(areas.max()) + 1), np.int32)
        for number, column in enumerate(near.T):
            found[rows, areas[column]] += 1 if votes is None else votes[:, number]
        area = found.argmax(axis=1).astype(np.int32)
        share = found[rows, area] / np.maximum(found.sum(axis=1), 1)
        return cls(area, share.astype(np.float32))

    @property
    def core(self) -> Ints:
        """The rows that are in the core of an area: int64[k]."""
        return np.flatnonzero((self.area != NOISE) & (self.share >= CORE))


class KnownAreas(NamedTuple):
    """The q areas of a run, on m of its rows: where these are; weight float64[m], the share of all
    rows that each stands for; requests: float64[q], how many equal ones the rows of each core are
    worth."""

    rows: InAreas
    weight: Doubles
    requests: Doubles

    def share(self) -> Doubles:
        """The share of all rows that is in the core of each area: float64[q]."""
        core = self.rows.core
        found = np.zeros(len(self.requests))
        np.add.at(found, self.rows.area[core], self.weight[core])
        return found

    def gone(self, later: InAreas, weight: Doubles) -> Mask:
        """Which areas have hardly any rows in a later run: bool[q].

        Args:
            later: where rows of that run are in these areas; weight: float64[n], the share of all
                that each stands for.
        """
        own, left = self.share(), KnownAreas(later, weight, self.requests).share()
        asked = (own >= LEAST_SHARE) & (self.requests >= LEAST_REQUESTS)
        return np.asarray(asked & (left < GONE * own))


def weights_of(label: Int32s, share: Doubles) -> Doubles:
    """The share of all rows that each of m rows stands for, float64[m]: of the cluster int32[m] of
    each and the share float64[c] of each cluster, of which those rows are a sample."""
    return np.asarray(share[label] / np.bincount(label, minlength=len(share))[label])
