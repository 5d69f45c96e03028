"""Areas of an earlier run (`consensus.areas`), and which of them a later run has no more.

Clusters do not follow areas, so what a task did may be parts of several of them. Where that task
comes no more they go on with the rest; what says so is an area that is gone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Int32s, Mask
from discovery.artifacts.schema import NOISE

# Neighbours among other rows that say of a row which of their areas it is in.
AREA_VOTERS = 10
# An area is gone where it has less than this share of what it had, if that was more than this share
# of the rows. Of areas of three requests and more, in 14 runs of real attention, the one of the
# task that went fell to 0.14 and no other below 0.36 (benchmarks/real_nights.py, seed 3171).
GONE, LEAST_SHARE = 0.25, 0.01


class KnownAreas(NamedTuple):
    """The q areas of a run, on m of its rows: area int32[m], of each, -1 for none; weight
    float64[m], the share of all rows that each stands for; requests: float64[q], how many equal
    ones the rows of each area are worth."""

    area: Int32s
    weight: Doubles
    requests: Doubles

    def gone(self, share: Doubles, least_requests: float) -> Mask:
        """Which areas have hardly any rows in a later run, of whose rows they have the shares
        float64[q]: bool[q].

        Args:
            least_requests: of an area that is asked for.
        """
        known = self.area != NOISE
        own = np.bincount(self.area[known], self.weight[known], len(self.requests))
        asked = (own >= LEAST_SHARE) & (self.requests >= least_requests)
        return np.asarray(asked & (share < GONE * own))


def weights_of(label: Int32s, share: Doubles) -> Doubles:
    """The share of all rows that each of m rows stands for, float64[m]: of the cluster int32[m] of
    each and the share float64[c] of each cluster, of which those rows are a sample."""
    return np.asarray(share[label] / np.bincount(label, minlength=len(share))[label])


def voted(areas: Int32s, near: Int32s) -> Int32s:
    """The area that most of its neighbours among other rows are in, of each of n rows: int32[n].

    Args:
        areas: int32[m], of the other rows; near: int32[n, k], numbers of neighbours among them.
    """
    votes = np.zeros((len(near), int(areas.max()) + 1), np.int32)
    rows = np.arange(len(near))
    for column in near.T:
        votes[rows, areas[column]] += 1
    return votes.argmax(axis=1).astype(np.int32)
