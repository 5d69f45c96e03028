"""What is new since the parent run, where rows are a continuum.

There it matters where the parent's rows are few, and `regions` may be cut by chance just there.
Regions of another kind are asked for it, and only those that are new are added to them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Ints, Mask

from .continued import counted, effective_requests, least_requests
from .regions import (
    Half,
    RowRegions,
    Rows,
    RowsInAtoms,
    Spaces,
    inverse_root,
    regions_of_all,
    regions_of_halves,
    spaces_of,
)

# Regions that are asked for what is new (`Probe`): so many families, in PCA space whose directions
# are divided by the root of their variance plus this many times the mean variance. A task that came
# made one of these new in each of four series of runs of real attention, and nothing else did. Of
# the regions above it made one new in two of the four, and in three a region of older tasks was new
# (benchmarks/real_nights.py, seeds 3171, 5001, 5002, and 4242, which is held out).
PROBED_FAMILIES, COARSE = 6, 3.0


class Probe(NamedTuple):
    """Regions that are not published, but asked which of them are new: the one int64[a] of each
    atom, by all requests and by halves of them."""

    of_atoms: Ints
    of_halves: list[Ints]

    def areas(self, is_new: Callable[[Ints], Mask], atoms: Ints) -> list[tuple[Mask, list[Mask]]]:
        """The atoms bool[a] of each region that is new, and those of what halves have of it.

        Args:
            is_new: says of the regions int64[a] of all atoms which are new, bool[r].
            atoms: int64[a], rows of each.
        """
        new = np.flatnonzero(is_new(self.of_atoms))
        areas = [self.of_atoms == number for number in new]

        def of_half(own: Ints, area: Mask) -> Mask:
            inside = np.bincount(own, atoms * area) > 0.5 * np.bincount(own, atoms)
            return np.asarray((inside & is_new(own))[own])

        return [(area, [of_half(own, area) for own in self.of_halves]) for area in areas]


def probe_of(of: RowsInAtoms, rng: np.random.Generator, pool: ThreadPoolExecutor) -> Probe:
    """What is asked about all these rows."""
    values, fine = spaces_of(of.rows, of.requests)
    covariance = values.T @ values / len(values)
    floor = COARSE * np.diag(covariance).mean() * np.eye(len(covariance))
    spaces = Spaces(values @ inverse_root(covariance + floor), fine)
    weight = np.ones(len(values))
    everything = Rows(spaces, weight, of.atom, of.atoms)
    means = of.means(spaces, weight)
    families = min(PROBED_FAMILIES, of.regions)
    whole = regions_of_all(everything, families, of, rng, pool)
    label = whole.of(spaces)
    halves = [Half(everything.taken(half), means) for half in of.halves]
    return Probe(
        counted(label, of.atom, len(whole.family), of.atoms).argmax(axis=0),
        [own.argmax(axis=0) for own in regions_of_halves(halves, families, of, rng, pool)],
    )


def with_new_areas(
    regions: RowRegions, labels: Ints, areas: list[tuple[Mask, list[Mask]]], atom: Ints,
    atoms: Ints, requests: Ints, size: int,
) -> tuple[RowRegions, Ints, Mask]:  # fmt: skip
    """Regions and clusters int64[a] with one more for each area that is new; which clusters these
    are, bool[c].

    Args:
        areas: as of `Probe.areas`; one of too few rows or requests for a cluster is left.
    """
    first = len(regions.family)
    for area, of_halves in areas:
        inside = np.where(area, 0, -1)[atom]
        many = effective_requests(inside, requests)[0] >= least_requests(requests)
        if many and atoms[area].sum() >= size:
            regions = regions.with_area(area, of_halves, atom)
            labels = np.where(area, labels.max() + 1, labels)
    names, numbers = np.unique(labels, return_inverse=True)
    count = len(regions.family) - first
    return regions, numbers, np.arange(len(names)) >= len(names) - count
