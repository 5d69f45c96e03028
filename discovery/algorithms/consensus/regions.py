"""Regions of a continuum, where trees of other requests hardly find one group again.

Where attention has no gaps, dense groups depend on which requests a run has. What depends on them
least is where the mass of the rows lies: k-means, with the best of many starts, in two levels.
Families are the centres of all rows, regions the centres within each.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints, Mask

from .continued import Continued, counted
from .partition import numbered

# Families, regions in all, and the most regions of one family.
FAMILIES, REGIONS, MOST_OF_FAMILY = 6, 14, 5
# Families: each direction of PCA space is divided by the root of its variance plus this many times
# the mean variance, or the first two directions would dominate the distances.
COARSE = 3.0
# Regions: the same with the covariance within requests, so that a direction counts less the more it
# varies there (Hatch et al. 2006, within-class covariance normalization).
FINE = 0.1
# Starts of k-means for the regions, and for each of the partitions of half of the requests.
STARTS_OF_ALL, STARTS_OF_HALF = 100, 20
# Halves of the requests that regions are found of as well.
REGIONS_OF_HALVES = 40
REGION_ROUNDS = 60
# Rounds on the rows, after those on the atoms.
POLISH = 10


class RowRegions(NamedTuple):
    """The r regions of n rows: label int64[n], the one of each row; of_atoms int64[a], that of most
    rows of each atom; family int64[r]; of_halves, what halves of the requests have: float32[g, a]
    each, how much of each atom is in each region."""

    label: Ints
    of_atoms: Ints
    family: Ints
    of_halves: list[Floats]

    def as_clusters(self, found: Continued) -> tuple[Doubles, Ints]:
        """How far each row belongs to each cluster, float64[n, c] of 0 and 1: to the one that most
        of its region's rows are in; and the family of each cluster, int64[c], by most rows."""
        clusters = len(found.heir_of)
        rows = counted(found.labels, self.label, clusters, len(self.family))
        of_family = rows @ np.eye(int(self.family.max()) + 1)[self.family]
        return np.eye(clusters)[rows.argmax(axis=0)[self.label]], numbered(of_family.argmax(axis=1))


class Spaces(NamedTuple):
    """n rows, or atoms, in the spaces of families and of regions: float64[n, d] each."""

    coarse: Doubles
    fine: Doubles


class Regions(NamedTuple):
    """Centres of families, float64[f, d] of `Spaces.coarse`, and of the regions of each,
    float64[r, d] of `Spaces.fine`; family: int64[r], of each region."""

    families: Doubles
    regions: Doubles
    family: Ints

    def of(self, points: Spaces) -> Ints:
        """The region of each point: int64[n]."""
        home = nearest_centre(points.coarse, self.families)
        found = np.empty(len(home), np.int64)
        for family in range(len(self.families)):
            own, regions = home == family, np.flatnonzero(self.family == family)
            found[own] = regions[nearest_centre(points.fine[own], self.regions[regions])]
        return found


