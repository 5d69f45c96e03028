"""What goes wrong around a running service: kills, full disks, locks, clocks, slow clients."""

from __future__ import annotations

import json
import random
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import zmq
from running import ARROW, PATIENCE_S, Pusher, Sidecar, arrow, holding, post_rows, running, until
from served_runs import rows_of, run_id_of, vectors_of

from capture_kernels.errors import WriteError
from pipeline.store.open import open_store
from sidecar.options import SidecarOptions
from sidecar.service import Service

ROWS = 250
CLASSIFY = {"vector": vectors_of(1)[0].tolist()}


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


KILLS = [("fingerprints.db", 1), ("fingerprints.db", 2), ("fingerprints", 1)]


@pytest.mark.parametrize(("name", "turn"), KILLS)
def test_what_was_committed_survives_a_kill_at_any_moment(tmp_path, runs, name, turn):
    seed = random.SystemRandom().randrange(2**32)
    db = tmp_path / name
    sidecar = Sidecar(tmp_path, "--db", db, runs=runs)
    try:
        sender = Pusher(sidecar.stream)
        load = Load(sidecar, 2, wait=True)
        for n in range(200):
            sender.send(rows_of(10, f"s{n}"))
        until(lambda: load.with_status(200), "no answer")
        time.sleep(random.Random(seed).uniform(0, 0.8))
        sidecar.kill()
        load.stop()
        sender.close()
    finally:
        sidecar.close()
    committed = load.with_status(200)
    assert set(load.answered.values()) == {200}, seed
    found = stored_requests(db)
    assert {batch: found[batch] for batch in committed} == dict.fromkeys(committed, ROWS), seed
    # Over HTTP: every one of them is known already.
    with running(tmp_path, "--db", db, runs=runs) as sidecar:
        for batch in sorted(committed):
            assert post_rows(sidecar, rows_of(ROWS, batch)).status_code == 200
        counts = sidecar.flush()
        assert counts["received"] == ROWS * len(committed)
        if name.endswith(".db"):
            assert counts["duplicate"] == ROWS * len(committed), seed
    assert stored_requests(db) == found, seed
    with open_store(db) as store:
        assert store.verify().is_good, seed


@pytest.mark.parametrize("name", ["fingerprints.db", "fingerprints"])
def test_a_full_disk_is_waited_for(tmp_path, runs, name):
    """No file may grow past a limit, which is then lifted as if space had been freed."""
    db = tmp_path / name
    most = 600_000 if name.endswith(".db") else 60_000
    with running(tmp_path, "--db", db, runs=runs, most_bytes=most) as sidecar:
        sent = 0
        while post_rows(sidecar, rows_of(2_000, f"b{sent}")).status_code == 200:
            sent += 1
            assert sent < 20, "the disk is not full"
        answer = post_rows(sidecar, rows_of(2_000, f"b{sent + 1}"))
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "still queued" in answer.json()["error"]
        ready = sidecar.client.get("/ready")
        assert ready.status_code == 503
        assert "the store takes no rows" in ready.json()["problems"][0]
        # All else goes on.
        assert sidecar.client.post("/classify", json=CLASSIFY).status_code == 200
        assert post_rows(sidecar, rows_of(100, "queued"), wait=False).status_code == 202
        assert sidecar.fingerprints()["queued"] == 4_100
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, no_limit)
        counts = sidecar.flush()
        assert counts["stored"] == counts["received"] == 2_000 * (sent + 2) + 100
        assert sidecar.client.get("/ready").status_code == 200
    found = stored_requests(db)
    assert found == {**{f"b{n}": 2_000 for n in range(sent + 2)}, "queued": 100}


def test_rows_that_could_not_be_stored_before_the_end_are_said_in_a_line(tmp_path, runs):
    sidecar = Sidecar(tmp_path, runs=runs)
    try:
        with holding(sidecar.db):
            assert post_rows(sidecar, rows_of(321), wait=False).status_code == 202
            done = sidecar.stop()
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: 321 rows were received and are not stored: ")
    finally:
        sidecar.close()
    assert stored_requests(sidecar.db) == {}


