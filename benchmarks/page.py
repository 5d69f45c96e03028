"""How soon the page is painted, how many bytes that takes, and what its Live view takes of a core
at 5,000 rows a second.

    python benchmarks/page.py --output RUNS [--rate 5000] [--seconds 30] [--json PATH]

RUNS is an output folder of attn discover (make discover). First paint is the browser's own
first-contentful-paint, each time in a new context without a cache, over loopback; ready is when
the view is mounted. Bytes are those of the page's own files as they are sent, without headers, to
a browser without a cache. The browser's CPU is that of all of its processes, WebGL on the CPU
included. Exits 1 if rows were lost, or if the page did not show the rate at which they came.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from playwright.sync_api import Browser, CDPSession

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import WrongAnswerError, exit_code, write_figures
from benchmarks.page_system import System, Traffic, chromium, system

VIEWS = ("live", "chat", "inspect", "manifold", "router", "compare", "overhead")
# Seconds until the charts have filled a little and all is warm.
WARM_S = 10.0
# Milliseconds after the navigation began.
PAINTED = """() => new Promise((resolve) => new PerformanceObserver((list) => {
  for (const { name, startTime } of list.getEntries()) {
    if (name === "first-contentful-paint") resolve(startTime);
  }
}).observe({ type: "paint", buffered: true }))"""
SENT = """() => performance.getEntries()
  .filter(({ name, entryType }) => entryType === "navigation" || name.includes("/static/"))
  .reduce((sum, { encodedBodySize }) => sum + (encodedBodySize ?? 0), 0)"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="Output folder of runs.")
    parser.add_argument("--rate", type=float, default=5_000.0, help="Rows a second.")
    parser.add_argument("--seconds", type=float, default=30.0, help="That the CPU is measured.")
    parser.add_argument("--times", type=int, default=5, help="That each view is opened.")
    parser.add_argument("--json", type=Path, help="Where the figures are written.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {}
        runs = given.output.resolve()
        with system(Path(folder), runs, engine=False) as running, chromium() as browser:
            figures["first_paint"] = paints(browser, running.url, given.times)
            figures["bytes"] = sizes(browser, running.url)
            figures["live"] = live(browser, running, given.rate, given.seconds)
    print(json.dumps(figures, indent=2))
    if given.json:
        write_figures(given.json, figures)


def paints(browser: Browser, url: str, times: int) -> dict[str, Any]:
    """Milliseconds until something is painted, and until the view is mounted, by view."""
    found: dict[str, Any] = {}
    for view in VIEWS:
        seen = [opened(browser, f"{url}/{view}") for _ in range(times)]
        found[view] = {
            name: {"median": round(float(np.median(values)), 1), "worst": round(max(values), 1)}
            for name, values in zip(("paint_ms", "ready_ms"), zip(*seen, strict=True), strict=True)
        }
    return found


def opened(browser: Browser, address: str) -> tuple[float, float]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    try:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("main[data-view]")
        ready: float = page.evaluate("performance.now()")
        painted: float = page.evaluate(PAINTED)
        return painted, ready
    finally:
        context.close()


def sizes(browser: Browser, url: str) -> dict[str, int]:
    """Bytes that are sent for each view when it is the first, and for all of them in turn."""
    found: dict[str, int] = {}
    for first in VIEWS:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/{first}")
        page.wait_for_selector(f"main[data-view={first}]")
        found[first] = page.evaluate(SENT)
        if first == VIEWS[-1]:
            for view in VIEWS:
                page.get_by_role("link", name=view.capitalize(), exact=True).click()
                page.wait_for_selector(f"main[data-view={view}]")
            found["all"] = page.evaluate(SENT)
        context.close()
    return found


def live(browser: Browser, running: System, rate: float, seconds: float) -> dict[str, Any]:
    """CPU of the browser and of the sidecar while Live is looked at, in shares of a core."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(f"{running.url}/live")
    page.wait_for_selector("main[data-view]")
    session = context.new_cdp_session(page)
    session.send("Performance.enable")
    with Traffic(running.stream, rate) as traffic:
        page.wait_for_selector("[data-panel=zones] [role=meter]", timeout=60_000)
        time.sleep(WARM_S)
        tasks, cpu, sidecar = task_seconds(session), browser_seconds(), cpu_of(running.pid)
        rows, began = traffic.rows, time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        figures = {
            "rows_per_s": round((traffic.rows - rows) / took),
            "browser_core_share": round((browser_seconds() - cpu) / took, 4),
            "page_main_thread_share": round((task_seconds(session) - tasks) / took, 4),
            "sidecar_core_share": round((cpu_of(running.pid) - sidecar) / took, 4),
            "seconds": round(took, 1),
        }
        shown = page.locator("[data-panel=ingest] [role=img]").first.get_attribute("aria-label")
    context.close()
    check(running, str(shown), rate)
    return {**figures, "page_shows": shown}


def check(running: System, shown: str, rate: float) -> None:
    """WrongAnswerError: rows were lost, or the page shows another rate."""
    found = httpx.get(f"{running.url}/stats", timeout=30).json()
    lost = found["stream"].get("dropped_by_sender", 0) + found["stream"].get("lost_in_transit", 0)
    if lost or found["fingerprints"]["queue_full"] or found["fingerprints"]["invalid"]:
        raise WrongAnswerError(f"rows were lost: {found['stream']}, {found['fingerprints']}")
    said = float(shown.partition("Now ")[2].partition(" a second")[0].replace(",", ""))
    if not 0.8 * rate < said < 1.25 * rate:
        raise WrongAnswerError(f"the page shows {said:g} rows a second, {rate:g} were sent")


def task_seconds(session: CDPSession) -> float:
    """Seconds that the page's main thread has worked."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def browser_seconds() -> float:
    """CPU seconds of all processes of the browser."""
    children = psutil.Process().children(recursive=True)
    return sum(cpu_of(one.pid) for one in children if "chrom" in one.name())


def cpu_of(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(exit_code(main))
