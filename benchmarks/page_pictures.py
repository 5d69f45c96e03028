"""Pictures of every view of the page, light and dark, from a running system.

    python benchmarks/page_pictures.py --output RUNS [--images docs/images] [--only live,chat]

RUNS is an output folder of attn discover (make discover), the more runs the better: Compare and the
lineage show the last two. The sidecar, the demo model and traffic are started for it, questions are
asked, and each view is brought to where it shows something. Writes VIEW-light.png and
VIEW-dark.png, each under 200 KB.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO, WrongAnswerError, exit_code
from benchmarks.page_system import System, Traffic, chromium, system

SIZE: ViewportSize = {"width": 1440, "height": 900}
MOST_BYTES = 200_000
# Rows a second, and seconds of them until the charts show something.
RATE, FILL_S = 120.0, 100.0
# Seconds until a page of 70,000 points has taken another theme, on a busy machine.
SETTLE_S = 6.0
# The model goes on with the number of the first line.
QUESTION = "alpha: 1729\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha:"
SETTINGS: dict[str, str | int] = {
    "style": "plain",
    "temperature": 0,
    "max_tokens": 6,
    "prompt_rows": 16,
}
TIMEOUT_MS = 120_000


def live(page: Page, _: System) -> None:
    page.wait_for_selector("[data-panel=latest] tbody tr")
    # Charts begin when the page is opened.
    time.sleep(FILL_S)


def chat(page: Page, _: System) -> None:
    page.locator(f"[data-i='{ask(page)}']").click()


def inspect(page: Page, _: System) -> None:
    page.locator(f"[data-i='{ask(page)}']").click()
    page.get_by_role("link", name="Inspect", exact=True).click()
    page.get_by_role("button", name="Measure the same tokens again").click()
    page.locator("[data-mode=exact] canvas").wait_for()
    page.locator(".inspect-main").evaluate("(main) => main.scrollTo(0, 0)")


def manifold(page: Page, _: System) -> None:
    page.wait_for_selector("main[data-view=manifold] canvas")
    page.get_by_role("radio", name="By family").click()
    time.sleep(8)


def router(page: Page, _: System) -> None:
    page.wait_for_selector("[data-panel=evidence] [role=meter]")
    time.sleep(15)


def compare(page: Page, running: System) -> None:
    runs = httpx.get(f"{running.url}/discovery/status", timeout=30).json()["runs"]
    first = page.get_by_role("link", name=re.compile("since the run before|last hour"))
    first.first.click()
    page.wait_for_selector("[data-similarity]")
    if not runs:
        raise WrongAnswerError("there is no run to compare with: make discover")


def overhead(page: Page, _: System) -> None:
    ask(page)
    page.get_by_role("link", name="Overhead", exact=True).click()
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("button", name="Measure").wait_for()


# Path to begin with, and what is done there.
VIEWS: dict[str, tuple[str, Callable[[Page, System], None]]] = {
    "live": ("/live", live),
    "chat": ("/chat", chat),
    "inspect": ("/chat", inspect),
    "manifold": ("/manifold", manifold),
    "router": ("/router", router),
    "compare": ("/compare", compare),
    "overhead": ("/chat", overhead),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="Output folder of runs.")
    parser.add_argument("--images", type=Path, default=REPO / "docs" / "images")
    parser.add_argument("--only", default=",".join(VIEWS), help="Views, with commas.")
    given = parser.parse_args()
    given.images.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        system(Path(folder), given.output.resolve(), engine=True) as running,
        Traffic(running.stream, RATE),
        chromium() as browser,
    ):
        for view in given.only.split(","):
            picture(browser, running, view, given.images)


def picture(browser: Browser, running: System, view: str, images: Path) -> None:
    """Both pictures of a view. WrongAnswerError: the page had an error, or a picture is large."""
    wrong: list[str] = []
    context = browser.new_context(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    page.add_init_script(
        f"localStorage.setItem('attn.settings', {json.dumps(json.dumps(SETTINGS))})"
    )
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    path, show = VIEWS[view]
    page.goto(running.url + path)
    page.wait_for_selector("main[data-view]")
    show(page, running)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        time.sleep(SETTLE_S)
        target = images / f"{view}-{scheme}.png"
        write(page.screenshot(), target)
        if target.stat().st_size > MOST_BYTES:
            raise WrongAnswerError(f"{target} has {target.stat().st_size:,} bytes")
        print(f"{target.name}: {target.stat().st_size:,} bytes", flush=True)
    context.close()
    if wrong:
        raise WrongAnswerError(f"{view}: {wrong[:3]}")


def write(shot: bytes, target: Path) -> None:
    """A picture with 256 colours, a third of its size: the means of what each stands for, so that
    large areas keep their colour."""
    with Image.open(BytesIO(shot)) as image:
        few = image.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
        )
        few.save(target, optimize=True)


def ask(page: Page) -> int:
    """Ask the demo model for a number in the prompt, and wait for its answer: the index of the
    answer's first token."""
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("[data-turn-state=done]")
    time.sleep(4)  # until the store has its rows
    tokens = int(page.locator(".flow").get_attribute("data-tokens") or 0)
    return tokens - int(SETTINGS["max_tokens"])


if __name__ == "__main__":
    sys.exit(exit_code(main))