@pytest.mark.parametrize("seconds", [0, pytest.param(10, marks=pytest.mark.slow)])
def test_a_store_that_another_process_holds_is_waited_for(tmp_path, runs, seconds):
    """Until the service has said so, and then for so many seconds."""
    with running(tmp_path, runs=runs) as sidecar:
        sender = Pusher(sidecar.stream)
        with holding(sidecar.db):
            for n in range(20):
                sender.send(rows_of(100, f"s{n}"))
                assert post_rows(sidecar, rows_of(50, f"h{n}"), wait=False).status_code == 202
            until(lambda: sidecar.client.get("/ready").status_code == 503, "nothing is said")
            problem = sidecar.get("/ready")["problems"][0]
            assert "the store takes no rows" in problem and "locked by another process" in problem
            answer = post_rows(sidecar, rows_of(10, "waits"))
            assert answer.status_code == 503 and "still queued" in answer.json()["error"]
            assert sidecar.get("/stats")["lag_seconds"] >= 5
            time.sleep(seconds)
            assert sidecar.client.post("/classify", json=CLASSIFY).status_code == 200
        counts = sidecar.flush()
        assert counts["stored"] == counts["received"] == 3_010
        assert sidecar.client.get("/ready").status_code == 200
        sender.close()
    wanted = {f"s{n}": 100 for n in range(20)} | {f"h{n}": 50 for n in range(20)} | {"waits": 10}
    assert stored_requests(sidecar.db) == wanted


def test_sigterm_under_load_ends_in_time_and_loses_nothing_that_was_answered(tmp_path, runs):
    with running(tmp_path, runs=runs) as sidecar:
        loads = [Load(sidecar, 2, wait=True), Load(sidecar, 1, wait=False, prefix="u")]
        sender = Pusher(sidecar.stream)
        stop = threading.Event()

        def push() -> None:
            while not stop.is_set():
                try:
                    sender.send(rows_of(100, f"s{sender.seq}"))
                except zmq.Again:
                    return

        pushing = threading.Thread(target=push)
        pushing.start()
        until(lambda: all(load.answered for load in loads), "no answers")
        until(lambda: sidecar.fingerprints()["received_by_source"].get("zmq"), "nothing received")
        time.sleep(0.5)
        began = time.monotonic()
        done = sidecar.stop()
        seconds = time.monotonic() - began
        stop.set()
        sender.set_patience(0)
        pushing.join(PATIENCE_S)
        for load in loads:
            load.stop()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    # Requests under way, the stream and the queue have 2, 1 and 5 seconds at most.
    assert seconds < 20, seconds
    found = stored_requests(sidecar.db)
    for load in loads:
        assert set(load.answered.values()) <= {200, 202, 503}
        for status in (200, 202):
            for batch in load.with_status(status):
                assert found[batch] == ROWS, (batch, status)
    received, stored = (int(number.replace(",", "")) for number in ended_with(done.stderr))
    assert sum(found.values()) == stored <= received
    # What the sender handed over and nobody received is counted when it comes back.
    of_stream = sum(rows for name, rows in found.items() if name.startswith("s"))
    with running(tmp_path, runs=runs) as sidecar:
        again = Pusher(sidecar.stream, started=sender.started)
        again.seq, again.rows = sender.seq, sender.rows
        again.send(rows_of(10, "back"))
        until(lambda: sidecar.get("/stats")["stream"].get("messages"), "nothing came")
        stream = sidecar.get("/stats")["stream"]
        assert stream.get("lost_in_transit", 0) + of_stream == sender.rows
        sidecar.flush()
        again.close()
        sender.close()


def ended_with(stderr: str) -> list[str]:
    """The numbers of received and stored fingerprints that the last line says."""
    last = stderr.splitlines()[-1]
    assert last.startswith("stopped; "), last
    return [word for word in last.split() if word[0].isdigit()]


