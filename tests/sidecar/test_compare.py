"""GET and POST /compare: two sets of fingerprints, their similarity and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from planted import planted, planted_batch
from running import Sidecar, post_rows, running
from served_runs import CAPTURE_ID, GOLDEN, MODEL, publish, publish_layered, rows_of, run_id_of
from shared import START

from sidecar.client import SidecarClient
from sidecar.http.compare.axes import NO_SHIFT, NOT_KNOWN
from sidecar.http.compare.figures import WEIGHTS, interval

NEAR, FAR = np.eye(12)[0], np.eye(12)[6]
# Sessions of three requests.
FEW = 8
ZONES = {"syntax_floor", "semantic_bridge", "long_range", "structure_ripple", "diffuse"}


def session_rows(session: str, rows: int, **others: Any) -> pa.RecordBatch:
    """Fingerprints of a session; ten of each request, of the planted behaviours `shares`."""
    shares = others.pop("shares", None)
    vectors, _ = planted(rows, 5, 0.0, **({} if shares is None else {"shares": shares}))
    return in_session(session, vectors, START, **others)


def in_session(
    session: str, vectors: NDArray[np.float32], start: datetime, **others: Any
) -> pa.RecordBatch:
    given = {"rows_per_request": 10, "model": MODEL, "capture_id": CAPTURE_ID} | others
    batch = planted_batch(vectors, start, session, **given)
    at = batch.schema.get_field_index("session_id")
    return batch.set_column(at, batch.schema.field(at), pa.array([session] * len(vectors)))


def sessions_of_the_run() -> list[pa.RecordBatch]:
    """Sessions of rows that the golden run kept: three requests each of any of its rows, and one
    of 40 requests that are all of its largest cluster."""
    kept = pq.read_table(GOLDEN / "run_v1" / "references.parquet")
    vectors = np.stack(kept.column("vector").to_pylist()).astype(np.float32)
    cluster = kept.column("cluster_id").to_numpy()
    clusters = pq.read_table(GOLDEN / "run_v1" / "clusters.parquet")
    ids, sizes = (clusters.column(name).to_numpy() for name in ("cluster_id", "size"))
    weight = np.array([sizes[ids == one][0] / (cluster == one).sum() for one in cluster])
    rng = np.random.default_rng(3)
    rows = [rng.choice(len(vectors), 30, p=weight / weight.sum()) for _ in range(FEW)]
    rows.append(rng.choice(np.flatnonzero(cluster == ids[sizes.argmax()]), 400))
    names = [*(f"few-{i}" for i in range(FEW)), "one behaviour"]
    start = START - timedelta(days=10)  # outside of the windows that are compared
    return [in_session(name, vectors[i], start) for name, i in zip(names, rows, strict=True)]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("compare")
    runs = folder / "runs"
    publish(runs, 0)
    publish(runs, 1)
    publish_layered(runs, 2, latest=False)
    with running(folder, runs=runs) as found:
        for batch in (
            session_rows("near", 400, shares=NEAR), session_rows("near again", 400, shares=NEAR),
            session_rows("far", 400, shares=FAR), session_rows("one", 10, shares=FAR),
            session_rows("other", 200, capture_id="other0000000"),
            session_rows("quantised", 300, model="m-int8", capture_id="quant0000000"),
            *sessions_of_the_run(),
        ):  # fmt: skip
            assert post_rows(found, batch).status_code == 200
        found.flush()
        yield found


def compared(sidecar: Sidecar, a: str, b: str) -> dict[str, Any]:
    answer = sidecar.client.get("/compare", params={"a": a, "b": b})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_is_the_same_is_similar_and_what_differs_is_said(sidecar):
    same = compared(sidecar, "session:near", "session:near again")
    other = compared(sidecar, "session:near", "session:far")
    assert same["similarity"]["total"] > 0.99 > 0.5 > other["similarity"]["total"]
    assert [words.startswith("No difference beyond chance") for words in same["words"]] == [True]
    assert not any(row["differs"] for row in same["zones"])
    assert any(row["differs"] for row in other["zones"])
    assert any(row["differs"] for row in other["clusters"])
    assert "B looks more at" in " ".join(other["words"]) and len(other["words"]) > 1
    assert other["drift"]["zones"]["low"] > same["drift"]["zones"]["high"]
    # The other way round everything is mirrored.
    back = compared(sidecar, "session:far", "session:near")
    assert back["similarity"] == other["similarity"]
    assert [row["a"] for row in back["zones"]] == [row["b"] for row in other["zones"]]
    assert back["histogram"]["a"] == other["histogram"]["b"]


def test_similarity_is_made_of_its_parts(sidecar):
    found = compared(sidecar, "session:near", "session:far")
    parts = {part["name"]: part for part in found["similarity"]["parts"]}
    assert {name: part["weight"] for name, part in parts.items()} == WEIGHTS
    total = sum(part["value"] * part["weight"] for part in parts.values())
    assert found["similarity"]["total"] == pytest.approx(total, abs=1e-5)
    zones = sum(min(row["a"], row["b"]) for row in found["zones"])
    assert parts["zones"]["value"] == pytest.approx(zones, abs=1e-5)
    shape = sum(math.sqrt(a * b) for a, b in zip(*found["histogram"].values(), strict=True))
    assert parts["shape"]["value"] == pytest.approx(shape, abs=1e-4)
    entropy = 1 - abs(found["a"]["entropy"] - found["b"]["entropy"])
    assert parts["entropy"]["value"] == pytest.approx(entropy, abs=1e-5)


def test_shares_are_those_of_the_rows_with_intervals_by_request(sidecar):
    found = compared(sidecar, "session:near", "session:far")
    zones = sidecar.get("/sessions/near")["zones"]
    total = sum(zones.values())
    for row in found["zones"]:
        assert row["a"] == pytest.approx(zones[row["zone"]] / total, abs=0.02)
        for side in ("a", "b"):
            assert 0 <= row[f"{side}_low"] <= row[side] <= row[f"{side}_high"] <= 1
    assert {row["zone"] for row in found["zones"]} == ZONES
    assert sum(row["a"] for row in found["clusters"]) == pytest.approx(1, abs=1e-4)
    for side in ("a", "b"):
        assert sum(found["histogram"][side]) == pytest.approx(1, abs=1e-4)
        assert found[side]["requests"] == 40 and found[side]["used_rows"] == 400
    # 40 requests of 10 rows know less than 400 rows would.
    row = max(found["zones"], key=lambda row: row["a"] * (1 - row["a"]))
    as_rows = interval(row["a"], row["a"] * (1 - row["a"]) / 400, 400)
    assert row["a_high"] - row["a_low"] > 0.9 * (as_rows[1] - as_rows[0])


def test_of_one_request_no_interval_is_claimed(sidecar):
    found = compared(sidecar, "session:one", "request:far-0000000")
    assert all(row["a_low"] is None and row["differs"] is None for row in found["zones"])
    assert found["drift"] == {"zones": None, "clusters": None}
    assert any("one request" in note for note in found["notes"])
    assert found["b"]["kind"] == "request" and found["b"]["rows"] == 10


def test_axes_claim_no_shift_where_the_words_find_no_difference(sidecar):
    """Three requests of a run's own rows lie somewhere on every axis, by chance."""
    apart, silent = 0, 0
    for session in (f"few-{i}" for i in range(FEW)):
        found = compared(sidecar, "run:latest", f"session:{session}")
        if not found["words"][0].startswith("No difference beyond chance"):
            continue
        silent += 1
        apart += any(abs(axis["b"]) > 0.04 for axis in found["axes"])
        assert {axis["differs"] for axis in found["axes"]} == {False}
        assert {axis["words"] for axis in found["axes"]} == {NO_SHIFT}
    # Somewhere: a fifth of the first axis's spread, which Cohen calls a slight difference.
    assert silent >= FEW // 2 and apart >= FEW // 2


