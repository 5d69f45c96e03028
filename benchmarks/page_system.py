"""What the page shows, running: a sidecar, an engine and traffic. Used by page.py and
page_pictures.py."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Browser, sync_playwright

from benchmarks.common import REPO, SAMPLE, WrongAnswerError, chromium_path
from capture_kernels.errors import OptionError
from pipeline.record import conform
from pipeline.store.open import open_store
from pipeline.stream.sender import Sender

ARGUMENTS = (
    "--no-sandbox --use-angle=swiftshader --enable-unsafe-swiftshader --disable-quic "
    "--disable-background-networking --disable-component-update --disable-sync --no-first-run"
).split()
# Rows of a message at most, messages a second if the rate is low, and sessions of the traffic.
BATCH_ROWS, MESSAGES_PER_S, SESSIONS = 250, 10, 6
START_S = 120.0


class System(NamedTuple):
    """Addresses of the page and of the stream, and the sidecar's process id."""

    url: str
    stream: str
    pid: int


@contextmanager
def system(folder: Path, output: Path, *, engine: bool) -> Iterator[System]:
    """`attn sidecar --page` with a new store in `folder` that holds the sample, and with the demo
    model behind it if `engine`.

    Args:
        output: folder of runs to serve.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "fingerprints.db"
    if not store.exists():
        with open_store(str(store), create=True) as opened:
            for batch in sample().to_batches():
                opened.append(batch)
    with ExitStack() as running:
        page, stream, api = (free_port() for _ in range(3))
        asked = ["--engine-url", f"http://127.0.0.1:{api}"] if engine else []
        sidecar = running.enter_context(
            process(folder / "sidecar.log", "sidecar", "--page", "--port", str(page), "--zmq-bind",
                    f"tcp://127.0.0.1:{stream}", "--db", str(store), "--discovery-dir",
                    str(output), *asked)
        )  # fmt: skip
        wait_for(f"http://127.0.0.1:{page}/health", sidecar)
        if engine:
            served = running.enter_context(
                process(folder / "engine.log", "serve", str(REPO / "examples" / "demo_model"),
                        "--engine", "transformers", "--device", "cpu", "--port", str(api),
                        "--served-model-name", "demo", "--return-attention-tokens",
                        "--attention-capture-layers", "all", "--enable-attention-instrumentation",
                        "--attention-sidecar-url", f"tcp://127.0.0.1:{stream}")
            )  # fmt: skip
            wait_for(f"http://127.0.0.1:{api}/v1/models", served)
        yield System(f"http://127.0.0.1:{page}", f"tcp://127.0.0.1:{stream}", sidecar.pid)


@contextmanager
def process(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """An `attn` command, which gets SIGTERM at the end."""
    with log.open("wb") as said:
        started = subprocess.Popen(
            [sys.executable, "-m", "cli", *arguments], cwd=REPO, stdout=said, stderr=said
        )
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def wait_for(url: str, started: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if started.poll() is not None:
            raise WrongAnswerError(f"{started.args!r} ended with {started.returncode}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise WrongAnswerError(f"no answer of {url} within {START_S:g} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def sample() -> pa.Table:
    """The records of the shipped sample."""
    batches = [conform(batch).batch for batch in pq.read_table(SAMPLE).to_batches()]
    return pa.Table.from_batches(batches).unify_dictionaries()


class Traffic:
    """A process that sends the sample's requests again and again under new names, shuffled.

    Args:
        rate: rows a second.
    """

    def __init__(self, stream: str, rate: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._sent = context.Value("q", 0)
        self._process = context.Process(
            target=_send, args=(stream, rate, self._stop, self._sent), daemon=True
        )

    @property
    def rows(self) -> int:
        """How many were sent."""
        return int(self._sent.value)

    def __enter__(self) -> Traffic:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


def _send(stream: str, rate: float, stop: Event, sent: Any) -> None:
    table = sample().combine_chunks()
    random = np.random.default_rng(0)
    names = np.array(table.column("request_id").to_pylist())
    size = int(min(BATCH_ROWS, max(1, rate / MESSAGES_PER_S)))
    began, number = time.monotonic(), 0
    with Sender(stream, sender_id="page-traffic") as sender:
        while not stop.wait(0.005):
            while sent.value < rate * (time.monotonic() - began) and not stop.is_set():
                number += 1
                rows = np.sort(random.choice(table.num_rows, size, replace=False))
                sender.send(_renamed(table.take(rows), names[rows], number))
                sent.value += size


def _renamed(table: pa.Table, names: np.ndarray[Any, Any], number: int) -> pa.RecordBatch:
    now = pa.array([datetime.now(UTC)] * table.num_rows, pa.timestamp("us", tz="UTC"))
    values = {
        "request_id": pa.array([f"{name}-{number}" for name in names]),
        "session_id": pa.array([f"shop-{number % SESSIONS}"] * table.num_rows),
        "captured_at": now,
    }
    for name, column in values.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(name), column)
    (batch,) = table.combine_chunks().to_batches()
    return conform(batch).batch


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; OptionError if there is none."""
    found = chromium_path()
    if found is None:
        raise OptionError("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
