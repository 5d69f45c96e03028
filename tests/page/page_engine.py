"""An engine to ask from the page, as a process: `attn serve` with the demo model."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Locator, Page, expect
from processes import AttnProcess
from running import PATIENCE_S, until
from shared import REPO

MODEL = REPO / "examples" / "demo_model"
# The row at the last colon reads the number off the first line.
NEEDLE = "alpha: 1729\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha:"
OPTIONS = (
    "--engine", "transformers", "--device", "cpu", "--return-attention-tokens",
    "--attention-capture-layers", "all", "--enable-attention-instrumentation",
    "--attention-instrumentation-layers", "all",
)  # fmt: skip
# Text that must be shown as it is, and do nothing.
HOSTILE = (
    "<img src=x onerror=\"window.hacked = 1\"><script>window.hacked = 2</script>",
    "\u202egnihton \u05d0\u05d1\u05d2 \u2066\u2067",
    "NUL \0 bell \a escape \x1b[31m",
    "${window.hacked = 3} {{constructor.constructor('window.hacked = 4')()}} `\"'&lt;",
    "long " + "x" * 10_240,
)  # fmt: skip


class Engine:
    """A running `attn serve`.

    Args:
        port: of its API, so that it can be started again at the same address.
        stream: where it sends its records.
    """

    def __init__(self, port: int, stream: str, *options: str | Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = (
            "serve", MODEL, *OPTIONS, "--port", str(port), "--attention-sidecar-url", stream,
            *options,
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = AttnProcess(*self._arguments)
        self._reader = threading.Thread(target=lambda: list(self.process.lines()), daemon=True)
        self._reader.start()
        until(self._is_up, "the engine does not answer", timeout=3 * PATIENCE_S)

    def _is_up(self) -> bool:
        assert self.process.alive_after(0), self.process.said
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    def active(self) -> int:
        """Requests that it runs, or that wait."""
        found: dict[str, int] = httpx.get(f"{self.url}/health").json()["requests"]
        return found["active"] + found["waiting"]

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/{route}", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.signal(signal.SIGKILL)
        self._reader.join(PATIENCE_S)
        self.process.finish()

    def stop(self) -> None:
        if self._reader.is_alive():
            self.kill()


def ask(page: Page, question: str, *, state: str = "done", **settings: str) -> None:
    """Ask in Chat, and wait until the answer has a state."""
    use(page, **settings)
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Send").click()
    turn = page.locator("[data-turn-state]")
    expect(turn).to_have_attribute("data-turn-state", state, timeout=60_000)


def use(page: Page, **settings: str) -> None:
    """Type settings of the next request, by their names in its body."""
    if not settings:
        return
    opener = page.get_by_role("button", name="Settings")
    if opener.get_attribute("aria-expanded") == "false":
        opener.click()
    for name, value in settings.items():
        page.locator(f".settings [name={name}]").fill(value)
    opener.click()


def tokens(page: Page) -> int:
    return int(page.locator(".flow").get_attribute("data-tokens") or 0)


def token(page: Page, index: int) -> Locator:
    return page.locator(f"[data-i='{index}']")


def texts(page: Page, first: int, last: int) -> str:
    """The text of tokens in sight, as it is shown."""
    return "".join(token(page, index).inner_text() for index in range(first, last))


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def hacked(page: Page) -> Any:
    return page.evaluate("window.hacked")
