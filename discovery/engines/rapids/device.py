"""The device: one pool of memory for all libraries, what happens when it is full, and our CUDA
kernels, compiled by CuPy at first use and kept in its cache on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from discovery.engines.gpu_memory import GpuMemoryErrors, is_gpu_out_of_memory

# A process keeps one part in so many of its device where it is not in use.
POOL_SHARE = 8
THREADS = 128
FOLDER = Path(__file__).parent

Result = TypeVar("Result")


@functools.cache
def set_up_device() -> int:
    """Have RAPIDS allocate from the driver's asynchronous pool, which gives back what is not used;
    returns how many GPUs this process sees.

    CuPy keeps its own pool: RMM's allocator for it is Python, and costs more than small arrays do.
    """
    import cupy
    import rmm

    if not isinstance(rmm.mr.get_current_device_resource(), rmm.mr.CudaAsyncMemoryResource):
        _, total = cupy.cuda.runtime.memGetInfo()
        # A worker may share the device, so not all that was ever used is kept.
        pool = rmm.mr.CudaAsyncMemoryResource(release_threshold=total // POOL_SHARE)
        rmm.mr.set_current_device_resource(pool)
    return int(cupy.cuda.runtime.getDeviceCount())


def freed_when_full(method: Callable[..., Result]) -> Callable[..., Result]:
    """Of an engine's method: where the device is full, free what the engine keeps and try again.

    Raises:
        RunError: it is full all the same.
    """

    @functools.wraps(method)
    def run(engine: Any, *arguments: Any) -> Result:
        try:
            return method(engine, *arguments)
        except Exception as error:
            if not is_gpu_out_of_memory(error):
                raise
            engine.release()
        with GpuMemoryErrors():
            return method(engine, *arguments)

    return run


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
