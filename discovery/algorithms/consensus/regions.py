"""Regions of a continuum, where trees of other requests hardly find one group again.

Where attention has no gaps, dense groups depend on which requests a run has. What depends on them
least is where the mass of the rows lies: k-means, with the best of many starts, in two levels.
Families are the centres of all rows, as many as halves of the requests agree on best; regions are
the centres within each. Rows of one request are much alike, so that it counts as their root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask

from .continued import Continued, counted
from .partition import adjusted_rand, numbered

# Regions in all, the most families that are tried, and the most regions of one family. Of real
# attention two are found: halves of 60 requests, halved again, agree on them by 0.83 to 0.86, and
# on three to eight by 0.63 at most (the half to develop on, in a trial).
REGIONS, MOST_FAMILIES, MOST_OF_FAMILY = 14, 8, 10
# A row weighs its request's rows to the power of minus this. Halves of 60 requests then agree on
# two families by 0.84 to 0.90 and on regions by 0.58 to 0.65, and by 0.81 to 0.86 and 0.56 to 0.61
# where all rows weigh the same (there). With 1 they agree on regions by 0.53 to 0.60.
ALIKE = 0.5
# Regions: each direction of PCA space is divided by the root of its variance within requests, so
# that it counts less the more it varies there (Hatch et al. 2006, within-class covariance
# normalization), plus this many times the mean variance.
FINE = 0.1
# Starts of k-means on the atoms, of which the best is moved on by all rows; and how often, of which
# the one that is best of all rows is taken. From other atoms, of another seed, it is the same: runs
# of one set of rows agree on regions by 0.98, and by 0.87 if atoms decide (there).
STARTS_OF_ALL, TIMES = 10, 10
# Rounds by all rows, at most; they end with one that gains less than this share of the squares.
ROUNDS_OF_ROWS, LEAST_GAIN = 30, 1e-5
# Starts for each of the partitions of half of the requests, which are of atoms alone.
STARTS_OF_HALF = 10
# Halves of the requests that regions are found of as well.
REGIONS_OF_HALVES = 40
REGION_ROUNDS = 60


class RowRegions(NamedTuple):
    """The r regions of n rows: label int64[n], the one of each row; of_atoms int64[a], that of most
    rows of each atom; family int64[r]; of_halves, what halves of the requests have: float32[g, a]
    each, how much of each atom is in each region."""

    label: Ints
    of_atoms: Ints
    family: Ints
    of_halves: list[Floats]
    profiled: bool = False

    @classmethod
    def of(
        cls,
        label: Ints,
        family: Ints,
        rows: RowsInAtoms,
        of_halves: list[Floats],
        profiled: bool = False,
    ) -> RowRegions:
        """Of the region int64[n] of each row and the family int64[r] of each region."""
        of_atoms = counted(label, rows.atom, len(family), rows.atoms).argmax(axis=0)
        return cls(label, of_atoms, family, of_halves, profiled)

    def with_area(self, area: Mask, of_halves: Sequence[Mask], atom: Ints) -> RowRegions:
        """The same with one region more, of the atoms bool[a].

        Args:
            of_halves: bool[a] each, what halves have of it; atom: int64[n], of each row.
        """
        number = len(self.family)
        home = np.bincount(self.family[self.of_atoms[area]]).argmax()
        return RowRegions(
            np.where(area[atom], number, self.label),
            np.where(area, number, self.of_atoms),
            np.append(self.family, home),
            [
                np.vstack([own * ~one, one]).astype(np.float32)
                for own, one in zip(self.of_halves, of_halves, strict=True)
            ],
            self.profiled,
        )

    def as_clusters(self, found: Continued) -> tuple[Ints, Ints]:
        """The cluster of each row, int64[n]: that which most of its region's rows are in; and the
        family of each cluster, int64[c], by most rows."""
        rows = counted(found.labels, self.label, len(found.heir_of), len(self.family))
        of_family = rows @ np.eye(int(self.family.max()) + 1)[self.family]
        return rows.argmax(axis=0)[self.label], numbered(of_family.argmax(axis=1))


class Spaces(NamedTuple):
    """n rows, or atoms, in the spaces of families and of regions: float64[n, d] each."""

    coarse: Doubles
    fine: Doubles


class Rows(NamedTuple):
    """n rows in both spaces; weight: float64[n]; atom: int64[n], of each, of so many `atoms`."""

    spaces: Spaces
    weight: Doubles
    atom: Ints
    atoms: int

    def taken(self, own: Mask) -> Rows:
        """Those of a mask bool[n]."""
        spaces = Spaces(*(values[own] for values in self.spaces))
        return Rows(spaces, self.weight[own], self.atom[own], self.atoms)


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


class RowsInAtoms(NamedTuple):
    """What regions are found of: rows float32[n, d] of PCA space, as `stable_clusters` has them.

    near: int32[n, k]; requests, atom: int64[n], of each row, of so many `atoms`; size: fewest rows
    of a cluster; halves: bool[n] each, the rows of one half of the requests and of the other, in
    turn, for some divisions of them.
    """

    rows: Floats
    near: Int32s
    requests: Ints
    atom: Ints
    atoms: int
    size: int
    halves: list[Mask]

    @property
    def regions(self) -> int:
        """How many regions there are to be."""
        return max(1, min(REGIONS, len(self.rows) // (2 * self.size)))

    @property
    def weight(self) -> Doubles:
        """float64[n], of each row."""
        return request_weights(self.requests)

    def means(self, spaces: Spaces, weight: Doubles) -> Spaces:
        """The mean of each atom's rows in both spaces."""
        return Spaces(*(means_of(of, weight, self.atom, self.atoms)[0] for of in spaces))


