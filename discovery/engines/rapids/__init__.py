"""The RAPIDS engine: cuML, cuVS and CuPy, and kernels of our own for what they are slow at."""

from __future__ import annotations

from importlib.util import find_spec

LIBRARIES = ("cupy", "rmm", "cuvs", "cuml")
# What RAPIDS 26.10 is built for: Volta and later.
LEAST_CAPABILITY = 70


def why_not() -> str | None:
    """Why the RAPIDS engine cannot work in this process, in words; None where it can.

    Everything of RAPIDS imports without a GPU and fails at its first use, so a device is used.
    """
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        return f"{missing[0]} is not installed; pip install 'attn[gpu]'"
    import cupy

    try:
        capability = int(cupy.cuda.Device().compute_capability)
        answer = int(cupy.arange(3).sum())
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, ImportError,
            cupy.cuda.compiler.CompileException, RuntimeError) as error:  # fmt: skip
        return f"no GPU answers ({str(error).splitlines()[0]})"
    if capability < LEAST_CAPABILITY or answer != 3:
        return f"the GPU's compute capability {capability / 10:g} is below 7.0"
    return None
