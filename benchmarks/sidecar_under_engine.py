"""A sidecar that is killed while SGLang serves: what inference notices, and where every row went.

    python benchmarks/sidecar_under_engine.py [--minutes 10] [--concurrency 8] [--tokens 64]
        [--device cpu] [--sglang PYTHON] [--folder DIR] [--json PATH]

SGLang serves the demo model on a CPU, or with --device cuda a model of the shape of Llama 3 8B with
weights that it makes up, and sends the fingerprints of every request to an `attn sidecar`, which
stores them in a SQLite file. So many requests as --concurrency are under way at any time. After 40%
of the time the sidecar is killed with SIGKILL, and after 60% it is started again.

Accounts, in rows, from five places that do not know of each other: the answers (one row for each
generated token but the last, which is never fed), the server's log when it ends, what the second
sidecar knows of the sender by its seq, the second sidecar's own counts, and the store. Rows that
the killed sidecar had received but not committed are those which the sender had handed over before
the second one's first message and which are not in the store.

Exits 1 if an answer failed or is not whole, if a row is not accounted for, if a request that had
nothing to do with the outage lacks a row, or if a token took more than MOST_TIMES as long while
there was no sidecar: of the server's CPU time, or of the time of the thread that runs the model.
That is by the clock, but for what it waited for a core, so that other work on the machine does not
count. Latencies and throughput, in which it does, are reported beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from benchmarks.engine_process import Usage
from benchmarks.record_accounts import accounts_of, rows_of
from benchmarks.sglang_process import REPO, SGLangProcess, python_on_cpu
from benchmarks.sglang_serving import SHAPES, VOCABULARY
from benchmarks.sidecar_process import Sidecar

DEMO = REPO / "examples" / "demo_model"
KILLED_AT, STARTED_AT = 0.4, 0.6
PROMPT = 96
# A row is on its way for as long as it waits in the plug-in, and the sender looks for a sidecar
# that has come back every second.
MARGIN_S = 10.0
# More than noise: other work moves the CPU time of a token by a tenth.
MOST_TIMES = 1.25
SLICE_S = 5.0
WARM_UP = 4
# Seconds without a new row after which none comes any more.
SETTLED = 5
# Of the tokens that a server of the demo model holds.
CACHE_TOKENS = 32_768
LIBRARIES = ("numpy", "pyarrow", "pyzmq", "httpx", "torch", "sglang")


class Answer(NamedTuple):
    """One request. began, ended: seconds since the load began; error: why it failed."""

    began: float
    ended: float
    request_id: str = ""
    tokens: int = 0
    error: str | None = None


class Mark(NamedTuple):
    """A moment of the load, and what the server had used until then."""

    at: float
    used: Usage


class Load:
    """Requests of so many random tokens each, so many at a time, until the time is over."""

    def __init__(self, url: str, vocabulary: int, tokens: int, concurrency: int) -> None:
        self._url, self._vocabulary = url, vocabulary
        self._tokens, self._concurrency = tokens, concurrency
        self._random = random.Random(1)
        self.answers: list[Answer] = []
        self.began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.began

    async def run(self, seconds: float) -> None:
        limits = httpx.Limits(max_connections=self._concurrency)
        self.began = time.monotonic()
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:

            async def keep_asking() -> None:
                while self.now() < seconds:
                    self.answers.append(await self._ask(client))

            await asyncio.gather(*(keep_asking() for _ in range(self._concurrency)))

    async def warm_up(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as client:
            for _ in range(WARM_UP):
                answer = await self._ask(client)
                self.answers.append(answer._replace(began=-1.0, ended=-0.5))

    async def _ask(self, client: httpx.AsyncClient) -> Answer:
        prompt = [self._random.randrange(3, self._vocabulary) for _ in range(PROMPT)]
        sampling = {"max_new_tokens": self._tokens, "ignore_eos": True, "temperature": 0}
        began = self.now()
        try:
            answer = await client.post(
                "/generate", json={"input_ids": prompt, "sampling_params": sampling}
            )
            answer.raise_for_status()
            info = answer.json()["meta_info"]
            return Answer(began, self.now(), info["id"], int(info["completion_tokens"]))
        except (httpx.HTTPError, ValueError, LookupError) as error:
            return Answer(began, self.now(), error=repr(error))


def figures_of(answers: list[Answer], marks: list[Mark]) -> dict[str, Any]:
    """Throughput and latencies between the first and the last of some moments. What other work on
    the machine does to some of the slices between them does not count: rates are their median. The
    tokens of a request are spread evenly over its time, and its latency counts where it ended."""
    rates, costs, steps = [], [], []
    for first, last in pairwise(marks):
        shares = (
            (min(one.ended, last.at) - max(one.began, first.at)) / (one.ended - one.began)
            for one in answers
            if one.tokens and one.ended > first.at and one.began < last.at
        )
        tokens = sum(shares) * max((one.tokens for one in answers), default=0)
        rates.append(tokens / (last.at - first.at))
        costs.append(1e3 * (last.used.cpu - first.used.cpu) / max(tokens, 1.0))
        own = last.at - first.at - (last.used.waited - first.used.waited)
        steps.append(1e3 * own / max(tokens, 1.0))
    begin, end = marks[0].at, marks[-1].at
    took = [1e3 * (one.ended - one.began) for one in answers if begin < one.ended <= end]
    if not took or not rates:
        raise WrongAnswerError(f"no request ended within {end - begin:.0f} s: use more --minutes")
    return {
        "seconds": end - begin,
        "requests": len(took),
        "tokens_per_second": float(np.median(rates)),
        "server_cpu_ms_per_token": float(np.median(costs)),
        "model_ms_per_token": float(np.median(steps)),
        "milliseconds": {
            name: float(np.quantile(took, share))
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
    }


def slower(windows: dict[str, dict[str, Any]]) -> list[str]:
    """In what answers took longer without a sidecar than with one."""
    found = []
    for what, name in (
        ("the model's time of a token", "model_ms_per_token"),
        ("the server's CPU time of a token", "server_cpu_ms_per_token"),
    ):
        times = windows["without"][name] / max(windows["before"][name], windows["after"][name])
        if times > MOST_TIMES:
            found.append(f"{what}: {times:.2f} times as long without a sidecar")
    return found


class Outage(NamedTuple):
    """When the sidecar was killed, and when the next one received: seconds of the load."""

    killed: float
    started: float


def missing_rows(answers: list[Answer], stored: Counter[str], outage: Outage) -> list[str]:
    """Requests whose rows are not all there though they were nowhere near the outage."""
    begin, end = outage.killed - MARGIN_S, outage.started + MARGIN_S
    return [
        f"request {one.request_id} of second {one.began:.0f} has {stored[one.request_id]} of "
        f"{one.tokens - 1} rows"
        for one in answers
        if (one.ended < begin or one.began > end) and stored[one.request_id] != one.tokens - 1
    ]


def free_address() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{bound.getsockname()[1]}"


async def until_settled(sidecar: Sidecar) -> dict[str, Any]:
    """The sidecar's counts, once no more rows come."""
    last, same = -1, 0
    while True:
        stats = await asyncio.to_thread(sidecar.stats)
        rows = stats["fingerprints"]
        same = same + 1 if rows["received"] == last and not rows["queued"] else 0
        if same == SETTLED:
            return stats
        last = rows["received"]
        await asyncio.sleep(1.0)


