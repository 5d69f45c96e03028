"""`attn sidecar` as a process on free ports, and what a client of it needs."""

from __future__ import annotations

import re
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx
import pyarrow as pa
import zmq
from processes import AttnProcess
from served_runs import rows_of

from pipeline.store.open import open_store
from pipeline.stream import wire

ARROW = {"content-type": "application/vnd.apache.arrow.stream"}
PATIENCE_S = 60.0
# Of one request of `Load`.
ROWS = 250
COUNTED = ("stored", "duplicate", "invalid", "queue_full", "queued")


class Sidecar:
    """A running `attn sidecar`.

    Args:
        folder: holds its store, `fingerprints.db` unless an option says otherwise.
        runs: its --discovery-dir; by default one that does not exist.
        options: further options of the command.
        limits: most_bytes and most_files of `AttnProcess`.

    Attributes:
        url, stream, hints: the addresses that it announced. said: its stderr so far.
    """

    def __init__(
        self, folder: Path, *options: str | Path, runs: Path | None = None, **limits: int
    ) -> None:
        self.db = folder / "fingerprints.db"
        given = [*map(str, options)]
        if "--db" in given:
            self.db = Path(given[given.index("--db") + 1])
        else:
            given += ["--db", str(self.db)]
        if "--zmq-bind" not in given:
            given += ["--zmq-bind", "tcp://127.0.0.1:*"]
        self.process = AttnProcess(
            "sidecar", "--port", "0", "--discovery-dir", runs or folder / "runs", *given,
            **limits,
        )  # fmt: skip
        self.said = ""
        self._announced = threading.Event()
        # Whoever does not read what a process says holds it up once the pipe is full.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def _read(self) -> None:
        for line in self.process.lines():
            self.said = self.process.said
            if " store " in f" {line}":
                self._announced.set()
        self._announced.set()

    def _wait(self) -> None:
        assert self._announced.wait(PATIENCE_S), self.said
        self.url = self._address("serving on")
        assert self.url, self.said
        self.stream = self._address("receiving fingerprints at")
        self.hints = self._address("publishing hints at")
        until(lambda: self.is_healthy(), "no answer of /health")

    def _address(self, what: str) -> str:
        found = re.search(rf"{what} (\S+)", self.said)
        return found[1] if found else ""

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            assert self.process.alive_after(0), self.said
            return False

    @property
    def host_port(self) -> tuple[str, int]:
        at = httpx.URL(self.url)
        assert at.port is not None
        return at.host, at.port

    def get(self, path: str) -> Any:
        return self.client.get(path).json()

    def fingerprints(self) -> dict[str, Any]:
        """What became of the fingerprints, of which none is missing."""
        found: dict[str, Any] = self.get("/stats")["fingerprints"]
        assert found["received"] == sum(found[name] for name in COUNTED), found
        assert found["received"] == sum(found["received_by_source"].values()), found
        assert found["invalid"] == sum(found["rejected"].values()), found
        return found

    def flush(self) -> dict[str, Any]:
        """What became of the fingerprints, once none is queued."""
        answer = self.client.post("/storage/flush")
        assert answer.status_code == 200, answer.text
        # A batch that still waits for room in the queue comes after it.
        until(lambda: self.fingerprints()["queued"] == 0, "rows stay in the queue")
        return self.fingerprints()

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.signal(signal.SIGKILL)
        self._finish()

    def stop(self, number: int = signal.SIGTERM, timeout: float = PATIENCE_S) -> CompletedProcess:
        """Signal it and wait for its end."""
        self.process.signal(number)
        return self._finish(timeout)

    def _finish(self, timeout: float = PATIENCE_S) -> CompletedProcess:
        self._reader.join(timeout)
        if self._reader.is_alive():
            self.process.signal(signal.SIGKILL)
            raise AssertionError(f"attn sidecar did not end:\n{self.said}")
        done = self.process.finish()
        self.ended = True
        return done

    ended = False

    def close(self) -> None:
        """End it if it runs."""
        if hasattr(self, "client"):
            self.client.close()
        if not self.ended:
            self.kill()


@contextmanager
def running(folder: Path, *options: str | Path, **more: Any) -> Iterator[Sidecar]:
    """An `attn sidecar` that is stopped at the end, which must be an ordinary one."""
    sidecar = Sidecar(folder, *options, **more)
    try:
        yield sidecar
        if not sidecar.ended:
            done = sidecar.stop()
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr, done.stderr
    finally:
        sidecar.close()


def until(true: Callable[[], Any], otherwise: str, timeout: float = PATIENCE_S) -> Any:
    """What `true` gives as soon as it is true."""
    deadline = time.monotonic() + timeout
    while not (found := true()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
    return found


def arrow(*batches: pa.RecordBatch) -> bytes:
    """Batches as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def post_rows(sidecar: Sidecar, batch: pa.RecordBatch, *, wait: bool = True) -> httpx.Response:
    return sidecar.client.post(
        "/fingerprints", content=arrow(batch), headers=ARROW, params={"wait": int(wait)}
    )


class Pusher:
    """A plain sender of the stream, which numbers what it sends as the wire format wants.

    Args:
        started: in microseconds since 1970.
    """

    def __init__(self, address: str, sender_id: str = "test-sender", started: int = 1) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1_000))
        self._socket.connect(address)
        self.sender_id, self.started = sender_id, started
        self.seq = self.rows = self.dropped = 0

    def message(self, batch: pa.RecordBatch) -> bytes:
        """The next message, which counts as sent."""
        data = wire.encode(
            batch, sender_id=self.sender_id, started=self.started, seq=self.seq,
            rows_before=self.rows, dropped_total=self.dropped,
        )  # fmt: skip
        self.seq, self.rows = self.seq + 1, self.rows + batch.num_rows
        return data

    def send(self, batch: pa.RecordBatch) -> None:
        self.send_bytes(self.message(batch))

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data)

    def set_patience(self, seconds: float) -> None:
        """How long a send may take, if nobody receives."""
        self._socket.setsockopt(zmq.SNDTIMEO, int(1_000 * seconds))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def holding(db: Path) -> Iterator[None]:
    """Hold the write lock of a SQLite store, as another process that writes for long does."""
    with closing(sqlite3.connect(db, timeout=PATIENCE_S, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def stored_requests(path: Path) -> Counter[str]:
    """Rows by the first part of their request id."""
    with open_store(path, read_only=True) as store:
        return Counter(
            name.split("-")[0]
            for batch in store.scan(columns=["request_id"])
            for name in batch.column("request_id").to_pylist()
        )


class Load:
    """Threads that post batches until they are stopped or the service ends.

    Attributes:
        answered: batches, by name, with the status that they were answered with.
    """

    def __init__(self, sidecar: Sidecar, threads: int, *, wait: bool, prefix: str = "t") -> None:
        self.answered: dict[str, int] = {}
        self._sidecar, self._wait, self._stop = sidecar, wait, threading.Event()
        self._prefix = prefix
        self._threads = [threading.Thread(target=self._post, args=(n,)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _post(self, thread: int) -> None:
        with httpx.Client(base_url=self._sidecar.url, timeout=PATIENCE_S) as client:
            number = 0
            while not self._stop.is_set():
                name = f"{self._prefix}{thread}n{number}"
                number += 1
                try:
                    found = client.post(
                        "/fingerprints", params={"wait": int(self._wait)}, headers=ARROW,
                        content=arrow(rows_of(ROWS, name)),
                    )  # fmt: skip
                except httpx.TransportError:
                    return
                self.answered[name] = found.status_code

    def with_status(self, status: int) -> set[str]:
        return {name for name, found in self.answered.items() if found == status}

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
