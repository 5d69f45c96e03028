"""GET /sessions and /requests: what was stored long ago and what arrives now."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from fastapi import FastAPI
from http_server import serving
from planted import planted
from shared import REPO, START, possible_vectors

from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from pipeline.record import make_batch
from pipeline.store.open import open_store
from sidecar.http import requests, sessions
from sidecar.http.errors import add_error_handlers

GOLDEN = REPO / "tests/golden/run_v1"
MANIFEST = open_artifacts(GOLDEN).manifest
RULES = ZoneRules(**MANIFEST["zone_rules"])


def served() -> Any:
    classifier = Classifier.load(GOLDEN)
    return SimpleNamespace(classifier=classifier, run_id=classifier.run_id, manifest=MANIFEST)


class NoSessions:
    """Live sessions, as the service keeps them."""

    def __init__(self, **found: dict[str, Any]) -> None:
        self._found = found

    def live(self, session_id: str | None = None) -> dict[str, Any] | None:
        return self._found.get(str(session_id))

    def newest(self, most: int) -> list[dict[str, Any]]:
        return list(self._found.values())[:most]


@contextmanager
def client_of(store: Any, run: Any = None, **live: dict[str, Any]) -> Iterator[httpx.Client]:
    app = FastAPI()
    add_error_handlers(app)
    app.include_router(sessions.router)
    app.include_router(requests.router)
    app.state.summaries = requests.Summaries()
    app.state.service = SimpleNamespace(
        store=store,
        serving=SimpleNamespace(current=run), sessions=NoSessions(**live),
    )  # fmt: skip
    with serving(app) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def request_rows(
    request_id: str, vectors: np.ndarray, *, session_id: str | None = None, prompt_len: int = 10,
    **columns: Any,
) -> pa.RecordBatch:  # fmt: skip
    """A request of one row a step, that thinks in its first half."""
    rows = len(vectors)
    at = START + dt.timedelta(seconds=1)
    given = {
        "request_id": request_id,
        "session_id": session_id,
        "position": np.arange(rows) + prompt_len,
        "prompt_len": prompt_len,
        "layer": -1,
        "captured_at": pa.array([at + dt.timedelta(seconds=i) for i in range(rows)]),
        "model": MANIFEST["model"],
        "capture_id": MANIFEST["capture_id"],
        "layout": 1,
        "phase": ["think"] * (rows // 2) + ["output"] * (rows - rows // 2),
        "vector": vectors,
    }
    return make_batch({**given, **columns}, rows)


VECTORS = planted(300, 3)[0]


@pytest.fixture(params=["fingerprints.db", "fingerprints"])
def store(request, tmp_path: Path) -> Iterator[Any]:
    with open_store(tmp_path / request.param, create=True) as opened:
        yield opened


def error_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    (message,) = answer.json().values()
    assert message and "\n" not in message
    return message


# requests


def test_a_request_shows_its_path_through_the_zones(store):
    store.append(request_rows("r/1 \u00e4", VECTORS[:200], session_id="s"))
    store.append(request_rows("other", VECTORS[200:]))
    zones = [ZONES[z] for z in RULES.classify(VECTORS[:200], Layout.LOG16).zone]
    spans = [(zone, len(list(same))) for zone, same in groupby(zones)]
    with client_of(store, served()) as client:
        found = client.get("/requests/r%2F1 \u00e4").json()
    assert (found["request_id"], found["session_id"], found["rows"]) == ("r/1 \u00e4", "s", 200)
    assert [(one["zone"], one["rows"]) for one in found["zone_path"]] == spans
    assert found["zone_spans"] == len(spans)
    steps = [(one["first_step"], one["last_step"]) for one in found["zone_path"]]
    assert steps[0][0] == 1 and steps[-1][1] == 200
    assert all(one[1] + 1 == other[0] for one, other in pairwise(steps))
    counts = np.zeros((5, 5), int)
    for one, other in pairwise(zones):
        counts[ZONES.index(one), ZONES.index(other)] += 1
    assert found["transitions"] == counts.tolist()
    assert found["zones"] == pytest.approx({z: zones.count(z) / 200 for z in ZONES}, abs=1e-6)
    assert (found["layers"], found["path_layer"], found["layout"]) == ([-1], -1, "log16")
    assert found["first_at"] == "2026-01-09T06:00:01Z"
    assert found["summarised_rows"] == 200


def test_thinking_is_compared_with_the_output(store):
    store.append(request_rows("r", VECTORS[:100]))
    with client_of(store, served()) as client:
        phases = client.get("/requests/r").json()["phases"]
    assert list(phases) == ["think", "output"]
    for phase, rows in (("think", VECTORS[:50]), ("output", VECTORS[50:100])):
        assert phases[phase]["rows"] == 50
        assert phases[phase]["mean_entropy"] == pytest.approx(rows[:, 3].mean(), abs=1e-5)
        zones = RULES.classify(rows, Layout.LOG16).zone
        expected = np.bincount(zones, minlength=5) / 50
        assert list(phases[phase]["zones"].values()) == pytest.approx(expected)


def test_clusters_are_those_of_the_rows_that_the_run_can_classify(store):
    run = served()
    store.append(request_rows("r", VECTORS[:100]))
    later = np.arange(100, 150)
    store.append(request_rows("r", VECTORS[100:150], position=later, capture_id="another"))
    found = run.classifier.classify(VECTORS[:100]).cluster_id
    with client_of(store, run) as client:
        answer = client.get("/requests/r", params={"limit": 1_000}).json()
    clusters = answer["clusters"]
    assert (clusters["run_id"], clusters["comparable_rows"]) == (run.run_id, 100)
    assert clusters["noise_rows"] == np.count_nonzero(found == -1)
    sizes = {one["cluster_id"]: one["rows"] for one in clusters["clusters"]}
    assert sizes == {int(i): int((found == i).sum()) for i in np.unique(found[found >= 0])}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert [one["cluster_id"] for one in answer["records"][:100]] == found.tolist()
    assert all(one["cluster_id"] is None for one in answer["records"][100:])
    with client_of(store) as client:
        answer = client.get("/requests/r").json()
    assert answer["clusters"] is answer["run_id"] is None and answer["zones"]


def test_rows_come_page_by_page_with_their_vectors_if_asked(store):
    store.append(request_rows("r", VECTORS))
    with client_of(store, served()) as client:
        offset, rows = 0, []
        while offset is not None:
            page = client.get("/requests/r", params={"offset": offset, "limit": 70}).json()
            rows, offset = rows + page["records"], page["next_offset"]
        assert [one["step"] for one in rows] == list(range(1, 301))
        assert [one["position"] for one in rows] == list(range(10, 310))
        zones = RULES.classify(VECTORS, Layout.LOG16).zone
        assert [one["zone"] for one in rows] == [ZONES[z] for z in zones]
        assert "vector" not in rows[0] and rows[0]["phase"] == "think"
        params = {"offset": 295, "limit": 1_000, "vectors": True}
        last = client.get("/requests/r", params=params).json()
        assert last["next_offset"] is None and len(last["records"]) == 5
        assert np.allclose([one["vector"] for one in last["records"]], VECTORS[295:])
        for params in ({"limit": 0}, {"offset": 300}, {"offset": 2**31 - 1}):
            page = client.get("/requests/r", params=params).json()
            assert page["records"] == [] and page["next_offset"] is None and page["rows"] == 300
        for wrong in ({"limit": -1}, {"limit": 1_001}, {"offset": -1}, {"offset": "x"}):
            error_of(client.get("/requests/r", params=wrong), 422)


def test_rows_alone_are_those_of_the_page_with_its_summary(store):
    store.append(request_rows("r", VECTORS))
    with client_of(store, served()) as client:
        for params in ({"limit": 70}, {"offset": 290, "limit": 70, "vectors": True}, {"limit": 0},
                       {"offset": 300}):  # fmt: skip
            whole = client.get("/requests/r", params=params).json()
            alone = client.get("/requests/r", params={**params, "summary": False}).json()
            assert "zone_path" not in alone
            assert alone == {name: whole[name] for name in alone}
        error_of(client.get("/requests/nobody", params={"summary": False}), 404)


def test_a_request_with_records_of_each_layer_has_the_path_of_one(store):
    rng = np.random.default_rng(0)
    vectors = possible_vectors(np.ones(40, np.int64), rng)
    for layer in (3, 7):
        store.append(request_rows("r", vectors[layer : layer + 20], layer=layer))
    with client_of(store) as client:
        found = client.get("/requests/r").json()
    assert (found["layers"], found["path_layer"], found["rows"]) == ([3, 7], 3, 40)
    zones = ZoneRules().classify(vectors[3:23], Layout.LOG16).zone
    assert sum(one["rows"] for one in found["zone_path"]) == 20
    assert found["zone_path"][0]["zone"] == ZONES[zones[0]]
    assert np.sum(found["transitions"]) == 19


def test_a_request_that_is_longer_than_a_summary_says_so(store, monkeypatch):
    monkeypatch.setattr(requests, "MOST_ROWS", 128)
    monkeypatch.setattr(requests, "PAGE_ROWS", 64)
    store.append(request_rows("r", VECTORS))
    with client_of(store) as client:
        found = client.get("/requests/r", params={"limit": 10}).json()
        assert (found["rows"], found["summarised_rows"], found["next_offset"]) == (300, 128, 10)
        for offset, steps in ((120, 10), (128, 10), (290, 10), (295, 5)):
            params = {"offset": offset, "limit": 10}
            page = client.get("/requests/r", params=params).json()
            first = offset + 1
            assert [one["step"] for one in page["records"]] == list(range(first, first + steps))
            assert page["next_offset"] == (offset + 10 if offset < 290 else None)


class CountingStore:
    """A store that counts the rows of requests which it reads."""

    def __init__(self, store: Any) -> None:
        self._store, self.read = store, 0

    def request(self, request_id: str, offset: int = 0, limit: int = 1_000) -> Any:
        found = self._store.request(request_id, offset, limit)
        self.read += found.rows.num_rows
        return found


def test_a_page_reads_its_own_rows_and_a_request_that_has_more_is_summed_up_anew(store):
    store.append(request_rows("r", VECTORS[:200]))
    counting = CountingStore(store)
    with client_of(counting) as client:
        first = client.get("/requests/r", params={"limit": 50}).json()
        assert counting.read == 200
        for offset in (50, 100, 150):
            page = client.get("/requests/r", params={"limit": 50, "offset": offset}).json()
            changing = ("offset", "records", "next_offset")
            assert {k: v for k, v in page.items() if k not in changing} == {
                k: v for k, v in first.items() if k not in changing
            }
        assert counting.read == 200 + 3 * 50
        store.append(request_rows("r", VECTORS[200:], position=np.arange(210, 310)))
        found = client.get("/requests/r", params={"limit": 0}).json()
        assert (found["rows"], found["summarised_rows"], found["records"]) == (300, 300, [])
    with client_of(store) as client:
        assert client.get("/requests/r", params={"limit": 0}).json() == found


def test_the_summaries_that_are_kept_are_the_last():
    kept = requests.Summaries(most=2)
    for name in ("a", "b", "a", "c"):
        kept.put(name, requests.Summary(1, None, {}))
    assert [name for name in "abc" if kept.get(name)] == ["a", "c"]


def test_what_is_not_there_is_404(store):
    store.append(request_rows("r", VECTORS[:5], session_id="s"))
    with client_of(store) as client:
        for path in ("/requests/nothing", "/requests/r/", "/sessions/nothing", "/requests/%00",
                     "/requests/' OR 1=1 --"):  # fmt: skip
            assert error_of(client.get(path), 404)
        assert error_of(client.get("/requests/" + "x" * 1_025), 422)


# sessions


def test_sessions_are_listed_page_by_page_and_restored_one_by_one(store):
    for number in range(7):
        at = START + dt.timedelta(hours=number)
        times = pa.array([at + dt.timedelta(seconds=i) for i in range(10)])
        for half in (0, 1):
            rows = VECTORS[20 * number + 10 * half :][:10]
            store.append(
                request_rows(f"r{number}-{half}", rows, session_id=f"s{number}", captured_at=times)
            )
    with client_of(store) as client:
        seen, after = [], None
        while True:
            params = {"limit": 3} | ({"after": after} if after else {})
            page = client.get("/sessions", params=params).json()
            seen += page["sessions"]
            if (after := page["next"]) is None:
                break
        assert [one["session_id"] for one in seen] == [f"s{n}" for n in reversed(range(7))]
        for number, one in zip(reversed(range(7)), seen, strict=True):
            assert (one["requests"], one["fingerprints"], one["live"]) == (2, 20, None)
            rows = VECTORS[20 * number : 20 * number + 20]
            expected = np.bincount(ZoneRules().classify(rows, Layout.LOG16).zone, minlength=5)
            assert [one["zones"][zone] for zone in ZONES] == expected.tolist()
        again = client.get("/sessions/s3").json()
        assert [(one["request_id"], one["rows"]) for one in again["requests"]] == [
            ("r3-0", 10), ("r3-1", 10)
        ]  # fmt: skip
        assert again["is_whole"] and again["fingerprints"] == 20 and len(again["groups"]) == 1
        assert again["zones"] == seen[3]["zones"]
        assert client.get("/requests/r3-0").json()["session_id"] == "s3"
        for wrong in ("x", "1", "99999999999999999999:0", "1:"):
            answer = client.get("/sessions", params={"after": wrong})
            assert answer.status_code in (400, 422) and answer.json()["error"]


def test_a_session_of_two_models_is_one_session(store):
    store.append(request_rows("a", VECTORS[:10], session_id="s"))
    store.append(request_rows("b", VECTORS[10:15], session_id="s", model="another"))
    with client_of(store) as client:
        page = client.get("/sessions").json()["sessions"]
        assert {(one["session_id"], one["fingerprints"]) for one in page} == {("s", 10), ("s", 5)}
        found = client.get("/sessions/s").json()
    assert found["fingerprints"] == sum(found["zones"].values()) == 15
    assert [one["request_id"] for one in found["requests"]] == ["a", "b"]


def test_a_session_among_too_many_rows_says_that_requests_may_be_missing(store, monkeypatch):
    store.append(request_rows("a", VECTORS[:100], session_id="s"))
    monkeypatch.setattr(sessions, "MOST_SCANNED", 50)
    with client_of(store) as client:
        assert not client.get("/sessions/s").json()["is_whole"]
    monkeypatch.setattr(sessions, "MOST_SCANNED", 101)
    monkeypatch.setattr(sessions, "MOST_REQUESTS", 1)
    with client_of(store) as client:
        assert client.get("/sessions/s").json()["is_whole"]
        store.append(request_rows("b", VECTORS[:1], session_id="s"))
        assert not client.get("/sessions/s").json()["is_whole"]


def test_what_happens_now_is_shown_with_what_is_stored(store):
    store.append(request_rows("r", VECTORS[:5], session_id="old"))
    old = {"session_id": "old", "fingerprints": 9}
    new = {"session_id": "new", "fingerprints": 3}
    with client_of(store, old=old, new=new) as client:
        found = client.get("/sessions").json()["sessions"]
        assert found[0] == {"session_id": "new", "live": new}
        assert (found[1]["session_id"], found[1]["live"]) == ("old", old)
        assert found[1]["fingerprints"] == 5 and len(found) == 2
        alone = client.get("/sessions/new").json()
        assert (alone["live"], alone["fingerprints"], alone["requests"]) == (new, 0, [])
        assert client.get("/sessions/old").json()["live"] == old


def test_answers_are_as_they_are_described(store):
    store.append(request_rows("r", VECTORS[:50], session_id="s"))
    described = {
        "/sessions": sessions.SessionPage, "/sessions/s": sessions.Session,
        "/requests/r": requests.RequestSummary,
    }  # fmt: skip
    for run in (None, served()):
        with client_of(store, run, s={"session_id": "s", "fingerprints": 1}) as client:
            for path, model in described.items():
                answer = client.get(path).json()
                model.model_validate(answer, strict=True)
                assert set(answer) == set(model.model_fields)


# the store


class Held:
    """A store whose reads wait, as those of a file do that another process has locked."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def sessions(self, limit: int, after: str | None) -> list[Any]:
        if not self.go.wait(30):
            raise StoreError("fingerprints.db is locked by another process:\nwait until it is done")
        return []

    def session(self, session_id: str) -> None:
        raise StoreError("fingerprints.db is locked by another process:\nwait until it is done")

    def request(self, request_id: str, offset: int, limit: int) -> None:
        return self.session(request_id)


def eventually(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_store_that_waits_holds_up_nobody_and_few_wait_for_it():
    store = Held()
    with client_of(store) as client:
        answers: list[httpx.Response] = []
        url = str(client.base_url) + "/sessions"
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=60)))
            for _ in range(48)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: len(answers) == 16)
        assert {one.status_code for one in answers} == {503}
        assert answers[0].headers["retry-after"] == "1"
        assert client.get("/openapi.json").status_code == 200  # the event loop is free
        store.go.set()
        for thread in threads:
            thread.join()
        assert sorted(one.status_code for one in answers) == [200] * 32 + [503] * 16
        assert client.get("/sessions").status_code == 200
        for path in ("/sessions/s", "/requests/r"):
            assert "locked" in error_of(client.get(path), 503)


def test_the_routes_are_described(tmp_path):
    with client_of(None) as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {"/sessions", "/sessions/{session_id}", "/requests/{request_id}"}
    for route in paths.values():
        answer = route["get"]["responses"]["200"]["content"]["application/json"]
        assert answer["schema"]["$ref"]
