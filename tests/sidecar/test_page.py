"""`attn sidecar --page`: its files, who needs a key, and the relay to an engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from running import Sidecar, running, until
from shared import REPO
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
VIEWS = ["/", "/live", "/chat", "/inspect", "/manifold", "/router", "/compare", "/overhead"]
KEY = "k" * 32


class Engine:
    """An engine that answers as it is asked to, by the request's `prompt`.

    Attributes:
        asked: the headers and the body of each request. gone: how many streams were cut off.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], Any]] = []
        self.gone = self.chunks = 0
        self.capabilities: Any = {"supported": True, "modes": ["raw"]}
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/attention/capabilities", self._capabilities),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listening]}, daemon=True
        )
        self._thread.start()
        until(lambda: self._server.started, "the engine does not start")

    async def _models(self, request: Request) -> Response:
        self.asked.append((dict(request.headers), None))
        return JSONResponse({"data": [{"id": "demo"}]})

    async def _capabilities(self, request: Request) -> Response:
        if self.capabilities is None:
            return JSONResponse({"error": {"message": "no"}}, 404)
        return JSONResponse(self.capabilities)

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append((dict(request.headers), body))
        wants = body["prompt"]
        if wants == "refused":
            error = {"error": {"message": "no such thing", "code": "x"}}
            return JSONResponse(error, 429, {"retry-after": "7", "set-cookie": "a=b"})
        if wants == "whole":
            return JSONResponse({"choices": [{"text": "ä"}]}, headers={"x-request-id": "r-1"})
        return StreamingResponse(self._events(wants), media_type="text/event-stream")

    async def _events(self, wants: str) -> Any:
        try:
            for number in range(3 if wants != "endless" else 10**6):
                yield f'data: {{"n": {number}}}\n\n'.encode()
                self.chunks += 1
                await asyncio.sleep(0.05)
                if wants == "breaks":
                    raise RuntimeError("the engine failed")
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone += 1
            raise

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = Engine()
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("page")
    with running(folder, "--page", "--engine-url", f"{engine.url}/v1/") as found:
        yield found


def key_file(path: Path, key: str) -> Path:
    path.write_text(f"{key}\n")
    path.chmod(0o600)
    return path


# the files


