"""What numba compiles of umap-learn and of ours, kept on disk so that a process loads it.

umap-learn compiles three functions in each process that computes a layout, which takes as long as
the layout of 20,000 rows; our loops of consensus clustering take as long. numba keeps compiled
functions in NUMBA_CACHE_DIR if that is set, otherwise in the `__pycache__` beside their module,
otherwise in the user's cache folder. It replaces files atomically, and a key has the CPU and a hash
of the code, so processes and machines may share a folder.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from numba.core.caching import FunctionCache

# What the documentation of pickle lists for data that is damaged.
UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, KeyError,
    TypeError, ValueError,
)  # fmt: skip


class OptionalCache(FunctionCache):
    """numba's cache of one function. Without it a run is slower, never different: a
    damaged file is replaced, and where nothing can be saved the function is compiled each time."""

    def __init__(self, function: Any) -> None:
        super().__init__(function.py_func)
        self._options = repr(sorted(function.targetoptions.items()))

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # numba's own key is of the code of one function, and not of its options; those of
        # umap-learn call others in other files.
        return super()._index_key(sig, codegen), version("umap-learn"), self._options

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except UNREADABLE:
            # Saving reads the index again. If it cannot be emptied, saving fails too.
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except UNREADABLE:
            self.disable()


def keep_compiled(function: Any) -> None:
    """Let numba keep a dispatcher that has not been called yet on disk, or load what it kept."""
    # RuntimeError: there is no folder that can be written.
    with suppress(RuntimeError):
        function._cache = OptionalCache(function)


def umap_class() -> Any:
    """umap-learn's UMAP, with the compiled functions of a Euclidean layout kept on disk, without
    Python's lock while an epoch is computed, as clusters are searched for beside it, and with a
    progress bar that prints, in a notebook too, where tqdm.auto would draw a widget."""
    from numba import njit
    from tqdm.std import tqdm
    from umap import UMAP, layouts, umap_

    layouts.tqdm = tqdm

    epoch = "_nb_optimize_layout_euclidean_single_epoch"
    # Another release may name them otherwise, and then compiles them in each process, and holds the
    # lock.
    found = getattr(layouts, epoch, None)
    if found is not None and not found.targetoptions.get("nogil"):
        options = {**found.targetoptions, "nogil": True}
        options.pop("nopython", None)  # it is what njit means
        setattr(layouts, epoch, njit(**options)(found.py_func))
    for module, name in (
        (umap_, "smooth_knn_dist"),
        (umap_, "compute_membership_strengths"),
        (layouts, epoch),
    ):
        function = getattr(module, name, None)
        if function is not None and not function.signatures:
            keep_compiled(function)
    return UMAP
