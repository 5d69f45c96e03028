"""Chromium, and pages in it in which nothing may go wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from running import Sidecar, running

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# SwiftShader draws WebGL without a GPU.
ARGUMENTS = (
    "--no-sandbox --use-angle=swiftshader --enable-unsafe-swiftshader --disable-quic "
    "--disable-background-networking --disable-component-update --disable-sync --no-first-run"
).split()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none, and fails where CI is set."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if not found:
        says = "no Chromium: install one (apt-get install chromium) to test the page"
        # A machine that checks every change must not leave this out unseen.
        pytest.fail(says) if os.environ.get("CI") else pytest.skip(says)
    # How fast the page is, benchmarks say: here what it shows counts, on a busy machine too.
    expect.set_options(timeout=15_000)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


class Watched:
    """Opens pages, and keeps what went wrong in them.

    Attributes:
        allowed: parts of console messages that this test brings about, as of a sidecar that ended.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.wrong: list[str] = []
        self.allowed: list[str] = []

    def open(self, url: str, **options: Any) -> Page:
        """A page in a context of its own, its view mounted."""
        usual = {"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce"}
        context = self._browser.new_context(**{**usual, **options})
        self._contexts.append(context)
        page = context.new_page()
        origin = "/".join(url.split("/")[:3]) + "/"
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", lambda asked: self._request(asked.url, origin))
        page.goto(url)
        page.wait_for_selector("main[data-view]")
        return page

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"console: {message.type} {message.text}")

    def _request(self, url: str, origin: str) -> None:
        if not url.startswith((origin, "data:", f"blob:{origin}")):
            self.wrong.append(f"foreign request: {url}")

    def leave(self) -> None:
        """Close the pages."""
        while self._contexts:
            self._contexts.pop().close()

    @contextmanager
    def beside(self, folder: Path, *options: str | Path, **more: Any) -> Iterator[Sidecar]:
        """A sidecar with the page, as of `running`; pages are closed before it ends."""
        with running(folder, "--page", *options, **more) as sidecar:
            try:
                yield sidecar
            finally:
                self.leave()

    def close(self) -> None:
        self.leave()
        wrong = [one for one in self.wrong if not any(part in one for part in self.allowed)]
        assert wrong == []
