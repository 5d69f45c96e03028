"""Mutated messages at the doors of a running sidecar: over ZMQ, and as Arrow and JSON over HTTP.

`benchmarks/sidecar_fuzz.py` sends many more of them than the tests do.
"""

from __future__ import annotations

import json
import random
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import zmq
from fuzzing import mutated

from capture_kernels.errors import RecordError
from pipeline.stream import wire

# Of the service by default.
MAX_ROWS, MAX_BYTES = 10_000, (10_000 + 32) * 2_048
QUEUE_ROWS = 524_288
PATIENCE_S = 60.0
# Requests on one connection at a time.
PIPELINED = 50
ARROW = "application/vnd.apache.arrow.stream"
STATUSES = (200, 202, 400, 413)


class Connection:
    """Pipelined requests to one HTTP server."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, PATIENCE_S)
        self._file = self._socket.makefile("rb")

    def post(self, requests: list[tuple[str, str, bytes]]) -> Iterator[tuple[int, Any]]:
        """Status and JSON of the answer to each of some requests: path, content type, body."""
        self._socket.sendall(
            b"".join(
                f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
                for path, kind, body in requests
            )
        )
        for _ in requests:
            status, size = int(self._file.readline().split()[1]), 0
            while (line := self._file.readline().lower()) != b"\r\n":
                if line.startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            yield status, json.loads(self._file.read(size))

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Fuzzer:
    """Sends mutated messages to a sidecar of the default limits that nobody else uses, and checks
    that each is answered or counted.

    Args:
        address: of HTTP; stream: of ZMQ.
        batch: records that the service accepts, of which messages are made.
    """

    def __init__(
        self, address: tuple[str, int], stream: str, batch: pa.RecordBatch, seed: int
    ) -> None:
        self._address, self._seed = address, seed
        self._push: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, 0)
        self._push.setsockopt(zmq.SNDTIMEO, int(1_000 * PATIENCE_S))
        self._push.connect(stream)
        self._connection = Connection(address)
        self.wanted: Counter[str] = Counter()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
            writer.write_batch(batch.slice(0, 3))
        rows = [row | {"captured_at": row["captured_at"].isoformat()} for row in batch.to_pylist()]
        vectors = [{"vector": row["vector"], "capture_id": row["capture_id"]} for row in rows]
        self._sources: list[tuple[str, str, bytes]] = [
            ("zmq", "", self._message(batch)),
            ("/fingerprints", ARROW, sink.getvalue().to_pybytes()),
            ("/classify", ARROW, sink.getvalue().to_pybytes()),
            ("/fingerprints", "application/json", json.dumps(rows[:5]).encode()),
            ("/fingerprint", "application/json", json.dumps(rows[0]).encode()),
            ("/classify", "application/json", json.dumps({"records": vectors[:5]}).encode()),
            ("/classify", "application/json", json.dumps(vectors[0]).encode()),
        ]

    def _message(self, batch: pa.RecordBatch) -> bytes:
        return wire.encode(
            batch, sender_id="fuzz", started=1, seq=0, rows_before=0, dropped_total=0
        )

    def send(self, messages: int, first: int = 0) -> None:
        """Send so many mutated messages. AssertionError: one was not answered as it must be.

        Args:
            first: number of the first of them; the seed and the number say how it is mutated.
        """
        waiting: list[tuple[str, str, bytes]] = []
        for number in range(first, first + messages):
            rng = random.Random(f"{self._seed} {number}")
            # As many over ZMQ as over HTTP.
            path, kind, data = self._sources[rng.randrange(1, 7) if number % 2 else 0]
            data = mutated(data, rng)
            if path == "zmq":
                self._push_one(data)
            else:
                waiting.append((path, kind, data))
            if len(waiting) == PIPELINED or number == first + messages - 1:
                self._post(waiting, number)
                waiting = []

    def _push_one(self, data: bytes) -> None:
        self.wanted["messages"] += 1
        found = read(lambda: wire.decode(data, max_rows=QUEUE_ROWS, max_bytes=MAX_BYTES))
        if found is None:
            self.wanted["malformed"] += 1
        else:
            self.wanted["zmq"] += found.batch.num_rows
        self._push.send(data)

    def _post(self, requests: list[tuple[str, str, bytes]], number: int) -> None:
        where = f"before message {number} of seed {self._seed}"
        answers = self._connection.post(requests)
        for (path, kind, data), (status, answer) in zip(requests, answers, strict=True):
            assert status in STATUSES, (where, path, kind, status, answer)
            if status >= 400:
                assert "\n" not in answer["error"], (where, answer)
                # A single one that is no fingerprint is counted as one of a batch is.
                single = path == "/fingerprint" and answer["error"].startswith("not a fingerprint")
                self.wanted["http"] += single
            elif path != "/classify":
                taken = answer["queued"] + sum(answer.get("rejected", {}).values())
                self.wanted["http"] += taken
                if kind == ARROW:
                    limits = {"max_rows": MAX_ROWS, "max_bytes": MAX_BYTES}
                    sent = read(partial(wire.read_batches, data, **limits))
                    assert sent is not None and taken == sum(b.num_rows for b in sent), where

    def check(self) -> dict[str, Any]:
        """/stats, once all that was sent is accounted for. AssertionError: something is not."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            stats = self._get("/stats")
            done = stats["stream"].get("messages", 0) == self.wanted["messages"]
            if done and not stats["fingerprints"]["queued"]:
                break
            assert time.monotonic() < deadline, (self.wanted, stats)
            time.sleep(0.05)
        counts = stats["fingerprints"]
        by_source = {name: counts["received_by_source"].get(name, 0) for name in ("zmq", "http")}
        assert by_source == {name: self.wanted[name] for name in by_source}, (self.wanted, stats)
        assert stats["stream"].get("malformed", 0) == self.wanted["malformed"]
        kinds = ("stored", "duplicate", "invalid", "queue_full")
        assert counts["received"] == sum(counts[name] for name in kinds), counts
        assert counts["queue_full"] == 0
        return dict(stats)

    def _get(self, path: str) -> Any:
        host, port = self._address
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    def close(self) -> None:
        self._push.close()
        self._connection.close()


def read(work: Callable[[], Any]) -> Any:
    """What is read of a message, or None if it is none."""
    try:
        return work()
    except RecordError:
        return None
