"""What a step's capture takes of the host, by what requests ask for.

    python benchmarks/step_host.py [--requests 64] [--steps 60] [--json PATH]

The recorder of SGLang's plug-in over stand-ins for SGLang's objects, as in its tests: it prepares a
decode step, gives the rows to their requests once the results are on the host, and hands out the
entries of answers. Two layers with experts are captured, and all requests ask for the same: to be
recorded into a store alone, or for entries of a mode in their answers. Times are of
CPU. Attention itself, which a GPU computes, and the thread that makes records are not in them. In a
server it is the thread that launches the model's steps that does this, so that it shows where a
step takes few milliseconds.

The peer is the same recorder with the entries of each row made separately, as the server of
`transformers` makes them. Both must give the same entries, and record every row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

REPO = Path(__file__).resolve().parents[1]
# The repository is no installed package everywhere.
sys.path[:0] = [str(REPO), str(REPO / "tests" / "pipeline" / "sglang_plugin")]

import recorder_steps as stand_ins  # type: ignore[import-not-found] # noqa: E402

from benchmarks.common import (  # noqa: E402
    WrongAnswerError,
    command_of,
    exit_code,
    write_figures,
)
from pipeline.engines.serving.answer_writer import ENTRIES  # noqa: E402
from pipeline.engines.serving.options import ServeOptions  # noqa: E402
from pipeline.engines.serving.steps.states import HostRows  # noqa: E402
from pipeline.engines.sglang.model_process import captured_model  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402

PROMPT, TOKEN, TOP_EXPERTS = 32, 5, 4
# Steps before those that count.
WARM = 5
ASKED: dict[str, dict[str, Any]] = {
    "recorded": {"mode": "fingerprint", "stream_entries": False},
    "fingerprint": {"mode": "fingerprint"},
    "raw, top 16": {"mode": "raw", "top_k": 16},
    "sketch, top 32": {"mode": "sketch", "top_k": 32},
}


class Router(torch.nn.Module):
    """As far as the recorder looks at SGLang's `TopK`."""

    topk_config = SimpleNamespace(top_k=TOP_EXPERTS, num_shared_topk_slots=0, output_format=None)


class Timer:
    """Adds up the milliseconds of CPU of some methods of a recorder in each step."""

    def __init__(self, recorder: Any, *names: str) -> None:
        self.steps: list[float] = []
        for name in names:
            setattr(recorder, name, self._timed(getattr(recorder, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*given, **named)
            finally:
                self.steps[-1] += 1e3 * (time.thread_time() - began)

        return timed


def measure(asked: dict[str, Any], requests: int, steps: int) -> tuple[float, list[Any]]:
    """Milliseconds of CPU of a step, and the entries of all steps.

    Raises:
        WrongAnswerError: capture ended, or rows are missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        options = ServeOptions(return_attention_tokens=True, layers="all", store=store)
        running = stand_ins.Steps(options, most_running=requests)
        reqs = [running.request(1 + row, PROMPT, **asked) for row in range(requests)]
        timer = Timer(running.recorder, "prepare", "after_sample", "consume", "outputs")
        said = []
        for step in range(steps):
            for req in reqs:
                req.output_ids.append(TOKEN)
            timer.steps.append(0.0)
            consume = running.run(reqs, [PROMPT + 1 + step] * requests)
            consume([SimpleNamespace(output_index=0, token_ids=(TOKEN,))] * requests)
            said.append(running.recorder.outputs(reqs)[ENTRIES])
        running.recorder.close()
        if running.recorder.off is not None:
            raise WrongAnswerError(f"capture ended: {running.recorder.off}")
        with open_store(store, read_only=True) as opened:
            rows = opened.counts().rows
    if rows != requests * steps:
        raise WrongAnswerError(f"{rows} of {requests * steps} rows are stored")
    return median(timer.steps[WARM:]), said


def run(asked: argparse.Namespace) -> None:
    layer = SimpleNamespace(
        tp_q_head_num=stand_ins.HEADS, tp_k_head_num=stand_ins.KEY_HEADS,
        qk_head_dim=stand_ins.DIM, scaling=0.3, logit_cap=0, logit_capping_method="tanh",
        xai_temperature_len=-1, sliding_window_size=-1,
    )  # fmt: skip
    numbers, figures = range(stand_ins.LAYERS), {}
    with (
        patch.object(captured_model, "attention_layers", lambda m: dict.fromkeys(numbers, layer)),
        patch.object(captured_model, "routers_of", lambda m: {n: Router() for n in numbers}),
        patch.object(captured_model, "routing_refusal", lambda arguments, routers: None),
    ):
        for name, request in ASKED.items():
            own, said = measure(request, asked.requests, asked.steps)
            with patch.object(HostRows, "entry_numbers", {}):
                peer, expected = measure(request, asked.requests, asked.steps)
            if said != expected:
                raise WrongAnswerError(f"{name}: entries differ from those of single rows")
            figures[name] = {"ms": own, "row_by_row_ms": peer}
            print(
                f"{name:<15} {own:6.2f} ms a step, {1e3 * own / asked.requests:5.1f} us a row; "
                f"row by row {peer:.2f} ms, {peer / own:.2f} times",
                flush=True,
            )
    if asked.json:
        command = command_of("step_host.py", None)
        write_figures(asked.json, {"command": command, "requests": asked.requests,
                                   "steps": asked.steps, "figures": figures})  # fmt: skip


def main() -> int:
    description = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    most = stand_ins.LONGEST - PROMPT - 1
    if not (asked.requests > 0 and WARM < asked.steps <= most):
        parser.error(f"--requests must be above 0, --steps {WARM + 1} to {most}")
    # As in a server, whose other cores have work of their own.
    torch.set_num_threads(1)
    return exit_code(lambda: run(asked))


if __name__ == "__main__":
    sys.exit(main())
