"""The page in front of a real sidecar, until `attn sidecar --page` serves it: files of
sidecar/static, and everything else from the sidecar."""

from __future__ import annotations

import mimetypes
import threading
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from shared import REPO

STATIC = REPO / "sidecar" / "static"
REPORT = REPO / "discovery" / "report"
VIEWS = ("/", "/live", "/chat", "/inspect", "/manifold", "/router", "/compare", "/overhead")
POLICY = "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"
CONFIG = b'{"engine": null, "version": "0", "examples": []}'


class PageServer:
    """Serves the page on a free port; `url` is its address.

    Args:
        sidecar: (host, port) of the sidecar; may be changed, as when it was started again.
    """

    def __init__(self, sidecar: tuple[str, int]) -> None:
        self.sidecar = sidecar
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                is_page = "text/html" in self.headers.get("Accept", "")
                if path in VIEWS and is_page:
                    self._file(STATIC / "index.html")
                elif path.startswith("/static/report/"):
                    self._file(REPORT / path.removeprefix("/static/report/"))
                elif path.startswith("/static/"):
                    self._file(STATIC / path.removeprefix("/static/"))
                elif path == "/page/config":
                    self._answer(200, CONFIG, "application/json")
                else:
                    self._relay()

            def do_POST(self) -> None:
                self._relay()

            def log_message(self, *_: Any) -> None:
                pass

            def _file(self, path: Any) -> None:
                if ".." in path.parts or not path.is_file():
                    self._answer(404, b"", "text/plain")
                    return
                kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
                self._answer(200, path.read_bytes(), kind)

            def _answer(self, status: int, content: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Security-Policy", POLICY)
                self.end_headers()
                self.wfile.write(content)

            def _relay(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                host, port = owner.sidecar
                headers = {k: v for k, v in self.headers.items() if k not in ("Host", "Origin")}
                with closing(HTTPConnection(host, port, timeout=60)) as connection:
                    try:
                        connection.request(self.command, self.path, body or None, headers)
                        answer = connection.getresponse()
                    except OSError:
                        self.close_connection = True  # as the sidecar itself: nobody answers
                        return
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in ("transfer-encoding", "connection"):
                            self.send_header(name, value)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.close_connection = True
                    try:
                        while piece := answer.read1(65_536):
                            self.wfile.write(piece)
                            self.wfile.flush()
                    except OSError:
                        return  # the browser left, or the sidecar ended

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