class Half(NamedTuple):
    """The rows of half of the requests; and where they have each of the a atoms."""

    rows: Rows
    means: Spaces


def regions_of(of: RowsInAtoms, rng: np.random.Generator, pool: ThreadPoolExecutor) -> RowRegions:
    """Regions by where rows are."""
    everything = Rows(spaces_of(of.rows, of.requests), of.weight, of.atom, of.atoms)
    means = of.means(everything.spaces, everything.weight)
    halves = [Half(everything.taken(half), means) for half in of.halves]
    families = families_of_halves(halves, of, rng, pool)
    whole = regions_of_all(everything, families, of, rng, pool)
    return RowRegions.of(
        whole.of(everything.spaces),
        whole.family,
        of,
        regions_of_halves(halves, families, of, rng, pool),
    )


def families_of_halves(
    halves: list[Half], of: RowsInAtoms, rng: np.random.Generator, pool: ThreadPoolExecutor
) -> int:
    """How many families the halves agree on best."""

    def of_half(half: Half, own: np.random.Generator) -> list[Ints]:
        return families_of_atoms(half.rows, half.means.coarse, of.regions, own)

    found = list(pool.map(of_half, halves, rng.spawn(len(halves))))
    return number_of_families(found, np.bincount(of.atom, minlength=of.atoms))


def regions_of_all(
    rows: Rows, families: int, of: RowsInAtoms, rng: np.random.Generator, pool: ThreadPoolExecutor
) -> Regions:
    """The regions by all rows, in so many families."""
    return found_regions(rows, families, of.regions, STARTS_OF_ALL, TIMES, rng, pool.map)


def regions_of_halves(
    halves: list[Half],
    families: int,
    of: RowsInAtoms,
    rng: np.random.Generator,
    pool: ThreadPoolExecutor,
) -> list[Floats]:
    """How much of each atom is in each region of the halves, float32[g, a] each."""

    def of_half(half: Half, own: np.random.Generator) -> Floats:
        found = found_regions(half.rows, families, of.regions, STARTS_OF_HALF, 0, own)
        return np.eye(len(found.family), dtype=np.float32)[found.of(half.means)].T

    return list(pool.map(of_half, halves, rng.spawn(len(halves))))


def spaces_of(rows: Floats, requests: Ints) -> Spaces:
    """The rows float32[n, d] of PCA space, by the request int64[n] of each: about their mean, and
    with what they vary by within requests evened out."""
    values = rows.astype(np.float64)
    values -= values.mean(axis=0)
    means, size = means_of(values, np.ones(len(values)), requests, int(requests.max()) + 1)
    apart = values - means[requests]
    within = apart.T @ apart / max(len(values) - int(np.count_nonzero(size)), 1)
    floor = FINE * np.square(values).mean() * np.eye(len(within))
    return Spaces(values, values @ inverse_root(within + floor))


def inverse_root(covariance: Doubles) -> Doubles:
    """float64[d, d], of a covariance without a variance of 0, but where all rows are alike."""
    variances, axes = np.linalg.eigh(covariance)
    return np.asarray((axes / np.sqrt(np.maximum(variances, np.finfo(np.float32).tiny))) @ axes.T)


def families_of_atoms(
    half: Rows, means: Doubles, most: int, rng: np.random.Generator
) -> list[Ints]:
    """The family int64[a] of each atom by the rows of half of the requests, for 2 families, for 3
    and so on, up to `most`.

    Args:
        means: float64[a, d], of each atom by all rows.
    """
    points, weight = seen_atoms(half.spaces.coarse, half.weight, half.atom, half.atoms)
    return [
        nearest_centre(means, best_means(points, weight, k, STARTS_OF_HALF, rng)[0])
        for k in range(2, min(MOST_FAMILIES, most) + 1)
    ]


def number_of_families(of_halves: Sequence[Sequence[Ints]], atoms: Ints) -> int:
    """How many families, of 2 and more, halves of the requests agree on best, as the mean adjusted
    Rand index; 1 where none were looked for.

    Args:
        of_halves: as of `families_of_atoms`, for one half and the other, in turn.
        atoms: int64[a], rows of each.
    """
    agree = [
        [adjusted_rand(*pair, atoms) for pair in zip(one, other, strict=True)]
        for one, other in zip(of_halves[0::2], of_halves[1::2], strict=True)
    ]
    return 2 + int(np.mean(agree, axis=0).argmax()) if of_halves[0] else 1