def test_a_sender_that_restarts_is_counted_as_restarted_and_not_as_lost(tmp_path, runs):
    with running(tmp_path, runs=runs) as sidecar:
        sent = 0
        for started in (1_000, 2_000, 3_000):
            sender = Pusher(sidecar.stream, started=started)
            for n in range(5):
                sender.send(rows_of(100, f"s{started}n{n}"))
            sent += 500
            until(lambda sent=sent: sidecar.fingerprints()["received"] == sent, "rows are missing")
            sender.close()
        stream = sidecar.get("/stats")["stream"]
        assert stream == {"messages": 15, "restarts": 2, "lost_in_transit": 0,
                          "dropped_by_sender": 0}  # fmt: skip
        assert sidecar.flush()["stored"] == 1_500


def test_a_sender_whose_clock_was_set_back_has_restarted_too(tmp_path, runs):
    with running(tmp_path, runs=runs) as sidecar:
        for started in (2_000, 1_000):
            sender = Pusher(sidecar.stream, started=started)
            for n in range(4):
                batch = sender.message(rows_of(100, f"s{started}n{n}"))
                if n != 2:
                    sender.send_bytes(batch)
            until(
                lambda started=started: sidecar.fingerprints()["received"] >= 600_000 / started,
                "rows are missing",
            )
            sender.close()
        stream = sidecar.get("/stats")["stream"]
        assert (stream["restarts"], stream["lost_in_transit"]) == (1, 200)
        assert stream.get("repeated", 0) == 0
        assert sidecar.flush()["stored"] == 600


def test_rows_that_are_missing_in_the_stream_are_counted(tmp_path, runs):
    """Lost on the way, dropped by the sender, and too large to be received."""
    limits = ("--max-batch", "500", "--queue-rows", "500")
    with running(tmp_path, *limits, runs=runs) as sidecar:
        sender = Pusher(sidecar.stream)
        sender.send(rows_of(100, "first"))
        for n in range(3):
            sender.message(rows_of(100 + n, f"lost{n}"))
        sender.send(rows_of(100, "second"))
        sender.dropped = 77
        sender.send(rows_of(100, "third"))
        until(lambda: sidecar.fingerprints()["received"] == 300, "rows are missing")
        stream = sidecar.get("/stats")["stream"]
        assert (stream["lost_in_transit"], stream["dropped_by_sender"]) == (303, 77)
        sender.send(rows_of(501, "too many"))
        until(lambda: sidecar.get("/stats")["stream"].get("malformed"), "it is not counted")
        sender.send(rows_of(100, "fourth"))
        until(lambda: sidecar.fingerprints()["received"] == 400, "rows are missing")
        assert sidecar.get("/stats")["stream"]["lost_in_transit"] == 303 + 501
        assert sidecar.said.count("malformed message") == 1
        sender.close()


def test_a_message_too_large_to_be_received_is_counted_with_the_next_one(tmp_path, runs):
    """ZMQ refuses it by closing the connection, which comes back by itself."""
    limits = ("--max-batch", "1", "--queue-rows", "10")
    with running(tmp_path, *limits, runs=runs) as sidecar:
        sender = Pusher(sidecar.stream)
        sender.send(rows_of(1, "first"))
        until(lambda: sidecar.fingerprints()["received"] == 1, "rows are missing")
        sender.send(rows_of(3_000, "large"))

        # What is under way to a connection that is closed may go with it.
        def more() -> bool:
            sender.send(rows_of(1, f"small{sender.seq}"))
            return sidecar.fingerprints()["received"] >= 2

        until(more, "the sender does not come back")
        last = sender.rows
        until(
            lambda: sidecar.fingerprints()["received"]
            + sidecar.get("/stats")["stream"]["lost_in_transit"] == last,
            "rows are not accounted for",
        )  # fmt: skip
        assert sidecar.get("/stats")["stream"]["lost_in_transit"] >= 3_000
        sender.close()


