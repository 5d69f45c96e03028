"""Hints go back for each request; a subscriber that does not read holds up nobody."""

from __future__ import annotations

import json
import time

import zmq
from processes import AttnProcess
from running import PATIENCE_S, post_rows, running
from served_runs import classifier_of, rows_of, run_id_of

from capture_kernels.fingerprint.zones import ZONES
from pipeline.record import vectors


def test_each_request_of_a_batch_gets_a_hint_from_its_newest_row(tmp_path, runs):
    batch = rows_of(40, "hinted")  # ten rows of each of four requests
    found = classifier_of(runs, run_id_of(0)).classify(vectors(batch))
    requests = batch.column("request_id").to_pylist()
    newest = {request: row for row, request in enumerate(requests)}
    hints = {}
    with running(tmp_path, "--hints-bind", "tcp://127.0.0.1:*", runs=runs) as sidecar:
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.subscribe("hinted")
        subscriber.connect(sidecar.hints)
        deadline = time.monotonic() + PATIENCE_S
        # What is published before a subscription has come is missed.
        while len(hints) < len(newest) and time.monotonic() < deadline:
            post_rows(sidecar, batch, wait=False)
            post_rows(sidecar, rows_of(10, "other"), wait=False)
            while subscriber.poll(200):
                topic, body = subscriber.recv_multipart()
                hints[topic.decode()] = json.loads(body)
        subscriber.close(0)
    assert set(hints) == set(newest)
    for request, row in newest.items():
        hint = hints[request]
        assert hint["request_id"] == request and hint["run_id"] == run_id_of(0)
        assert hint["position"] == batch.column("position")[row].as_py()
        assert hint["zone"] == ZONES[found.zone[row]]
        assert hint["cluster_id"] == found.cluster_id[row]
        assert 0 < hint["sampling_hint"]["temperature"] <= 1


def test_a_hints_address_that_is_taken_is_one_line(tmp_path):
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        done = AttnProcess(
            "sidecar", "--port", "0", "--zmq-bind", "none", "--db", tmp_path / "rows.db",
            "--hints-bind", f"tcp://127.0.0.1:{port}",
        ).finish()  # fmt: skip
    assert done.returncode == 2 and "cannot bind --hints-bind" in done.stderr
    assert len(done.stderr.splitlines()) == 1
