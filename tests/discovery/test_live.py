"""Live progress: whoever connects, early or late, sees the whole run, and nobody can harm it."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from shared import NOW, REPO, free_port
from watching import SCHEMA, Client, address, logged
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from capture_kernels.errors import OptionError
from discovery.events.log import EventLog
from discovery.events.schema import COMMANDS, LOGGED, Event, RunPaused, RunResumed
from discovery.events.websocket import (
    MOST_BYTES,
    MOST_CLIENTS,
    MOST_CONNECTIONS,
    Backlog,
    LiveEvents,
    client_file,
    write_client_file,
)
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.stages.registry import STAGES

RUN_ID = "2026-01-10T04-02-11"


def event(kind: str, **fields: object) -> dict:
    return {"event": kind, "run_id": RUN_ID, "at": "2026-01-10T04:02:11.000+00:00", **fields}


def part(done: int, total: int = 9) -> dict:
    return event("progress", stage="extract", done=done, total=total)


STARTED = event(
    "run_started", resumed=False, engine="cpu engine", model="m", layout="log16", rows=5
)
STAGE = event("stage_started", stage="extract", number=1, of=10)
FINISHED = event("run_finished", clusters=3, peak_memory_gb=0.5)


class Served(LiveEvents):
    """Takes events as the JSON objects that clients get."""

    def __call__(self, message: dict) -> None:
        super().__call__(decoded(message))


@pytest.fixture
def live():
    """A server with nothing to say yet: (its port, the listener, the request that it steers)."""
    port, stop = free_port(), StopRequest()
    served = Served(port, stop)
    yield port, served, stop
    with suppress(RuntimeError):  # closed by the test
        served.close()


def upgrade(port: int) -> socket.socket:
    """A WebSocket with nothing but a socket behind it, that never reads."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    raw.connect(("127.0.0.1", port))
    key = base64.b64encode(os.urandom(16)).decode()
    raw.sendall(
        f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
        f"Authorization: {address(port)['additional_headers']['Authorization']}\r\n\r\n".encode()
    )
    return raw


def decoded(message: dict) -> Event:
    """The event of a message, which must fit its struct."""
    kinds = {kind.__struct_config__.tag: kind for kind in LOGGED}
    return msgspec.convert(message, kinds[message["event"]])


def seen_late(events: list[dict]) -> list[dict]:
    """What a client that connects after these events gets."""
    backlog = Backlog()
    for one in map(decoded, events):
        backlog.add(one, msgspec.json.encode(one))
    return [json.loads(message) for _, message in backlog.current]


def test_a_client_sees_a_run_from_its_start_to_its_end(planted_store, tmp_path):
    port = free_port()
    command = [sys.executable, str(REPO / "cli.py"), "discover", "--db", str(planted_store(400))]
    command += ["--output", str(tmp_path / "out"), "--hours", "0", "--websocket-port", str(port)]
    command += ["--now", f"{NOW:%Y-%m-%dT%H:%M:%S}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with Client(port) as client:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\x16\x03\x01 this is no handshake\r\n\r\n")
        hello, *events = client.rest()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "handshake" not in said and "Traceback" not in said  # the run's own lines stay readable
    assert (hello["event"], hello["protocol"]) == ("hello", 1)
    assert hello["stages"] == [stage.name for stage in STAGES]
    assert hello["commands"] == ["pause", "resume", "stop", "ping"]
    finished = [event["stage"] for event in events if event["event"] == "stage_finished"]
    assert finished == [stage.name for stage in STAGES]
    assert (events[0]["event"], events[-1]["event"]) == ("run_started", "run_finished")
    assert events[0].items() >= {"model": "planted-model", "layout": "log16", "rows": 400}.items()
    log = logged(tmp_path / "out" / "latest")
    # On a busy machine the run begins before the client is there, which then is a late one.
    missed = range(1, len(log)) if hello["run_id"] else [0]
    assert events in [[*seen_late(log[:count]), *log[count:]] for count in missed]


def test_who_waits_for_the_file_that_says_how_to_connect_never_reads_a_part_of_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path, over = client_file(1), threading.Event()

    def write() -> None:
        for _ in range(500):
            write_client_file(1, "token")
        over.set()

    with ThreadPoolExecutor(1) as pool:
        writing, read = pool.submit(write), 0
        while not over.is_set():
            with suppress(FileNotFoundError):
                assert json.loads(path.read_text())["token"] == "token"
                read += 1
        writing.result()
    assert read > 10 and path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_schema_and_the_code_have_the_same_commands_and_stages():
    assert SCHEMA["$defs"]["Command"]["properties"]["command"]["enum"] == sorted(COMMANDS)
    names = sorted(stage.name for stage in STAGES)
    assert SCHEMA["$defs"]["Progress"]["properties"]["stage"]["enum"] == names


