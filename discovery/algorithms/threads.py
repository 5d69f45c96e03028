"""One thread, for work whose result would depend on the number of threads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController


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
