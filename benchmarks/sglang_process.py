"""SGLang's server as a process, on a GPU or on a CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.engine_process import EngineProcess

REPO = Path(__file__).resolve().parents[1]
# Kernels that come with every installation, and decode graphs of few sizes.
OPTIONS = {
    "cuda": (
        "--attention-backend", "triton", "--sampling-backend", "pytorch",
        "--disable-prefill-cuda-graph", "--skip-server-warmup",
    ),
    "cpu": (
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--dtype", "float32", "--skip-server-warmup",
    ),
}  # fmt: skip
ENVIRONMENT = {
    "cuda": {},
    # Threads that wait for each other are slow where another process uses the cores as well.
    "cpu": {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
}


def python_on_cpu() -> Path | None:
    """The interpreter of the SGLang that `make sglang` sets up; None if it is not there."""
    beside = Path(os.environ.get("SGLANG_VENV") or f"{sys.prefix}-sglang").absolute()
    found = beside / "bin" / "python"
    return found if found.exists() else None


class SGLangProcess(EngineProcess):
    """A running `python -m sglang.launch_server`; leaving it ends all of its processes.

    Args:
        model: its folder.
        log: file for what it prints.
        options: more of its options.
        environment: more environment variables.
        device: cuda or cpu.
        python: the interpreter of SGLang's installation; by default this one.

    Raises:
        RuntimeError: as `EngineProcess`.
    """

    def __init__(
        self, model: Path, log: Path, *options: str, environment: Mapping[str, str] | None = None,
        device: str = "cuda", python: Path | None = None,
    ) -> None:  # fmt: skip
        command = [
            str(python or sys.executable), "-m", "sglang.launch_server", "--model-path", str(model),
            *OPTIONS[device], *options,
        ]  # fmt: skip
        super().__init__(command, log, {**ENVIRONMENT[device], **(environment or {})})