def test_axes_have_intervals_by_request_and_name_what_lies_apart(sidecar):
    for a, b in (
        ("run:latest", "session:one behaviour"), ("session:one behaviour", "run:latest"),
        ("session:near", "session:far"),
    ):  # fmt: skip
        found = compared(sidecar, a, b)
        assert any(axis["differs"] for axis in found["axes"])
        for axis in found["axes"]:
            assert axis["words"].startswith("B lies ") is axis["differs"]
            for side in ("a", "b"):
                assert axis[f"{side}_low"] <= axis[side] <= axis[f"{side}_high"]
    same = compared(sidecar, "session:far", "session:far")
    assert {axis["differs"] for axis in same["axes"]} == {False}


def test_contexts_that_a_run_has_not_seen_are_no_shift(sidecar):
    """Coordinates are centred by context octave; the planted ones are longer than all of the run's,
    so that how they should be centred is not known."""
    found = compared(sidecar, "run:latest", "session:far")
    assert {axis["differs"] for axis in found["axes"]} == {False}


def test_of_one_request_no_axis_claims_a_shift(sidecar):
    for a, b in (("run:latest", "session:one"), ("session:one", "session:near")):
        found = compared(sidecar, a, b)
        assert {axis["differs"] for axis in found["axes"]} == {None}
        assert {axis["words"] for axis in found["axes"]} == {NOT_KNOWN}
        side = "b" if b == "session:one" else "a"
        assert {axis[f"{side}_low"] for axis in found["axes"]} == {None}


