"""POST /discovery/runs/{run_id}/rows: whose the points of a map are."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from running import Sidecar, post_rows, running
from served_runs import classifier_of, publish, rows_of, vectors_of

from discovery.artifacts.read import open_artifacts
from sidecar.http.discovery.rows import MOST_NUMBERS, MOST_REQUESTS, Tables

ROWS = "/discovery/runs/latest/rows"


@pytest.fixture(scope="module")
def embedding(runs: Path) -> list[dict]:
    (run,) = [one for one in runs.iterdir() if one.is_dir() and not one.is_symlink()]
    return pq.read_table(run / "embedding.parquet").to_pylist()


def test_rows_come_by_number_in_the_order_asked_for(sidecar: Sidecar, embedding: list[dict]):
    wanted = [len(embedding) - 1, 0, 7, 7]
    answer = sidecar.client.post(ROWS, json={"rows": wanted})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["is_whole"] is True
    assert [row.pop("row") for row in found["rows"]] == wanted
    for row, number in zip(found["rows"], wanted, strict=True):
        # A run of version 1 names no second cluster.
        second = {"second_cluster_id": -1, "second_probability": 0.0}
        assert row == embedding[number] | second
    # The same rows as those of the map, which has no names.
    x = sidecar.client.get("/discovery/runs/latest/map?columns=x").content
    assert memoryview(x).cast("f")[7] == pytest.approx(found["rows"][2]["x"])


def test_all_rows_of_requests_come_by_request_and_position(sidecar: Sidecar, embedding: list[dict]):
    first, last = embedding[0]["request_id"], embedding[-1]["request_id"]
    found = sidecar.client.post(ROWS, json={"requests": [last, "not on the map", first]}).json()
    expected = [
        number
        for request in (last, first)
        for number, row in sorted(
            enumerate(embedding), key=lambda one: (one[1]["position"], one[1]["layer"])
        )
        if row["request_id"] == request
    ]
    assert [row["row"] for row in found["rows"]] == expected
    assert sidecar.client.post(ROWS, json={"requests": ["neither"]}).json()["rows"] == []
    assert sidecar.client.post(ROWS, json={"rows": []}).json()["rows"] == []


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "give rows"),
        ({"rows": [0], "requests": ["a"]}, 400, "give rows"),
        ({"rows": [1_000_000]}, 400, "has no row 1000000"),
        ({"rows": [-1]}, 422, "rows"),
        ({"rows": [1 << 40]}, 422, "rows"),
        ({"rows": ["a"]}, 422, "rows"),
        ({"rows": [0] * (MOST_NUMBERS + 1)}, 422, "rows"),
        ({"requests": ["a"] * (MOST_REQUESTS + 1)}, 422, "requests"),
        ({"requests": ["a" * 1_025]}, 422, "requests"),
    ],
)
def test_what_cannot_be_answered_is_refused(sidecar: Sidecar, body: dict, status: int, says: str):
    answer = sidecar.client.post(ROWS, json=body)
    assert answer.status_code == status
    assert says in answer.json()["error"]


def test_a_run_that_is_gone_or_damaged_has_no_rows(tmp_path: Path):
    runs = tmp_path / "runs"
    damaged, served = publish(runs, 0), publish(runs, 1)
    (runs / damaged / "embedding.parquet").write_bytes(b"no table")
    with running(tmp_path, runs=runs) as sidecar:
        path = f"/discovery/runs/{damaged}/rows"
        assert sidecar.client.post(path, json={"rows": [0]}).status_code == 410
        assert sidecar.client.post(path.replace(damaged, "2020-01-01T00-00-00"),
                                   json={"rows": [0]}).status_code == 404  # fmt: skip
        assert sidecar.client.post(ROWS, json={"rows": [0]}).json()["run_id"] == served
        shutil.rmtree(runs / served)
        assert sidecar.client.post(ROWS, json={"rows": [0]}).status_code == 410


def test_tables_that_were_not_asked_for_lately_are_given_up(tmp_path: Path):
    found = [open_artifacts(tmp_path / publish(tmp_path, number)) for number in range(3)]
    tables = Tables(most_bytes=1)
    first = tables.get(found[0])
    again: list = []
    threads = [threading.Thread(target=lambda: again.append(tables.get(found[0]))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(again) == 2 and all(one is first for one in again)
    assert tables.get(found[1]) is not first
    # What was given up is still good for whoever has it, and is made again when asked for.
    assert first.num_rows == tables.get(found[0]).num_rows > 0


def test_rows_of_a_stored_request_have_a_point_on_the_served_map(sidecar: Sidecar, runs: Path):
    own, other = rows_of(20, "placed"), rows_of(10, "elsewhere", capture_id="another00000")
    assert {post_rows(sidecar, batch).status_code for batch in (own, other)} == {200}
    placed, elsewhere = (batch.column("request_id")[0].as_py() for batch in (own, other))
    records = sidecar.get(f"/requests/{placed}?vectors=true")["records"]
    classified = classifier_of(runs, "latest").classify([one["vector"] for one in records])
    assert [[one["x"], one["y"]] for one in records] == classified.coordinates.tolist()
    for record in sidecar.get(f"/requests/{elsewhere}")["records"]:
        assert record["x"] is record["y"] is None


def test_vectors_are_placed_on_any_run_as_its_classifier_does(tmp_path: Path):
    runs = tmp_path / "runs"
    older, newer = publish(runs, 0), publish(runs, 1)
    vectors = vectors_of(30, seed=3)
    with running(tmp_path, runs=runs) as sidecar:
        for run_id in (older, newer):
            path = f"/discovery/runs/{run_id}/place"
            answer = sidecar.client.post(path, json={"vectors": vectors.tolist()}).json()
            expected = classifier_of(runs, run_id).classify(vectors)
            assert answer["run_id"] == run_id
            rows = answer["rows"]
            assert [[row["x"], row["y"]] for row in rows] == expected.coordinates.tolist()
            assert [row["cluster_id"] for row in rows] == expected.cluster_id.tolist()
            assert sidecar.client.post(path, json={"vectors": []}).json()["rows"] == []
            for wrong, status in (([[0.5] * 19], 422), ([[-1.0] * 20], 400), ([["a"] * 20], 422)):
                refused = sidecar.client.post(path, json={"vectors": wrong})
                assert refused.status_code == status and refused.json()["error"]
