"""Areas of a continuum: where the rows of the same requests are.

A row's profile is how much of the rows about it each request has. Rows are of one area where their
profiles are alike, however far apart they are themselves, so that an area is what some requests do,
whatever shapes it has. Halves of few requests agree on areas less than on `regions`, so that these
are the clusters; but what an area stands for, as a task, is gone where its rows are gone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Int32s, Ints
from discovery.algorithms.known_areas import InAreas
from pipeline.hashing import Hashes

from .continued import effective_requests

# Steps from a row to its neighbours, coordinates of profiles, and areas.
STEPS, DIMENSIONS, AREAS = 2, 6, 12
# Of the search for coordinates, as `scipy.sparse.linalg.svds` has them.
TOLERANCE, LANCZOS = 1e-3, 40
# Rounds in which each row is put to the area of most of its neighbours and itself.
VOTES = 3


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
    areas, about = search.labels_, np.column_stack([np.arange(len(near)), near])
    for _ in range(VOTES):
        areas = InAreas.by_vote(areas, about).area
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


def profiles_of_rows(near: Int32s, requests: Ints, weight: Doubles) -> Doubles:
    """Coordinates of the profile of each of n rows: float64[n, DIMENSIONS], by correspondence
    analysis (Greenacre 2017, Correspondence Analysis in Practice) of how much each request has of
    what `STEPS` lead to. There is no table of all rows and requests.

    Args:
        near: int32[n, k]; requests: int64[n]; weight: float64[n], of each row.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import LinearOperator, svds

    n, k = near.shape
    count = int(requests.max()) + 1
    # One step is to a row itself or to one of its neighbours.
    to = np.column_stack([np.arange(n), near]).ravel()
    starts = np.arange(0, len(to) + 1, k + 1)
    step = csr_array((np.full(len(to), 1.0 / (k + 1)), to, starts), shape=(n, n))
    back = step.T.tocsr()
    of_request = csr_array((weight, (np.arange(n), requests)), shape=(n, count))
    total = weight
    for _ in range(STEPS):
        total = step @ total
    mass = weight / weight.sum()

    def profiles(of_requests: Doubles) -> Doubles:
        found = of_request @ of_requests
        for _ in range(STEPS):
            found = step @ found
        return np.asarray(found / total)

    def requests_of(of_rows: Doubles) -> Doubles:
        found = of_rows / total
        for _ in range(STEPS):
            found = back @ found
        return np.asarray(of_request.T @ found)

    roots, mean = np.sqrt(mass), np.sqrt(requests_of(mass))

    def forward(vector: NDArray[np.float64]) -> Doubles:
        own = vector.ravel()
        return np.asarray(roots * (profiles(own / mean) - mean @ own))

    def backward(vector: NDArray[np.float64]) -> Doubles:
        own = vector.ravel()
        return np.asarray(requests_of(roots * own) / mean - mean * (roots @ own))

    table = LinearOperator((n, count), matvec=forward, rmatvec=backward, dtype=np.float64)
    # Where requests share hardly anything, many values are the same, and would converge to all
    # digits in minutes only.
    left, values, _ = svds(
        table, k=DIMENSIONS, v0=np.ones(count), tol=TOLERANCE, ncv=min(LANCZOS, count - 1)
    )
    return evened(left * values / roots[:, None])


def evened(profiles: Doubles) -> Doubles:
    """The profiles float64[n, d] with those far from the mean one drawn nearer: what a single
    request does is farthest from it."""
    squares = np.square(profiles).sum(axis=1)
    return np.asarray(profiles / np.sqrt(squares + max(np.median(squares), 1e-12))[:, None])
