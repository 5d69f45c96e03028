"""What a sender of live records costs the program that calls it, and what a message costs.

    python benchmarks/stream.py [--batch-rows 256] [--seconds 2] [--json PATH]

The caller sends one batch each millisecond, as a decode loop does, to a receiver in another
process. The peer does what the systems before this one did: it makes JSON of each fingerprint and
sends it itself. Exits 1 if a row is lost, or comes out of order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.store import make_batches
from pipeline.stream.sender import Sender
from pipeline.stream.wire import decode, encode

SENDER: dict[str, Any] = {
    "sender_id": "x",
    "started": 1,
    "seq": 2,
    "rows_before": 3,
    "dropped_total": 4,
}
LIMITS: dict[str, Any] = {"max_rows": 1 << 20, "max_bytes": 1 << 30}


def receive(pipe: Connection) -> None:
    """Receives until it is told to end; says how many rows came in order."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind("tcp://127.0.0.1:*")
        pipe.send(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
        rows, at = 0, -1
        while not pipe.poll():
            while socket.poll(20):
                data = socket.recv()
                if data[:1] == b"{":
                    continue
                message = decode(data, **LIMITS)
                rows += message.batch.num_rows if message.seq == at + 1 else 0
                at = message.seq
        pipe.send(rows)


def microseconds(call: Callable[[], object], seconds: float) -> dict[str, float]:
    """How long a call takes that is made once a millisecond: median and 99th percentile."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1_000)
        time.sleep(0.001)
    return {
        "calls": len(times),
        "median_us": round(float(np.median(times)), 1),
        "p99_us": round(float(np.quantile(times, 0.99)), 1),
    }


def cpu_microseconds(call: Callable[[], object], times: int = 1_000) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return round((time.process_time() - began) / times * 1e6, 1)


def as_json(socket: zmq.Socket[bytes], batch: pa.RecordBatch) -> None:
    for row in batch.to_pylist():
        row["captured_at"] = row["captured_at"].isoformat()
        socket.send(json.dumps(row).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-rows", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batch = make_batches(options.batch_rows)[0]
    found: dict[str, Any] = {"batch_rows": batch.num_rows}
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,))
    process.start()
    address = here.recv()
    with Sender(address) as sender:
        found["send"] = microseconds(lambda: sender.send(batch), options.seconds)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        found["peer"] = microseconds(lambda: as_json(socket, batch), options.seconds)
    here.send(None)
    received = here.recv()
    process.join()
    data = encode(batch, **SENDER)
    found["message_bytes"] = len(data)
    found["encode_cpu_us"] = cpu_microseconds(lambda: encode(batch, **SENDER))
    found["decode_cpu_us"] = cpu_microseconds(lambda: decode(data, **LIMITS))
    found["rows_received"], found["rows_dropped"] = received, sender.dropped.rows
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    given = found["send"]["calls"] * batch.num_rows
    if received != sender.sent.rows or given != sender.sent.rows + sender.dropped.rows:
        print(f"{given:,} rows were sent and {received:,} received", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
