"""One thread, for work whose answer would depend on how many there are."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from threadpoolctl import ThreadpoolController


@functools.cache
def _loaded() -> ThreadpoolController:
    """A handle on the libraries that have threads; finding them takes milliseconds, so once."""
    # It brings its own OpenMP, which has to be there to be found.
    import sklearn.cluster  # noqa: F401

    return ThreadpoolController()


def one_thread() -> AbstractContextManager[Any]:
    """Inside the block BLAS and OpenMP use one thread.

    k-means of scikit-learn adds its threads' sums up in whatever order they end, and sums of three
    or more depend on that.
    """
    limited: AbstractContextManager[Any] = _loaded().limit(limits=1)
    return limited
