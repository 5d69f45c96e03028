"""How many threads there may be, and one thread where a result would depend on their number."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block, or the function that it decorates, BLAS and OpenMP use one thread.

    scikit-learn's k-means adds its threads' sums in the order in which they end, and floating-point
    sums depend on that order.
    """
    with _loaded().limit(limits=1):
        yield
