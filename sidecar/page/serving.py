"""The page's routes in front of the others: GET of its views and of /static/.

A view has the path of an API route in two cases, /live and /compare: what accepts text/html, as a
browser's navigation does, gets the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sidecar.http.discovery.maps import is_unchanged
from sidecar.http.errors import error_body
from sidecar.http.limits import App, Receive, Scope, Send

from .files import INDEX, PageFile, PageFiles

VIEWS = frozenset(
    ("/", "/live", "/chat", "/inspect", "/manifold", "/router", "/compare", "/overhead")
)
STATIC = "/static/"
METHODS = ("GET", "HEAD")
Answered = Callable[[str, str, int, float], None]


def is_page(scope: Scope) -> bool:
    """Whether a request is for a file of the page, which needs no key."""
    if scope["method"] not in METHODS:
        return False
    path = scope["path"]
    return path.startswith(STATIC) or (path in VIEWS and _accepts_html(scope))


def _accepts_html(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


class Page:
    """An ASGI app that answers with the page's files and passes on everything else.

    Args:
        answered: told method, route, status and seconds of each answer.
    """

    def __init__(self, app: App, files: PageFiles, answered: Answered) -> None:
        self._app, self._files, self._answered = app, files, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_page(scope):
            await self._app(scope, receive, send)
            return
        began, path = time.perf_counter(), scope["path"]
        is_file = path.startswith(STATIC)
        name = path.removeprefix(STATIC) if is_file else INDEX
        found = await asyncio.to_thread(self._files.get, name)
        if found is None:
            why = "the page's files are not in this install: pip install attn again"
            if is_file:
                why = f"the page has no {path[:200]}"
            status, content = 404, error_body(why)
            headers = [(b"content-type", b"application/json")]
        else:
            status, headers, content = _answer(scope, found)
        if status != 304:
            headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({
            "type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content,
        })  # fmt: skip
        route = f"{STATIC}{{path}}" if is_file else "/{view}"
        self._answered(scope["method"], route, status, time.perf_counter() - began)


def _answer(scope: Scope, found: PageFile) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    asked = dict(scope["headers"])
    headers = [
        (b"etag", b"W/" + found.etag.encode()),  # weak: of both encodings
        # Kept, and asked about each time: an upgrade shows with the next reload.
        (b"cache-control", b"no-cache"),
        (b"vary", b"Accept, Accept-Encoding"),
        (b"content-security-policy", found.policy.encode()),
    ]
    known = asked.get(b"if-none-match")
    if known is not None and is_unchanged(known.decode("latin-1"), found.etag):
        return 304, headers, b""
    content = found.content
    if found.packed and b"gzip" in asked.get(b"accept-encoding", b""):
        content = found.packed
        headers.append((b"content-encoding", b"gzip"))
    return 200, [(b"content-type", found.media_type.encode()), *headers], content
