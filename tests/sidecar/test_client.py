"""The client tries again what is safe, gives up in time, and says what is wrong in one line."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from failing_server import FailingServer, Reply, events
from hypothesis import given
from hypothesis import strategies as st
from planted import planted, planted_batch
from shared import START

from capture_kernels.errors import AttnError, OptionError
from sidecar import client as api
from sidecar.client.answers import NO_CLUSTER
from sidecar.client.retries import Attempts, Call

VECTOR = [0.05] * 20
MANIFOLD = {"zone": "diffuse", "confidence": 0.5, "cluster_id": 3, "cluster_label": "wide"}
HEAD = {"schema_version": 1, "run_id": "2026-01-10T04-02-11"}
OK = Reply(200, {"status": "ok"})
QUICK = api.Retries(deadline_s=10.0, first_s=0.01, most_s=0.05)
# Of each call its path and a good reply.
SAFE: dict[str, tuple[Callable[[Any], Any], str, Reply]] = {
    "health": (lambda c: c.health(), "/health", OK),
    "ready": (lambda c: c.ready(), "/ready", Reply(200, {"ready": True})),
    "version": (lambda c: c.version(), "/version", Reply(200, {"attn": "1"})),
    "stats": (lambda c: c.stats(), "/stats", Reply(200, {"rows": 1})),
    "drift": (lambda c: c.drift(), "/stats", Reply(200, {"drift": {"state": "steady"}})),
    "centroids": (lambda c: c.centroids(), "/centroids", Reply(200, {"clusters": []})),
    "classify_one": (lambda c: c.classify_one(VECTOR), "/classify",
                     Reply(200, {"manifold": MANIFOLD, **HEAD})),
    "classify": (lambda c: c.classify([VECTOR]), "/classify",
                 Reply(200, {"results": [{"manifold": MANIFOLD}], **HEAD})),
    "predict": (lambda c: c.predict(VECTOR), "/predict", Reply(200, {"cluster_id": 1})),
    "add": (lambda c: c.add({"request_id": "a", "vector": VECTOR}), "/fingerprint",
            Reply(202, {"queued": 1})),
    "add_many": (lambda c: c.add_many([{"request_id": "a", "vector": VECTOR}]), "/fingerprints",
                 Reply(202, {"queued": 1})),
    "sessions": (lambda c: c.sessions(), "/sessions", Reply(200, {"sessions": []})),
    "session": (lambda c: c.session("a"), "/sessions/a", Reply(200, {"session_id": "a"})),
    "request": (lambda c: c.request("a"), "/requests/a", Reply(200, {"request_id": "a"})),
    "compare": (lambda c: c.compare("run:x", "run:y"), "/compare", Reply(200, {"differences": []})),
    "compare with rows": (lambda c: c.compare({"rows": []}, "run:y"), "/compare", Reply(200, {})),
    "discovery_status": (lambda c: c.discovery_status(), "/discovery/status", Reply(200, {})),
    "runs": (lambda c: c.runs(), "/discovery/runs", Reply(200, {"runs": []})),
    "run": (lambda c: c.run("latest"), "/discovery/runs/latest", Reply(200, {})),
    "run_clusters": (
        lambda c: c.run_clusters("latest"),
        "/discovery/runs/latest/clusters",
        Reply(200, {}),
    ),
    "run_lineage": (
        lambda c: c.run_lineage("latest"),
        "/discovery/runs/latest/lineage",
        Reply(200, {}),
    ),
    "map_about": (lambda c: c.map_about("x"), "/discovery/runs/x/map/meta", Reply(200, {})),
    "map": (lambda c: c.map("latest"), "/discovery/runs/latest/map", Reply(200, raw=b"")),
}  # fmt: skip
UNSAFE: dict[str, tuple[Callable[[Any], Any], str, Reply]] = {
    "control": (lambda c: c.control("pause"), "/discovery/control", Reply(200, {})),
    "recluster": (lambda c: c.recluster(), "/recluster", Reply(200, {})),
    "reload": (lambda c: c.reload(), "/discovery/reload", Reply(200, {})),
    "flush": (lambda c: c.flush(), "/storage/flush", Reply(200, {})),
}
FAILURES = {
    "busy": Reply(503, {"error": "the queue is full"}),
    "too many": Reply(429, {"error": "slow down"}),
    "lost": Reply(200, headers={"content-length": "9999"}, raw=b"{", lost=True),
}


@pytest.fixture(scope="module")
def server() -> Iterator[FailingServer]:
    found = FailingServer().start()
    yield found
    found.stop()


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, server: FailingServer) -> Callable[..., Any]:
    """Make a call with a client of either kind."""
    server.asked.clear()

    def sync(use: Callable[[Any], Any], **options: Any) -> Any:
        options = {"retries": QUICK, "timeout_s": 5.0, **options}
        with api.SidecarClient(options.pop("url", server.url), **options) as client:
            found = use(client)
            return list(found) if isinstance(found, Iterator) else found

    def by_asyncio(use: Callable[[Any], Any], **options: Any) -> Any:
        async def run() -> Any:
            given = {"retries": QUICK, "timeout_s": 5.0, **options}
            async with api.AsyncSidecarClient(given.pop("url", server.url), **given) as client:
                found = use(client)
                return [one async for one in found] if hasattr(found, "__anext__") else await found

        return asyncio.run(run())

    return sync if request.param == "sync" else by_asyncio


def test_every_endpoint_is_called_in_these_tests() -> None:
    methods = {n for n, v in vars(api.clients.Endpoints).items() if not n.startswith("_")}
    assert methods == {name.split()[0] for name in (*SAFE, *UNSAFE)}


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        # Every call, and every failure of one of them.
        pytest.param(
            name, failure, marks=() if name == "health" or failure == "busy" else pytest.mark.slow
        )
        for name in SAFE
        for failure in FAILURES
    ],
)
def test_a_safe_call_is_made_again_until_it_succeeds(
    call: Callable[..., Any], server: FailingServer, name: str, failure: str
) -> None:
    use, path, good = SAFE[name]
    server.script(path, FAILURES[failure], FAILURES[failure], good)
    call(use)
    assert server.paths() == [path] * 3


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_call_is_made_once(
    call: Callable[..., Any], server: FailingServer, name: str, failure: str
) -> None:
    use, path, good = UNSAFE[name]
    server.script(path, FAILURES[failure], good)
    with pytest.raises((api.SidecarBusyError, api.UnreachableError)):
        call(use)
    assert server.paths() == [path]
    assert call(use) == {}


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (Reply(401, {"error": "a key is needed"}), api.UnauthorizedError, "a key is needed"),
        (Reply(404, {"error": "no run x"}), api.NotFoundError, "no run x"),
        (Reply(422, {"detail": "bad vector"}), api.RefusedError, "bad vector"),
        (Reply(507, {"error": "the disk is full"}), api.RefusedError, "the disk is full"),
        (Reply(400, raw=b"<html>"), api.RefusedError, "400 Bad Request"),
        (Reply(200, raw=b"<html>"), api.WrongAnswerError, "does not understand"),
        (Reply(200, {"state": 1}), api.WrongAnswerError, "does not understand"),
        (Reply(200, raw=b"zz", headers={"content-encoding": "gzip"}), api.WrongAnswerError, "not"),
    ],
)  # fmt: skip
def test_what_does_not_pass_is_said_at_once_and_in_one_line(
    call: Callable[..., Any], server: FailingServer, reply: Reply, kind: type, says: str
) -> None:
    server.script("/health", reply)
    with pytest.raises(kind, match=says) as raised:
        call(lambda c: c.health())
    assert isinstance(raised.value, AttnError) and "\n" not in str(raised.value)
    assert len(server.asked) == 1


def test_a_sidecar_that_stays_busy_is_given_up_at_the_deadline(
    call: Callable[..., Any], server: FailingServer
) -> None:
    server.script("/health", Reply(503, {"error": "starting"}))
    with pytest.raises(api.SidecarBusyError, match="starting"):
        call(lambda c: c.health(), retries=api.Retries(deadline_s=0.5, first_s=0.05))
    assert len(server.asked) > 2


def test_retry_after_is_waited_for_and_one_beyond_the_deadline_is_not(
    call: Callable[..., Any], server: FailingServer
) -> None:
    server.script("/health", Reply(429, {}, {"retry-after": "0.4"}), OK)
    call(lambda c: c.health())
    first, second = (asked.at for asked in server.asked)
    assert second - first >= 0.4
    late = email.utils.formatdate(time.time() + 3_600, usegmt=True)
    for value in ("3600", "inf", late):
        server.script("/health", Reply(503, {"error": "later"}, {"retry-after": value}), OK)
        server.asked.clear()
        with pytest.raises(api.SidecarBusyError, match="later"):
            call(lambda c: c.health())
        assert len(server.asked) == 1


def test_a_sidecar_that_starts_late_is_reached(call: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(api.UnreachableError, match="is the sidecar running there"):
        call(lambda c: c.health(), url=url, retries=api.Retries(deadline_s=0.3, first_s=0.05))
    late: list[FailingServer] = []

    def start() -> None:
        late.append(FailingServer(port))
        late[0].script("/health", OK)
        late[0].start()

    timer = threading.Timer(0.3, start)
    timer.start()
    try:
        assert call(lambda c: c.health(), url=url).status == "ok"
    finally:
        timer.join()
        late[0].stop()


def test_an_answer_that_does_not_come_is_asked_for_again(
    call: Callable[..., Any], server: FailingServer
) -> None:
    server.script("/health", OK._replace(pause_s=30), OK)
    assert call(lambda c: c.health(), timeout_s=0.3).status == "ok"
    assert len(server.asked) == 2


def test_without_retries_a_safe_call_is_made_once(
    call: Callable[..., Any], server: FailingServer
) -> None:
    server.script("/health", FAILURES["busy"], OK)
    with pytest.raises(api.SidecarBusyError):
        call(lambda c: c.health(), retries=api.Retries(deadline_s=0))
    assert len(server.asked) == 1


def test_requests_say_what_was_meant(call: Callable[..., Any], server: FailingServer) -> None:
    server.script("/classify", SAFE["classify_one"][2])
    found = call(lambda c: c.classify_one(VECTOR), key="secret")
    assert (found.manifold.cluster_id, found.run_id) == (3, HEAD["run_id"])
    assert msgspec.json.decode(server.asked[-1].body) == {"vector": VECTOR}
    assert server.asked[-1].headers["authorization"] == "Bearer secret"

    server.script("/classify", SAFE["classify"][2])
    mixed = [VECTOR, {"vector": VECTOR, "position": 7}]
    assert call(lambda c: c.classify(mixed)).results[0].manifold.zone == "diffuse"
    sent = msgspec.json.decode(server.asked[-1].body)
    assert sent == {"records": [{"vector": VECTOR}, {"vector": VECTOR, "position": 7}]}

    server.script("/sessions/a%2F%3F%20b", Reply(200, {}))
    call(lambda c: c.session("a/? b"))
    server.script("/requests/r", Reply(200, {}))
    call(lambda c: c.request("r", limit=10))
    assert server.asked[-1].query == "limit=10"
    server.script("/discovery/control", Reply(200, {}))
    call(lambda c: c.control("stop"))
    assert msgspec.json.decode(server.asked[-1].body) == {"command": "stop"}


def test_rows_go_as_an_arrow_stream_that_gives_the_same_rows(
    call: Callable[..., Any], server: FailingServer
) -> None:
    batch = planted_batch(planted(500, 0)[0], START)
    server.script("/fingerprints", Reply(200, {"committed": 500, "rejected": {"phase": 1}}))
    added = call(lambda c: c.add_many(pa.Table.from_batches([batch]), wait=True))
    assert (added.committed, added.rejected) == (500, {"phase": 1})
    asked = server.asked[-1]
    assert asked.query == "wait=1"
    assert asked.headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert pa.ipc.open_stream(asked.body).read_all().to_batches()[0] == batch


def test_a_map_comes_as_arrays(call: Callable[..., Any], server: FailingServer) -> None:
    columns = (np.float32([1, 2, 3]), np.float32([4, 5, 6]), np.uint16([7, 0, NO_CLUSTER]),
               np.uint8([0, 1, 4]))  # fmt: skip
    path = "/discovery/runs/latest/map"
    server.script(path, Reply(raw=b"".join(column.tobytes() for column in columns)))
    for found, sent in zip(call(lambda c: c.map("latest")), columns, strict=True):
        assert found.dtype == sent.dtype and np.array_equal(found, sent)
    server.script(path, Reply(raw=b"12345"))
    with pytest.raises(api.WrongAnswerError, match="no whole number of rows"):
        call(lambda c: c.map("latest"))


def test_a_sidecar_that_is_not_ready_says_why_at_once(
    call: Callable[..., Any], server: FailingServer
) -> None:
    problems = ["no run is served"]
    server.script("/ready", Reply(503, {"ready": False, "problems": problems}))
    found = call(lambda c: c.ready())
    assert not found.ready and found.problems == problems
    assert len(server.asked) == 1


def test_events_with_ids_go_on_where_they_were(
    call: Callable[..., Any], server: FailingServer
) -> None:
    stream = {"content-type": "text/event-stream"}
    server.script(
        "/discovery/live",
        Reply(200, None, stream, b"id: run:7\nevent: progress\ndata: {}\n\n", lost=True),
        Reply(200, None, stream, b"id: run:8\nevent: progress\ndata: {}\n\n"),
    )
    found = call(lambda c: c.discovery_live())
    assert [(event.id, event.event) for event in found] == [
        ("run:7", "progress"),
        ("run:8", "progress"),
    ]
    assert [asked.headers.get("last-event-id") for asked in server.asked] == [None, "run:7"]


def test_live_events_go_on_after_a_lost_connection(
    call: Callable[..., Any], server: FailingServer
) -> None:
    stream = {"content-type": "text/event-stream"}
    for path, use in (
        ("/live", lambda c: c.live()),
        ("/discovery/live", lambda c: c.discovery_live()),
    ):
        server.script(
            path,
            FAILURES["busy"],
            Reply(200, None, stream, events([{"n": 1}, {"n": 2}]), lost=True),
            Reply(200, None, stream, events([{"n": 3}])),
        )
        assert [event.data["n"] for event in call(use)] == [1, 2, 3]
    server.script("/live", Reply(401, {"error": "a key is needed"}))
    with pytest.raises(api.UnauthorizedError, match="a key is needed"):
        call(lambda c: c.live())
    server.script("/live", Reply(200, {"not": "events"}))
    with pytest.raises(api.WrongAnswerError, match="not a stream of events"):
        call(lambda c: c.live())
    server.script("/live", Reply(200, None, stream, b"data: {\n\n"))
    with pytest.raises(api.WrongAnswerError, match="not JSON"):
        call(lambda c: c.live())


def test_a_stream_that_is_lost_again_and_again_is_followed_for_longer_than_the_deadline(
    call: Callable[..., Any], server: FailingServer
) -> None:
    stream = {"content-type": "text/event-stream"}
    lost = Reply(200, None, stream, events([1]), lost=True, pause_s=0.25)
    server.script("/live", *[lost] * 6, Reply(200, None, stream, events([2])))
    found = call(lambda c: c.live(), retries=api.Retries(deadline_s=1.0, first_s=0.01))
    assert [event.data for event in found] == [1] * 6 + [2]


@pytest.mark.parametrize("url", ["localhost:9009", "ftp://localhost", "http://", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="URL"):
        api.SidecarClient(url)
    with pytest.raises(OptionError, match="key"):
        api.SidecarClient(key="two\nlines")


@given(st.floats(0.01, 60), st.floats(0.001, 1), st.floats(1, 20), st.floats(0, 0.999))
def test_pauses_grow_to_their_limit_and_never_pass_the_deadline(
    deadline: float, first: float, most: float, chance: float
) -> None:
    now = 0.0
    retries = api.Retries(deadline, first, most)
    call = Call("GET", "/health", lambda answer: None)
    attempts = Attempts(call, retries, 5.0, clock=lambda: now, chance=lambda: chance)
    busy = api.retries.httpx.Response(503)
    count = 0
    while (pause := attempts.pause(busy)) is not None:
        longest = min(most, first * 2**count)
        assert longest / 2 <= pause <= longest
        now += pause
        count += 1
        assert now < deadline and count < 1_000_000
    assert now < deadline <= now + min(most, first * 2**count)