def test_a_run_is_compared_with_rows_that_it_classifies(sidecar):
    found = compared(sidecar, "run:latest", "session:near")
    assert found["run_id"] == found["a"]["id"] == run_id_of(1)
    assert found["a"]["comparable"] and found["b"]["comparable"]
    assert all(axis["a"] == 0 for axis in found["axes"])
    assert {row["cluster_id"] for row in found["clusters"]} > {-1}
    assert all(row["a"] is None for row in found["phases"])
    both = compared(sidecar, f"run:{run_id_of(0)}", f"run:{run_id_of(1)}")
    assert both["similarity"]["total"] == 1.0 and both["axes"] is None
    assert both["drift"]["zones"]["psi"] == 0


def test_other_models_and_captures_are_compared_without_clusters(sidecar):
    found = compared(sidecar, f"model:{MODEL}", "model:m-int8")
    assert found["clusters"] is None and found["axes"] is None
    assert sum(part["weight"] for part in found["similarity"]["parts"]) == pytest.approx(1)
    assert any("other models" in note for note in found["notes"])
    assert any("200 rows of another model or capture" in note for note in found["notes"])
    assert found["a"]["capture_id"] == CAPTURE_ID  # the served run's, not another one's
    other = compared(sidecar, "session:near", "session:other")
    assert any("other captures" in note for note in other["notes"])


def test_windows_are_compared(sidecar):
    middle, end = (START + timedelta(seconds=s) for s in (200, 4_000))
    first = f"window:{START.isoformat()}..{middle.isoformat()}"
    second = f"window:{middle:%Y-%m-%dT%H:%M:%SZ}..{end:%Y-%m-%dT%H:%M:%SZ}"
    found = compared(sidecar, first, second)
    assert found["a"]["used_rows"] == 610 and found["b"]["used_rows"] == 600
    assert found["a"]["last_at"] < found["b"]["first_at"]


