"""The sidecar under load, with the load generator on the same machine, and a plain peer.

    python benchmarks/sidecar.py [--seconds 60] [--soak MINUTES] [--json PATH]

Against `attn sidecar` in a process of its own and a run of the shipped sample:

- classify: POST /classify at 1,000 requests a second of constant arrival, latencies from the
  intended start; then batches of 256 as fast as they go, JSON and Arrow; both again while `latest`
  moves to another run every second. Every answer is compared with the classifier's own.
- ingest: ZMQ to a SQLite file and to a Parquet folder, a tenth more offered than 150,000 and
  300,000 rows a second, and afterwards the store is counted.
- peer: FastAPI with a model of Pydantic, hdbscan.approximate_predict for each request. The same
  vectors and connections, as fast as it goes.
- soak: half of both loads for some minutes, and the slope of the resident memory.

Targets: 99% of the requests under 5 ms, none failed or wrong; 100,000 fingerprints a second in
batches; both rates of ingest with every row accounted for. Exits 1 where an answer is wrong or a
row is missing; a missed target is said, and is no failure of the benchmark.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import uvloop
import zmq

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import REPO, SAMPLE, WrongAnswerError
from benchmarks.sidecar_load import Load, as_fast_as_possible, constant_arrival, post
from benchmarks.sidecar_process import Sidecar, moving, second_run
from discovery.artifacts.classifier import ANSWER_VERSION, Classifier
from pipeline import record
from pipeline.store.open import open_store
from pipeline.stream.wire import encode

LIBRARIES = ("numpy", "pyarrow", "fastapi", "uvicorn", "uvloop", "pyzmq", "msgspec", "hdbscan")
RATE, P99_MS, BATCH, BATCH_RATE = 1_000, 5.0, 256, 100_000
INGEST = {"sqlite": 150_000, "parquet": 300_000}
# Of a rate that is to be sustained, so much is offered: the last rows are stored after the last was
# sent.
OFFERED = 1.1
# Rows of a message: what 100 requests of a busy engine decode in 20 steps.
MESSAGE_ROWS = 2_048
SINGLES, BATCHES = 2_000, 40
ARROW = "application/vnd.apache.arrow.stream"


def of_load(load: Load, rows: int, cpu: float) -> dict[str, Any]:
    """The figures of a load; WrongAnswerError where a request failed or was answered wrong."""
    bad = {status: n for status, n in load.statuses.items() if status != 200}
    if bad or load.wrong:
        raise WrongAnswerError(f"{bad} failed, {load.wrong} wrong of {sum(load.statuses.values())}")
    answered = len(load.latencies)
    return {
        "requests": answered,
        "fingerprints_per_second": rows * answered / load.seconds,
        "milliseconds": {
            name: 1e3 * load.quantile(share)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))
        },
        "server_cpu_us_per_fingerprint": 1e6 * cpu / (rows * answered),
    }


def measured(sidecar: Sidecar, rows: int, load: Callable[[], Any]) -> dict[str, Any]:
    before = sidecar.cpu_seconds()
    found: Load = uvloop.run(load())
    return of_load(found, rows, sidecar.cpu_seconds() - before)


class Answers:
    """Requests of sample rows, and what must be answered whichever of the runs serves."""

    def __init__(self, classifiers: Sequence[Classifier], records: pa.RecordBatch) -> None:
        vectors = record.vectors(records)
        picked = np.random.default_rng(0).permutation(len(vectors))
        singles = [vectors[i].astype(float).round(7).tolist() for i in picked[:SINGLES]]
        self.singles = [post("/classify", msgspec.json.encode({"vector": v})) for v in singles]
        self._single = [self._expected(c, singles, one=True) for c in classifiers]
        self.batches, self.arrow = [], []
        batches: list[list[list[float]]] = []
        slices = []
        for number in range(BATCHES):
            rows = picked[number * BATCH : (number + 1) * BATCH]
            part = records.take(pa.array(rows))
            slices.append(part)
            batches.append(vectors[rows].astype(float).tolist())
            body = {"records": [{"vector": vector} for vector in batches[-1]]}
            self.batches.append(post("/classify", msgspec.json.encode(body)))
            self.arrow.append(post("/classify", message(part, 0, 0), ARROW))
        self._batch = [
            [self._expected(c, batch, one=False)[0] for batch in batches] for c in classifiers
        ]

    @staticmethod
    def _expected(classifier: Classifier, vectors: list[Any], *, one: bool) -> list[bytes]:
        head = {"schema_version": ANSWER_VERSION, "run_id": classifier.run_id}
        found = classifier.manifolds(classifier.classify(vectors))
        answers = [{"manifold": manifold} for manifold in found]
        whole = [{**a, **head} for a in answers] if one else [{"results": answers, **head}]
        return [msgspec.json.encode(answer) for answer in whole]

    def single(self, number: int, body: bytes) -> bool:
        return any(body == expected[number] for expected in self._single)

    def batch(self, number: int, body: bytes) -> bool:
        return any(body == expected[number] for expected in self._batch)


def message(rows: pa.RecordBatch, seq: int, before: int) -> bytes:
    return encode(
        rows, sender_id="benchmark", started=1, seq=seq, rows_before=before, dropped_total=0
    )


def classify(folder: Path, output: Path, runs: Sequence[Path], records: pa.RecordBatch,
             seconds: float) -> dict[str, Any]:  # fmt: skip
    """Latency of single requests and rate of batches, without and with a reload each second."""
    answers = Answers([Classifier.load(run) for run in runs], records)
    sidecar = Sidecar(folder, output)
    port = sidecar.port
    loads = {
        "single": partial(constant_arrival, port, answers.singles, RATE, seconds, answers.single),
        "json": partial(as_fast_as_possible, port, answers.batches, seconds / 3, answers.batch),
        "arrow": partial(as_fast_as_possible, port, answers.arrow, seconds / 3, answers.batch),
        "closed": partial(as_fast_as_possible, port, answers.singles, seconds / 3, answers.single),
    }
    found: dict[str, Any] = {}
    for name, load in loads.items():
        rows = BATCH if name in ("json", "arrow") else 1
        found[name] = measured(sidecar, rows, load)
        say(name, found[name])
        if name == "closed":
            continue
        before = sidecar.stats()["reloads"]["loaded"]
        with moving(output, runs):
            again = found[f"{name}, reloading"] = measured(sidecar, rows, load)
        again["reloads"] = sidecar.stats()["reloads"]["loaded"] - before
        say(f"{name}, {again['reloads']} reloads", again)
    sidecar.stop()
    return found


def say(name: str, figures: dict[str, Any]) -> None:
    ms = figures["milliseconds"]
    print(
        f"{name}: {figures['fingerprints_per_second']:,.0f} fingerprints/s, "
        f"p50 {ms['p50']:.2f} p99 {ms['p99']:.2f} max {ms['max']:.1f} ms, "
        f"{figures['server_cpu_us_per_fingerprint']:.2f} us of CPU each",
        flush=True,
    )


class Messages:
    """Messages of `MESSAGE_ROWS` new rows each, made by writing numbers into one that is encoded
    once, so that the generator takes little of the machine."""

    WIDTH = 12
    MARK = "9" * (WIDTH - 1)

    def __init__(self, records: pa.RecordBatch) -> None:
        rows = np.random.default_rng(1).integers(0, records.num_rows, MESSAGE_ROWS)
        batch = records.take(pa.array(rows))
        ids = [f"{number % 32:02d}-{self.MARK}" for number in range(MESSAGE_ROWS)]
        for name, column in (
            ("request_id", pa.array(ids)),
            ("position", pa.array(np.arange(MESSAGE_ROWS) // 32, pa.int32())),
        ):
            batch = batch.set_column(batch.schema.get_field_index(name), name, column)
        marks = {"seq": 10**18 + 7, "rows_before": 10**18 + 8}
        encoded = encode(batch, sender_id="benchmark", started=1, dropped_total=0, **marks)
        self._bytes = np.frombuffer(encoded, np.uint8).copy()
        self._numbers = {name: encoded.index(str(mark).encode()) for name, mark in marks.items()}
        first = encoded.index(ids[0].encode())
        text = self._bytes[first : first + MESSAGE_ROWS * len(ids[0])]
        self._ids = text.reshape(MESSAGE_ROWS, -1)[:, -len(self.MARK) :]
        self.sent = 0
        self.rows = 0

    def next(self) -> bytes:
        for name, number in (("seq", self.sent), ("rows_before", self.rows)):
            digits = np.frombuffer(f"{number:019d}".encode(), np.uint8)
            at = self._numbers[name]
            self._bytes[at : at + len(digits)] = digits
        self._ids[:] = np.frombuffer(f"{self.sent:0{len(self.MARK)}d}".encode(), np.uint8)
        self.sent += 1
        self.rows += MESSAGE_ROWS
        return self._bytes.tobytes()


def send(stream: str, messages: Messages, rate: float, seconds: float) -> float:
    """Send at a rate, in rows a second; the seconds that it took."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 64)
    socket.connect(stream)
    start, first = time.perf_counter(), messages.rows
    while (gone := time.perf_counter() - start) < seconds:
        early = (messages.rows - first) / rate - gone
        if early > 0:
            time.sleep(early)
        socket.send(messages.next())
    took = time.perf_counter() - start
    socket.close()
    context.term()
    return took