def found_regions(
    rows: Rows,
    families: int,
    count: int,
    starts: int,
    times: int,
    rng: np.random.Generator,
    mapped: Callable[..., Iterable[Any]] = map,
) -> Regions:
    """Regions of the rows, so many in all.

    Args:
        starts, times: as of `best_of_rows`; mapped: `map`, or that of a pool.
    """

    def tasks(rows: Rows, values: Doubles, counts: Sequence[int]) -> list[Task]:
        atoms = seen_atoms(values, rows.weight, rows.atom, rows.atoms)
        return [
            Task(values, rows.weight, *atoms, k, own)
            for k, own in zip(counts, rng.spawn(len(counts)), strict=True)
        ]

    def done(some: list[Task]) -> Iterator[tuple[Doubles, float]]:
        return iter(mapped(lambda task: best_of_rows(task, starts, times), some))

    [(of_families, _)] = done(tasks(rows, rows.spaces.coarse, [families]))
    used, home = np.unique(nearest_centre(rows.spaces.coarse, of_families), return_inverse=True)
    # By family the centres of one region, of two and so on, and the squares about them.
    wanted = []
    for family in range(len(used)):
        own = rows.taken(home == family)
        most = min(MOST_OF_FAMILY, len(np.unique(own.atom)))
        wanted.append(tasks(own, own.spaces.fine, range(1, most + 1)))
    # All families' at once, as one's are few for many threads.
    found = done([task for own in wanted for task in own])
    choices = [[next(found) for _ in own] for own in wanted]
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
        of_families[used],
        np.concatenate([of[k - 1][0] for of, k in zip(choices, parts, strict=True)]),
        np.repeat(np.arange(len(parts)), parts),
    )


class Task(NamedTuple):
    """Rows float64[n, d] with weights float64[n], means float64[a, d] and weights float64[a] of
    their atoms, how many centres are wanted, and the random numbers for them."""

    rows: Doubles
    weights: Doubles
    atoms: Doubles
    of_atoms: Doubles
    centres: int
    rng: np.random.Generator


def best_of_rows(task: Task, starts: int, times: int) -> tuple[Doubles, float]:
    """The centres float64[count, d] of rows, and the squares about them.

    Args:
        starts: of k-means on the atoms, which is done so many `times`, and moved on by all rows;
            with 0 it is done once, and the squares are those of the atoms.
    """
    from .loops import settled

    rows, weights, atoms, of_atoms, count, rng = task
    if not times:
        return best_means(atoms, of_atoms, count, starts, rng)
    found = []
    for _ in range(times if count > 1 else 1):
        centres, _ = best_means(atoms, of_atoms, count, starts, rng)
        found.append((centres, float(settled(rows, weights, ROUNDS_OF_ROWS, LEAST_GAIN, centres))))
    return min(found, key=lambda one: one[1])


def best_means(
    points: Doubles, weights: Doubles, count: int, starts: int, rng: np.random.Generator
) -> tuple[Doubles, float]:
    """The centres float64[count, d] of weighted points float64[n, d]; the squares about them."""
    from .loops import best_of_starts

    best = np.empty((count, points.shape[1]))
    draws = rng.random((starts if count > 1 else 1, count))
    squares = best_of_starts(points, weights, draws, REGION_ROUNDS, best)
    return best, float(squares)


def seen_atoms(
    values: Doubles, weights: Doubles, atom: Ints, atoms: int
) -> tuple[Doubles, Doubles]:
    """Means and weights as of `means_of`, of the atoms that have rows."""
    means, weight = means_of(values, weights, atom, atoms)
    return means[weight > 0], weight[weight > 0]


def request_weights(requests: Ints) -> Doubles:
    """The weight float64[n] of each row: its request's rows to the power of minus `ALIKE`, by the
    request int64[n] of each."""
    return np.bincount(requests).astype(np.float64)[requests] ** -ALIKE


def means_of(values: Doubles, weights: Doubles, atom: Ints, atoms: int) -> tuple[Doubles, Doubles]:
    """The mean of each atom's rows, float64[a, d], 0 for one without rows; and its weight,
    float64[a]: of float64[n, d], float64[n] and the atom int64[n] of each."""
    weight = np.bincount(atom, weights, atoms).astype(np.float64)
    sums = [np.bincount(atom, column * weights, atoms) for column in values.T]
    return np.column_stack(sums) / np.where(weight > 0, weight, 1.0)[:, None], weight


def nearest_centre(points: Doubles, centres: Doubles) -> Ints:
    """The nearest centre of each point: int64[n]."""
    # |x - p|^2 = |x|^2 + (|p|^2 - 2 x.p): the bracket decides.
    return np.asarray(((centres**2).sum(axis=1) - 2.0 * points @ centres.T).argmin(axis=1))
