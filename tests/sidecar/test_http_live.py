"""GET /live: what clients see of the records that arrive, and that none of them holds anything."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from fastapi import FastAPI
from http_server import EventReader, serving
from planted import planted, planted_batch
from shared import REPO, START

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import Artifacts
from sidecar.http import live
from sidecar.http.live import Broadcast
from sidecar.http.streams import EventStreams, event
from sidecar.ingest.hints import hints as socket_hints
from sidecar.serving import ServedRun
from sidecar.traits import SamplingHint, sampling_hint

VECTORS, _ = planted(2_000, 0)
BATCH = planted_batch(VECTORS, START)


@pytest.fixture(scope="module")
def run() -> ServedRun:
    classifier = Classifier.load(REPO / "tests/golden/run_v1")
    hints = {id: SamplingHint(0.2, 0.9, "local") for id in classifier.labels}
    return ServedRun(classifier, {}, [], hints, Artifacts(Path(), {}), datetime.now(UTC))


def processed(run: Any, rows: int = len(VECTORS)) -> Any:
    vectors = VECTORS[:rows]
    return SimpleNamespace(
        batch=BATCH.slice(0, rows), vectors=vectors, run=run, run_id=run and run.run_id,
        classified=run and run.classifier.classify(vectors),
        comparable=np.full(rows, run is not None), received_at=0.0,
    )  # fmt: skip


class Feed:
    """Shows a broadcast the same batch again and again, in a thread of its own."""

    def __init__(self, broadcast: Broadcast, batch: Any, pause: float = 0.01) -> None:
        self._broadcast, self._batch, self._pause = broadcast, batch, pause
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(self._pause):
            self._broadcast(self._batch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def app_of(broadcast: Broadcast) -> FastAPI:
    app = FastAPI()
    app.include_router(live.router)
    app.state.broadcast = broadcast
    return app


def seen(reader: EventReader, zones: int) -> list[dict[str, Any]]:
    """Events up to this many of `zones`."""
    found, left = [], zones
    for one in reader.events():
        found.append(one)
        left -= one.get("event") == "zones"
        if not left:
            return found
    raise AssertionError("the stream ended")


def test_a_client_sees_a_sample_of_the_records_as_they_were_classified(run):
    broadcast = Broadcast()
    batch = processed(run)
    with (
        serving(app_of(broadcast)) as server,
        Feed(broadcast, batch),
        EventReader(server, "/live") as reader,
    ):
        assert reader.status == 200
        events = seen(reader, 3)
    records = [one["data"] for one in events if one["event"] == "record"]
    assert 20 <= len(records) <= 60 and len({r["request_id"] for r in records}) > 5
    for one in records:
        row = int(one["request_id"].rsplit("-", 1)[1]) * 100 + one["position"]
        assert one["zone"] == ZONES[batch.classified.zone[row]]
        assert one["cluster_id"] == batch.classified.cluster_id[row]
        assert one["cluster_label"] == run.classifier.labels.get(one["cluster_id"])
        assert (one["run_id"], one["step"]) == (run.run_id, one["position"] + 1)
        assert [one["x"], one["y"]] == pytest.approx(batch.classified.coordinates[row])
    hints = [one["data"] for one in events if one["event"] == "hint"]
    assert [one["request_id"] for one in hints] == [one["request_id"] for one in records]
    for one in hints:
        clustered = one["cluster_id"] >= 0
        wanted = SamplingHint(0.2, 0.9, "local") if clustered else sampling_hint(one["zone"])
        assert one["sampling_hint"] == msgspec.to_builtins(wanted)


def test_hints_are_those_of_the_socket(run):
    """Of rows in a cluster, without one, and of another capture."""
    ids = pa.array([f"r{row}" for row in range(len(VECTORS))])
    one_each = BATCH.set_column(0, "request_id", ids)
    batch = SimpleNamespace(**{**vars(processed(run)), "batch": one_each})
    batch.comparable = np.arange(len(VECTORS)) % 3 > 0
    batch.classified = batch.classified._replace(
        cluster_id=np.where(batch.comparable, batch.classified.cluster_id, -1)
    )
    assert len(set(batch.classified.cluster_id.tolist())) > 2
    sample = [(0.0, batch, row) for row in range(0, len(VECTORS), 7)]
    lines = [one for one in live.messages_of(sample) if one.startswith(b"event: hint")]
    shown = [json.loads(one.partition(b"data: ")[2]) for one in lines]
    published = {one["request_id"]: one for one in msgspec.to_builtins(socket_hints(batch))}
    assert len(shown) == len(sample)
    assert all(one == published[one["request_id"]] for one in shown)
    assert not [one for one in live.messages_of([(0.0, processed(None), 0)]) if b": hint" in one]


def test_the_zones_of_each_second_are_those_of_all_rows(run):
    broadcast = Broadcast()
    batch = processed(run)
    counts = np.bincount(batch.classified.zone, minlength=5)
    with (
        serving(app_of(broadcast)) as server,
        Feed(broadcast, batch),
        EventReader(server, "/live") as reader,
    ):
        mixes = [one["data"] for one in seen(reader, 3) if one["event"] == "zones"]
    for mix in mixes:
        batches = mix["rows"] // len(VECTORS)
        assert batches > 5 and mix["rows"] == mix["comparable"] == batches * len(VECTORS)
        assert [mix["zones"][name] for name in ZONES] == (batches * counts).tolist()
        assert mix["clustered"] == batches * np.count_nonzero(batch.classified.cluster_id >= 0)
        assert 0.5 < mix["seconds"] < 5


def test_without_a_run_records_have_the_standard_zones_and_no_cluster():
    broadcast = Broadcast()
    standard = ZoneRules().classify(VECTORS, Layout.LOG16).zone
    evidence = ZoneRules().evidence(VECTORS, Layout.LOG16)
    with (
        serving(app_of(broadcast)) as server,
        Feed(broadcast, processed(None, 500)),
        EventReader(server, "/live") as reader,
    ):
        events = seen(reader, 2)
    mix = events[-1]["data"]
    batches = mix["rows"] // 500
    expected = np.bincount(standard[:500], minlength=5) * batches
    assert [mix["zones"][name] for name in ZONES] == expected.tolist() and not mix["comparable"]
    records = [one["data"] for one in events if one["event"] == "record"]
    assert records and "hint" not in {one["event"] for one in events}
    for one in records:
        row = int(one["request_id"].rsplit("-", 1)[1]) * 100 + one["position"]
        assert (one["zone"], one["cluster_id"]) == (ZONES[standard[row]], -1)
        assert one["run_id"] is one["cluster_label"] is one["x"] is None
        assert list(one["evidence"].values()) == pytest.approx(evidence[row].tolist(), abs=1e-6)
        assert max(one["evidence"], key=one["evidence"].get) == one["zone"]


def test_a_sample_is_of_all_rows_that_came_and_not_of_the_first_ones(run):
    broadcast = Broadcast()
    drawn: Counter[int] = Counter()
    broadcast._clients.add(object())  # type: ignore[arg-type]
    for _ in range(300):
        for rows in (400, 1_200, 400):
            broadcast(processed(None, rows))
        drawn.update(len(one.vectors) for _, one, _ in broadcast._sample)
        assert len(broadcast._sample) == 5
        broadcast._sample = []
    assert 0.5 < drawn[1_200] / drawn.total() < 0.7  # 1,200 of 2,000 rows


def test_a_client_that_goes_away_leaves_nothing(run):
    broadcast = Broadcast()
    with serving(app_of(broadcast)) as server, Feed(broadcast, processed(run)):
        for _ in range(3):
            with EventReader(server, "/live") as reader:
                seen(reader, 1)
        deadline = time.monotonic() + 10
        while broadcast.streams.clients or broadcast._clients:
            assert time.monotonic() < deadline, "it is still counted"
            time.sleep(0.02)
        time.sleep(1.5)
        assert broadcast._ticker is None or broadcast._ticker.done()
        with EventReader(server, "/live") as reader:  # and it begins anew
            assert seen(reader, 1)


def test_one_client_too_many_is_refused_until_another_goes(run):
    broadcast = Broadcast(EventStreams(most=2))
    with serving(app_of(broadcast)) as server:
        with EventReader(server, "/live"), EventReader(server, "/live"):
            refused = httpx.get(server.url + "/live")
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert "2 clients" in refused.json()["error"]
        deadline = time.monotonic() + 10
        while broadcast.streams.clients:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with EventReader(server, "/live") as reader:
            assert reader.status == 200 and seen(reader, 1)


def test_the_end_of_the_service_ends_all_streams(run):
    broadcast = Broadcast()
    with serving(app_of(broadcast)) as server, Feed(broadcast, processed(run)):
        readers = [EventReader(server, "/live") for _ in range(3)]
        for reader in readers:
            seen(reader, 1)
        began = time.monotonic()
        broadcast.close()
        for reader in readers:
            for _ in reader.events():
                pass
        assert time.monotonic() - began < 5
        assert httpx.get(server.url + "/live").status_code == 503
    assert broadcast.streams.clients == 0


def test_a_slow_client_loses_the_oldest_messages_and_is_told_how_many():
    client = live.Client()
    for number in range(live.MOST_WAITING + 44):
        client.put(b"%d" % number)
    assert client.dropped == 44
    assert list(client.waiting) == [b"%d" % n for n in range(44, live.MOST_WAITING + 44)]


def test_a_client_that_reads_again_is_told_what_it_missed(run, monkeypatch):
    monkeypatch.setattr(live, "MOST_WAITING", 3)
    broadcast = Broadcast()
    with serving(app_of(broadcast)) as server, EventReader(server, "/live") as reader:
        seen(reader, 1)
        (client,) = broadcast._clients

        async def put() -> None:
            for number in range(10):
                client.put(event("zones", json.dumps({"number": number}).encode()))

        loop = next(iter(broadcast.streams._wake))[0]
        loop.call_soon_threadsafe(lambda: loop.create_task(put()))
        events = []
        for one in reader.events():
            events.append(one)
            if one["data"].get("number") == 9:
                break
    events = [one for one in events if "rows" not in one["data"]]
    assert events[0] == {"event": "dropped", "data": {"dropped": 7}}
    assert [one["data"]["number"] for one in events[1:]] == [7, 8, 9]


def test_a_client_that_never_reads_is_cut_off_and_others_are_not(run):
    streams = EventStreams(stalled_s=0.5)
    app = FastAPI()

    async def flood():
        while True:
            yield event("zones", b'"' + b"x" * 100_000 + b'"')

    @app.get("/flood")
    async def flooded():
        return streams.response(flood)

    with serving(app) as server:
        silent = EventReader(server, "/flood")
        deadline = time.monotonic() + 15
        with EventReader(server, "/flood") as reader:
            for _ in reader.events():
                if streams.cut_off:
                    break
                assert time.monotonic() < deadline, "it was never cut off"
            assert streams.clients == 1
        last = b""
        while chunk := silent.socket.recv(1 << 20):
            last = chunk
        assert not last.endswith(b"0\r\n\r\n")  # cut off, not ended
        silent.close()
        while server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_quiet_stream_has_heartbeats():
    streams = EventStreams(heartbeat_s=0.2)
    app = FastAPI()

    async def quiet():
        import asyncio

        while True:
            await asyncio.sleep(0.05)
            yield None

    @app.get("/quiet")
    async def answer():
        return streams.response(quiet)

    with serving(app) as server, EventReader(server, "/quiet") as reader:
        found = reader.events()
        assert [next(found) for _ in range(2)] == 2 * [{"comment": "still here"}]
        threading.Timer(0.1, streams.close).start()
        list(found)