class Driven(NamedTuple):
    """What a load with an outage in it left, and the sidecar that then ran."""

    answers: list[Answer]
    windows: dict[str, dict[str, Any]]
    outage: Outage
    when_killed: Counter[str]  # rows of each request in the store
    sidecar: Sidecar


async def drive(
    asked: argparse.Namespace, folder: Path, server: SGLangProcess, stream: str, vocabulary: int
) -> Driven:
    runs = folder / "runs"
    runs.mkdir()
    sidecar = Sidecar(folder, runs, stream=stream)
    load = Load(server.url, vocabulary, asked.tokens, asked.concurrency)
    seconds = 60.0 * asked.minutes
    windows: dict[str, list[Mark]] = {name: [] for name in ("before", "without", "after")}

    async def marked(name: str, until: float) -> None:
        """Note slices of a window until its end."""
        while True:
            windows[name].append(Mark(load.now(), server.usage()))
            if load.now() >= until:
                return
            await asyncio.sleep(min(SLICE_S, max(0.1, until - load.now())))

    try:
        await load.warm_up()
        running = asyncio.create_task(load.run(seconds))
        await asyncio.sleep(SLICE_S)
        await marked("before", KILLED_AT * seconds)
        sidecar.kill()
        killed = load.now()
        when_killed = rows_of(sidecar.store)
        print(f"{killed:.0f} s: killed, {when_killed.total():,} rows stored", flush=True)
        await marked("without", STARTED_AT * seconds)
        # Its start takes a core for some seconds, which are no part of either window.
        sidecar = await asyncio.to_thread(Sidecar, folder, runs, stream=stream)
        started = load.now()
        print(f"{started:.0f} s: started again", flush=True)
        await marked("after", seconds)
        await running
        await until_settled(sidecar)
    except BaseException:
        sidecar.process.kill()
        raise
    figures = {name: figures_of(load.answers, marks) for name, marks in windows.items()}
    return Driven(load.answers, figures, Outage(killed, started), when_killed, sidecar)


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    stream, log = free_address(), folder / "sglang.log"
    options = [
        "--attention-sidecar-url", stream, "--attention-fingerprint-max-steps", "0",
        "--attention-tokens-max", "0", "--max-running-requests", str(max(16, asked.concurrency)),
    ]  # fmt: skip
    model, vocabulary, python = DEMO, 2_048, asked.sglang
    if asked.device == "cpu":
        options += ["--max-total-tokens", str(CACHE_TOKENS)]
    else:
        model, vocabulary = folder / "model", VOCABULARY
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPES["llama-8b"]), encoding="utf-8")
        options += [
            "--load-format", "dummy", "--skip-tokenizer-init", "--context-length", "131072",
            "--cuda-graph-bs-decode", str(asked.concurrency),
        ]  # fmt: skip
    with SGLangProcess(model, log, *options, device=asked.device, python=python) as server:
        server.wait()
        driven = asyncio.run(drive(asked, folder, server, stream, vocabulary))
    # The server has delivered what it had.
    stats = asyncio.run(until_settled(driven.sidecar))
    driven.sidecar.stop()
    answers, outage, windows = driven.answers, driven.outage, driven.windows
    stored = rows_of(folder / "sidecar.db")
    accounts = accounts_of(
        folder, log, stats, expected=sum(one.tokens - 1 for one in answers),
        in_store_when_killed=driven.when_killed.total(), in_store=stored.total(),
    )  # fmt: skip
    wrong = [one for one in answers if one.error or one.tokens != asked.tokens]
    faults = [f"request of second {one.began:.0f}: {one.error or one.tokens}" for one in wrong]
    faults += accounts.faults()
    unknown = stored.keys() - {one.request_id for one in answers}
    faults += [f"the store has request {name}, which nobody made" for name in sorted(unknown)]
    faults += missing_rows(answers, stored, outage)
    faults += slower(windows)
    return {
        "device": asked.device, "minutes": asked.minutes, "concurrency": asked.concurrency,
        "tokens": asked.tokens, "prompt": PROMPT, "requests": len(answers), "failed": len(wrong),
        "outage_seconds": outage.started - outage.killed, "windows": windows,
        "rows": accounts._asdict() | {"lost_with_the_killed": accounts.lost_with_the_killed},
        "faults": faults,
    }  # fmt: skip


