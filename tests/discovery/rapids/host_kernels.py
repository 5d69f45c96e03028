"""The CUDA kernels of discovery/rapids as host code: threads one after another, NumPy for CuPy."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).parents[3] / "discovery" / "engines" / "rapids" / "spanning_tree.cu"
SHIM = Path(__file__).with_name("cuda_on_host.h")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class HostLaunch:
    """Stands in for `discovery.engines.rapids.plane.Launch`.

    Args:
        folder: where the libraries are built.
        order: the order in which n threads run, which no result may depend on.
    """

    def __init__(self, folder: Path, order: Callable[[int], range] = range) -> None:
        self._folder = folder
        self._order = order
        self._libraries: dict[int, ctypes.CDLL] = {}

    def __call__(self, k: int, name: str, threads: int, *arguments: Any) -> None:
        if k not in self._libraries:
            self._libraries[k] = self._build(k)
        places = self._order(threads)
        kernel = getattr(self._libraries[k], f"run_{name}")
        kernel(
            ctypes.c_long(places.start), ctypes.c_long(places.stop), ctypes.c_long(places.step),
            *map(as_argument, arguments),
        )  # fmt: skip

    def _build(self, k: int) -> ctypes.CDLL:
        source = SOURCE.read_text()
        loops = []
        for name, parameters in re.findall(
            r'extern "C" __global__ void (\w+)\(([^)]*)\)', source.replace("\n", " ")
        ):
            names = ", ".join(word.split()[-1].lstrip("*") for word in parameters.split(","))
            loops.append(
                f'extern "C" void run_{name}(long from, long to, long by, {parameters}) {{\n'
                "  for (long t = from; t != to; t += by) {\n"
                f"    blockIdx.x = t;\n    {name}({names});\n  }}\n}}\n"
            )
        if k == 1:
            loops = [loop for loop in loops if "run_nearest(" not in loop]
        path = self._folder / f"kernels-{k}.cpp"
        path.write_text(f'#include "{SHIM}"\n{source}\n{"".join(loops)}')
        library = path.with_suffix(".so")
        define = [] if k == 1 else [f"-DK={k}"]
        subprocess.run(
            [str(COMPILER), "-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off",
             *define, "-o", str(library), str(path)],
            check=True,
        )  # fmt: skip
        return ctypes.CDLL(str(library))


def as_argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_double(value) if isinstance(value, np.float64) else ctypes.c_long(value)
