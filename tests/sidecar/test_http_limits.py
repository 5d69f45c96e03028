"""Limits of requests and connections, through real sockets: what is refused, and how it says so."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from http_server import exchange, rest, serving
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import OptionError, StoreError
from pipeline.api_keys import ApiKeys, read_keys
from sidecar.http.errors import add_error_handlers
from sidecar.http.keys import KeyFile
from sidecar.http.limits import Limits, allowed_hosts, name_of, protected

KEY = "0123456789abcdef-first"
HOSTS = allowed_hosts("127.0.0.1")


def small_app() -> FastAPI:
    """A few routes as the service has them."""
    app = FastAPI(docs_url=None)
    add_error_handlers(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/slow")
    async def slow() -> dict[str, str]:
        await asyncio.sleep(1)
        return {"status": "ok"}

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(64 << 20))

    @app.get("/wrong")
    async def wrong() -> None:
        raise ZeroDivisionError("secret inner workings")

    @app.get("/store")
    async def store() -> None:
        raise StoreError("the store is locked:\nwait")

    @app.post("/body")
    async def body(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @app.post("/json")
    async def parsed(body: dict[str, Any]) -> dict[str, int]:
        return {"fields": len(body)}

    return app


class Bare:
    """An app beside FastAPI that reads the body itself, as the hot routes do."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope.get("path") != "/bare":
            await self._app(scope, receive, send)
            return
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b'{"bytes": %d}' % size})


def guarded(keys: ApiKeys | None = None, **limits: Any) -> Any:
    return protected(Bare(small_app()), Limits(hosts=HOSTS, **limits), keys)


