"""The page's files: found, read once until they change, and how a browser may keep and use them."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
from base64 import b64encode
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

INDEX = "index.html"
# A checkout's own files are looked at again with each request, so that an edit shows.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
COMPRESSED = (".html", ".js", ".mjs", ".css", ".json", ".txt", ".svg")
# Modules of report.html that the page uses, too.
REPORT, REPORT_TYPES = "report/", (".js", ".css")
# One step of a path: no hidden files, nothing above.
_NAME = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9_.@-]*")
_INLINE = re.compile(rb"<script\b([^>]*)>(.*?)</script>", re.DOTALL | re.IGNORECASE)
_POLICY = (
    "default-src 'self'; script-src 'self'{hashes}; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; font-src 'self'; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class PageFile:
    """One file as it is sent: content, gzip of it (empty if that is not smaller), entity tag in
    quotes, media type, and content security policy (a worker has that of its own file)."""

    content: bytes
    packed: bytes
    etag: str
    media_type: str
    policy: str


class PageFiles:
    """The files below two folders, read when they are asked for. Safe to use from several threads.

    Args:
        page: folder of index.html and of what /static/ names.
        report: folder of what /static/report/ names.
    """

    def __init__(self, page: Path | None = None, report: Path | None = None) -> None:
        self._page = (page or Path(str(files("sidecar") / "static"))).resolve()
        self._report = (report or Path(str(files("discovery") / "report"))).resolve()
        self._known: dict[Path, tuple[tuple[int, int], PageFile]] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> PageFile | None:
        """A file by its path after /static/; None if there is no such file of the page."""
        steps = name.split("/")
        kind = Path(name).suffix
        if kind not in TYPES or not all(map(_NAME.fullmatch, steps)):
            return None
        folder = self._page
        if name.startswith(REPORT):
            if len(steps) != 2 or kind not in REPORT_TYPES:
                return None
            folder, steps = self._report, steps[1:]
        path = folder.joinpath(*steps)
        try:
            facts = path.stat()
            # A link may lead anywhere.
            if not path.is_file() or not path.resolve().is_relative_to(folder):
                return None
            mark = facts.st_mtime_ns, facts.st_size
            with self._lock:
                known = self._known.get(path)
            if known is None or known[0] != mark:
                known = mark, _read(path)
                with self._lock:
                    self._known[path] = known
        except OSError:
            return None
        return known[1]


def _read(path: Path) -> PageFile:
    content, kind = path.read_bytes(), path.suffix
    packed = gzip.compress(content, 6, mtime=0) if kind in COMPRESSED else b""
    return PageFile(
        content,
        packed if len(packed) < len(content) else b"",
        f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        TYPES[kind],
        policy_of(content if kind == ".html" else b""),
    )


def policy_of(page: bytes) -> str:
    """The content security policy of an HTML page: everything from this server, nothing inline but
    its import maps, which browsers take from the page alone."""
    hashes = [
        f" 'sha256-{b64encode(hashlib.sha256(content).digest()).decode()}'"
        for attributes, content in _INLINE.findall(page)
        if b"importmap" in attributes
    ]
    return _POLICY.format(hashes="".join(hashes))
