"""What a longer context makes of a row by itself, learned from requests that span several octaves.

Rows of one request that have twice the context of its others differ by what the length does, for
the request is the same. Rows of different requests differ by what they ask for as well: a workload
that only ever has one length would be taken for the effect of that length, and erased.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, array_module, on_host
from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS

# Contrasts of a run that are kept, which bounds their memory: 6 MB.
MOST_CONTRASTS = 65_536
# Rows' worth of contrasts at which half of an effect is believed.
SHRINK_ROWS = 50.0


class Contrasts(NamedTuple):
    """How m pairs of a request's octaves differ, on the host.

    octave int32[m], the lower of the two; weight float32[m], rows that the difference is worth:
    n m / (n + m) for n and m rows; difference float32[m, 20], mean of the upper less the lower.
    """

    octave: Int32s
    weight: Floats
    difference: Floats

    @classmethod
    def none(cls) -> Contrasts:
        return cls(
            np.empty(0, np.int32), np.empty(0, np.float32), np.empty((0, DIMENSIONS), np.float32)
        )

    @classmethod
    def of(cls, raised: Doubles, octave: Ints, requests: Ints, most: int) -> Contrasts:
        """Those of n rows; neighbouring octaves of a request whose rows are among them.

        Args:
            raised: float64[n, 20], on any device.
            octave: int64[n], there.
            requests: int[n], a number for each request, there.
            most: with more pairs than that every so manieth is kept.
        """
        xp = array_module(raised)
        if not len(raised):
            return cls.none()
        key = requests.astype(np.int64) * HIST_BINS + octave
        order = xp.argsort(key)
        key = key[order]
        first = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), key[1:] != key[:-1]]))
        ends = xp.concatenate([first[1:], xp.asarray([len(key)])])
        counts, group = (ends - first).astype(np.float64), key[first]
        # Two octaves of one request that follow each other.
        lower = xp.flatnonzero((group[1:] == group[:-1] + 1) & (group[1:] % HIST_BINS > 0))
        lower = lower[:: max(1, -(-len(lower) // most))]
        if not len(lower):
            return cls.none()
        sums = xp.concatenate(
            [xp.zeros((1, raised.shape[1])), xp.cumsum(raised[order], axis=0)]
        )  # fmt: skip
        below, above = (
            (sums[ends[at]] - sums[first[at]]) / counts[at, None] for at in (lower, lower + 1)
        )
        few, many = counts[lower], counts[lower + 1]
        return cls(
            on_host(group[lower] % HIST_BINS).astype(np.int32),
            on_host(few * many / (few + many)).astype(np.float32),
            on_host(above - below).astype(np.float32),
        )

    def __add__(self, other: Contrasts) -> Contrasts:  # type: ignore[override]
        return Contrasts(*(np.concatenate(both) for both in zip(self, other, strict=True)))

    def effects(self) -> Doubles:
        """What each octave adds to a row, beside the first: float64[16, 20].

        The sum of the steps below it. A step is the weighted median over requests, number by
        number, because a mean would take out of all rows what a few kinds of request do; with
        contrasts worth W rows it is shrunk by W / (W + SHRINK_ROWS).
        """
        effect = np.zeros((HIST_BINS, DIMENSIONS))
        for octave in range(HIST_BINS - 1):
            own = self.octave == octave
            effect[octave + 1] = effect[octave]
            if own.any():
                weight = self.weight[own].astype(np.float64)
                believed = weight.sum() / (weight.sum() + SHRINK_ROWS)
                effect[octave + 1] += believed * weighted_median(self.difference[own], weight)
        return effect


def weighted_median(values: Floats, weight: Doubles) -> Doubles:
    """Of each column of float32[m, d] the smallest value that has half of the weight at or below
    it: float64[d]."""
    order = np.argsort(values, axis=0, kind="stable")
    cumulative = np.cumsum(weight[order], axis=0)
    at = (cumulative >= cumulative[-1] / 2).argmax(axis=0)
    columns = np.arange(values.shape[1])
    return values[order[at, columns], columns].astype(np.float64)
