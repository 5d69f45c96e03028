"""Kills, full disks, locks, deleted stores and clocks: nothing that was answered is lost."""

from __future__ import annotations

import random
import resource
import signal
import threading
import time
from typing import Any

import httpx
import pytest
from running import (
    ARROW,
    PATIENCE_S,
    ROWS,
    Load,
    Pusher,
    Sidecar,
    arrow,
    holding,
    post_rows,
    running,
    stored_requests,
    until,
)
from served_runs import rows_of, run_id_of, vectors_of

from pipeline.store.open import open_store
from sidecar.options import SidecarOptions
from sidecar.service import Service

CLASSIFY = {"vector": vectors_of(1)[0].tolist()}


KILLS = [
    ("fingerprints.db", 1),
    pytest.param("fingerprints.db", 2, marks=pytest.mark.slow),
    pytest.param("fingerprints.db", 3, marks=pytest.mark.slow),
    ("fingerprints", 1),
    pytest.param("fingerprints", 2, marks=pytest.mark.slow),
]


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
    """Those of the stream that waited for room in the queue are among them."""
    limits = ("--queue-rows", "400", "--max-batch", "400")
    sidecar = Sidecar(tmp_path, *limits, runs=runs)
    try:
        with holding(sidecar.db):
            assert post_rows(sidecar, rows_of(321), wait=False).status_code == 202
            sender = Pusher(sidecar.stream)
            sender.send(rows_of(100, "waits"))
            until(lambda: sidecar.fingerprints()["queued"] == 421, "rows are missing")
            done = sidecar.stop()
            sender.close()
        assert done.returncode == 3
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: 421 rows were received and are not stored: ")
    finally:
        sidecar.close()
    assert stored_requests(sidecar.db) == {}


def test_an_end_while_clients_wait_for_the_store_answers_them_and_stores_their_rows(tmp_path, runs):
    """The store comes free after the requests were given up, and before the end."""
    sidecar = Sidecar(tmp_path, runs=runs)
    answers: dict[str, httpx.Response] = {}

    def post(path: str, **content: Any) -> None:
        answers[path] = httpx.post(f"{sidecar.url}{path}", timeout=PATIENCE_S, **content)

    rows = {"content": arrow(rows_of(100, "waited")), "headers": ARROW}
    waiting = [
        threading.Thread(target=post, args=("/fingerprints?wait=1",), kwargs=rows),
        threading.Thread(target=post, args=("/storage/flush",)),
    ]
    try:
        with holding(sidecar.db):
            waiting[0].start()
            until(lambda: sidecar.fingerprints()["queued"] == 100, "the rows did not come")
            waiting[1].start()
            assert post_rows(sidecar, rows_of(50, "queued"), wait=False).status_code == 202
            time.sleep(0.5)  # a request that came is not seen from outside
            sidecar.process.signal(signal.SIGTERM)
            for thread in waiting:
                thread.join(PATIENCE_S)
        done = sidecar.stop()
        assert done.returncode == 0, done.stderr
        assert "stopped; 150 fingerprints received, 150 stored" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        sidecar.close()
    assert {path: found.status_code for path, found in answers.items()} == {
        "/fingerprints?wait=1": 503, "/storage/flush": 503,
    }  # fmt: skip
    assert all("error" in found.json() for found in answers.values())
    assert stored_requests(sidecar.db) == {"waited": 100, "queued": 50}


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
            assert sidecar.get("/stats")["lag_seconds"] >= 5
            time.sleep(seconds)
            assert sidecar.client.post("/classify", json=CLASSIFY).status_code == 200
        counts = sidecar.flush()
        assert counts["stored"] == counts["received"] == 3_000
        assert sidecar.client.get("/ready").status_code == 200
        sender.close()
    wanted = {f"s{n}": 100 for n in range(20)} | {f"h{n}": 50 for n in range(20)}
    assert stored_requests(sidecar.db) == wanted


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
        assert done.returncode == 3 and "10 rows were received and are not stored" in done.stderr
    finally:
        sidecar.close()
