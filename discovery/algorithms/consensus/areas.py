"""Areas of a continuum: rows whose `request_profiles` are alike.

Halves of few requests agree on areas less than on `regions`, so that these are the clusters; but
what an area stands for, as a task, is gone where its rows are gone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Int32s, Ints
from discovery.algorithms.known_areas import InAreas
from discovery.algorithms.threads import one_thread
from pipeline.hashing import Hashes

from .continued import effective_requests
from .regions import request_weights
from .request_profiles import as_neighbours, profiles_of_rows

AREAS = 12


class Areas(NamedTuple):
    """found: the area of each of n rows. profiles: float64[n, DIMENSIONS], what they are found by,
    as of `profiles_of_rows`; None where there are too few requests for areas."""

    found: InAreas
    profiles: Doubles | None


def areas_of(near: Int32s, requests: Ints, seed: int) -> Areas:
    """Areas by each row's neighbours of other requests, in one thread; none where there are too few
    requests for areas.

    Args:
        near: int32[n, k], numbers of each one's neighbours; requests: int64[n], a number for the
            request of each.
    """
    from sklearn.cluster import KMeans

    if requests.max(initial=-1) < 2 * AREAS:
        return Areas(InAreas.none(len(near)), None)
    weight = request_weights(requests)
    with one_thread():
        profiles = profiles_of_rows(near, requests, weight)
        count = min(AREAS, len(np.unique(profiles.round(6), axis=0)))
        search = KMeans(count, n_init=10, random_state=seed).fit(profiles, sample_weight=weight)
    areas = as_neighbours(search.labels_, near)
    return Areas(InAreas.by_vote(areas, near, requests[near] != requests[:, None]), profiles)


def core_requests(found: InAreas, requests: Ints | Hashes) -> Doubles:
    """How many equal requests the rows of each area's core are worth: float64[AREAS], of the
    request int64[n] or hash uint64[n] of each row."""
    core, worth = found.core, np.zeros(AREAS)
    if len(core):
        _, numbers = np.unique(requests[core], return_inverse=True)
        own = effective_requests(found.area[core].astype(np.int64), numbers)
        worth[: len(own)] = own
    return worth
