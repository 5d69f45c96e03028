"""Shares of categories in rows that come in requests, and how uncertain these shares are.

The rows of one request are alike, so the unit of sampling is the request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capture_kernels.arrays import Doubles
from pipeline.hashing import Hashes

# Requests are counted in this many buckets by their hash, so that memory does not grow with them.
BUCKETS = 8_192
# Bytes of `DistinctCount`, one for each bucket.
BITMAP = 1 << 22


@dataclass(frozen=True)
class Shares:
    """A run's shares of k categories, and how precisely its requests determine them.

    shares: float64[k], summing to 1; all 0 without rows.
    covariance: float64[k, k], of these shares over repeated samples of as many requests.
    requests, rows: how many there were.
    effective_rows: how many independent rows would determine the shares as precisely.
    """

    shares: Doubles
    covariance: Doubles
    requests: int
    rows: int
    effective_rows: float

    @property
    def effective_requests(self) -> Doubles:
        """How many requests of equal size the rows of each category are worth: float64[k]."""
        variance = np.diag(self.covariance)
        return np.square(self.shares) / np.maximum(variance, np.finfo(float).tiny)


class DistinctCount:
    """Number of distinct hashes in constant memory: exact for a few thousand, within 1% for 20
    million.

    Source: linear counting, Whang et al. 1990.
    """

    def __init__(self) -> None:
        self._seen = np.zeros(BITMAP, bool)

    def add(self, hashes: Hashes) -> None:
        """Count uint64[n] hashes, of which some may have been counted before."""
        # BITMAP is a power of two: its remainder is these bits.
        self._seen[hashes & np.uint64(BITMAP - 1)] = True

    @property
    def estimate(self) -> int:
        empty = max(1, BITMAP - int(np.count_nonzero(self._seen)))
        return round(BITMAP * np.log(BITMAP / empty))


class RequestCounts:
    """Rows counted by request and category, in chunks of any size and order.

    Requests are grouped into hash buckets, the random groups of survey sampling (Wolter 2007,
    Introduction to Variance Estimation, chapter 2). Two requests in one bucket count as one, which
    leaves the covariance right on average, however many requests there are.
    """

    def __init__(self, categories: int) -> None:
        self.counts = np.zeros((BUCKETS, categories), np.int64)

    def add(self, requests: Hashes, category: NDArray[np.integer[Any]]) -> None:
        """Count n rows: the hash of each one's request, uint64[n] (`pipeline.hashing`), and
        its category, int[n] from 0."""
        # BUCKETS is a power of two: its remainder is these bits.
        bucket = (requests & np.uint64(BUCKETS - 1)).astype(np.int64)
        cell = bucket * self.counts.shape[1] + category
        self.counts += np.bincount(cell, minlength=self.counts.size).reshape(self.counts.shape)

    def shares(self, requests: int) -> Shares:
        """The shares of the rows so far, of as many requests, which buckets do not know."""
        return replace(shares_of(self.counts), requests=requests)


def shares_of(counts: ArrayLike) -> Shares:
    """Shares of all rows, and their cluster-robust covariance over requests.

    With c_i the counts of request i, m_i their sum, N the sum of all and p the shares, the
    linearised residual of a request is c_i - p m_i, and the covariance is
    sum_i (c_i - p m_i)(c_i - p m_i)^T / N^2. Few requests show less variation than they have: to
    this is added 1/r of the most that r requests of these sizes could vary, which is each of them
    wholly in one category.

    Args:
        counts: int[r, k], rows of each request in each category; requests without rows are ignored.

    Source: Cochran 1977, Sampling Techniques, chapter 6.
    """
    table = np.asarray(counts, np.float64)
    table = table[table.sum(axis=1) > 0]
    requests, categories = table.shape
    if not requests:
        flat = np.full(categories, 1.0 / categories)
        covariance = np.diag(flat) - np.outer(flat, flat)
        return Shares(np.zeros(categories), covariance, requests=0, rows=0, effective_rows=1.0)
    sizes = table.sum(axis=1)
    total = sizes.sum()
    shares = table.sum(axis=0) / total
    residuals = (table - np.outer(sizes, shares)) / total
    # One more request that is spread evenly: a category without rows may still exist.
    guess = (requests * shares + 1.0 / categories) / (requests + 1)
    alike = np.square(sizes / total).sum()
    most = alike * (np.diag(guess) - np.outer(guess, guess))
    covariance = residuals.T @ residuals + most / requests
    # Between one row a request, where those of a request are all the same, and every row.
    variance = max(np.trace(covariance), np.finfo(float).tiny)
    effective = min(max((1.0 - np.square(shares).sum()) / variance, 1.0 / alike), total)
    return Shares(shares, covariance, requests, int(total), float(effective))