@pytest.mark.parametrize("path", VIEWS)
def test_every_view_is_the_page_for_a_browser(page, path):
    found = page.client.get(path, headers=HTML)
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/html")
    assert found.content == (REPO / "sidecar" / "static" / "index.html").read_bytes()
    policy = found.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "http" not in policy
    assert "frame-ancestors 'none'" in policy
    # Kept by the browser, and asked about.
    again = page.client.get(path, headers={**HTML, "if-none-match": found.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    head = page.client.head(path, headers=HTML)
    assert head.status_code == 200 and int(head.headers["content-length"]) > 0


def test_what_is_no_browser_gets_the_api_at_the_same_path(page):
    found = page.client.get("/compare", params={"a": "x", "b": "y"})
    assert found.status_code == 400 and "KIND" in found.json()["error"]
    with page.client.stream("GET", "/live", headers={"accept": "text/event-stream"}) as live:
        assert live.headers["content-type"].startswith("text/event-stream")


def test_everything_that_the_page_names_is_served(page):
    index = page.client.get("/", headers=HTML).text
    named = re.findall(r'(?:src|href)="(/static/[^"]+)"', index)
    assert any(name.endswith(".js") for name in named)
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for name in named:
        found = page.client.get(name)
        assert found.status_code == 200, name
        assert found.headers["content-type"].startswith(kinds[Path(name).suffix]), name
        assert found.headers["etag"] and found.headers["x-content-type-options"] == "nosniff"
    module = page.client.get("/static/report/map.js")
    assert module.content == (REPO / "discovery" / "report" / "map.js").read_bytes()


def test_files_are_sent_packed_to_who_takes_that(page):
    path = "/static/app/main.js"
    packed = page.client.get(path, headers={"accept-encoding": "gzip"})
    plain = page.client.get(path, headers={"accept-encoding": "identity"})
    assert packed.content == plain.content
    assert packed.headers["etag"] == plain.headers["etag"]
    raw = httpx.Client(base_url=page.url)
    with raw.stream("GET", "/static/report/map.js", headers={"accept-encoding": "gzip"}) as found:
        content = b"".join(found.iter_raw())
    assert found.headers["content-encoding"] == "gzip"
    assert gzip.decompress(content) == (REPO / "discovery/report/map.js").read_bytes()


@pytest.mark.parametrize(
    "path",
    ["/static/", "/static/none.js", "/static/../options.py", "/static/%2e%2e/options.py",
     "/static/app", "/static/.hidden.js", "/static//etc/passwd", "/static/report/page.py",
     "/static/report/../options.py", "/static/report/a/map.js", "/static/app/%00.js",
     "/static/report/template.html", "/static/" + "a" * 5000 + ".js", "/static/\u202e.js"],
)  # fmt: skip
def test_nothing_else_is(page, path):
    found = page.client.get(path)
    assert found.status_code == 404 and list(found.json()) == ["error"]


def test_an_edited_file_is_served_anew(tmp_path):
    from sidecar.page.files import PageFiles

    root = tmp_path / "static"
    root.mkdir()
    (root / "a.js").write_text("1")
    (tmp_path / "secret.js").write_text("secret")
    (root / "link.js").symlink_to(tmp_path / "secret.js")
    found = PageFiles(root, root)
    first = found.get("a.js")
    assert first is not None and found.get("a.js") is first
    (root / "a.js").write_text("22")
    second = found.get("a.js")
    assert second is not None and second.content == b"22" and second.etag != first.etag
    assert found.get("link.js") is None
    (root / "a.js").unlink()
    assert found.get("a.js") is None


def test_an_import_map_is_all_that_may_be_inline():
    from sidecar.page.files import policy_of

    page = b'<script type="importmap">{"imports": {}}</script><script>alert(1)</script>'
    policy = policy_of(page)
    assert policy.count("'sha256-") == 1 and "unsafe" not in policy


def test_without_the_option_there_is_no_page(tmp_path):
    with running(tmp_path) as sidecar:
        for path in ("/", "/static/app/main.js", "/page/config", "/engine/v1/models"):
            assert sidecar.client.get(path, headers=HTML).status_code == 404, path


def test_with_a_key_the_files_are_open_and_the_data_is_not(tmp_path, engine):
    options = ("--page", "--engine-url", engine.url, "--api-key-file",
               key_file(tmp_path / "keys", KEY), "--engine-key-file",
               key_file(tmp_path / "engine", "e" * 32))  # fmt: skip
    with running(tmp_path, *options) as sidecar:
        get = sidecar.client.get
        for path in (*VIEWS, "/static/app/main.js", "/static/report/map.js"):
            assert get(path, headers=HTML).status_code == 200, path
        closed = ("/page/config", "/stats", "/sessions", "/engine/v1/models", "/discovery/status",
                  "/static", "/docs", "/static/../stats", "/requests/a", "/map")  # fmt: skip
        for path in closed:
            for headers in (HTML, {}, {"x-api-key": "wrong" * 8}):
                assert get(path, headers=headers).status_code == 401, path
        assert sidecar.client.post("/", headers=HTML).status_code == 401
        assert get("/compare?a=session:x&b=session:y").status_code == 401
        assert get("/live", headers={"accept": "text/event-stream"}).status_code == 401
        before = len(engine.asked)
        found = get("/page/config", headers={"x-api-key": KEY})
        assert found.status_code == 200 and found.json()["engine"]["model"] == "demo"
        # The engine gets its own key, and never ours.
        sent = engine.asked[before][0]
        assert sent["authorization"] == f"Bearer {'e' * 32}"
        answer = sidecar.client.post(
            "/engine/v1/chat/completions", json={"prompt": "whole"},
            headers={"authorization": f"Bearer {KEY}"},
        )  # fmt: skip
        assert answer.status_code == 200
        assert KEY not in json.dumps(engine.asked[-1])


# what it begins with


def test_the_config_says_what_the_engine_has(page, engine):
    found = page.get("/page/config")
    assert found["engine"] == {"model": "demo", "capabilities": engine.capabilities}
    assert found["engine_problem"] is None and found["notes"] == []
    assert found["version"] == page.get("/version")["attn"]
    for example in found["examples"]:
        assert set(example) == {"name", "prompt", "style", "says"}
        assert example["style"] in ("chat", "plain") and all(example.values())


def test_an_engine_without_the_attention_api_is_still_one(tmp_path, engine):
    engine.capabilities = None
    try:
        with running(tmp_path, "--page", "--engine-url", engine.url) as sidecar:
            assert sidecar.get("/page/config")["engine"] == {"model": "demo", "capabilities": None}
    finally:
        engine.capabilities = {"supported": True, "modes": ["raw"]}


def test_an_engine_that_is_not_there_is_said_in_a_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(tmp_path, "--page", "--engine-url", f"http://127.0.0.1:{port}") as sidecar:
        config = sidecar.get("/page/config")
        assert config["engine"] is None and f"127.0.0.1:{port}" in config["engine_problem"]
        answer = sidecar.client.post("/engine/v1/chat/completions", json={"prompt": "whole"})
        assert answer.status_code == 502 and "\n" not in answer.json()["error"]
        assert "--engine-url" in answer.json()["error"]
    with running(tmp_path, "--page") as sidecar:
        assert "--engine-url" in sidecar.get("/page/config")["engine_problem"]
        assert sidecar.client.get("/engine/v1/models").status_code == 404


def test_an_engine_that_says_nothing_does_not_hold_up_the_page(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with running(tmp_path, "--page", "--engine-url", url) as sidecar:
            config = sidecar.get("/page/config")
            assert config["engine"] is None and "does not answer within" in config["engine_problem"]


# the relay


def test_an_answer_is_relayed_as_it_is(page, engine):
    asked = {"prompt": "whole", "return_attention_tokens": True}
    headers = {"x-session-id": "s-1", "traceparent": "00-1", "cookie": "a=b", "x-other": "c"}
    found = page.client.post("/engine/v1/chat/completions", json=asked, headers=headers)
    assert found.status_code == 200 and found.json() == {"choices": [{"text": "ä"}]}
    assert found.headers["x-request-id"] == "r-1"
    sent, body = engine.asked[-1]
    assert body == asked and sent["x-session-id"] == "s-1" and sent["traceparent"] == "00-1"
    assert not {"cookie", "x-other", "authorization"} & set(sent)
    assert page.client.get("/engine/v1/models").json() == {"data": [{"id": "demo"}]}


def test_an_error_of_the_engine_keeps_its_status_and_body(page):
    found = page.client.post("/engine/v1/chat/completions", json={"prompt": "refused"})
    assert found.status_code == 429 and found.headers["retry-after"] == "7"
    assert found.json()["error"]["message"] == "no such thing"
    assert "set-cookie" not in found.headers


def test_a_stream_comes_chunk_by_chunk(page):
    body = {"prompt": "stream", "stream": True}
    times = []
    with page.client.stream("POST", "/engine/v1/chat/completions", json=body) as found:
        assert found.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in found.iter_lines() if line and not times.append(time.monotonic())]
    assert lines == ['data: {"n": 0}', 'data: {"n": 1}', 'data: {"n": 2}', "data: [DONE]"]
    assert len(set(times)) == 4


def test_a_stream_that_breaks_off_says_so(page):
    found = page.client.post("/engine/v1/chat/completions", json={"prompt": "breaks"})
    last = [line for line in found.text.splitlines() if line][-1]
    assert "broke off" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_a_client_that_goes_away_ends_the_request_of_the_engine(page, engine):
    before = engine.gone
    body = {"prompt": "endless"}
    with page.client.stream("POST", "/engine/v1/chat/completions", json=body) as found:
        next(found.iter_bytes())
    until(lambda: engine.gone == before + 1, "the engine goes on")


def test_streams_do_not_outlast_the_sidecar(tmp_path, engine):
    before = engine.gone
    with running(tmp_path, "--page", "--engine-url", engine.url) as sidecar:
        asking = threading.Thread(
            target=lambda: _read_all(sidecar.url, {"prompt": "endless"}), daemon=True
        )
        chunks = engine.chunks
        asking.start()
        until(lambda: engine.chunks > chunks + 2, "nothing comes")
        assert sidecar.stop().returncode == 0
    until(lambda: engine.gone == before + 1, "the engine goes on")
    asking.join(20)


def _read_all(url: str, body: Any) -> None:
    try:
        httpx.post(f"{url}/engine/v1/chat/completions", json=body, timeout=60)
    except httpx.TransportError:
        return


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/engine/", 404), ("GET", "/engine/health", 404), ("POST", "/engine/generate", 404),
        ("GET", "/engine/../stats", 200), ("GET", "/engine/v1/../../stats", 200),
        ("GET", "/engine/v1/%2e%2e/health", 404), ("GET", "/engine/v1/chat/completions", 405),
        ("POST", "/engine/v1/models", 405), ("PUT", "/engine/v1/models", 405),
        ("GET", "/engine/http://example.com/", 404), ("GET", "/engine//127.0.0.1/v1/models", 404),
    ],
)  # fmt: skip
def test_nothing_else_is_relayed(page, engine, method, path, status):
    before = len(engine.asked)
    found = page.client.request(method, path)
    assert found.status_code == status, found.text
    assert len(engine.asked) == before