def error_of(answer: httpx.Response, status: int) -> str:
    """The one line of an error."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (message,) = answer.json().values()
    assert message and "\n" not in message and "Traceback" not in message
    return message


def status_of(raw: bytes) -> tuple[int, str]:
    """Status and error of an answer that was read from a socket."""
    head, _, content = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)["error"]


# bodies


@pytest.mark.parametrize("path", ["/body", "/json", "/bare"])
def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(path):
    with serving(guarded(most_body_bytes=1_000)) as server:
        for content in (b"x" * 1_001, iter([b"x" * 600] * 2), iter([b"x" * 100_000] * 300)):
            answer = httpx.post(server.url + path, content=content)
            assert "larger than 1,000 bytes" in error_of(answer, 413)
            assert answer.headers["connection"] == "close"
        fits = b"[%b]" % (b" " * 998)
        assert httpx.post(server.url + "/body", content=fits).json() == {"bytes": 1_000}
        assert httpx.post(server.url + "/bare", content=iter([fits])).json() == {"bytes": 1_000}


@pytest.mark.parametrize("path", [b"/body", b"/bare"])
def test_a_body_that_comes_too_slowly_is_refused_and_holds_nothing(path):
    with serving(guarded(body_seconds=0.5)) as server, server.connect() as client:
        client.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nab" % path)
        began = time.monotonic()
        status, reason = status_of(rest(client))
        assert (status, reason) == (408, "the body did not come within 0.5 seconds")
        assert time.monotonic() - began < 10


def test_drops_of_a_body_do_not_extend_its_time():
    with serving(guarded(body_seconds=1.0)) as server, server.connect() as client:
        client.sendall(b"POST /bare HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n")
        for _ in range(200):
            try:
                client.sendall(b"x")
            except OSError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("a body of one byte in 50 ms was read for ten seconds")


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"99999999999999999999", b"\xb2"])
def test_a_length_that_is_no_length_is_refused(length):
    with serving(guarded()) as server:
        sent = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: %b\r\n\r\n" % length
        assert status_of(exchange(server, sent))[0] in (400, 413)


# load


def test_more_requests_than_the_limit_are_told_to_come_again_and_health_is_answered():
    with serving(guarded(most_requests=2)) as server, ThreadPoolExecutor(6) as pool:
        slow = [pool.submit(httpx.get, server.url + "/slow") for _ in range(6)]
        time.sleep(0.5)
        assert httpx.get(server.url + "/health").status_code == 200
        answers = [one.result() for one in slow]
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503, 503, 503]
        full = next(answer for answer in answers if answer.status_code == 503)
        assert "2 requests" in error_of(full, 503) and full.headers["retry-after"] == "1"
        assert httpx.get(server.url + "/slow").status_code == 200  # none is counted for ever


def answered(client: socket.socket) -> bytes:
    """One answer, whose head and body may come one after the other."""
    found = b""
    while not found.endswith(b"}") and (more := client.recv(65_536)):
        found += more
    return found


def test_a_client_that_asks_nothing_or_half_a_request_is_cut_off():
    with serving(guarded(), bounds={"head_seconds": 0.5}) as server:
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost: loc", b"G"):
            assert exchange(server, sent) == b""
        with server.connect() as client:  # nor in a second request of the same connection
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answered(client).endswith(b'{"status":"ok"}')
            client.sendall(b"\r\n")
            assert rest(client) == b""


def test_a_head_that_never_ends_is_cut_off():
    with serving(guarded()) as server, server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        sent = 0
        with pytest.raises(OSError):  # long before ten seconds are over
            while sent < 64 << 20:
                sent += client.send(b"x" * 16_384)
        # What the system's buffers hold, and not all of it.
        assert sent < 64 << 20


def test_a_connection_that_is_used_stays_open():
    with serving(guarded(), bounds={"head_seconds": 0.5}) as server, server.connect() as client:
        for _ in range(4):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answered(client).endswith(b'{"status":"ok"}')
            time.sleep(0.3)
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")  # longer than a head may
        assert answered(client).endswith(b'{"status":"ok"}')


def test_connections_above_the_limit_are_closed_and_the_others_are_served():
    refused: list[None] = []
    bounds = {"most_connections": 20, "on_refusal": lambda: refused.append(None)}
    with serving(guarded(), bounds=bounds) as server:
        opened = [server.connect(2) for _ in range(40)]
        try:
            closed = 0
            time.sleep(0.5)
            for client in opened:
                client.settimeout(0.05)
                try:
                    closed += client.recv(1) == b""
                except ConnectionError:
                    closed += 1
                except TimeoutError:
                    continue
            assert closed == len(refused) == 20
        finally:
            for client in opened:
                client.close()
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a bound of Linux")
def test_a_client_that_never_reads_its_answer_is_cut_off():
    with (
        serving(guarded(), bounds={"stalled_seconds": 0.5}) as server,
        server.connect() as client,
    ):
        client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 15
        time.sleep(0.2)
        assert len(server.server_state.connections) == 1
        while server.server_state.connections:
            assert time.monotonic() < deadline, "its connection is still open"
            time.sleep(0.05)


# keys


def test_every_route_but_health_needs_a_key():
    keys = ApiKeys([KEY.encode(), b"second-key-0123456"])
    with serving(guarded(keys)) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").json() == {"status": "ok"}
        for path in ("/", "/docs", "/openapi.json", "/slow", "/health/", "//health", "/nothing"):
            answer = client.get(path)
            assert "needs an API key" in error_of(answer, 401)
            assert answer.headers["www-authenticate"].startswith("Bearer")
        for given in (KEY, "second-key-0123456"):
            for headers in ({"Authorization": f"Bearer {given}"}, {"X-API-Key": given},
                            {"authorization": f"bearer  {given}"}):  # fmt: skip
                assert client.post("/body", content=b"x", headers=headers).json() == {"bytes": 1}
        for wrong in (KEY[:-1], KEY + "x", "", "Basic", "\u00e9" * 20):
            headers = {"X-API-Key": wrong.encode()}
            message = error_of(client.get("/docs", headers=headers), 401)
            assert "not valid" in message and (not wrong or wrong not in message)
        headers = {"Authorization": f"Basic {KEY}"}
        assert client.get("/docs", headers=headers).status_code == 401


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5), st.data())
def test_a_key_is_taken_if_and_only_if_it_is_in_the_list(keys, data):
    known = ApiKeys(keys)
    given_key = data.draw(st.one_of(st.sampled_from(keys), st.binary(max_size=40)))
    assert (given_key in known) == (given_key in keys)


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_file_holds_one_key_a_line(tmp_path):
    lines = f"# of the router\n{KEY}\n\n  second-key-0123456  \r\n# end".encode()
    keys = read_keys(key_file(tmp_path, lines))
    assert len(keys) == 2 and KEY.encode() in keys and b"second-key-0123456" in keys
    assert len(read_keys(key_file(tmp_path, lines, 0o440))) == 2  # as a secret is mounted


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"", 0o600, "holds no key"),
        (b"# only a comment\n", 0o600, "holds no key"),
        (b"short\n", 0o600, "line 1"),
        (b"# one\nwith a space in its middle\n", 0o600, "line 2"),
        (b"\xff" * 20, 0o600, "line 1"),
        (b"x" * 2_000, 0o600, "line 1"),
        (KEY.encode(), 0o604, "chmod 600"),
        (KEY.encode(), 0o620, "chmod 600"),
    ],
)
def test_a_key_file_that_cannot_be_trusted_is_refused_in_one_line(tmp_path, content, mode, said):
    with pytest.raises(OptionError, match=said) as refused:
        read_keys(key_file(tmp_path, content, mode))
    assert "\n" not in str(refused.value)
    assert content == b"" or content.strip().splitlines()[-1].decode("latin-1") not in str(refused)


def test_what_is_not_a_file_of_keys_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        with pytest.raises(OptionError, match="--api-key-file"):
            read_keys(path)


def test_a_key_file_is_read_again_when_it_changes_and_not_when_it_cannot_be_used(tmp_path, caplog):
    path = key_file(tmp_path, KEY.encode())
    keys = KeyFile(path)
    second = b"second-key-0123456"
    path.write_bytes(KEY.encode() + b"\n" + second)
    keys.look()
    assert KEY.encode() in keys and second in keys
    (tmp_path / "new").write_bytes(second)
    (tmp_path / "new").chmod(0o600)
    (tmp_path / "new").replace(path)  # as a mounted secret is changed
    keys.look()
    assert KEY.encode() not in keys and second in keys
    bad = [lambda: path.write_bytes(b""), lambda: key_file(tmp_path, b"x" * 20, 0o604), path.unlink]
    for number, spoil in enumerate(bad, start=1):
        spoil()
        for _ in range(3):
            keys.look()
        assert second in keys and b"x" * 20 not in keys and len(keys) == 1
        warnings = [one for one in caplog.records if one.levelname == "WARNING"]
        assert len(warnings) == number and "--api-key-file" in warnings[-1].reason
    key_file(tmp_path, b"third-key-01234567")
    keys.look()
    assert b"third-key-01234567" in keys and second not in keys


# browsers


def test_a_page_elsewhere_cannot_use_a_service_on_loopback():
    with serving(guarded()) as server, httpx.Client(base_url=server.url) as client:
        port = server.port
        for host in ("localhost", "127.0.0.1", f"localhost:{port}", f"[::1]:{port}", "LOCALHOST"):
            assert client.get("/health", headers={"Host": host}).status_code == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::1"):
            answer = client.get("/health", headers={"Host": host})
            assert error_of(answer, 421)
        # A form or a script can send this without asking, to the right host.
        for origin in ("http://evil.example", "null", "http://localhost:1"):
            answer = client.post("/body", headers={"Origin": origin}, content=b"x")
            assert "--cors-origins" in error_of(answer, 403)
        own = {"Origin": f"http://127.0.0.1:{port}"}
        assert client.post("/body", headers=own, content=b"x").json() == {"bytes": 1}
        assert "access-control-allow-origin" not in client.get("/health", headers=own).headers


def test_a_service_for_others_takes_any_host():
    assert allowed_hosts("0.0.0.0") is None and allowed_hosts("10.0.0.7") is None
    assert "127.0.0.2" in (allowed_hosts("127.0.0.2") or ())
    with serving(protected(small_app(), Limits())) as server:
        answer = httpx.get(server.url + "/health", headers={"Host": "sidecar.internal"})
        assert answer.status_code == 200


@given(st.text("abc.-", min_size=1, max_size=20), st.integers(0, 65535))
def test_a_host_has_the_same_name_with_and_without_its_port(name, port):
    assert name_of(name.encode()) == name_of(f"{name}:{port}".encode()) == name
    assert name_of(f"[::1]:{port}".encode()) == name_of(b"[::1]") == "[::1]"


def test_only_the_given_origins_may_read_and_send():
    page = "https://page.example"
    app = guarded(ApiKeys([KEY.encode()]), origins=(page,))
    with serving(app) as server, httpx.Client(base_url=server.url) as client:
        asked = {"Origin": page, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization"}  # fmt: skip
        allowed = client.options("/body", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == page
        sent = {"Origin": page, "X-API-Key": KEY}
        answer = client.post("/body", headers=sent, content=b"x")
        assert answer.headers["access-control-allow-origin"] == page
        refused = client.get("/slow", headers={"Origin": page})  # the page can read why
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == page
        other = client.options("/body", headers={**asked, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("path", ["/health", "/nothing", "/wrong", "/openapi.json"])
def test_every_answer_has_the_security_headers(path):
    with serving(guarded()) as server:
        headers = httpx.get(server.url + path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


# errors


def test_every_error_is_one_line_of_json():
    with serving(guarded()) as server, httpx.Client(base_url=server.url) as client:
        assert "/nothing" in error_of(client.get("/nothing"), 404)
        wrong_method = client.get("/body")
        assert "use POST" in error_of(wrong_method, 405) and wrong_method.headers["allow"] == "POST"
        assert error_of(client.post("/json", json=[1]), 422).startswith("body")
        assert error_of(client.post("/json", content=b"{"), 422)
        assert error_of(client.get("/store"), 400) == "the store is locked: wait"
        message = error_of(client.get("/wrong"), 500)
        assert "secret" not in message and "log" in message
        raw = exchange(server, b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert status_of(raw)[0] == 400
        assert client.get("/health").status_code == 200


def test_a_web_socket_is_refused():
    upgrade = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with serving(guarded(ApiKeys([KEY.encode()]))) as server, server.connect() as client:
        client.sendall(upgrade.replace(b"/health", b"/live"))
        client.shutdown(socket.SHUT_WR)
        assert b" 101 " not in client.recv(65_536)
