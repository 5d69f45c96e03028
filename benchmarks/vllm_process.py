"""vLLM's server as a process, on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.engine_process import EngineProcess

# What an installation without a network and without FlashInfer needs.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TRANSFORMERS_OFFLINE": "1",
}


class VllmProcess(EngineProcess):
    """A running `vllm serve`; leaving it ends all of its processes.

    Args:
        model: its folder.
        log: file for what it prints.
        options: more of its options.
        environment: more environment variables.

    Raises:
        RuntimeError: as `EngineProcess`.
    """

    def __init__(
        self, model: Path, log: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
            "--host", "127.0.0.1", *options,
        ]  # fmt: skip
        super().__init__(command, log, {**ENVIRONMENT, **(environment or {})})
