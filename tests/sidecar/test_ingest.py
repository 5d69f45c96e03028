"""Fingerprints that are sent are stored, or counted under the reason why they are not."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from running import ARROW, Pusher, Sidecar, arrow, holding, post_rows, running, until
from served_runs import CAPTURE_ID, MODEL, layered_vectors, rows_of, run_id_of, vectors_of

from pipeline.store.open import open_store

VECTOR = vectors_of(1)[0].tolist()
STORES = ["fingerprints.db", "fingerprints"]


def stored(path: Path) -> list[dict[str, Any]]:
    """The rows of a store, by key."""
    with open_store(path, read_only=True) as store:
        rows = [row for batch in store.scan() for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row["request_id"], row["position"], row["layer"]))


def rows_in(path: Path) -> int:
    with open_store(path, read_only=True) as store:
        return sum(batch.num_rows for batch in store.scan(columns=["position"]))


def new_row(sidecar: Sidecar, **given: Any) -> dict[str, Any]:
    """Post a fingerprint, and find it in the store."""
    before = {(row["request_id"], row["position"]) for row in stored(sidecar.db)}
    answer = sidecar.client.post("/fingerprint?wait=1", json=given)
    assert answer.status_code == 200, answer.text
    assert answer.json()["committed"] == 1
    (row,) = (r for r in stored(sidecar.db) if (r["request_id"], r["position"]) not in before)
    return row


def test_a_fingerprint_is_classified_queued_and_stored(sidecar):
    row = {"request_id": "one", "position": 3, "vector": VECTOR}
    answer = sidecar.client.post("/fingerprint", json=row)
    assert answer.status_code == 202
    classified = sidecar.client.post("/classify", json={"vector": VECTOR}).json()
    assert answer.json() == {"queued": 1, **classified}
    sidecar.flush()
    (found,) = (row for row in stored(sidecar.db) if row["request_id"] == "one")
    assert found["vector"] == VECTOR


def test_what_a_fingerprint_leaves_out_is_that_of_the_run(sidecar):
    began = dt.datetime.now(dt.UTC)
    row = new_row(sidecar, request_id="defaults", position=4, vector=VECTOR)
    assert (row["model"], row["capture_id"], row["layout"]) == (MODEL, CAPTURE_ID, 1)
    assert (row["layer"], row["phase"]) == (-1, "output")
    assert began <= row["captured_at"] <= dt.datetime.now(dt.UTC)
    assert row["session_id"] is row["prompt_len"] is row["token_id"] is None


def test_what_a_fingerprint_gives_is_kept(sidecar):
    given = {
        "request_id": "given", "position": 40, "prompt_len": 30, "layer": 2, "model": "m",
        "capture_id": "c", "layout": 1, "phase": "think", "token_id": 7, "session_id": "s",
        "sink_mass": 0.5, "router_entropy": 0.25, "top_experts": [1, 2],
        "captured_at": "2026-01-09T06:00:00.000001+00:00",
    }  # fmt: skip
    row = new_row(sidecar, **given, vector=VECTOR)
    row["captured_at"] = row["captured_at"].isoformat(timespec="microseconds")
    assert {name: row[name] for name in given} == given


@pytest.mark.parametrize(
    "given, position",
    [
        ({"step": 1}, 0),
        ({"step": 5}, 4),
        ({"step": 1, "prompt_len": 100}, 100),
        ({"step": 7, "prompt_len": 100}, 106),
        ({"position": 3, "step": 9}, 3),
        ({"position": 0}, 0),
        ({"position": None, "step": 2}, 1),
    ],
)
def test_a_step_stands_for_a_position(sidecar, given, position):
    name = f"step-{given}"
    assert new_row(sidecar, request_id=name, vector=VECTOR, **given)["position"] == position


WRONG = [
    ({"vector": VECTOR, "position": 1}, "request_id"),
    ({"request_id": "w", "vector": VECTOR}, "position: missing, and so is step"),
    ({"request_id": "w", "vector": VECTOR, "step": "1"}, "step"),
    ({"request_id": "w", "vector": VECTOR, "step": 0}, "negative position"),
    ({"request_id": "w", "vector": VECTOR, "position": -1}, "negative position"),
    ({"request_id": "w", "vector": VECTOR, "position": 2**31}, "position"),
    ({"request_id": "w", "vector": VECTOR, "step": 10**30}, "position"),
    ({"request_id": "w", "vector": VECTOR, "position": 1.5}, "position"),
    ({"request_id": "w", "vector": VECTOR[:19], "position": 1}, "wrong length"),
    ({"request_id": "w", "vector": [1e39] * 20, "position": 1}, "NaN or infinity"),
    ({"request_id": "w", "vector": [0.5] * 20, "position": 1}, "histogram does not sum to 1"),
    ({"request_id": "w", "vector": VECTOR, "position": 1, "layout": 3}, "unknown layout"),
    ({"request_id": "w", "vector": VECTOR, "position": 1, "layout": "x"}, "layout"),
    ({"request_id": "w", "vector": VECTOR, "position": 1, "phase": "x"}, "unknown phase"),
    ({"request_id": "w" * 1025, "vector": VECTOR, "position": 1}, "longer than 1,024 bytes"),
    ({"request_id": "w", "vector": VECTOR, "position": 1, "captured_at": "now"}, "captured_at"),
    ({"request_id": "w", "vector": VECTOR, "position": 1, "captured_at": "1999-01-01"}, "2000"),
    ("text", "a fingerprint is a JSON object"),
    (None, "a fingerprint is a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "reason"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_fingerprint_is_refused_or_counted_with_its_reason(sidecar, wrong, reason):
    before = sidecar.flush()
    if isinstance(wrong, dict):
        found = sidecar.client.post("/fingerprint", json=wrong)
        assert found.status_code == 400 and reason in found.json()["error"]
        # A single one is counted as one of many is.
        after = sidecar.fingerprints()
        assert after["invalid"] == before["invalid"] + 1
        before = after
    right = [
        {"request_id": f"beside-{WRONG.index((wrong, reason))}", "position": n, "vector": VECTOR}
        for n in range(2)
    ]
    found = sidecar.client.post("/fingerprints?wait=1", json=[right[0], wrong, right[1]])
    assert found.status_code == 200
    ((said, count),) = found.json()["rejected"].items()
    assert (found.json()["committed"], count) == (2, 1) and reason in said
    after = sidecar.fingerprints()
    assert after["rejected"][said] == before["rejected"].get(said, 0) + 1
    assert (after["received"], after["stored"]) == (before["received"] + 3, before["stored"] + 2)


def test_reasons_that_quote_what_was_sent_do_not_fill_the_memory(sidecar):
    """What is counted by reason is shown in /stats: a sender must not make it any longer."""
    for start in range(0, 2_000, 500):
        rows = [
            {"request_id": "w", "position": 1, "vector": VECTOR, "layout": f"layout {n}"}
            for n in range(start, start + 500)
        ]
        assert sidecar.client.post("/fingerprints", json=rows).status_code == 202
    found = sidecar.fingerprints()
    assert found["invalid"] >= 2_000
    assert len(found["rejected"]) <= 300


def test_a_batch_is_stored_as_json_or_arrow(sidecar):
    batch = rows_of(997, "batch")
    assert post_rows(sidecar, batch).json() == {
        "committed": 997, "rejected": {}, "schema_version": 1, "run_id": run_id_of(0),
    }  # fmt: skip
    as_json = [
        {**row, "request_id": row["request_id"].replace("batch", "json"),
         "captured_at": row["captured_at"].isoformat()}
        for row in batch.to_pylist()
    ]  # fmt: skip
    found = sidecar.client.post("/fingerprints?wait=1", json={"records": as_json})
    assert found.status_code == 200 and found.json()["committed"] == 997
    rows = stored(sidecar.db)
    by_arrow = [row for row in rows if row["request_id"].startswith("batch")]
    by_json = [row for row in rows if row["request_id"].startswith("json")]
    assert by_arrow == batch.to_pylist()
    assert [{**row, "request_id": row["request_id"].replace("json", "batch")} for row in by_json] \
        == by_arrow  # fmt: skip


def test_the_same_rows_again_are_duplicates(sidecar):
    batch = rows_of(101, "again")
    assert post_rows(sidecar, batch).status_code == 200
    before = sidecar.flush()
    assert post_rows(sidecar, batch).status_code == 200
    after = sidecar.flush()
    assert after["duplicate"] == before["duplicate"] + 101
    assert after["stored"] == before["stored"]


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 202), ("wait=1", 200), ("wait=true", 200), ("wait=0", 202), ("wait=%ff&a=%00", 202),
     ("wait=0&wait=1", 200), ("wait", 202), ("%ff=%ff&wait=1;x", 202)],
)  # fmt: skip
def test_whoever_asks_for_it_waits_for_the_store(sidecar, query, status):
    found = sidecar.client.post(
        f"/fingerprints?{query}", content=arrow(rows_of(3, f"q{query}")), headers=ARROW
    )
    assert found.status_code == status, found.text


def test_rows_of_the_stream_are_counted_and_stored(sidecar):
    before = sidecar.flush()
    sender = Pusher(sidecar.stream)
    for n in range(50):
        sender.send(rows_of(199, f"stream{n}"))
    until(lambda: sidecar.fingerprints()["received"] == before["received"] + 50 * 199, "not there")
    after = sidecar.flush()
    sender.close()
    assert after["stored"] == before["stored"] + 50 * 199
    zmq = after["received_by_source"]["zmq"] - before["received_by_source"].get("zmq", 0)
    assert zmq == 50 * 199
    stream = sidecar.get("/stats")["stream"]
    assert (stream["messages"], stream.get("malformed", 0)) == (50, 0)
    assert stream.get("lost_in_transit", 0) == stream.get("dropped_by_sender", 0) == 0


def test_a_batch_of_rows_that_are_none_of_a_record_is_counted(sidecar):
    """Columns that cannot be cast take every row with them."""
    before = sidecar.flush()
    batch = rows_of(10, "cast")
    times = pa.array([10**18 * (n % 2) for n in range(10)], pa.int64())
    batch = batch.set_column(batch.schema.get_field_index("position"), "position", times)
    found = sidecar.client.post("/fingerprints", content=arrow(batch), headers=ARROW)
    assert found.status_code == 400 and "'position' cannot be cast" in found.json()["error"]
    sender = Pusher(sidecar.stream, "casts")
    sender.send(batch)
    until(lambda: sidecar.fingerprints()["received"] == before["received"] + 10, "not counted")
    sender.close()
    after = sidecar.flush()
    assert after["invalid"] == before["invalid"] + 10


@pytest.mark.parametrize("name", STORES)
def test_both_stores_keep_every_row_across_a_restart(tmp_path, runs, name):
    options = ("--db", tmp_path / name)
    with running(tmp_path, *options, runs=runs) as sidecar:
        sender = Pusher(sidecar.stream)
        for n in range(20):
            sender.send(rows_of(1_000, f"stream{n}"))
            post_rows(sidecar, rows_of(100, f"http{n}"), wait=False)
        until(lambda: sidecar.fingerprints()["received"] == 22_000, "not received")
        sender.close()
    said = sidecar.said
    assert "stopped; 22,000 fingerprints received, 22,000 stored" in said
    assert rows_in(tmp_path / name) == 22_000
    with running(tmp_path, *options, runs=runs) as sidecar:
        assert sidecar.fingerprints()["received"] == 0
        assert post_rows(sidecar, rows_of(101, "http3")).status_code == 200
        found = sidecar.flush()
        # A Parquet store finds duplicates of other files when it is read.
        assert found["stored"] == (1 if name.endswith(".db") else 101)
    assert rows_in(tmp_path / name) == 22_001
    with open_store(tmp_path / name) as store:
        assert store.verify().is_good


@pytest.mark.parametrize("name", STORES)
def test_two_sidecars_may_write_to_one_store(tmp_path, runs, name):
    options = ("--db", tmp_path / name)
    with (
        running(tmp_path, *options, runs=runs) as one,
        running(tmp_path, *options, runs=runs) as other,
    ):
        for n in range(30):
            post_rows(one, rows_of(200, f"one{n}"), wait=False)
            post_rows(other, rows_of(200, f"other{n}"), wait=False)
        assert one.flush()["stored"] == other.flush()["stored"] == 6_000
    assert rows_in(tmp_path / name) == 12_000


def test_a_full_queue_is_503_and_nothing_of_the_batch_is_taken(tmp_path, runs):
    """The store is held by another process, so that nothing leaves the queue."""
    limits = ("--queue-rows", "1000", "--max-batch", "400")
    with running(tmp_path, *limits, runs=runs) as sidecar:
        with holding(sidecar.db):
            for n in range(2):
                assert post_rows(sidecar, rows_of(400, f"in{n}"), wait=False).status_code == 202
            full = post_rows(sidecar, rows_of(400, "out"), wait=False)
            assert full.status_code == 503 and int(full.headers["retry-after"]) > 0
            assert "queue to the store is full" in full.json()["error"]
            found = sidecar.fingerprints()
            assert (found["queued"], found["queue_full"]) == (800, 400)
            # A smaller one still fits, and nobody saw what was not taken.
            assert post_rows(sidecar, rows_of(200, "fits"), wait=False).status_code == 202
            assert sidecar.client.post("/classify", json={"vector": VECTOR}).status_code == 200
        found = sidecar.flush()
        assert (found["stored"], found["queue_full"], found["queued"]) == (1_000, 400, 0)
    requests = Counter(row["request_id"].split("-")[0] for row in stored(sidecar.db))
    assert requests == {"in0": 400, "in1": 400, "fits": 200}


def test_a_full_queue_holds_the_stream_up_and_loses_none_of_it(tmp_path, runs):
    limits = ("--queue-rows", "1000", "--max-batch", "400")
    with running(tmp_path, *limits, runs=runs) as sidecar:
        sender = Pusher(sidecar.stream)
        with holding(sidecar.db):
            for n in range(20):
                sender.send(rows_of(300, f"in{n}"))
            until(lambda: sidecar.get("/stats")["queue"]["rows"] == 900, "the queue is not full")
            # One batch waits for room; the others are still on their way.
            until(lambda: sidecar.fingerprints()["queued"] == 1_200, "rows are missing")
        until(lambda: sidecar.fingerprints()["received"] == 6_000, "rows are missing")
        found = sidecar.flush()
        assert (found["stored"], found["queue_full"]) == (6_000, 0)
        sender.close()


def test_vectors_of_layout_2_are_stored_beside_the_others(sidecar):
    vectors = layered_vectors(3).tolist()
    rows = [
        {
            "request_id": "layered",
            "position": n,
            "vector": v,
            "layout": "layered",
            "capture_id": "l",
        }
        for n, v in enumerate(vectors)
    ]
    found = sidecar.client.post("/fingerprints?wait=1", json=rows)
    assert found.status_code == 200 and found.json()["rejected"] == {}
    rows = [row for row in stored(sidecar.db) if row["request_id"] == "layered"]
    assert [row["layout"] for row in rows] == [2, 2, 2]
    np.testing.assert_array_equal(np.float32([row["vector"] for row in rows]), np.float32(vectors))