def show(figures: dict[str, Any]) -> None:
    for name, each in figures["windows"].items():
        ms = each["milliseconds"]
        print(
            f"{name:<8}{each['tokens_per_second']:8.1f} tokens/s, ms {ms['p50']:.0f} (p99 "
            f"{ms['p99']:.0f}, max {ms['max']:.0f}), {each['server_cpu_ms_per_token']:.2f} ms of "
            f"CPU and {each['model_ms_per_token']:.2f} of the model a token, "
            f"{each['requests']} requests"
        )
    rows = figures["rows"]
    print(
        f"{rows['expected']:,} rows of {figures['requests']:,} answers: {rows['in_store']:,} in "
        f"the store, {rows['dropped']:,} dropped by the sender while nobody listened, "
        f"{rows['lost_with_the_killed']:,} lost with the killed sidecar, "
        f"{rows['lost_in_transit']:,} lost on the way to the next"
    )


def run(asked: argparse.Namespace) -> None:
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="sidecar-under-engine-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(asked, folder)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    show(figures)
    if asked.json:
        common.write_figures(asked.json, {**common.about(LIBRARIES), **figures})
    if figures["faults"]:
        raise WrongAnswerError("; ".join(figures["faults"][:20]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sglang", type=Path, help="the Python that SGLang is installed for")
    parser.add_argument("--folder", type=Path, help="keeps the logs and the store")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.sglang is None and asked.device == "cpu":
        asked.sglang = python_on_cpu()
        if asked.sglang is None:
            parser.error("SGLang is not set up: run `make sglang`, or give --sglang")
    sys.exit(common.exit_code(lambda: run(asked)))


if __name__ == "__main__":
    main()