def regions_of(
    rows: Floats,
    requests: Ints,
    atom: Ints,
    atoms: int,
    size: int,
    halves: list[Mask],
    rng: np.random.Generator,
    pool: ThreadPoolExecutor,
) -> RowRegions:
    """Regions of the rows float32[n, d] of PCA space.

    Args:
        requests, atom: int64[n], of each row; atoms: how many there are.
        size: fewest rows of a cluster; halves: bool[n] each, the rows of half of the requests.
    """
    count = max(1, min(REGIONS, len(rows) // (2 * size)))
    points = spaces_of(rows, requests)
    whole = regions_of_rows(points, atom, atoms, count, rng)
    label = whole.of(points)
    sizes = np.bincount(atom, minlength=atoms)
    means = Spaces(*(means_of(values, atom, sizes) for values in points))

    def of_half(half: Mask, own: np.random.Generator) -> Floats:
        found = regions_of_atoms(points, atom, atoms, count, STARTS_OF_HALF, own, half)
        return np.eye(len(found.family), dtype=np.float32)[found.of(means)].T

    some = halves[:REGIONS_OF_HALVES]
    return RowRegions(
        label,
        counted(label, atom, len(whole.family), atoms).argmax(axis=0),
        whole.family,
        list(pool.map(of_half, some, rng.spawn(len(some)))),
    )


def spaces_of(rows: Floats, requests: Ints) -> Spaces:
    """The rows float32[n, d] of PCA space, by the request int64[n] of each."""
    values = rows.astype(np.float64)
    values -= values.mean(axis=0)
    covariance = values.T @ values / len(values)
    sizes: Ints = np.bincount(requests)
    apart = values - means_of(values, requests, sizes)[requests]
    free = len(values) - int(np.count_nonzero(sizes))
    within = apart.T @ apart / max(free, 1)
    floor = np.diag(covariance).mean() * np.eye(len(covariance))
    return Spaces(
        values @ inverse_root(covariance + COARSE * floor),
        values @ inverse_root(within + FINE * floor),
    )


def inverse_root(covariance: Doubles) -> Doubles:
    """float64[d, d], of a covariance without a variance of 0, but where all rows are alike."""
    variances, axes = np.linalg.eigh(covariance)
    return np.asarray((axes / np.sqrt(np.maximum(variances, np.finfo(np.float32).tiny))) @ axes.T)


def regions_of_rows(
    points: Spaces, atom: Ints, atoms: int, count: int, rng: np.random.Generator
) -> Regions:
    """Regions of n rows.

    Args:
        atom: int64[n], of each row, of so many atoms; count: of regions.
    """
    found = regions_of_atoms(points, atom, atoms, count, STARTS_OF_ALL, rng)
    families, regions = found.families.copy(), found.regions.copy()
    polish(points.coarse, families)
    home = nearest_centre(points.coarse, families)
    for family in range(len(families)):
        own, fine = found.family == family, points.fine[home == family]
        if len(fine):
            moved = regions[own]
            polish(fine, moved)
            regions[own] = moved
    return Regions(families, regions, found.family)


def regions_of_atoms(
    points: Spaces,
    atom: Ints,
    atoms: int,
    count: int,
    starts: int,
    rng: np.random.Generator,
    taken: Mask | None = None,
) -> Regions:
    """Regions of the atoms' means, weighted by their rows, from so many starts.

    Args:
        taken: bool[n], the rows that are seen; None for all.
    """
    if taken is not None:
        points, atom = Spaces(*(values[taken] for values in points)), atom[taken]
    sizes = np.bincount(atom, minlength=atoms)
    seen = np.flatnonzero(sizes)
    weights = sizes[seen].astype(np.float64)
    coarse, fine = (means_of(values, atom, sizes)[seen] for values in points)
    families = best_means(coarse, weights, min(FAMILIES, count, len(seen)), starts, rng)[0]
    home = nearest_centre(coarse, families)
    # By family the centres of one region, of two and so on, and the squares about them.
    choices = []
    for family in range(len(families)):
        own = home == family
        most = min(MOST_OF_FAMILY, max(int(own.sum()), 1))
        if not own.any():
            choices.append([(np.zeros((1, fine.shape[1])), 0.0)])
            continue
        choices.append(
            [best_means(fine[own], weights[own], k, starts, rng) for k in range(1, most + 1)]
        )
    parts = [1] * len(choices)
    while sum(parts) < count:
        gains = [
            of[k - 1][1] - of[k][1] if k < len(of) else -1.0
            for of, k in zip(choices, parts, strict=True)
        ]
        best = int(np.argmax(gains))
        if gains[best] <= 0.0:
            break
        parts[best] += 1
    return Regions(
        families,
        np.concatenate([of[k - 1][0] for of, k in zip(choices, parts, strict=True)]),
        np.repeat(np.arange(len(parts)), parts),
    )


def best_means(
    points: Doubles, weights: Doubles, count: int, starts: int, rng: np.random.Generator
) -> tuple[Doubles, float]:
    """The centres float64[count, d] of weighted points float64[n, d]; the squares about them."""
    from .loops import best_of_starts

    best = np.empty((count, points.shape[1]))
    draws = rng.random((starts if count > 1 else 1, count))
    squares = best_of_starts(np.ascontiguousarray(points), weights, draws, REGION_ROUNDS, best)
    return best, float(squares)


def polish(points: Doubles, centres: Doubles) -> None:
    """Move the centres by rounds of k-means on all points, in place."""
    from .loops import moved

    weights = np.ones(len(points))
    for _ in range(POLISH):
        moved(points, weights, centres)


def means_of(values: Doubles, atom: Ints, sizes: Ints) -> Doubles:
    """The mean of each atom's rows: float64[a, d], 0 for one without rows."""
    sums = np.zeros((len(sizes), values.shape[1]))
    np.add.at(sums, atom, values)
    return np.asarray(sums / np.maximum(sizes, 1)[:, None])


def nearest_centre(points: Doubles, centres: Doubles) -> Ints:
    """The nearest centre of each point: int64[n]."""
    # |x - p|^2 = |x|^2 + (|p|^2 - 2 x.p): the bracket decides.
    return np.asarray(((centres**2).sum(axis=1) - 2.0 * points @ centres.T).argmin(axis=1))