def test_a_subscriber_of_hints_that_never_reads_holds_nobody_up(tmp_path, runs):
    hints = ("--hints-bind", "tcp://127.0.0.1:*")
    with running(tmp_path, *hints, runs=runs) as sidecar:
        context = zmq.Context.instance()
        with context.socket(zmq.SUB) as silent, context.socket(zmq.SUB) as reading:
            for subscriber, most in ((silent, 1), (reading, 100_000)):
                subscriber.setsockopt(zmq.RCVHWM, most)
                subscriber.subscribe(b"")
                subscriber.connect(sidecar.hints)
            until(lambda: hint_arrives(sidecar, reading), "no hint")
            rounds = 40
            for n in range(rounds):
                assert post_rows(sidecar, rows_of(5_000, f"r{n}"), wait=False).status_code == 202
            assert sidecar.get("/stats")["hints_published"] >= rounds * 500
            assert sidecar.get("/stats")["observer_errors"] == {}
            last = until(lambda: newest(reading, f"r{rounds - 1}-"), "the last hint did not come")
            assert last["run_id"] == run_id_of(0) and last["zone"]
        assert sidecar.flush()["stored"] >= rounds * 5_000


def hint_arrives(sidecar: Sidecar, subscriber: zmq.Socket) -> bool:
    post_rows(sidecar, rows_of(1, "hello"))
    return bool(subscriber.poll(100))


def newest(subscriber: zmq.Socket, prefix: str) -> dict | None:
    found = None
    while subscriber.poll(50):
        name, hint = subscriber.recv_multipart()
        if name.decode().startswith(prefix):
            found = json.loads(hint)
            assert found["request_id"] == name.decode()
    return found


@contextmanager
def connections(sidecar: Sidecar, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(sidecar.host_port, PATIENCE_S))
            for _ in range(count)
        ]


def test_a_thousand_idle_connections_and_slow_clients_keep_nobody_waiting(tmp_path, runs):
    """With no more open files allowed than a shell gives, which are fewer."""
    with (
        running(tmp_path, runs=runs, most_files=512) as sidecar,
        connections(sidecar, 1_000) as idle,
        connections(sidecar, 40) as slow,
    ):
        head = b"POST /classify HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n"
        for turn in range(5):
            for number, client in enumerate(slow):
                # One half drips its head, the other its body.
                first = head if number % 2 else head + b"\r\n"
                client.sendall(first if turn == 0 else b"x")
            assert sidecar.client.post("/classify", json=CLASSIFY).status_code == 200
            assert post_rows(sidecar, rows_of(50, f"r{turn}")).status_code == 200
            # A new one is let in too.
            assert httpx.get(f"{sidecar.url}/health", timeout=PATIENCE_S).status_code == 200
        for client in idle[::100]:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        # They do not hold up the end either.
        done = sidecar.stop(timeout=30)
        assert done.returncode == 0, done.stderr
    assert stored_requests(sidecar.db) == {f"r{turn}": 50 for turn in range(5)}


def test_pipelined_requests_are_answered_in_their_order(tmp_path, runs):
    with running(tmp_path, runs=runs) as sidecar, connections(sidecar, 1) as (client,):
        bodies = [json.dumps({"vector": v}).encode() for v in vectors_of(20).tolist()]
        head = b"POST /classify HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
        client.sendall(b"".join(head % len(body) + body for body in bodies))
        wanted = [sidecar.client.post("/classify", content=body).json() for body in bodies]
        found, file = [], client.makefile("rb")
        for _ in bodies:
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            size = 0
            while (line := file.readline().lower()) != b"\r\n":
                if line.startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            found.append(json.loads(file.read(size)))
        assert found == wanted


