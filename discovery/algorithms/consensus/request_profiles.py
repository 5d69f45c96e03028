"""Profiles of rows: how much of the rows about each one every request has.

Rows are alike in this where the same requests have them, however far apart they are themselves. So
what some requests do is one, whatever shapes it has, and what others do between them is another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Int32s, Ints
from discovery.algorithms.known_areas import InAreas

from .continued import counted

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Steps from a row to its neighbours, and coordinates of profiles.
STEPS, DIMENSIONS = 2, 6
# Of the search for coordinates, as `scipy.sparse.linalg.svds` has them.
TOLERANCE, LANCZOS = 1e-3, 40
# Of singular values, which are 1 at most: what is less is left by rounding.
ROUNDED = 1e-6
# Rounds in which each row is put to what most of its neighbours and itself are in.
VOTES = 3


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


def steps_of_atoms(near: Int32s, atom: Ints, atoms: int) -> Doubles:
    """What `STEPS` from the rows of each atom lead to, as shares of atoms: float64[a, a]."""
    step = np.zeros((atoms, atoms))
    for column in (np.arange(len(near)), *near.T):
        step += counted(atom, atom[column], atoms, atoms)
    step /= step.sum(axis=1, keepdims=True)
    return np.asarray(np.linalg.matrix_power(step, STEPS))


def profiles_of_atoms(steps: Doubles, inside: csr_array) -> Doubles:
    """As `profiles_of_rows`, of atoms: float64[a, DIMENSIONS]. One that no row of the requests is
    near has the mean.

    Args:
        steps: as of `steps_of_atoms`; inside: float64[a, r], the weight of each request in each.
    """
    of_atoms = np.asarray(inside.sum(axis=1))
    total, mass = steps @ of_atoms, of_atoms / of_atoms.sum()
    is_near = total > 0
    shares = steps / np.where(is_near, total, 1.0)[:, None]
    # With profiles p, their mean m and 1 / m as the weight of a request, (p - m) . (q - m) is
    # p . q - 1, as p . m, q . m and m . m are sums of shares. So no table of all atoms and requests
    # is made: there may be as many requests as rows.
    mean = inside.T @ (shares.T @ mass)
    weighted = inside * (1.0 / np.where(mean > 0, mean, 1.0))
    products = shares @ (weighted @ inside.T).toarray() @ shares.T - np.outer(is_near, is_near)
    roots = np.sqrt(mass)[:, None]
    values, left = np.linalg.eigh(roots * products * roots.T)
    largest = np.sqrt(np.maximum(values[-DIMENSIONS:], 0.0))
    axes = roots * left[:, -DIMENSIONS:] / np.where(largest > ROUNDED, largest, np.inf)
    return evened(products @ axes)


def evened(profiles: Doubles) -> Doubles:
    """The profiles float64[n, d] with those far from the mean one drawn nearer: what a single
    request does is farthest from it."""
    squares = np.square(profiles).sum(axis=1)
    return np.asarray(profiles / np.sqrt(squares + max(np.median(squares), 1e-12))[:, None])


def as_neighbours(labels: Ints | Int32s, near: Int32s) -> Ints:
    """The label int64[n] of each row after `VOTES` rounds in which it takes that of most of its
    neighbours int32[n, k] and itself."""
    about = np.column_stack([np.arange(len(near)), near])
    for _ in range(VOTES):
        labels = InAreas.by_vote(labels, about).area
    return labels.astype(np.int64)
