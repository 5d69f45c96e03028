"""Areas of a continuum: rows whose `request_profiles` are alike.

Halves of few requests agree on areas less than on `regions`, so that these are the clusters; but
what an area stands for, as a task, is gone where its rows are gone.
"""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Doubles, Int32s, Ints
from discovery.algorithms.known_areas import InAreas
from pipeline.hashing import Hashes

from .continued import effective_requests
from .request_profiles import as_neighbours, profiles_of_rows

AREAS = 12


def areas_of(near: Int32s, requests: Ints, seed: int) -> InAreas:
    """The area of each of n rows, by its neighbours of other requests; none where there are too few
    requests for areas.

    Args:
        near: int32[n, k], numbers of each one's neighbours; requests: int64[n], a number for the
            request of each.
    """
    from sklearn.cluster import KMeans

    rows = np.bincount(requests)
    if len(rows) <= 2 * AREAS:
        return InAreas.none(len(near))
    # Rows of one request are much alike, so that it counts as their root.
    weight = rows[requests].astype(np.float64) ** -0.5
    profiles = profiles_of_rows(near, requests, weight)
    count = min(AREAS, len(np.unique(profiles.round(6), axis=0)))
    search = KMeans(count, n_init=10, random_state=seed).fit(profiles, sample_weight=weight)
    areas = as_neighbours(search.labels_, near)
    return InAreas.by_vote(areas, near, requests[near] != requests[:, None])


def core_requests(found: InAreas, requests: Ints | Hashes) -> Doubles:
    """How many equal requests the rows of each area's core are worth: float64[AREAS], of the
    request int64[n] or hash uint64[n] of each row."""
    core, worth = found.core, np.zeros(AREAS)
    if len(core):
        _, numbers = np.unique(requests[core], return_inverse=True)
        own = effective_requests(found.area[core].astype(np.int64), numbers)
        worth[: len(own)] = own
    return worth