# late clients


def test_an_early_client_is_told_of_no_run_yet(live):
    port, served, _ = live
    with Client(port) as client:
        assert client.next()["run_id"] is None
        served(STARTED)
        assert client.next() == STARTED


def test_a_late_client_gets_what_has_happened_with_only_the_newest_progress(live):
    port, served, _ = live
    for one in (STARTED, STAGE, *map(part, range(1, 5))):
        served(one)
    with Client(port) as client:
        hello = client.next()
        assert [client.next() for _ in range(3)] == [STARTED, STAGE, part(4)]
        served(FINISHED)
        assert client.next() == FINISHED
    known = {name: hello[name] for name in ("run_id", "model", "layout", "rows")}
    assert known == {"run_id": RUN_ID, "model": "m", "layout": "log16", "rows": 5}


def test_a_late_client_sees_a_pause_only_while_it_lasts(live):
    port, served, _ = live
    for one in (STARTED, STAGE, part(1), event("run_paused")):
        served(one)
    with Client(port) as client:
        client.until("run_paused", timeout=5)
    for one in (event("run_resumed"), part(2)):
        served(one)
    with Client(port) as client:
        client.next()
        assert [client.next() for _ in range(3)] == [STARTED, STAGE, part(2)]


def test_a_late_client_gets_only_the_newest_sample_of_the_map(live):
    port, served, _ = live
    first, second = (
        event("embedding_sample", of=2, rows=[0, 1], points=[[0, 0], [1, 1]], cluster_ids=ids)
        for ids in (None, [7, -1])
    )
    for one in (STARTED, first, STAGE, second):
        served(one)
    with Client(port) as client:
        client.next()
        assert [client.next() for _ in range(3)] == [STARTED, STAGE, second]


def test_a_client_that_goes_away_does_not_stop_the_events(live):
    port, served, _ = live
    with Client(port):
        served(STARTED)
    served(FINISHED)
    with Client(port) as client:
        assert client.until("run_finished", timeout=5) == FINISHED
        served.close()
        assert client.rest()[1:] == [STARTED, FINISHED]


# commands


def test_commands_are_answered_and_reach_the_run(live):
    port, _, stop = live
    with Client(port) as client:
        assert client.ask("ping", "a") == {"event": "pong", "id": "a"}
        refused = client.ask("resume", "b")
        assert (refused["ok"], refused["reason"]) == (False, "the run is not paused")
        for given in ("c", "d"):
            answer = {"event": "answer", "command": "pause", "id": given, "ok": True}
            assert client.ask("pause", given) == answer
            assert stop.paused
        assert client.ask("resume", "e")["ok"] and not stop.paused
        stop.check()
        assert client.ask("stop", "f")["ok"] and client.ask("stop", "g")["ok"]
        assert client.ask("pause", "h")["reason"] == "the run is stopping"
    with pytest.raises(Interrupted, match="stop command, at a checkpoint") as stopped:
        stop.check()
    assert stopped.value.exit_code == 4


