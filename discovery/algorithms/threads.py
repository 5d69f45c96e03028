"""How many threads there may be, and one thread where a result would depend on their number."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threadpoolctl import ThreadpoolController


def usable_cpus() -> int:
    """How many CPUs this process may use; all of them where the system does not say (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@functools.cache
def _loaded() -> ThreadpoolController:
    """A handle on the libraries with threads. Finding them takes milliseconds, so once."""
    # It brings its own OpenMP, which must be loaded to be found.
    import sklearn.cluster  # noqa: F401

    return ThreadpoolController()


class _Limit:
    """BLAS in one thread for as long as any block wants it. Its number of threads is the process's,
    and blocks of several threads overlap: the first that ends must not give the others more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._limiter: Any = None

    def begin(self) -> None:
        with self._lock:
            if not self._blocks:
                self._limiter = _loaded().limit(limits=1, user_api="blas")
            self._blocks += 1

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._limiter.restore_original_limits()


_BLAS = _Limit()


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block, or the function that it decorates, BLAS and OpenMP use one thread.

    scikit-learn's k-means adds its threads' sums in the order in which they end, and floating-point
    sums depend on that order.
    """
    _BLAS.begin()
    try:
        # The number of OpenMP's threads is each thread's own.
        with _loaded().limit(limits=1, user_api="openmp"):
            yield
    finally:
        _BLAS.end()
