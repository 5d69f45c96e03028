"""POST /classify answers what the served run's classifier answers, for whatever is sent."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import ARROW, Sidecar, arrow, post_rows, running, until
from served_runs import (
    CAPTURE_ID,
    classifier_of,
    layered_vectors,
    publish_layered,
    publish_without_clusters,
    rows_of,
    run_id_of,
    vectors_of,
)

from discovery.artifacts.classifier import Classifier
from sidecar.http.hot import bodies
from sidecar.server import SWITCH_S

MAX_BATCH = 2_000
HEAD = {"schema_version": 1, "run_id": run_id_of(0)}


@pytest.fixture(scope="module")
def classifier(runs) -> Classifier:
    return classifier_of(runs, run_id_of(0))


def answers(classifier: Classifier, records: Any) -> list[dict[str, Any]]:
    """What each of a batch is answered: run_id and schema_version stand beside them, once."""
    return [
        {name: value for name, value in answer.items() if name not in HEAD}
        for answer in classifier.answer(records)
    ]


def records_of(vectors) -> list[dict[str, Any]]:
    return [{"vector": vector} for vector in vectors.tolist()]


def test_one_fingerprint_is_answered_as_by_the_classifier(sidecar, classifier):
    for vector in vectors_of(20).tolist():
        found = sidecar.client.post("/classify", json={"vector": vector, "position": 7})
        assert found.status_code == 200
        assert found.headers["content-type"] == "application/json"
        (wanted,) = classifier.answer([{"vector": vector}])
        assert found.json() == wanted
        assert wanted["run_id"] == HEAD["run_id"] and "manifold" in wanted


@pytest.mark.parametrize("rows", [0, 1, 997, MAX_BATCH])
def test_a_batch_is_answered_as_by_the_classifier(sidecar, classifier, rows):
    vectors = vectors_of(rows, seed=rows)
    found = sidecar.client.post("/classify", json={"records": records_of(vectors)})
    assert found.status_code == 200
    assert found.json() == {"results": answers(classifier, records_of(vectors)), **HEAD}
    found = sidecar.client.post("/classify", content=arrow(rows_of(rows, seed=rows)), headers=ARROW)
    assert found.status_code == 200
    assert found.json() == {"results": answers(classifier, records_of(vectors)), **HEAD}


def test_an_arrow_stream_of_several_batches_is_one_batch(sidecar, classifier):
    whole = rows_of(1_009)
    parts = [whole.slice(0, 1), whole.slice(1, 0), whole.slice(1, 500), whole.slice(501)]
    found = sidecar.client.post("/classify", content=arrow(*parts), headers=ARROW)
    assert found.json()["results"] == answers(classifier, records_of(vectors_of(1_009)))


def test_more_than_the_largest_batch_is_refused_whole(sidecar):
    records = records_of(vectors_of(MAX_BATCH + 1))
    found = sidecar.client.post("/classify", json={"records": records})
    assert found.status_code == 413
    assert "2,001 rows in one request: send at most 2,000" in found.json()["error"]
    batch = arrow(rows_of(MAX_BATCH), rows_of(1))
    for path in ("/classify", "/predict", "/fingerprints"):
        found = sidecar.client.post(path, content=batch, headers=ARROW)
        assert found.status_code == 413
        assert "2,001 rows: send at most 2,000 (--max-batch)" in found.json()["error"]


@pytest.mark.parametrize("path", ["/classify", "/predict", "/fingerprint", "/fingerprints"])
def test_a_route_that_takes_posts_says_so(sidecar, path):
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        found = sidecar.client.request(method, path)
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
        if method != "HEAD":
            assert found.json() == {"error": f"{path} does not take {method}: use POST"}


def large(body: Any) -> bytes:
    """As JSON, with as much white space as makes it a body that is decoded in a thread."""
    return json.dumps(body).encode() + b" " * 300_000


@pytest.mark.parametrize("path", ["/classify", "/predict", "/fingerprint", "/fingerprints"])
def test_a_large_body_is_answered_as_a_small_one(sidecar, path):
    (vector,) = vectors_of(1).tolist()
    one = {"vector": vector, "layout": "log16", "position": 3}
    rows = [{**one, "request_id": "large", "position": n} for n in range(20)]
    for body in (
        one, rows[0], {"records": []}, {"records": rows}, {"records": [{**one, "more": [{}]}]},
        {"records": [one, {"vector": [1, 2]}]}, {"records": rows, "vector": 7}, {"records": 7},
        {"records": [one, 7]}, {"records": [{"vector": [None]}]}, [], rows, [7], 7, {},
    ):  # fmt: skip
        small = sidecar.client.post(path, content=json.dumps(body).encode())
        found = sidecar.client.post(path, content=large(body))
        assert found.status_code == small.status_code, body
        if found.status_code in (200, 202):
            assert found.json() == small.json()
        else:
            assert (
                found.json()["error"].partition(" - at")[0]
                == (small.json()["error"].partition(" - at")[0])
            )
    for cut in (b'{"records": [', b'{"records": [{"vector": [1}]}', b"[" * 100_000, b"\xff"):
        found = sidecar.client.post(path, content=cut + b" " * 300_000)
        assert found.status_code == 400 and "not what this route takes" in found.json()["error"]


@pytest.mark.parametrize("decode", [bodies.fingerprints_of, bodies.rows_of])
def test_others_have_their_turn_while_a_large_body_is_decoded(decode):
    content = json.dumps({"records": records_of(vectors_of(10_000))}).encode()

    async def longest_wait() -> float:
        """Of the others, as a share of the time that it took."""
        decoding, times = asyncio.ensure_future(decode(content)), [time.perf_counter()]
        while not decoding.done():
            await asyncio.sleep(0)
            times.append(time.perf_counter())
        decoding.result()
        return float(np.diff(times).max() / (times[-1] - times[0]))

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)  # as the service has it
    try:
        # Whatever else the machine does makes it longer: the best of some.
        assert min(asyncio.run(longest_wait()) for _ in range(10)) < 0.5
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("options", "mode", "of_status"),
    [([], "batch", "recluster"), (["--online"], "online", "online")],
)
def test_the_way_of_finding_live_clusters_is_said(tmp_path, options, mode, of_status):
    with running(tmp_path, *options) as sidecar:
        found = sidecar.get("/centroids")
        assert (found["mode"], found["status"]["mode"]) == (mode, of_status)
        assert sidecar.get("/stats")["live_clusters"]["mode"] == of_status


def test_live_clusters_of_an_arrow_stream_are_those_of_json(tmp_path, runs):
    batch = rows_of(500)
    with running(tmp_path, "--online", runs=runs) as sidecar:
        post_rows(sidecar, rows_of(3_000, "seen"))

        def all_are_in_clusters() -> bool:
            """Later rows would move what the two answers to compare are of."""
            live = sidecar.get("/centroids")["status"]
            return live["rows"] == 3_000 and not live["pending_rows"] and live["clusters"] > 0

        until(all_are_in_clusters, "the rows are not in live clusters")

        def predicted(of: pa.RecordBatch) -> httpx.Response:
            return sidecar.client.post("/predict", content=arrow(of), headers=ARROW)

        vectors = vectors_of(500)
        wanted = sidecar.client.post("/predict", json={"records": records_of(vectors)})
        assert predicted(batch).json() == wanted.json()
        assert len({one["cluster_id"] for one in wanted.json()["results"]}) > 1
        doubles = pa.array(vectors.tolist(), pa.list_(pa.float64()))
        assert predicted(with_column(batch, "vector", doubles)).json() == wanted.json()
        for odd, (name, column) in ODD_COLUMNS.items():
            found = predicted(with_column(rows_of(3), name, column))
            if odd in ("vector of doubles", "vector of integers") or name != "vector":
                assert len(found.json()["results"]) == 3, odd
            else:
                assert found.status_code == 400 and "20 finite numbers" in found.json()["error"]


WRONG = [
    {"vector": [0.5] * 20},
    {"vector": [0.0] * 20},
    {"vector": [-0.1, *[0.1] * 19]},
    {"vector": [1e300] * 20},
    {"vector": [1, 2, 3]},
    {"vector": []},
    {"vector": vectors_of(1)[0].tolist(), "layout": "layered"},
    {"vector": vectors_of(1)[0].tolist(), "layout": 2},
    {"vector": vectors_of(1)[0].tolist(), "layout": "no such layout"},
    {"vector": vectors_of(1)[0].tolist(), "capture_id": "another"},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_row_gets_a_reason_and_the_others_an_answer(sidecar, classifier, wrong):
    right = records_of(vectors_of(11))
    right[3] |= {"layout": "log16", "capture_id": CAPTURE_ID}
    right[4] |= {"layout": 1}
    mixed = [*right[:5], wrong, *right[5:]]
    found = sidecar.client.post("/classify", json={"records": mixed})
    assert found.status_code == 200
    assert found.json()["results"] == answers(classifier, mixed)
    assert [n for n, one in enumerate(found.json()["results"]) if "error" in one] == [5]
    found = sidecar.client.post("/classify", json=wrong)
    assert found.status_code == 400
    assert found.json() == classifier.answer([wrong])[0]


def test_rows_that_are_not_of_the_run_get_a_reason_in_arrow_too(sidecar, classifier):
    batch = rows_of(10)
    vectors = vectors_of(10)
    vectors[2] = np.nan
    vectors[3] = 0.5
    layout = pa.array([1, 1, 1, 1, 2, 1, 1, 9, 1, 1], pa.uint8())
    capture = pa.array([CAPTURE_ID] * 5 + ["another"] + [CAPTURE_ID] * 4).dictionary_encode()
    changed = {"layout": layout, "capture_id": capture}
    flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 20)
    changed["vector"] = flat
    for name, column in changed.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, column)
    found = sidecar.client.post("/classify", content=arrow(batch), headers=ARROW).json()["results"]
    assert [n for n, one in enumerate(found) if "error" in one] == [2, 3, 4, 5, 7]
    right = [0, 1, 6, 8, 9]
    wanted = answers(classifier, records_of(vectors_of(10)[right]))
    assert [found[n] for n in right] == wanted


def with_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    field = pa.field(name, values.type)
    return batch.set_column(batch.schema.get_field_index(name), field, values)


NOT_UTF8 = pa.array([b"\xff\xfe", b"a", b"b"], pa.binary()).view(pa.string())
ODD_COLUMNS = {
    "capture_id without a value": ("capture_id", pa.nulls(3, pa.string())),
    "capture_id without an index": (
        "capture_id", pa.array([CAPTURE_ID, None, "x"]).dictionary_encode()
    ),
    "capture_id of nulls": ("capture_id", pa.nulls(3)),
    "capture_id that is not text": ("capture_id", NOT_UTF8),
    "capture_id that is not text, in a dictionary": ("capture_id", NOT_UTF8.dictionary_encode()),
    "layout without a value": ("layout", pa.array([1, None, 2], pa.uint8())),
    "layout of another width": ("layout", pa.array([1, 70_000, -1], pa.int64())),
    "layout of floats": ("layout", pa.array([1.0, float("nan"), 2.5])),
    "vector without a value": (
        "vector", pa.array([[0.5] * 20, None, [0.1] * 20], pa.list_(pa.float32(), 20))
    ),
    "vector with a missing number": (
        "vector", pa.array([[None] * 20] * 3, pa.list_(pa.float32(), 20))
    ),
    "vector of doubles": ("vector", pa.array(vectors_of(3).tolist(), pa.list_(pa.float64()))),
    "vector of any length": ("vector", pa.array([[1.0], [], None], pa.list_(pa.float32()))),
    "vector of integers": ("vector", pa.array([[1] * 20] * 3, pa.list_(pa.int64(), 20))),
    "vector of nulls": ("vector", pa.nulls(3)),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD_COLUMNS)
@pytest.mark.parametrize("path", ["/classify", "/fingerprints"])
def test_odd_columns_of_arrow_are_answered_row_by_row_or_refused(sidecar, odd, path):
    batch = with_column(rows_of(3, prefix=odd), *ODD_COLUMNS[odd])
    before = sidecar.flush()  # What other tests sent is stored by now.
    found = sidecar.client.post(path, content=arrow(batch), headers=ARROW)
    assert found.status_code in (200, 202, 400), found.text
    if found.status_code == 400:
        assert found.json()["error"].count("\n") == 0
        assert sidecar.fingerprints()["stored"] == before["stored"]
    elif path == "/classify":
        assert len(found.json()["results"]) == 3
        assert all(("error" in one) != ("manifold" in one) for one in found.json()["results"])
    else:
        answer = found.json()
        assert answer["queued"] + sum(answer["rejected"].values()) == 3


def test_dictionaries_that_differ_from_batch_to_batch_are_no_error(sidecar):
    """Two batches of one stream may replace a dictionary, whose small indices have no room for
    both."""

    def batch(name: str) -> pa.RecordBatch:
        words = pa.array([f"{name}{n}" for n in range(100)])
        indices = pa.array(np.arange(100), pa.int8())
        return with_column(
            rows_of(100, prefix=name), "capture_id",
            pa.DictionaryArray.from_arrays(indices, words),
        )  # fmt: skip

    for path, ok in (("/classify", 200), ("/fingerprints", 202)):
        content = arrow(batch("a"), batch("b"))
        found = sidecar.client.post(path, content=content, headers=ARROW)
        assert found.status_code in (ok, 400), found.text


BODIES = [
    b"", b"{", b"null", b"[]", b"7", b'"text"', b"{}", b'{"vector": null}', b'{"records": null}',
    b'{"records": {}}', b'{"records": [null]}', b'{"records": [[1]]}', b'{"vector": "0"}',
    b'{"vector": [NaN]}', b'{"vector": [1e999]}', b"\xff\xfe", b'{"vector": ["\\ud800"]}',
    b'{"vector": [true]}', b'{"position": 1e99, "vector": [1]}',
    b'{"position": -1, "vector": [1]}', b'{"position": 2147483648, "vector": [1]}', b"[" * 100_000,
    b'{"a":' * 100_000, b'{"vector": [' + b"9" * 5_000 + b"]}",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", ["/classify", "/fingerprint", "/fingerprints"])
@pytest.mark.parametrize("headers", [{}, ARROW], ids=["json", "arrow"])
def test_what_is_not_a_body_is_one_line(sidecar, path, body, headers):
    found = sidecar.client.post(path, content=body, headers=headers)
    if found.status_code == 202:  # a list of no fingerprints, or of something else
        assert path == "/fingerprints" and body.endswith((b"]", b"]}"))
        assert found.json()["queued"] == 0
        return
    assert found.status_code == 400, found.text
    assert found.json()["error"] and "\n" not in found.json()["error"]
    assert len(found.json()["error"]) < 500


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
names = st.sampled_from(
    ["vector", "records", "position", "layout", "capture_id", "request_id", "model", "step",
     "prompt_len", "phase", "captured_at", "layer", "top_experts", "session_id"]
)  # fmt: skip
vectors = st.sampled_from(vectors_of(5).tolist()) | st.lists(
    st.floats(allow_nan=False, allow_infinity=False), min_size=20, max_size=20
)
record = st.fixed_dictionaries(
    {}, optional={"vector": vectors, "request_id": st.text(max_size=5), "position": st.integers()}
)
rows = st.builds(lambda a, b: {**a, **b}, record, st.dictionaries(names, values, max_size=4))
bodies = values | rows | st.fixed_dictionaries({"records": st.lists(rows, max_size=4)})


@given(body=bodies, path=st.sampled_from(["/classify", "/fingerprint", "/fingerprints"]))
def test_any_json_is_answered_or_refused_with_a_reason(sidecar, body, path):
    found = sidecar.client.post(path, content=json.dumps(body).encode())
    assert found.status_code in (200, 202, 400), (found.status_code, found.text)
    if found.status_code == 400:
        assert found.json()["error"]
    if found.status_code == 200 and isinstance(body, dict) and "records" in body:
        assert len(found.json()["results"]) == len(body["records"])
    sidecar.fingerprints()


@pytest.fixture(scope="module")
def layered_sidecar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layered")
    publish_layered(folder / "runs")
    with running(folder, runs=folder / "runs") as found:
        yield found


def test_a_run_of_layout_2_answers_fingerprints_of_layout_2(layered_sidecar, tmp_path):
    sidecar: Sidecar = layered_sidecar
    runs = tmp_path / "runs"
    publish_layered(runs)
    classifier = classifier_of(runs, run_id_of(0))
    right, wrong = records_of(layered_vectors(300)), records_of(vectors_of(1))
    found = sidecar.client.post("/classify", json={"records": [*right, *wrong]}).json()
    assert found["results"] == answers(classifier, [*right, *wrong])
    manifolds = [one["manifold"] for one in found["results"][:300]]
    assert {one["cluster_id"] for one in manifolds} == {0, 1, 2}
    second = {"cluster_id": 1, "cluster_label": classifier.labels[1], "probability": 0.4}
    for one in manifolds:
        assert one["second"] == (second if one["cluster_id"] == 0 else None)
    # So is what arrives, in the answer and in the rows of its request.
    first = next(i for i, one in enumerate(manifolds) if one["cluster_id"] == 0)
    row = {"request_id": "between", "position": 1, **right[first]}
    stored = sidecar.client.post("/fingerprint?wait=1", json=row)
    assert stored.json()["manifold"]["second"] == second
    records = sidecar.client.get("/requests/between").json()["records"]
    assert [one["second"] for one in records] == [second]
    assert "no attention row has this vector" in found["results"][300]["error"]


def test_fingerprints_of_another_layout_or_capture_are_stored_with_their_zone(layered_sidecar):
    """Their zone is that of their own layout; they are in no cluster."""
    sidecar: Sidecar = layered_sidecar
    (vector,) = vectors_of(1, seed=3).tolist()
    row = {"request_id": "other", "position": 1, "vector": vector, "layout": "log16",
           "model": "m", "capture_id": "c"}  # fmt: skip
    found = sidecar.client.post("/fingerprint?wait=1", json=row)
    assert found.status_code == 200, found.text
    manifold = found.json()["manifold"]
    assert (manifold["cluster_id"], manifold["probability"]) == (-1, 0.0)
    assert manifold["second"] is None
    zoned = Classifier.answer(classifier_golden(), [{"vector": vector}])[0]["manifold"]
    assert (manifold["zone"], manifold["confidence"]) == (zoned["zone"], zoned["confidence"])


def classifier_golden() -> Classifier:
    from served_runs import GOLDEN

    return Classifier.load(GOLDEN / "run_v1")


def test_a_run_without_clusters_gives_zones(tmp_path):
    publish_without_clusters(tmp_path / "runs")
    with running(tmp_path, runs=tmp_path / "runs") as sidecar:
        records = records_of(vectors_of(50))
        found = sidecar.client.post("/classify", json={"records": records}).json()["results"]
        assert found == answers(classifier_of(tmp_path / "runs", run_id_of(0)), records)
        assert {one["manifold"]["cluster_id"] for one in found} == {-1}
        assert sidecar.get("/ready")["ready"] is True


def test_without_a_run_what_to_do_is_said_and_rows_are_stored_all_the_same(tmp_path):
    with running(tmp_path) as sidecar:
        found = sidecar.client.post("/classify", json=records_of(vectors_of(1))[0])
        assert found.status_code == 503 and found.headers["retry-after"]
        assert "run attn discover" in found.json()["error"]
        ready = sidecar.client.get("/ready")
        assert ready.status_code == 503 and "attn discover" in ready.json()["problems"][0]
        found = sidecar.client.post(
            "/fingerprints?wait=1", content=arrow(rows_of(7)), headers=ARROW
        )
        assert (found.status_code, found.json()["committed"]) == (200, 7)
        assert found.json()["run_id"] is None


def test_classify_times_and_refused_requests_are_measured(sidecar):
    def value(sample: str) -> float:
        lines = sidecar.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{sample} "))

    timed = 'attn_sidecar_classify_seconds_count{source="http"}'
    refused = 'attn_sidecar_http_refused_total{status="421"}'
    before = value(timed), value(refused)
    assert (
        sidecar.client.post("/classify", json={"vector": vectors_of(1)[0].tolist()}).status_code
        == 200
    )
    assert sidecar.client.get("/stats", headers={"host": "other.example"}).status_code == 421
    assert (value(timed), value(refused)) == (before[0] + 1, before[1] + 1)
