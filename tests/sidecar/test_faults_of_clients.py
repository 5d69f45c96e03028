"""Senders, clients and signals that do what they should not: counted, and nobody waits."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import zmq
from running import (
    ARROW,
    PATIENCE_S,
    ROWS,
    Load,
    Pusher,
    Sidecar,
    arrow,
    post_rows,
    running,
    stored_requests,
    until,
)
from served_runs import rows_of, run_id_of, vectors_of

from capture_kernels.errors import WriteError
from sidecar.options import SidecarOptions
from sidecar.service import Service

CLASSIFY = {"vector": vectors_of(1)[0].tolist()}


def test_sigterm_under_load_ends_in_time_and_loses_nothing_that_was_answered(tmp_path, runs):
    with running(tmp_path, runs=runs) as sidecar:
        loads = [Load(sidecar, 2, wait=True), Load(sidecar, 1, wait=False, prefix="u")]
        sender = Pusher(sidecar.stream)
        # A send that waits already would wait for all of a patience that is shortened meanwhile.
        sender.set_patience(0.1)
        stop = threading.Event()

        def push() -> None:
            while not stop.is_set():
                message = sender.message(rows_of(100, f"s{sender.seq}"))
                while not stop.is_set():
                    try:
                        sender.send_bytes(message)
                    except zmq.Again:
                        continue
                    break

        pushing = threading.Thread(target=push)
        pushing.start()
        until(lambda: all(load.answered for load in loads), "no answers")
        until(lambda: sidecar.fingerprints()["received_by_source"].get("zmq"), "nothing received")
        time.sleep(0.5)
        began = time.monotonic()
        done = sidecar.stop()
        seconds = time.monotonic() - began
        stop.set()
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
        counted = {name: count for name, count in stream.items() if count}
        assert counted == {"messages": 15, "restarts": 2}
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
            rounds = 12
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


def test_what_senders_had_sent_may_not_be_saved(tmp_path, runs, monkeypatch, caplog):
    """A full disk at the end, or a damaged file at the start, costs the counts of losses only."""
    options = SidecarOptions(db=tmp_path / "rows.db", discovery_dir=runs,
                             zmq_bind="tcp://127.0.0.1:*")  # fmt: skip
    saved = tmp_path / "rows.db.tcp-127.0.0.1-.senders.json"
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


def test_a_flood_of_malformed_messages_is_counted_and_does_not_fill_the_log(tmp_path, runs):
    with running(tmp_path, runs=runs) as sidecar:
        sender = Pusher(sidecar.stream)
        for n in range(3_000):
            sender.send_bytes(b"no message %d" % n)
        stream = until(
            lambda: (
                sidecar.get("/stats")["stream"].get("malformed") == 3_000
                and sidecar.get("/stats")["stream"]
            ),
            "they are not counted",
        )
        assert stream["messages"] == 3_000
        # A line a second, which says of how many it is.
        assert 1 <= sidecar.said.count("malformed message") <= 60
        assert "messages=1" in sidecar.said
        sender.close()
