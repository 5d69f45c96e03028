"""What a step's capture takes of the host, by what requests ask for.

    python benchmarks/step_host.py [--requests 64] [--steps 60] [--json PATH]

The recorder of SGLang's plug-in over stand-ins for SGLang's objects, as in its tests: it prepares a
decode step, gives the rows to their requests once the results are on the host, and hands out the
entries of answers. Two layers with experts are captured, and all requests ask for the same: to be
recorded into a store alone, or for entries of a mode in their answers. Times are of
CPU. Attention itself, which a GPU computes, and other threads are not in them. In a
server it is the thread that launches the model's steps that does this, so that it shows where a
step takes few milliseconds.

The peer is the same recorder with the entries of each row made separately, as the server of
`transformers` makes them. Both must give the same entries, and record every row.

Then the other threads of the model's process, whose Python takes turns with that thread: steps of
64 rows in two layers are recorded into a store, one every six milliseconds. They pack rows, and
send them to the process that makes and stores the records. The peer is threads of the same process
that do all of it. Each library has one thread; every row must be in the store.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from threadpoolctl import threadpool_limits

REPO = Path(__file__).resolve().parents[1]
# The repository is no installed package everywhere.
TESTS = REPO / "tests" / "pipeline"
sys.path[:0] = [str(REPO), str(TESTS / "sglang_plugin"), str(TESTS / "collecting")]

import recorder_steps as stand_ins  # type: ignore[import-not-found] # noqa: E402
from in_process_records import RecordThread  # type: ignore[import-not-found] # noqa: E402
from step_rows import collector, step_of  # type: ignore[import-not-found] # noqa: E402

from benchmarks.common import (  # noqa: E402
    WrongAnswerError,
    command_of,
    exit_code,
    write_figures,
)
from capture_kernels.fingerprint.vector import Layout  # noqa: E402
from pipeline.engines.serving.answer_writer import ENTRIES  # noqa: E402
from pipeline.engines.serving.options import ServeOptions  # noqa: E402
from pipeline.engines.serving.sinks import RecordSink, StoreTarget  # noqa: E402
from pipeline.engines.serving.steps.records.process import RecordProcess  # noqa: E402
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


# Of recording alone: seconds from one step to the next, steps, and times that each way is measured.
PACE_S, RECORDED_STEPS, ROUNDS = 0.006, 1_000, 3


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
        check_stored(store, requests * steps)
    return median(timer.steps[WARM:]), said


def check_stored(store: Path, expected: int) -> None:
    with open_store(store, read_only=True) as opened:
        rows = opened.counts().rows
    if rows != expected:
        raise WrongAnswerError(f"{rows} of {expected} rows are stored")


def recorded(folder: Path, requests: int, *, apart: bool) -> tuple[float, float]:
    """Microseconds of CPU of a step that is recorded: of the other threads of this process, and of
    the process that makes records, from when it is ready to its end.

    Args:
        apart: whether a process makes them, and not threads of this one.

    Raises:
        WrongAnswerError: rows are missing.
    """
    store = folder / "records.db"
    records: Any = None
    before = 0.0
    if apart:
        records = RecordProcess(Layout.LOG16, store=store)
        before = sum(psutil.Process(records.worker).cpu_times()[:2]) + ended_children()
    else:
        records = RecordThread(RecordSink(StoreTarget(store)), Layout.LOG16)
    asking = [collector(f"r{row}") for row in range(requests)]
    spent = time.process_time() - time.thread_time()
    due = time.perf_counter()
    for number in range(RECORDED_STEPS):
        records.put(step_of(asking, number))
        due += PACE_S
        time.sleep(max(0.0, due - time.perf_counter()))
    counts = records.close()
    spent = time.process_time() - time.thread_time() - spent
    worker = ended_children() - before if apart else 0.0
    rows = RECORDED_STEPS * requests
    if counts != (rows, rows, 0, 0, 0, 0):
        raise WrongAnswerError(f"of {rows} rows: {counts}")
    check_stored(store, rows)
    return 1e6 * spent / RECORDED_STEPS, 1e6 * worker / RECORDED_STEPS


def ended_children() -> float:
    """Seconds of CPU that processes have taken that this one started and that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def recording(requests: int) -> dict[str, Any]:
    """Both ways in turn, and the median of each."""
    apart: list[tuple[float, float]] = []
    threads: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        for found, way in ((apart, True), (threads, False)):
            with tempfile.TemporaryDirectory() as folder:
                found.append(recorded(Path(folder), requests, apart=way))
    return {
        "pace_ms": 1e3 * PACE_S,
        "steps": RECORDED_STEPS,
        "other_threads_us": median(each[0] for each in apart),
        "process_us": median(each[1] for each in apart),
        "in_threads_us": median(each[0] for each in threads),
    }


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
    found = recording(asked.requests)
    own, peer = found["other_threads_us"], found["in_threads_us"]
    print(
        f"{'recording':<15} {own:6.0f} us a step of the other threads; in threads {peer:.0f} us, "
        f"{peer / own:.1f} times; {found['process_us']:.0f} us of the process for records"
    )
    if asked.json:
        measured = {
            "command": command_of("step_host.py", None), "requests": asked.requests,
            "steps": asked.steps, "figures": figures, "recording": found,
        }  # fmt: skip
        write_figures(asked.json, measured)


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
    with threadpool_limits(1):
        return exit_code(lambda: run(asked))


if __name__ == "__main__":
    sys.exit(main())
