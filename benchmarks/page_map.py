"""Frames a second of the page's map while it is panned, without a graphics card.

    python benchmarks/page_map.py [--rows 200000 1000000] [--ways software ..] [--json PATH]

For each number of points a sidecar serves a run with a map of planted clusters; Chromium opens the
Manifold view and moves the map by 10 pixels at every frame for four seconds, after one to settle.
`software`: Chromium without a graphics card, and the image in memory that the page then draws;
`swiftshader`: the same image in a Chromium that composes its window by SwiftShader;
`swiftshader-webgl`: WebGL by SwiftShader, which the page leaves to real graphics cards. Exits 1
unless

- the map says that it drew every row, before and after;
- the image has at least as many coloured pixels as the clusters must cover;
- at every frame the view had moved on, and afterwards all points are drawn again;
- without a graphics card (`software`) it draws 30 frames a second or more, of any number of points.

Frames a second and milliseconds between frames are by the clock, and fall with other work on the
machine, whose load average stands beside them; CPU milliseconds a frame, of all processes of the
browser, fall less. The peer is WebGL on SwiftShader.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "sidecar"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "page"))

from playwright.sync_api import Page, sync_playwright

from benchmarks import common
from benchmarks.common import WrongAnswerError
from benchmarks.sidecar_process import Sidecar

# The tests' own modules find one another by the paths above.
publish_map = import_module("map_runs").publish_map

ARGUMENTS = (
    "--no-sandbox --disable-quic --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
).split()
# What draws the window and the map: memory alone, as Chromium does without a graphics card; or
# SwiftShader, which is a graphics card in software.
WAYS = {
    "software": ("image", ("--disable-gpu",)),
    "swiftshader": ("image", ("--use-angle=swiftshader", "--enable-unsafe-swiftshader")),
    "swiftshader-webgl": ("webgl", ("--use-angle=swiftshader", "--enable-unsafe-swiftshader")),
}
CLUSTERS = 40
WIDE, TALL = 1440, 900
SETTLE_MS, MEASURE_MS = 1_000, 4_000
PATIENCE_MS = 180_000
# Frames a second below which a movement is no longer smooth.
LEAST_FRAMES = 30
# The largest change of the view that a frame may leave out, in pixels, and how far a frame pans.
PAN_PX = 10

# Pans by real pointer events of the page itself, one a frame: those of the browser's automation
# come through another process, and would be measured as well.
PAN = """async ([settle, measure, pan]) => {
  const map = document.querySelector("[data-map]");
  const box = map.getBoundingClientRect();
  const fire = (type, x, y) => map.dispatchEvent(new PointerEvent(type, {
    bubbles: true, cancelable: true, pointerId: 1, button: 0, clientX: x, clientY: y,
  }));
  map.setPointerCapture = () => {};
  let [x, step] = [box.left + box.width / 2, pan];
  const y = box.top + box.height / 2;
  fire("pointerdown", x, y);
  const times = [];
  const shares = [];
  let stuck = 0;
  let before = map.dataset.view;
  const began = performance.now();
  for (;;) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    if (now - began > settle + measure) break;
    if (now - began > settle) {
      times.push(now);
      shares.push(Number(map.dataset.share));
      stuck += map.dataset.view === before;
    }
    before = map.dataset.view;
    x += step;
    if (Math.abs(x - box.left - box.width / 2) > 300) step = -step;
    fire("pointermove", x, y);
  }
  fire("pointerup", x, y);
  const gaps = times.slice(1).map((t, i) => t - times[i]).sort((a, b) => a - b);
  return {
    frames: gaps.length, seconds: (times.at(-1) - times[0]) / 1000, stuck,
    median_ms: gaps[gaps.length >> 1], p95_ms: gaps[Math.floor(gaps.length * 0.95)],
    least_share: Math.min(...shares),
  };
}"""
COLORED = """() => {
  const points = document.querySelector("canvas.points");
  const image = document.createElement("canvas");
  Object.assign(image, {width: points.width, height: points.height});
  const pen = image.getContext("2d");
  pen.drawImage(points, 0, 0);
  const {data} = pen.getImageData(0, 0, image.width, image.height);
  let colored = 0;
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b] = [data[i], data[i + 1], data[i + 2]];
    colored += data[i + 3] > 20 && Math.max(r, g, b) - Math.min(r, g, b) > 25;
  }
  return colored;
}"""


def cpu_seconds() -> float:
    """Of all processes of the browser, which this process started."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if "chrom" in process.name():
                total += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return total