def test_clients_that_vanish_leave_nothing_behind(tmp_path, runs):
    """In the middle of a head, of a body, and before the answer."""
    body = arrow(rows_of(100, "gone"))
    whole = (
        b"POST /fingerprints?wait=1 HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
        + ARROW["content-type"].encode() + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )  # fmt: skip
    with running(tmp_path, runs=runs) as sidecar:
        for cut in (1, 40, len(whole) - len(body), len(whole) - 1, len(whole)):
            for _ in range(10):
                with connections(sidecar, 1) as (client,):
                    client.sendall(whole[:cut])
        until(lambda: sidecar.fingerprints()["received"] == 1_000, "the whole ones are not stored")
        counts = sidecar.flush()
        assert (counts["stored"], counts["duplicate"]) == (100, 900)
        assert sidecar.client.get("/health").status_code == 200


def test_a_clock_that_jumps_changes_no_wait_and_loses_no_row(tmp_path, runs, monkeypatch):
    """Years ahead and years back, in a service of this process: its clock can be replaced."""
    jump, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    service = Service(
        SidecarOptions(
            db=tmp_path / "rows.db", discovery_dir=runs, zmq_bind="tcp://127.0.0.1:*",
            auto_reload_interval=0.5,
        )
    )  # fmt: skip
    try:
        year = 365 * 86_400.0
        for number, jumped in enumerate([0.0, 10 * year, -20 * year, 0.0]):
            jump[0] = jumped
            ticket, processed = service.intake.submit(rows_of(100, f"r{number}"), "http")
            assert ticket is not None and ticket.wait(PATIENCE_S) and ticket.committed
            assert processed.run_id == run_id_of(0)
            assert service.intake.flush(PATIENCE_S)
            stats = service.stats()
            assert 0 <= stats["uptime_seconds"] < PATIENCE_S
            assert 0 <= stats["lag_seconds"] < PATIENCE_S
            assert service.readiness()["ready"]
            assert service.sessions.newest(1)[0]["fingerprints"] == 100 * (number + 1)
        assert service.stats()["fingerprints"]["stored"] == 400
    finally:
        assert service.drain()
    assert stored_requests(tmp_path / "rows.db") == {f"r{n}": 100 for n in range(4)}


def test_a_store_that_was_deleted_under_the_service_is_said_and_its_rows_kept(tmp_path, runs):
    sidecar = Sidecar(tmp_path, runs=runs)
    try:
        assert post_rows(sidecar, rows_of(10, "before")).status_code == 200
        for path in tmp_path.glob("fingerprints.db*"):
            path.unlink()
        answer = post_rows(sidecar, rows_of(10, "after"))
        assert answer.status_code == 503
        assert "was deleted or replaced" in sidecar.get("/ready")["problems"][0]
        assert sidecar.fingerprints()["queued"] == 10
        done = sidecar.stop()
        assert done.returncode == 1 and "10 rows were received and are not stored" in done.stderr
    finally:
        sidecar.close()


def test_what_senders_had_sent_may_not_be_saved(tmp_path, runs, monkeypatch, caplog):
    """A full disk at the end, or a damaged file at the start, costs the counts of losses only."""
    options = SidecarOptions(db=tmp_path / "rows.db", discovery_dir=runs,
                             zmq_bind="tcp://127.0.0.1:*")  # fmt: skip
    saved = tmp_path / "rows.db.senders.json"
    for content in (b"{", b"[]", b'{"a": 1}', b'{"a": {"started": "x"}}', b"\xff"):
        saved.write_bytes(content)
        service = Service(options)
        assert service.drain()

    def full(*_: object) -> None:
        raise WriteError("the disk is full")

    service = Service(options)
    sender = Pusher(service.receiver.address)
    sender.send(rows_of(10))
    until(lambda: service.intake.counts["received"], "nothing came")
    monkeypatch.setattr("sidecar.service.write_json", full)
    assert service.drain()
    assert "what senders sent was not saved" in caplog.text
    sender.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_an_ordinary_end(tmp_path, runs, number):
    with running(tmp_path, runs=runs) as sidecar:
        assert post_rows(sidecar, rows_of(500, "last"), wait=False).status_code == 202
        done = sidecar.stop(number)
        assert done.returncode == 0
        assert done.stderr.splitlines()[-1] == "stopped; 500 fingerprints received, 500 stored"
    assert stored_requests(sidecar.db) == {"last": 500}
