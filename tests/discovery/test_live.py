"""Live progress: whoever connects, early or late, sees the whole run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared import NOW, REPO
from websockets.sync.client import connect

from discovery.live import LiveEvents
from discovery.stages import STAGES


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listen(port: int, patience: float = 60.0) -> list[dict]:
    """Every event until the server says goodbye, from as soon as it is there."""
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = connect(f"ws://127.0.0.1:{port}")
            break
        except OSError:
            assert time.monotonic() < deadline, "no server came up"
            time.sleep(0.05)
    with connection:
        return [json.loads(message) for message in connection]


def test_a_client_sees_a_run_from_its_start_to_its_end(planted_store, tmp_path):
    port = free_port()
    command = [sys.executable, str(REPO / "cli.py"), "discover", "--db", str(planted_store(400))]
    command += ["--output", str(tmp_path / "out"), "--hours", "0", "--websocket-port", str(port)]
    command += ["--now", f"{NOW:%Y-%m-%dT%H:%M:%S}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events = listen(port)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    finished = [event["stage"] for event in events if event["event"] == "stage_finished"]
    assert finished == [stage.name for stage in STAGES]
    assert (events[0]["event"], events[-1]["event"]) == ("run_started", "run_finished")
    log = (tmp_path / "out" / "latest" / "progress.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in log]
    assert [e for e in events if e["event"] != "progress"] == [
        e for e in kept if e["event"] != "progress"
    ]


def test_a_late_client_gets_what_has_happened_with_only_the_newest_progress():
    port = free_port()
    live = LiveEvents(port)
    live({"event": "run_started"})
    for done in range(5):
        live({"event": "progress", "done": done})
    with connect(f"ws://127.0.0.1:{port}") as client:
        first = [json.loads(client.recv(timeout=5)) for _ in range(2)]
        live({"event": "stage_finished"})
        then = json.loads(client.recv(timeout=5))
        live.close()
    assert first == [{"event": "run_started"}, {"event": "progress", "done": 4}]
    assert then == {"event": "stage_finished"}


def test_a_client_that_goes_away_does_not_stop_the_events():
    port = free_port()
    live = LiveEvents(port)
    with connect(f"ws://127.0.0.1:{port}"):
        live({"event": "run_started"})
    live({"event": "run_finished"})
    with connect(f"ws://127.0.0.1:{port}") as client:
        assert json.loads(client.recv(timeout=5)) == {"event": "run_started"}
        assert json.loads(client.recv(timeout=5)) == {"event": "run_finished"}
        live.close()


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