def ingest(folder: Path, output: Path, records: pa.RecordBatch, kind: str, rate: float,
           seconds: float) -> dict[str, Any]:  # fmt: skip
    """Rows a second from ZMQ to the store, classified on the way, and whether all are there."""
    sidecar = Sidecar(folder, output, store={"sqlite": "ingest.db", "parquet": "ingest"}[kind])
    messages, before = Messages(records), sidecar.cpu_seconds()
    began = time.perf_counter()
    sending = send(sidecar.stream, messages, rate, seconds)
    counts: dict[str, Any] = {}
    while counts.get("stored", 0) < messages.rows and time.perf_counter() - began < 3 * seconds:
        counts = sidecar.stats()["fingerprints"]
        time.sleep(0.1)
    took = time.perf_counter() - began
    found = {
        "rows": messages.rows,
        "offered_per_second": rate,
        "sent_per_second": messages.rows / sending,
        "stored_per_second": messages.rows / took,
        "seconds_behind": took - sending,
        "server_cpu_us_per_fingerprint": 1e6 * (sidecar.cpu_seconds() - before) / messages.rows,
        "resident_mb": sidecar.usage.memory_info().rss / 1e6,
    }
    stream = sidecar.stats()["stream"]
    sidecar.stop()
    with open_store(sidecar.store, read_only=True) as store:
        stored = store.counts().rows
    lost = {name: stream[name] for name in ("lost_in_transit", "dropped_by_sender", "restarts")}
    if stored != messages.rows or any(lost.values()) or counts["stored"] != stored:
        raise WrongAnswerError(f"{messages.rows:,} rows sent, {stored:,} stored; {counts} {lost}")
    print(
        f"zmq to {kind}: {found['stored_per_second']:,.0f} rows/s of {rate:,.0f}, "
        f"{found['server_cpu_us_per_fingerprint']:.2f} us of CPU each, "
        f"{found['resident_mb']:,.0f} MB",
        flush=True,
    )
    return found


