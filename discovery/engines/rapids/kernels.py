"""Our CUDA kernels, compiled by CuPy at first use and kept in its cache on disk."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

THREADS = 128
FOLDER = Path(__file__).parent


@functools.cache
def module(source: str, k: int) -> Any:
    """The kernels of a .cu file, compiled for lists of k neighbours."""
    import cupy

    code = (FOLDER / source).read_text(encoding="utf-8")
    # Without fused products a GPU rounds as a CPU does, and gives the same tree to the bit.
    return cupy.RawModule(code=code, options=("-std=c++17", "-fmad=false", f"-DK={k}"))


def launch(k: int, name: str, threads: int, *arguments: Any) -> None:
    """Run a kernel of spanning_tree.cu on the current stream: see `plane.py`."""
    kernel = module("spanning_tree.cu", k).get_function(name)
    kernel((-(-threads // THREADS),), (THREADS,), arguments)
