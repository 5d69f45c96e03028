"""Whether there is a valley of density between two groups of rows.

Every clustering cuts a behaviour that is long and thin somewhere. Of two behaviours that touch,
there are fewer rows between them than in each. Rows are laid on the line that separates the two
groups best (Fisher 1936), and the density along it is looked at (as by dip tests in Kalogeratos &
Likas 2012 and Leiber et al. 2021). The line is found by half of the requests and the density is the
other half's: rows that a line was found by show a valley that is not there.

What a longer context does to rows must not look like a valley. So the rows of both groups count as
if they were equally many at each length, and groups without common lengths show none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints, Mask

# Lengths of context are alike within a quarter of an octave. With a whole one, rows just above a
# power of two, whose last histogram bin holds little yet, were a group apart.
STEPS_OF_OCTAVE = 4
# Rows of each group at common lengths in each half of the requests. Fewer show nothing.
LEAST_ROWS = 15
# Share of the mean variance that is added to each dimension's, as groups have few rows.
SHRINKAGE = 0.1
# Bins that a density is counted in.
BINS = 256


class Pair(NamedTuple):
    """The rows of two groups: float64[m, d] and float64[l, d], in one of the halves.

    weights: float64[m] and float64[l], whose sums are 1; common: how many rows of each are at
    lengths that both have.
    """

    rows: tuple[Doubles, Doubles]
    weights: tuple[Doubles, Doubles]
    common: int


def length_steps(positions: Ints, octaves: Ints) -> Ints:
    """The lengths of context of rows, in steps of a quarter of an octave: int64[n]. The length of a
    row that looks further back than its position says is like no other's, and below 0: there the
    position means something else.

    Args:
        positions: int64[n]; octaves: int64[n], of how far each row looks.
    """
    steps = np.floor(STEPS_OF_OCTAVE * np.log2(positions + 1.0)).astype(np.int64)
    alone = -1 - np.arange(len(steps))
    return np.where(positions + 1 < 2 ** octaves.astype(np.int64), alone, steps)


def valley(rows: Floats, lengths: Ints, halves: Sequence[Mask], first: Ints, second: Ints) -> float:
    """The density in the valley between two groups, over that at the lower of the tops beside it,
    in [0, 1]: the most that a half of the requests shows. 1 is no valley.

    Args:
        rows: float32[n, d]; lengths: int64[n], as of `length_steps`.
        halves: bool[n] each, rows of half of the requests.
        first, second: int64[m] and int64[l], numbers of the groups' rows.
    """
    shallowest = 0.0
    for half in halves:
        found_by, seen_in = (
            pair_of(rows, lengths, *(own[half[own] == inside] for own in (first, second)))
            for inside in (True, False)
        )
        if min(found_by.common, seen_in.common) < LEAST_ROWS:
            return 1.0
        shallowest = max(shallowest, along(discriminant(found_by), seen_in))
    return shallowest


def pair_of(rows: Floats, lengths: Ints, first: Ints, second: Ints) -> Pair:
    """Two groups of rows, with weights that make them equally many at each length."""
    both = np.concatenate([first, second])
    _, length = np.unique(lengths[both], return_inverse=True)
    of = length[: len(first)], length[len(first) :]
    counts = [np.bincount(own, minlength=length.max(initial=-1) + 1) for own in of]
    common = np.minimum(*counts)
    total = max(int(common.sum()), 1)
    weights = [(common / np.maximum(n, 1))[own] / total for n, own in zip(counts, of, strict=True)]
    return Pair(
        (rows[first].astype(np.float64), rows[second].astype(np.float64)),
        (weights[0], weights[1]),
        int(common.sum()),
    )


def discriminant(pair: Pair) -> Doubles:
    """The direction that two groups lie apart in, over what they vary within: float64[d]."""
    means = [own @ rows for rows, own in zip(pair.rows, pair.weights, strict=True)]
    within = np.zeros((len(means[0]), len(means[0])))
    for rows, own, mean in zip(pair.rows, pair.weights, means, strict=True):
        within += 0.5 * ((rows - mean) * own[:, None]).T @ (rows - mean)
    within += SHRINKAGE * max(np.trace(within), 1e-12) / len(within) * np.eye(len(within))
    return np.asarray(np.linalg.solve(within, means[1] - means[0]))


def along(line: Doubles, pair: Pair) -> float:
    """The valley between two groups along a line float64[d], as of `valley`."""
    from scipy.ndimage import gaussian_filter1d

    places = [rows @ line for rows in pair.rows]
    middles = [median(at, own) for at, own in zip(places, pair.weights, strict=True)]
    if middles[1] <= middles[0]:
        return 1.0
    edges = np.linspace(min(map(np.min, places)), max(map(np.max, places)), BINS + 1)
    spread = np.mean([deviation(at, own) for at, own in zip(places, pair.weights, strict=True)])
    # Silverman 1986, of as many rows as are at common lengths; in bins, and of rows that are all
    # alike a little.
    width = max(1.06 * spread * pair.common**-0.2 / (edges[1] - edges[0]), 0.1)
    # A group of few rows counts as the root of them: as itself, it would hardly be seen beside a
    # large one, and as much as that, the tail of the large one would be a top.
    counts = sum(
        np.histogram(at, edges, weights=own * np.sqrt(len(at)))[0]
        for at, own in zip(places, pair.weights, strict=True)
    )
    density = gaussian_filter1d(counts, width, mode="constant")
    begin, end = np.clip(np.searchsorted(edges, middles) - 1, 0, BINS - 1)
    lowest = begin + int(density[begin : end + 1].argmin())
    lower_top = min(density[: lowest + 1].max(), density[lowest:].max())
    return float(density[lowest] / lower_top) if lower_top > 0 else 1.0


def median(values: Doubles, weights: Doubles) -> float:
    """The weighted median of float64[n]."""
    order = values.argsort(kind="stable")
    reached = weights[order].cumsum()
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def deviation(values: Doubles, weights: Doubles) -> float:
    """The weighted standard deviation of float64[n]."""
    return float(np.sqrt(weights @ np.square(values - weights @ values)))
