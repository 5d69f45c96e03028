"""Attention rows, simulated key by key, and reduced to fingerprints.

A head of a behaviour spreads its mass over the distances d = 0..n-1 of the n visible keys in parts:

    bump    around 2^centre tokens back, `width` octaves wide
    decay   exp(-d / 2^centre)
    comb    every 2^centre tokens, for 2^width teeth
    place   around the share `centre` of the context from its start, `width` of it wide
    flat    on all keys alike

A row draws its parts' shares from a Dirichlet around the head's, moves their centres, and then each
key's mass is multiplied by exp(roughness * normal), as it depends on the token that is there. A
sparse row puts its mass on a few keys only, drawn from the same parts: all others have exactly 0.
The statistics of a row are those of `capture_kernels.fingerprint.vector.fingerprint`, by sums over
slices of the distances; tests compare the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import (
    DIMENSIONS,
    HIST_BINS,
    LAYERED_BAND_EDGES,
    LOG16_BAND_BINS,
    PLACE_BINS,
    Layout,
    at_depths,
    log2_bins,
)

Form = Literal["bump", "decay", "comb", "place", "flat"]
Doubles = NDArray[np.float64]
Masses = NDArray[np.float32]
# Keys of the longest row.
LONGEST = 40_000
_LOG2 = np.log2(np.arange(1, LONGEST + 1)).astype(np.float32)
_INVERSE = (1.0 / np.arange(1, LONGEST + 1)).astype(np.float32)
_DISTANCE = np.arange(LONGEST, dtype=np.float32)
_BIN_STARTS = np.array([0, *(2**b for b in range(1, HIST_BINS))])
# exp() of less is 0 in float32, whose logarithm is not wanted.
_LEAST = np.float32(1e-37)


@dataclass(frozen=True)
class Part:
    """One part of a head's mass: what `centre` and `width` are in depends on the form."""

    form: Form
    centre: float
    width: float
    share: float


@dataclass(frozen=True)
class Head:
    """Parts whose shares sum to 1, and the deviation of a key's log mass from token to token."""

    parts: tuple[Part, ...]
    roughness: float


@dataclass(frozen=True)
class Behaviour:
    """What captured layers do, each by its heads; a layout of one layer has one.

    drift: the behaviour is a family, whose centres lie anywhere in a range of so many octaves.
    keys: of a sparse row; None for a row with mass on every key.
    """

    layers: tuple[tuple[Head, ...], ...]
    drift: float = 0.0
    keys: int | None = None


def moved(part: Part, octaves: float) -> Part:
    """The part with its centre so many octaves on; places move by a hundredth for a tenth."""
    if part.form == "flat":
        return part
    if part.form == "place":
        centre = min(max(part.centre + 0.1 * octaves, 0.0), 1.0)
    else:
        centre = max(part.centre + octaves, 0.0)
    return Part(part.form, centre, part.width, part.share)


def kernel(part: Part, n: int) -> Masses:
    """The part's mass on each distance, nearest first: float32[n], its sum 1."""
    if part.form == "flat":
        return np.full(n, 1.0 / n, np.float32)
    if part.form == "bump":
        # 1 / d makes it a normal distribution of log2(d).
        centre = min(part.centre, math.log2(n))
        mass = np.exp(-0.5 * ((_LOG2[:n] - centre) / part.width) ** 2) * _INVERSE[:n]
    elif part.form == "decay":
        mass = np.exp(_DISTANCE[:n] * np.float32(-(2.0**-part.centre)))
    elif part.form == "comb":
        period = max(2, round(2.0**part.centre))
        mass = np.zeros(n, np.float32)
        teeth = np.arange(0, n, period)
        mass[teeth] = np.exp(-np.arange(len(teeth)) / 2.0**part.width)
    else:
        place = 1.0 - (_DISTANCE[:n] + 0.5) / n
        mass = np.exp(-0.5 * ((place - np.float32(part.centre)) / np.float32(part.width)) ** 2)
    total = mass.sum(dtype=np.float64)
    return (mass / total).astype(np.float32)


def dense_row(
    head: Head, n: int, rng: np.random.Generator | None, octaves: float, concentration: float
) -> Masses:
    """One row's masses, nearest key first: float32[n]; without `rng` what is expected of it."""
    shares = np.array([part.share for part in head.parts])
    if rng is not None and len(shares) > 1:
        shares = rng.dirichlet(concentration * shares + 0.05)
    row = np.zeros(n, np.float32)
    for part, share in zip(head.parts, shares, strict=True):
        row += np.float32(share) * kernel(moved(part, octaves), n)
    if rng is not None and head.roughness:
        row *= np.exp(rng.standard_normal(n, np.float32) * np.float32(head.roughness))
    return row


