"""A GPU that runs out of memory: told apart from other failures, with what to do about it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType

from capture_kernels.errors import RunError

# What CuPy, RMM, Thrust and the CUDA runtime say, in lower case.
SIGNS = ("out of memory", "out_of_memory", "cudaerrormemoryallocation")


class GpuMemoryErrors(AbstractContextManager[None]):
    """Inside the block, a failure for want of GPU memory is a RunError that names the options.

    Each library has a type of its own for it, and some none but RuntimeError; what is not for want
    of GPU memory passes as it is.

    Raises:
        RunError: the GPU ran out of memory.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and is_gpu_out_of_memory(error):
            raise gpu_out_of_memory() from None


def gpu_out_of_memory() -> RunError:
    """What a user is told where the current GPU has no memory left."""
    free, _ = sys.modules["cupy"].cuda.runtime.memGetInfo()
    return RunError(
        f"the GPU has too little free memory ({free / 1e9:.1f} GB): start a new run with a smaller "
        "--umap-sample-size or --batch-size, or finish this one with --engine cpu"
    )


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
