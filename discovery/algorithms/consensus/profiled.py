"""Regions in families by what requests have rows near a row, where there are many requests.

Such a family follows what requests do, as a task, and not where rows are: it is of rows whose
`request_profiles` are alike. Its regions are by place, as those of `regions`, which say less of
tasks, and on which halves of the requests agree better (docs/performance.md).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints, Mask

from .areas import Areas
from .partition import agreement_of_halves
from .regions import (
    Half,
    RowRegions,
    Rows,
    RowsInAtoms,
    Spaces,
    regions_of_all,
    regions_of_halves,
    spaces_of,
)
from .request_profiles import as_neighbours, profiles_of_atoms, steps_of_atoms

# Families by profiles. Runs of 504 requests agree on six by 0.79, and by 0.53 where each has as
# many as its own halves agree on best, which are two to five (benchmarks/real_nights.py, captures
# of seed 3171, in a trial).
PROFILED_FAMILIES = 6
# Fewest requests, and how far halves of them agree on the regions, as the mean adjusted Rand index.
# Runs of 504 requests agree by 0.72 on the clusters of rows; runs of 250 by 0.42, and by 0.85 on
# those by place (there).
MANY_REQUESTS, AGREED = 800, 0.5


def profiled_regions(
    of: RowsInAtoms,
    areas: Future[Areas],
    rng: np.random.Generator,
    pool: ThreadPoolExecutor,
) -> RowRegions | None:
    """Regions in families by profiles; None where there are few requests, or halves of them do not
    agree on these.

    Args:
        areas: of these rows, by the same profiles.
    """
    from scipy.sparse import csr_array

    requests = int(of.requests.max()) + 1
    if requests < MANY_REQUESTS:
        return None
    weight, fine = of.weight, spaces_of(of.rows, of.requests).fine
    fine_of_atoms = of.means(Spaces(fine, fine), weight).fine
    steps = steps_of_atoms(of.near, of.atom, of.atoms)

    def of_half(half: Mask) -> Half:
        where = of.atom[half], of.requests[half]
        inside = csr_array((weight[half], where), shape=(of.atoms, requests))
        profiles = profiles_of_atoms(steps, inside)
        rows = Rows(Spaces(profiles[of.atom], fine), weight, of.atom, of.atoms)
        return Half(rows.taken(half), Spaces(profiles, fine_of_atoms))

    halves = list(pool.map(of_half, of.halves))
    families = min(PROFILED_FAMILIES, of.regions)
    of_halves = regions_of_halves(halves, families, of, rng, pool)
    partitions = [own.argmax(axis=0) for own in of_halves]
    if agreement_of_halves(partitions, np.bincount(of.atom, minlength=of.atoms)) < AGREED:
        return None
    profiles = areas.result().profiles
    assert profiles is not None
    everything = Rows(Spaces(profiles, fine), weight, of.atom, of.atoms)
    whole = regions_of_all(everything, families, of, rng, pool)
    label = as_neighbours(whole.of(everything.spaces), of.near)
    return RowRegions.of(label, whole.family, of, of_halves, profiled=True)


def parts_found(inside: Doubles, groups: list[Floats], atoms: Ints) -> Doubles:
    """How far each cluster is found in halves of the requests, as the mean over them: float64[c] of
    the rows float64[c, a] of each in each atom. What a half has of a cluster are all of its
    regions that have most of their rows in it.

    Args:
        groups: float32[g, a] each, how much of each atom is in each region of a half; atoms:
            int64[a], rows of each.
    """
    found = []
    for own in groups:
        most = (own @ inside.T).argmax(axis=1)
        theirs = (np.eye(len(inside))[most].T @ own) * atoms
        both = np.minimum(inside, theirs).sum(axis=1)
        found.append(both / (inside.sum(axis=1) + theirs.sum(axis=1) - both))
    return np.asarray(np.mean(found, axis=0))
