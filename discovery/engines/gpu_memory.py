"""A GPU that runs out of memory: distinguished from other failures, with advice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from capture_kernels.errors import RunError

# What CuPy, RMM, Thrust and the CUDA runtime say, in lower case.
SIGNS = ("out of memory", "out_of_memory", "cudaerrormemoryallocation")


@contextmanager
def gpu_memory_errors() -> Iterator[None]:
    """Turn a lack of GPU memory inside the block into an error that names the options.

    Each library has a type of its own for it, and some only RuntimeError. Other errors pass as they
    are.

    Raises:
        RunError: the GPU ran out of memory.
    """
    try:
        yield
    except Exception as error:
        if not is_gpu_out_of_memory(error):
            raise
        free, _ = sys.modules["cupy"].cuda.runtime.memGetInfo()
        raise RunError(
            f"the GPU has too little free memory ({free / 1e9:.1f} GB): start a new run with a "
            "smaller --umap-sample-size or --batch-size, or finish this one with --engine cpu"
        ) from None


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU, and not the host, has no memory left."""
    # Not imported: where it is not, nothing of this process is on a GPU.
    if "cupy" not in sys.modules:
        return False
    ours = isinstance(error, MemoryError | RuntimeError)
    if not ours and type(error).__module__.partition(".")[0] not in ("cuml", "cuvs"):
        return False
    said = str(error).lower()
    return any(sign in said for sign in SIGNS)