@pytest.mark.parametrize("end", ["run_finished", "run_failed", "run_interrupted"])
def test_a_run_that_is_over_takes_no_more_commands(live, end):
    port, served, stop = live
    ends = {
        "run_finished": FINISHED,
        "run_failed": event("run_failed", reason="full disk"),
        "run_interrupted": event("run_interrupted", reason="SIGTERM", says="resume it"),
    }
    with Client(port) as client:
        served(ends[end])
        client.until(end)
        answers = [client.ask(command) for command in ("pause", "resume", "stop")]
        assert {answer["reason"] for answer in answers} == {"the run is over"}
        client.ask("ping")
    stop.check()
    assert not stop.paused


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * MOST_BYTES, "not JSON"),
        ("9" * MOST_BYTES, "not a JSON object"),
        (b"\xff\xfe\x00", "not JSON"),
        ("null", "not a JSON object"),
        ('["stop"]', "not a JSON object"),
        ("{}", "no such command"),
        ('{"command": "STOP"}', "no such command"),
        ('{"command": "__class__", "id": "\\ud800"}', "not JSON"),
        ('{"command": "__class__"}', "no such command"),
        ('{"command": ["stop"]}', "no such command"),
        ('{"command": "stop", "id": 5}', "id must be text"),
        ('{"command": "stop", "id": {"a": []}}', "id must be text"),
    ],
)
def test_what_is_no_command_is_answered_and_changes_nothing(live, message, reason):
    port, _, stop = live
    with Client(port) as client:
        client.next()
        client.connection.send(message)
        answer = client.next()
        assert (answer["event"], answer["ok"]) == ("answer", False)
        assert reason in answer["reason"]
        assert client.ask("ping") == {"event": "pong", "id": "1"}
    stop.check()
    assert not stop.paused


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x81\xfe\x10\x01", 1009),  # text of one byte more than a command may have
        (b"\x81\xff\x7f" + b"\xff" * 7, 1009),  # of 2**63 - 1 bytes
        (b"\x83\x80\x00\x00\x00\x00", 1002),  # an opcode that does not exist
    ],
)
def test_a_frame_that_cannot_be_read_closes_its_own_connection_only(live, frame, code):
    port, served, _ = live
    with Client(port) as other, connect(**address(port)) as client:
        client.recv()
        client.socket.sendall(frame)
        if len(frame) == 4:
            with suppress(OSError):
                client.socket.sendall(b"\x00" * (MOST_BYTES + 5))
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=5)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == code
        served(STARTED)
        assert other.until("run_started") == STARTED


def test_text_that_is_not_utf_8_is_answered_as_no_json(live):
    port, _, _ = live
    with Client(port) as client:
        client.next()
        client.connection.socket.sendall(b"\x81\x81\x00\x00\x00\x00\xff")
        assert client.next()["reason"] == "not JSON"
        assert client.ask("ping")


def test_a_page_of_a_browser_is_refused(live):
    port, _, _ = live
    for origin in ("http://evil.example", f"http://127.0.0.1:{port}", "null"):
        with pytest.raises(InvalidStatus) as refused:
            connect(**address(port), origin=origin).__enter__()
        assert refused.value.response.status_code == 403


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer x", "Basic dTpw"])
def test_a_client_without_the_token_is_refused_and_hears_nothing(live, given):
    port, _, _ = live
    headers = {} if given is None else {"Authorization": given}
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{port}", additional_headers=headers).__enter__()
    assert refused.value.response.status_code == 401
    assert str(client_file(port)) in refused.value.response.body.decode()
    with Client(port) as client:
        assert client.next()["event"] == "hello"


def test_a_token_that_is_not_ascii_is_refused_like_any_other(live):
    port, _, _ = live
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            b"Authorization: Bearer \xff\r\n\r\n"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 401 ")


def test_only_this_user_can_read_the_token(live):
    port, served, _ = live
    file = client_file(port)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    served.close()
    assert not file.exists()


def test_a_folder_that_others_can_read_holds_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    client_file(0).parent.mkdir(mode=0o755)
    with pytest.raises(OptionError, match="open to other users"):
        LiveEvents(0, StopRequest())
    assert list(client_file(0).parent.iterdir()) == []


def test_a_free_port_is_taken_and_reported():
    served = LiveEvents(0, StopRequest())
    with Client(served.port) as client:
        assert client.next()["event"] == "hello"
        served.close()


def test_only_this_machine_can_connect(live):
    port, _, _ = live
    listening = [
        line.split()[1]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{port:04X}"]


# too many, and too slow


def test_clients_are_bounded_and_a_place_that_is_left_is_free_again(live):
    port, served, _ = live
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(port)) for _ in range(MOST_CLIENTS)]
        for client in clients:
            client.next()
        for _ in range(8):
            with Client(port) as late, pytest.raises(ConnectionClosed) as closed:
                late.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        served(STARTED)
        assert {client.next()["event"] for client in clients} == {"run_started"}
        clients[0].connection.close()
        deadline = time.monotonic() + 5
        while True:
            with Client(port) as again, suppress(ConnectionClosed):
                again.until("run_started", timeout=5)
                break
            assert time.monotonic() < deadline


def test_connections_that_say_nothing_are_bounded(live):
    port, served, _ = live
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_CONNECTIONS + 40)]
    cut = 0
    for one in silent:
        one.settimeout(0.01)
        with suppress(TimeoutError):
            # A reset, or an end: either way it was cut off.
            try:
                cut += one.recv(1) == b""
            except ConnectionResetError:
                cut += 1
    assert cut == 40
    for one in silent:
        one.close()
    served(STARTED)
    with Client(port) as client:
        assert client.until("run_started", timeout=5) == STARTED