def sparse_row(
    head: Head, n: int, keys: int, rng: np.random.Generator, octaves: float, concentration: float
) -> Masses:
    """One row's masses, nearest key first: float32[n], 0 on all but about `keys` of them."""
    shares = np.array([part.share for part in head.parts])
    shares = rng.dirichlet(concentration * shares + 0.05)
    # At least one key of each part: the mass is split by the parts, not by chance.
    of = np.concatenate([np.arange(len(shares)), rng.choice(len(shares), keys, p=shares)])
    weight = rng.standard_gamma(4.0, len(of))
    weight *= (shares / np.bincount(of, weight, len(shares)))[of]
    row = np.zeros(n, np.float32)
    for part, mass in zip(of, weight, strict=True):
        row[drawn_distance(moved(head.parts[part], octaves), n, rng)] += mass
    return row


def drawn_distance(part: Part, n: int, rng: np.random.Generator) -> int:
    """A distance drawn from the part."""
    if part.form == "bump":
        distance = 2.0 ** rng.normal(part.centre, part.width) - 1.0
    elif part.form == "decay":
        distance = rng.exponential(2.0**part.centre)
    elif part.form == "comb":
        period = max(2, round(2.0**part.centre))
        distance = period * math.floor(rng.exponential(2.0**part.width))
    elif part.form == "place":
        distance = n * (1.0 - rng.normal(part.centre, part.width))
    else:
        distance = rng.uniform(0, n)
    return min(max(int(distance), 0), n - 1)


def vector_of(
    behaviour: Behaviour,
    n: int,
    layout: Layout,
    rng: np.random.Generator | None = None,
    octaves: float = 0.0,
    concentration: float = 40.0,
) -> Doubles:
    """The fingerprint of one row over n visible keys: float64[20].

    Args:
        rng: draws the row; None for the one that is expected (of a sparse row: before its keys are
            drawn).
        octaves: how far the row's centres are moved.
        concentration: of the Dirichlet of the parts' shares.
    """
    found, entropies = [], []
    for heads in behaviour.layers:
        rows = [
            sparse_row(head, n, behaviour.keys, rng, octaves, concentration)
            if behaviour.keys is not None and rng is not None
            else dense_row(head, n, rng, octaves, concentration)
            for head in heads
        ]
        reduced = [reduce_row(row, layout) for row in rows]
        found.append(np.mean([shares for shares, _ in reduced], axis=0))
        entropies.append(float(np.mean([entropy for _, entropy in reduced])))
    shares = np.mean(found, axis=0)
    vector = np.zeros(DIMENSIONS)
    vector[:3], vector[3] = shares[:3], np.mean(entropies)
    vector[4 : 1 + len(shares)] = shares[3:]
    if layout is Layout.LAYERED:
        vector[4 + PLACE_BINS :] = at_depths(np.array(entropies))
    return vector


def reduce_row(row: Masses, layout: Layout) -> tuple[Doubles, float]:
    """Bands and bins of one row, nearest key first, and its entropy.

    Args:
        row: float32[n], not all 0; of any sum.

    Returns:
        float64[3 + 16] (layered: [3 + 8]) and the entropy in [0, 1].
    """
    n, total = len(row), float(row.sum(dtype=np.float64))
    bins = np.zeros(HIST_BINS if layout is Layout.LOG16 else PLACE_BINS)
    if layout is Layout.LOG16:
        last = int(log2_bins(n - 1))
        sums = np.add.reduceat(row, _BIN_STARTS[: last + 1], dtype=np.float64)
        bins[: last + 1] = sums / total
        bands = [bins[a:b].sum() for a, b in pairwise(LOG16_BAND_BINS)]
    else:
        sums = np.concatenate([[0.0], np.cumsum(row, dtype=np.float64)]) / total
        near, far = (sums[min(edge, n)] for edge in LAYERED_BAND_EDGES)
        bands = [near, far - near, sums[-1] - far]
        # The first key of each bin, oldest first, where (2 rank + 1) * bins // 2n changes.
        first = -(-(2 * n * np.arange(PLACE_BINS + 1) - PLACE_BINS) // (2 * PLACE_BINS))
        upto = sums[n - np.clip(first, 0, n)]
        bins[:] = upto[:-1] - upto[1:]
    entropy = 0.0
    if n > 1:
        p = np.maximum(row / np.float32(total), _LEAST)
        entropy = -float(np.dot(p, np.log(p))) / math.log(n)
    return np.concatenate([bands, bins]), min(max(entropy, 0.0), 1.0)
