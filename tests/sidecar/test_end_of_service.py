"""What a service that fails to start, or is ending, leaves behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from processes import AttnProcess
from running import Pusher, holding, post_rows, running, until
from served_runs import rows_of
from shared import REPO

from pipeline.store.open import open_store
from sidecar.options import SidecarOptions
from sidecar.repeating import Repeating
from sidecar.service import Service


def rows_in(path) -> int:
    with open_store(path, read_only=True) as store:
        return sum(batch.num_rows for batch in store.scan(columns=["position"]))


def test_rows_are_stored_though_the_request_that_waits_for_them_is_ended(tmp_path, runs):
    """The event loop is gone when the writer reports the commit."""

    def ask() -> None:
        answers.append(post_rows(sidecar, rows_of(100, "waited")))

    answers: list[httpx.Response] = []
    with running(tmp_path, runs=runs) as sidecar:
        with holding(sidecar.db):
            waiting = threading.Thread(target=ask)
            waiting.start()
            until(lambda: sidecar.fingerprints()["queued"] == 100, "the rows did not come")
            time.sleep(0.5)  # the writer has begun with them
            assert post_rows(sidecar, rows_of(100, "next"), wait=False).status_code == 202
            done = []
            ending = threading.Thread(target=lambda: done.append(sidecar.stop()))
            ending.start()
            waiting.join()  # requests that are under way have two seconds
            time.sleep(0.5)
        ending.join()
        assert done[0].returncode == 0, done[0].stderr
    assert "Traceback" not in done[0].stderr
    assert rows_in(sidecar.db) == 200
    assert answers[0].status_code == 503 and "the service is ending" in answers[0].json()["error"]


def test_a_bad_file_of_keys_is_seen_before_anything_is_received(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("short\n")
    keys.chmod(0o600)
    process = AttnProcess(
        "sidecar", "--port", "0", "--zmq-bind", "tcp://127.0.0.1:*", "--db", tmp_path / "rows.db",
        "--api-key-file", keys,
    )  # fmt: skip
    done = process.finish()
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and "not a key" in done.stderr
    assert not (tmp_path / "rows.db").exists()


def test_what_senders_sent_is_kept_by_a_start_that_fails(tmp_path):
    """Else what was lost since would not be counted by the next one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        kept = tmp_path / f"fingerprints.db.tcp-127.0.0.1-{port}.senders.json"
        text = json.dumps({"s": {"started": 1, "next_seq": 2, "next_row": 20, "dropped": 0}})
        kept.write_text(text)
        process = AttnProcess(
            "sidecar", "--port", "0", "--zmq-bind", address, "--db", tmp_path / "fingerprints.db"
        )
        assert process.finish().returncode == 2
    assert kept.read_text() == text
    with running(tmp_path, "--zmq-bind", address):
        assert not kept.exists()


def test_services_of_one_store_remember_their_own_senders(tmp_path):
    """One that starts or ends takes nothing from the other."""
    options = [
        SidecarOptions(db=tmp_path / "rows.db", discovery_dir=tmp_path, zmq_bind=f"ipc://{name}")
        for name in (tmp_path / "a", tmp_path / "b")
    ]
    for one in options:
        service = Service(one)
        sender = Pusher(service.receiver.address)
        sender.send(rows_of(10))
        until(lambda: service.intake.counts["received"], "nothing came")  # noqa: B023
        assert service.drain()
        sender.close()
    assert len(list(tmp_path.glob("rows.db.*.senders.json"))) == 2
    for one in options:
        service = Service(one)
        assert len(service.senders.state()) == 1
        assert service.drain()


def test_the_end_waits_once_for_all_that_does_not_end(tmp_path):
    service = Service(SidecarOptions(db=tmp_path / "rows.db", discovery_dir=tmp_path,
                                     zmq_bind=None))  # fmt: skip
    began, release = threading.Barrier(4), threading.Event()

    def endless() -> None:
        began.wait()
        release.wait()

    stuck = [Repeating(name, endless, 60.0) for name in ("drift", "nightly", "reload")]
    for part, one in zip((service.drift, service.nightly, service.serving), stuck, strict=True):
        part._repeating.close()
        part._repeating = one
        one.start()
    began.wait()
    ending = threading.Thread(target=service.drain, args=(0.0,))
    ending.start()
    # One after another they are waited for 15 seconds.
    ending.join(12.0)
    assert not ending.is_alive()
    release.set()


def test_a_damaged_file_of_senders_is_as_none(tmp_path):
    kept = tmp_path / "fingerprints.db.tcp-127.0.0.1-.senders.json"  # of tcp://127.0.0.1:*
    kept.write_text('{"s": {"started": "never"}}')
    with running(tmp_path) as sidecar:
        assert not kept.exists()
        assert sidecar.get("/stats")["stream"]["lost_in_transit"] == 0


@pytest.mark.parametrize(
    ("limits", "connections", "files"), [((256, 8_192), 4_096, 4_608), ((256, 1_024), 512, 1_024)]
)
def test_the_limit_of_files_has_room_for_connections_and_the_store(limits, connections, files):
    program = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "from sidecar.server import room_for_connections\n"
        "print(room_for_connections(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO, check=True
    )
    assert done.stdout.split() == [str(n) for n in (connections, files, limits[1])]