def test_a_client_that_never_reads_is_cut_off_and_slows_nobody(live):
    port, served, _ = live
    points = [[0.1234, 0.5678]] * 1_000
    big = event("embedding_sample", of=1_000, rows=[0] * 1_000, points=points, cluster_ids=None)
    raw = upgrade(port)
    with Client(port) as reader:
        reader.next()
        slowest = 0.0
        count = 2_000
        for done in range(count):
            message = decoded(big if done < 400 else part(done + 1, count))
            began = time.perf_counter()
            LiveEvents.__call__(served, message)
            slowest = max(slowest, time.perf_counter() - began)
            if done % 100 == 99:  # the reader keeps up
                got = [reader.connection.recv(timeout=5) for _ in range(100)]
        assert json.loads(got[-1]) == part(count, count)
        # Its messages are no longer kept: what it can still read ends before they do.
        raw.settimeout(5)
        left = 0
        with suppress(ConnectionResetError):
            while chunk := raw.recv(65_536):
                left += len(chunk)
        assert left < 400 * len(json.dumps(big))
    assert slowest < 1.0


def test_the_end_waits_for_a_client_that_never_reads_no_longer_than_a_few_seconds(live):
    port, served, _ = live
    raw = upgrade(port)
    with Client(port) as reader:
        reader.next()
        time.sleep(0.2)
        points = [[0.1234, 0.5678]] * 1_000
        for _ in range(100):
            served(
                event("embedding_sample", of=9, rows=[0] * 1_000, points=points, cluster_ids=None)
            )
        served(FINISHED)
        got = [reader.connection.recv(timeout=5) for _ in range(101)]
        assert json.loads(got[-1]) == FINISHED
        began = time.monotonic()
        served.close()
        assert time.monotonic() - began < 6
    raw.close()


def test_a_flood_of_commands_is_answered_at_the_servers_pace(live):
    port, served, _ = live
    with Client(port) as flood, Client(port) as other:
        for number in range(50):
            flood.connection.send(json.dumps({"command": "ping", "id": str(number)}))
        began = time.monotonic()
        served(STARTED)
        assert other.until("run_started") == STARTED
        assert other.ask("ping")
        flood.until("pong", id="49")
        assert time.monotonic() - began >= 0.5
        pongs = [message["id"] for message in flood.seen if message["event"] == "pong"]
        assert pongs == [str(number) for number in range(50)]


@pytest.mark.parametrize("port", ["taken", "70000"])
def test_a_port_that_cannot_be_served_is_refused_before_anything_is_written(
    attn, planted_store, tmp_path: Path, port: str
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1]) if port == "taken" else port
        done = attn(
            "discover", "--db", planted_store(300), "--output", tmp_path / "out",
            "--hours", "0", "--websocket-port", number,
        )  # fmt: skip
    assert done.returncode == 2
    assert "--websocket-port" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


# parts that come fast


def test_of_hundreds_of_chunks_the_first_and_the_last_are_reported_and_few_between(tmp_path):
    now = [0.0]
    seen: list[Event] = []
    log = EventLog(tmp_path / "progress.jsonl", RUN_ID, [seen.append], clock=lambda: now[0])
    for stage in ("neighbors", "umap"):
        for done in range(1, 1_001):
            log.chunk_done(stage, done, 1_000)
            now[0] += 0.01
    log.close()
    for stage in ("neighbors", "umap"):
        done = [one.done for one in seen if one.stage == stage]
        assert (done[0], done[-1]) == (1, 1_000)
        assert done == sorted(set(done))
        assert 50 <= len(done) <= 65  # ten at once, then five in each of ten seconds
    assert [decoded(line) for line in logged(tmp_path)] == seen


def test_the_newest_chunk_is_reported_before_a_pause_or_an_end(tmp_path):
    seen: list[Event] = []
    log = EventLog(tmp_path / "progress.jsonl", RUN_ID, [seen.append], clock=lambda: 0.0)
    for done in range(1, 41):
        log.chunk_done("umap", done, 50)
    log.emit(RunPaused)
    log.emit(RunResumed)
    log.close()
    assert [one.done for one in seen[:-2]] == [*range(1, 11), 40]
    assert [type(one) for one in seen[-2:]] == [RunPaused, RunResumed]