def peer(records: pa.RecordBatch, seconds: float) -> dict[str, Any]:
    """FastAPI, Pydantic and hdbscan.approximate_predict, as fast as they go."""
    vectors = record.vectors(records)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "vectors.npy", vectors)
        process = subprocess.Popen(
            [sys.executable, str(REPO / "benchmarks" / "sidecar_peer.py"), folder],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            requests = [
                post("/classify", msgspec.json.encode({"vector": vector.astype(float).tolist()}))
                for vector in vectors[:SINGLES]
            ]
            load = uvloop.run(
                as_fast_as_possible(port, requests, seconds, lambda _, body: b"cluster_id" in body)
            )
            used = psutil.Process(process.pid).cpu_times()
        finally:
            process.terminate()
            process.wait()
    found = of_load(load, 1, used.user)
    say("peer", found)
    return found


def soak(folder: Path, output: Path, records: pa.RecordBatch, minutes: float) -> dict[str, Any]:
    """Half of both loads, and how the resident memory grows."""
    answers = Answers([Classifier.load(output)], records)
    sidecar = Sidecar(folder, output, store="soak")
    messages, memory = Messages(records), []
    sender = threading.Thread(
        target=send, args=(sidecar.stream, messages, INGEST["sqlite"] / 2, 60 * minutes)
    )
    sender.start()
    start = time.perf_counter()
    latency = []
    while sender.is_alive():
        load = uvloop.run(
            constant_arrival(sidecar.port, answers.singles, RATE / 2, 10, answers.single)
        )
        latency.append(of_load(load, 1, 0.0)["milliseconds"]["p99"])
        memory.append((time.perf_counter() - start, sidecar.usage.memory_info().rss / 1e6))
    sender.join()
    sidecar.stop()
    with open_store(sidecar.store, read_only=True) as store:
        if (stored := store.counts().rows) != messages.rows:
            raise WrongAnswerError(f"{messages.rows:,} rows sent, {stored:,} stored")
    # Without the first third, in which caches fill and files are merged for the first time.
    at, used = np.array(memory[len(memory) // 3 :]).T
    slope = float(np.polyfit(at / 60, used, 1)[0]) if len(at) > 2 else float("nan")
    found = {
        "minutes": minutes, "rows": messages.rows, "resident_mb": memory[-1][1],
        "mb_per_minute": slope, "p99_ms_worst_10_s": max(latency),
        "resident_mb_each_minute": [round(used) for _, used in memory[::6]],
    }  # fmt: skip
    print(f"soak: {found}", flush=True)
    return found


def run(arguments: argparse.Namespace) -> None:
    seconds = arguments.seconds
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        db = common.make_store(folder / "sample.db", common.read_records(SAMPLE))
        first = common.run_job(db, folder / "out", seed=42, engine="cpu").artifacts.folder
        output = first.parent
        runs = [first, second_run(output, first)]
        records = common.read_records(SAMPLE).to_batches()[0]
        figures: dict[str, Any] = {"targets": {}}
        if arguments.soak:
            figures["soak"] = soak(folder, output, records, arguments.soak)
        else:
            figures["classify"] = found = classify(folder, output, runs, records, seconds)
            figures["peer"] = peer(records, seconds / 6)
            ratio = (
                found["closed"]["fingerprints_per_second"]
                / figures["peer"]["fingerprints_per_second"]
            )
            figures["times_the_peer"] = ratio
            figures["batches_times_the_peer"] = (
                found["json"]["fingerprints_per_second"]
                / figures["peer"]["fingerprints_per_second"]
            )
            print(f"{ratio:.1f} times the peer's requests a second")
            figures["ingest"] = {
                kind: ingest(folder, output, records, kind, OFFERED * rate, seconds)
                for kind, rate in INGEST.items()
            }
            figures["targets"] = targets(figures)
    for name, met in figures["targets"].items():
        print(f"{'met' if met else 'MISSED'}: {name}")
    if arguments.json:
        common.write_figures(arguments.json, {**common.about(LIBRARIES), **figures})


def targets(figures: dict[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name in ("single", "single, reloading"):
        p99 = figures["classify"][name]["milliseconds"]["p99"]
        found[f"{name}: p99 under {P99_MS:g} ms"] = p99 < P99_MS
    for name in ("json", "json, reloading", "arrow", "arrow, reloading"):
        rate = figures["classify"][name]["fingerprints_per_second"]
        found[f"{name}: {BATCH_RATE:,} a second"] = rate >= BATCH_RATE
    for kind, rate in INGEST.items():
        stored = figures["ingest"][kind]["stored_per_second"]
        found[f"{kind}: {rate:,} rows a second"] = stored >= rate
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="of each measurement")
    parser.add_argument("--soak", type=float, help="only the soak, for this many minutes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.exit(common.exit_code(lambda: run(arguments)))


if __name__ == "__main__":
    main()