def test_a_body_past_the_bound_is_refused(page, engine):
    before = len(engine.asked)
    found = page.client.post("/engine/v1/chat/completions", content=b" " * (9 << 20))
    assert found.status_code == 413 and len(engine.asked) == before


def test_pages_of_other_origins_may_not_ask(page, engine):
    before = len(engine.asked)
    found = page.client.post(
        "/engine/v1/chat/completions", json={"prompt": "whole"},
        headers={"origin": "http://evil.example"},
    )  # fmt: skip
    assert found.status_code == 403 and len(engine.asked) == before


@pytest.mark.parametrize(
    "options",
    [
        ("--engine-url", "http://127.0.0.1:1"), ("--page", "--engine-url", "127.0.0.1:1"),
        ("--page", "--engine-url", "file:///etc/passwd"), ("--page", "--engine-url", "http://"),
        ("--page", "--engine-url", "http://user:secret@h/"), ("--page", "--engine-url", "http://h:x"),
        ("--page", "--engine-url", "http://h/?key=1"), ("--page", "--engine-key-file", "keys"),
        ("--page", "--engine-url", "http://h", "--engine-key-file", "none"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used_are_refused_in_a_line(attn, tmp_path, options):
    done = attn("sidecar", "--db", tmp_path / "f.db", "--port", "0", *options)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1 and "secret" not in done.stderr
