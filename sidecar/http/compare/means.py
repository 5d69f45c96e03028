"""Mean coordinates of rows that come in requests, and how uncertain these means are.

The unit of sampling is the request, as for shares: rows of one request are alike. A mean coordinate
has a t interval, because its variance is known from the same requests.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles

CONFIDENCE = 0.95
DIGITS = 6
# Points of the integral behind a quantile of t, and degrees of freedom from which it is normal.
_POINTS, _MANY = 1 << 16, 10_000


class Means(NamedTuple):
    """Mean coordinates of a side.

    mean float64[d]; variance float64[d], of these means over repeated samples of as many requests,
    NaN if one request says nothing of others; spread float64[d], the standard deviation of the
    rows; degrees of freedom of the variance; octaves float64[16], shares of the rows by context
    octave, which coordinates are centred by.
    """

    mean: Doubles
    variance: Doubles
    spread: Doubles
    degrees: float
    octaves: Doubles


def means_of(sums: Doubles, squares: Doubles, rows: Doubles, octaves: Doubles) -> Means:
    """Means over all rows, and how precisely r requests determine them.

    With w_i the share of request i in the rows and x_i its mean, the variance of sum_i w_i x_i is
    sum_i w_i^2 (x_i - mean)^2, divided by how much of it is left on average after the mean was
    taken out, as (r - 1) / r is where all are of one size.

    Args:
        sums, squares: float64[r, d], of the coordinates of each request and of their squares.
        rows: float64[r], above 0. octaves: float64[r, 16], rows by context octave.

    Source: Cochran 1977, Sampling Techniques, chapter 6.
    """
    total = rows.sum()
    weight = rows / total
    mean = sums.sum(axis=0) / total
    spread = np.sqrt(np.maximum(squares.sum(axis=0) / total - mean**2, 0.0))
    alike = float(np.square(weight).sum())
    left = 1.0 + alike - 2.0 * float((weight**3).sum()) / alike
    found = np.square((sums - rows[:, None] * mean) / total).sum(axis=0)
    variance = found / left if left > 1e-9 else np.full_like(found, np.nan)
    return Means(mean, variance, spread, max(1.0 / alike - 1.0, 1.0), octaves.sum(axis=0) / total)


def compared_means(a: Means, b: Means, *, runs: tuple[bool, bool]) -> list[dict[str, Any]]:
    """Mean coordinates of both sides with 95% intervals, and whether they differ beyond chance:
    two-sided, at 5% over all axes (Bonferroni), by t of the degrees of freedom of the side that has
    fewer. Welch's approximate degrees call chance a shift in a fifth of the comparisons in which a
    side has two requests.

    Args:
        runs: whether a side is the run that the axes are of.

    Returns:
        For each axis a, b, the ends of their intervals and differs; these are None where there is
        one request. size: the difference in standard deviations of the rows.
    """
    sides = (as_centre(a, b) if runs[0] else a, as_centre(b, a) if runs[1] else b)
    a, b = sides
    variance = a.variance + b.variance
    # Mickey & Brown 1966, Bounds on the distribution functions of the Behrens-Fisher statistic.
    of_difference = quantile_of_t((1 - CONFIDENCE) / len(a.mean), min(a.degrees, b.degrees))
    with np.errstate(divide="ignore", invalid="ignore"):
        ours, theirs = (
            np.where(np.isfinite(one.spread), one.spread, other.spread)
            for one, other in ((a, b), (b, a))
        )
        sizes = (b.mean - a.mean) / np.sqrt((ours**2 + theirs**2) / 2)
    found = []
    for i in range(len(a.mean)):
        row: dict[str, Any] = {}
        for name, side in zip("ab", sides, strict=True):
            row[name] = round(float(side.mean[i]), DIGITS)
            low = high = None
            if np.isfinite(side.variance[i]):
                half = quantile_of_t(1 - CONFIDENCE, side.degrees) * np.sqrt(side.variance[i])
                low, high = (round(float(side.mean[i] + sign * half), DIGITS) for sign in (-1, 1))
            row |= {f"{name}_low": low, f"{name}_high": high}
        row["differs"] = None
        if np.isfinite(variance[i]):
            limit = of_difference * np.sqrt(variance[i])
            # Rounded, as sums of the same rows in another order differ in the last digits.
            row["differs"] = bool(round(abs(b.mean[i] - a.mean[i]), DIGITS) > limit)
        row["size"] = float(sizes[i])
        found.append(row)
    return found


def as_centre(run: Means, other: Means) -> Means:
    """A run as what another side's coordinates are centred on: they have the error of the means of
    its octaves, which few of its rows determine where other rows are many."""
    inflation = float(np.sum(other.octaves**2 / run.octaves))
    return run._replace(variance=run.variance * max(inflation, 1.0))


@lru_cache(maxsize=256)
def quantile_of_t(outside: float, degrees: float) -> float:
    """What |t| exceeds with probability `outside`, of as many degrees of freedom, 1 or more.

    With t = sqrt(v) tan(a), a has a density proportional to cos(a)^(v - 1).
    """
    if degrees > _MANY:
        return NormalDist().inv_cdf(1.0 - outside / 2)
    angles = np.linspace(0.0, np.pi / 2, _POINTS)
    density = np.cos(angles) ** (degrees - 1.0)
    inside = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(1.0 - outside, inside / inside[-1], angles)
    return float(np.sqrt(degrees) * np.tan(angle))