def measured(page: Page, url: str, rows: int, way: str) -> dict[str, Any]:
    painter = WAYS[way][0]
    page.goto(f"{url}/manifold?painter={painter}")
    page.wait_for_selector("[data-map][data-frames]", timeout=PATIENCE_MS)
    until(page, lambda: page.evaluate(COLORED) > 0)
    found = {"rows": rows, "way": way}
    check(page, rows, painter)
    before = cpu_seconds()
    page.locator("[data-map]").focus()
    panned = page.evaluate(PAN, [SETTLE_MS, MEASURE_MS, PAN_PX])
    cpu = cpu_seconds() - before
    until(page, lambda: page.locator("[data-map]").get_attribute("data-share") == "1.0000")
    check(page, rows, painter)
    if panned["frames"] < 2:
        raise WrongAnswerError(f"{rows:,} points: only {panned['frames']} frames")
    if panned["stuck"] > 0.1 * panned["frames"]:
        raise WrongAnswerError(f"{rows:,} points: {panned['stuck']} frames showed no movement")
    rate = panned["frames"] / panned["seconds"]
    # CPU time is of the whole panning, of which the measured part has this share.
    share = MEASURE_MS / (SETTLE_MS + MEASURE_MS)
    return found | {
        "frames_per_s": round(rate, 1),
        "median_ms": round(panned["median_ms"], 1),
        "p95_ms": round(panned["p95_ms"], 1),
        "points_while_moving": round(rows * panned["least_share"]),
        "cpu_ms_per_frame": round(1_000 * cpu * share / panned["frames"], 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def until(page: Page, true: Callable[[], bool]) -> None:
    """Wait. The page's policy forbids the browser's own way, which makes a function of a string."""
    deadline = time.monotonic() + PATIENCE_MS / 1_000
    while not true():
        if time.monotonic() > deadline:
            raise WrongAnswerError("the map was not drawn")
        page.wait_for_timeout(100)


def check(page: Page, rows: int, painter: str) -> None:
    """That the map shows what it must."""
    facts = page.locator("[data-map]").evaluate("node => ({...node.dataset})")
    if int(facts["drawn"]) != rows or facts["painter"] != painter:
        raise WrongAnswerError(f"the map drew {facts['drawn']} of {rows:,} by {facts['painter']}")
    least = min(rows, 20_000)
    if (colored := page.evaluate(COLORED)) < least:
        raise WrongAnswerError(f"{rows:,} points: {colored:,} coloured pixels, fewer than {least}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 1_000_000])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if (chromium := common.chromium_path()) is None:
        print("no Chromium: install one (apt-get install chromium)", file=sys.stderr)
        return 2
    found: list[dict[str, Any]] = []

    def work() -> None:
        for rows in given.rows:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                publish_map(folder / "runs", rows=rows, count=CLUSTERS, prefix="r")
                found.extend(of_a_run(folder, rows, given.ways, chromium))

    if code := common.exit_code(work):
        return code
    met = targets(found)
    for name, is_met in met.items():
        print(f"{name}: {'met' if is_met else 'missed'}")
    if given.json:
        figures = common.about(("playwright",)) | {
            "viewport": [WIDE, TALL], "maps": found, "targets": met,
        }  # fmt: skip
        common.write_figures(given.json, figures)
    return 0 if all(met.values()) else 1


def targets(found: list[dict[str, Any]]) -> dict[str, bool]:
    """What was to be reached, and whether it was."""
    return {
        f"{case['rows']:,} points without a graphics card at {LEAST_FRAMES} frames/s":
            case["frames_per_s"] >= LEAST_FRAMES
        for case in found if case["way"] == "software"
    }  # fmt: skip


def of_a_run(folder: Path, rows: int, ways: list[str], chromium: str) -> list[dict[str, Any]]:
    found = []
    service = Sidecar(folder, folder / "runs", "--page")
    try:
        for way in ways:
            with sync_playwright() as started:
                browser = started.chromium.launch(
                    executable_path=chromium, args=[*ARGUMENTS, *WAYS[way][1]]
                )
                page = browser.new_page(viewport={"width": WIDE, "height": TALL})
                found.append(measured(page, service.url, rows, way))
                browser.close()
            print(found[-1], flush=True)
    finally:
        service.stop()
    return found


if __name__ == "__main__":
    sys.exit(main())