def test_rows_of_a_trace_are_compared_as_those_of_a_request(sidecar):
    batch = session_rows("far", 400, shares=FAR)
    vectors = batch.column("vector").to_pylist()[:10]
    trace = {"name": "mine", "vectors": vectors, "phases": ["think"] * 4 + ["output"] * 6}
    answer = sidecar.client.post("/compare", json={"a": trace, "b": "request:far-0000000"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["similarity"]["total"] > 0.999
    assert found["a"]["kind"] == "trace" and found["a"]["comparable"]
    assert {row["phase"]: row["a"] for row in found["phases"]} == {"think": 0.4, "output": 0.6}
    with SidecarClient(sidecar.url) as client:
        assert client.compare(trace, "request:far-0000000") == found
        by_name = client.compare("session:near", "session:far")
        assert by_name == compared(sidecar, "session:near", "session:far")
    foreign = sidecar.client.post(
        "/compare", json={"a": {**trace, "capture_id": "f" * 12}, "b": "session:far"}
    ).json()
    assert not foreign["a"]["comparable"] and foreign["clusters"] is None


@pytest.mark.parametrize(
    ("a", "status"),
    [
        ("near", 400), ("session:", 400), ("sessions:near", 400), ("session:none", 404),
        ("request:none", 404), ("run:none", 404), ("run:../runs", 404), ("run:..", 404),
        ("model:none", 404), ("window:today", 400), ("window:2026-01-01..2025-01-01", 400),
        ("window:1999-01-01..1999-01-02", 404), ("session:" + "x" * 2000, 422),
        ("session:\x00", 404), ("session:'; DROP TABLE fingerprints; --", 404),
        ("request:<img src=x onerror=alert(1)>", 404), ("session:\u202e\U0001f642", 404),
        (f"run:{run_id_of(2)}", 400),
    ],
)  # fmt: skip
def test_what_is_no_side_is_refused_in_one_line(sidecar, a, status):
    for sides in ({"a": a, "b": "session:near"}, {"a": "session:near", "b": a}):
        answer = sidecar.client.get("/compare", params=sides)
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"] and len(answer.json()["error"]) < 400
        assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("given", "missing"), [({}, "a and b"), ({"a": "run:latest"}, "b"), ({"b": "run:latest"}, "a")]
)
def test_a_request_without_sides_is_told_its_form(sidecar, given, missing):
    answer = sidecar.client.get("/compare", params=given)
    assert answer.status_code == 422
    said = answer.json()["error"]
    assert said.startswith(f"without {missing}: ask /compare?a=KIND:ID&b=KIND:ID with KIND one of ")
    assert sidecar.client.get("/compare?a=session:near&b=run:latest").status_code == 200
    assert said.endswith("such as a=session:s-1&b=run:latest")


GOOD = [0.5, 0.25, 0.25, 0.3, *([0.5] + [0.0] * 2), 0.25, *([0.0] * 4), 0.25, *([0.0] * 7)]


@pytest.mark.parametrize(
    "change",
    [
        {"vectors": []}, {"vectors": [[0.5] * 19]}, {"vectors": [[-1.0] * 20]},
        {"vectors": [["a"] * 20]}, {"vectors": [[1e39] * 20]}, {"vectors": [[0.9] * 20]},
        {"vectors": None}, {"layout": "log32"}, {"phases": ["prompt", "think"]},
        {"phases": ["x"]}, {"name": "x" * 2000}, {"layout": "layered"},
    ],
)  # fmt: skip
def test_rows_that_are_none_are_refused(sidecar, change):
    good = {"name": "t", "vectors": [GOOD]}
    body = {"a": good, "b": "session:near"}
    assert sidecar.client.post("/compare", json=body).status_code == 200
    answer = sidecar.client.post("/compare", json={**body, "a": {**good, **change}})
    assert answer.status_code in (400, 422), answer.text
    assert list(answer.json()) == ["error"]


def test_a_sidecar_without_a_run_compares_what_needs_none(tmp_path):
    with running(tmp_path) as sidecar:
        for name in ("a", "b"):
            assert post_rows(sidecar, rows_of(50, name)).status_code == 200
        sidecar.flush()
        found = compared(sidecar, "request:a-0000000", "request:b-0000000")
        assert found["run_id"] is None and found["clusters"] is None
        assert found["similarity"]["total"] > 0.99
        answer = sidecar.client.get("/compare", params={"a": "run:latest", "b": "session:a"})
        assert answer.status_code == 404


@given(
    share=st.floats(0, 1), rows=st.floats(1, 1e9), design=st.floats(1, 100),
)  # fmt: skip
def test_an_interval_holds_its_share_and_narrows_with_rows(share, rows, design):
    low, high = interval(share, share * (1 - share) * design / rows, rows)
    assert -1e-12 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1 + 1e-12
    wider = interval(share, share * (1 - share) * design / rows * 4, rows / 4)
    assert wider[1] - wider[0] >= high - low - 1e-9
