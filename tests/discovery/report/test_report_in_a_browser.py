"""report.html in Chromium: what a reader sees and does, without an error and without a network."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from report_inputs import HOSTILE, Inputs, first_run, hostile, later_run

from discovery.artifacts.memberships import BETWEEN

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --disable-quic"
).split()
PIXELS = """() => {
  const {width, height} = canvas;
  const image = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const seen = new Map();
  let sum = 0;
  for (let i = 0; i < image.length; i += 4) {
    const rgb = `${image[i]},${image[i + 1]},${image[i + 2]}`;
    seen.set(rgb, (seen.get(rgb) || 0) + 1);
    sum = (sum * 31 + image[i] + 256 * image[i + 1] + 65536 * image[i + 2]) % 1000000007;
  }
  const [ground, most] = [...seen].sort((a, b) => b[1] - a[1])[0];
  return {ground, drawn: width * height - most, colors: seen.size, sum, width, height};
}"""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if not found:
        says = "no Chromium: install one (apt-get install chromium) to test the report"
        # A machine that checks every change must not leave this out unseen.
        pytest.fail(says) if os.environ.get("CI") else pytest.skip(says)
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a run's report; at the end of the test no error and no request may have been seen."""
    wrong: list[str] = []
    contexts = []

    def opened(inputs: Inputs, **options) -> Page:
        path = tmp_path / "report.html"
        path.write_bytes(inputs.html())
        options = {"viewport": {"width": 1440, "height": 900}, **options}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: wrong.append(f"console: {m.type} {m.text}"))
        page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
        page.on(
            "request",
            lambda r: None if r.url == path.as_uri() else wrong.append(f"request: {r.url}"),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("#map[data-frames]")
        settled(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def settled(page: Page) -> None:
    """Wait for what a change draws at the next frame."""
    page.evaluate("() => new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))")


def pixels(page: Page) -> dict:
    settled(page)
    return page.evaluate(PIXELS)


def drawn(page: Page) -> int:
    settled(page)
    return int(page.locator("#map").get_attribute("data-drawn"))


def zoom(page: Page) -> float:
    settled(page)
    return float(page.locator("#map").get_attribute("data-zoom"))


def pixel_of(page: Page, row: dict) -> tuple[float, float]:
    """Where a row lies in the window."""
    x0, y0, x1, y1 = map(float, page.locator("#map").get_attribute("data-view").split())
    page.locator("#map").scroll_into_view_if_needed()
    box = page.locator("#canvas").bounding_box()
    across, down = (row["x"] - x0) / (x1 - x0), (y1 - row["y"]) / (y1 - y0)
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def lonely_rows(inputs: Inputs, count: int, noise: bool = False) -> list[dict]:
    """The rows of clusters (or of noise) that lie the farthest from any other."""
    places = np.column_stack([inputs.rows[name].to_numpy() for name in ("x", "y")])
    apart = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    alone = apart.min(axis=1)
    alone[(inputs.rows["cluster_id"].to_numpy() < 0) != noise] = -1
    return [inputs.rows.slice(int(i), 1).to_pylist()[0] for i in np.argsort(-alone)[:count]]


RUNS: dict[str, Callable[[Path], Inputs]] = {
    "first": first_run,
    "later": later_run,
    "failed": lambda folder: later_run(folder, passed=False),
    "layered": lambda folder: later_run(folder, layout="layered"),
    "two clusters": lambda folder: first_run(folder, count=2),
    "sixty clusters": lambda folder: later_run(folder, rows=6_000, count=60),
    "all noise": lambda folder: first_run(folder, count=0),
    "one row": lambda folder: first_run(folder, rows=1, count=0),
    "no rows": lambda folder: first_run(folder, rows=0, count=0),
}


# A first run, one with a parent, and one without a row to draw.
FAST_RUNS = ("first", "later", "no rows")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in FAST_RUNS else pytest.mark.slow) for kind in RUNS],
)
def test_every_kind_of_run_opens(show, tmp_path: Path, kind: str):
    inputs = RUNS[kind](tmp_path)
    page = show(inputs)
    assert page.locator("h1").inner_text() == inputs.manifest["run_id"]
    assert page.locator(".card").count() == inputs.clusters.num_rows
    assert drawn(page) == inputs.rows.num_rows
    if inputs.rows.num_rows > 1:
        assert pixels(page)["drawn"] > 300
    for section in ("lineage", "zones", "quality", "axes", "sampling"):
        assert page.locator(f"#{section} h2").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440


@pytest.mark.parametrize(
    "says",
    ["a new lineage, as was asked for: 5 new clusters", pytest.param("", marks=pytest.mark.slow)],
)
def test_a_run_without_a_parent_says_why_it_has_none(show, tmp_path: Path, says: str):
    inputs = first_run(tmp_path)
    events = [{"event": "born", "cluster_id": c, "parents": [], "children": [], "says": ""}
              for c in range(5)]  # fmt: skip
    inputs.manifest["lineage"] = {
        "parent": None, "says": says, "parent_clusters": [], "links": [], "events": events,
        "history": [],
    }  # fmt: skip
    page = show(inputs)
    said = page.locator("#lineage .note").inner_text()
    assert said.startswith(f"{says.capitalize()}. " if says else "No earlier run was followed. ")
    assert "first run" not in page.locator("body").inner_text()


@pytest.mark.slow
def test_hover_tells_the_row_under_the_pointer(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    page = show(inputs)
    for row in lonely_rows(inputs, 4) + lonely_rows(inputs, 2, noise=True):
        page.mouse.move(*pixel_of(page, row))
        tip = page.locator("#tip").inner_text()
        cluster = row["cluster_id"]
        name = "noise" if cluster < 0 else f"{cluster}  label {cluster}"
        assert row["request_id"] in tip
        facts = dict(zip(*[iter(tip.split("\n"))] * 2, strict=True))
        token = row["token_id"]
        assert facts["position"] == str(row["position"])
        assert facts["phase"] == row["phase"]
        assert facts["cluster"] == name
        assert facts["zone"] == row["zone"].replace("_", " ")
        assert abs(float(facts["probability"]) - row["probability"]) < 0.01
        second, share = row["second_cluster_id"], row["second_probability"]
        # Shares are shown of 255ths: too near to the limit is either.
        if abs(share - BETWEEN * row["probability"]) > 0.01:
            is_between = cluster >= 0 and share > BETWEEN * row["probability"]
            assert ("second cluster" in facts) == is_between
        if "second cluster" in facts:
            said, of_it = facts["second cluster"].rsplit(" ", 1)
            assert said == f"{second}  label {second}"
            assert abs(float(of_it.strip("()")) - share) < 0.01
        assert (
            facts["token"].split()[0] == str(token) if token is not None else "token" not in facts
        )
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


@pytest.mark.slow
def test_a_row_is_drawn_where_it_lies_and_felt_within_nine_pixels(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    page = show(inputs)
    page.locator("#toggle-labels").click()
    for row in lonely_rows(inputs, 3, noise=True):
        x, y = pixel_of(page, row)
        for across, down, felt in ((0, 0, True), (7, 0, True), (0, -7, True), (12, 0, False),
                                   (-12, 0, False), (0, 12, False), (0, -12, False)):  # fmt: skip
            page.mouse.move(x + across, y + down)
            assert page.locator("#tip").is_visible() == felt
        box = page.locator("#canvas").bounding_box()
        at = "([x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)"
        here = page.evaluate(at, [x - box["x"], y - box["y"]])
        beside = page.evaluate(at, [x - box["x"] + 12, y - box["y"]])
        assert beside == [255, 255, 255]
        assert max(here) < 250


@pytest.mark.slow
def test_each_way_to_colour_gives_another_picture(show, tmp_path: Path):
    page = show(later_run(tmp_path))
    sums = {pixels(page)["sum"]}
    for name, entries in (("zone", 5), ("phase", 3), ("request", 12)):
        page.locator(f"label[for=color-{name}]").click()
        sums.add(pixels(page)["sum"])
        assert page.locator("#legend-entries li").count() == entries
    assert len(sums) == 4
    page.locator("label[for=color-cluster]").click()
    assert pixels(page)["sum"] in sums


def test_the_legend_hides_and_isolates_and_filters_add_up(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    page = show(inputs)
    ids, phases = (np.array(inputs.rows[n].to_pylist()) for n in ("cluster_id", "phase"))
    total = len(ids)

    def entry(name: str):
        return page.locator("#legend-entries li", has=page.get_by_text(name, exact=True))

    entry("label 2").locator(".entry").click()
    assert drawn(page) == total - (ids == 2).sum()
    entry("noise").locator(".entry").focus()
    page.keyboard.press("Space")
    assert drawn(page) == ((ids >= 0) & (ids != 2)).sum()
    # The key is at the same entry still, though the legend was made anew.
    page.keyboard.press("Space")
    assert drawn(page) == total - (ids == 2).sum()
    entry("label 4").locator(".only").focus()
    page.keyboard.press("Enter")
    assert drawn(page) == (ids == 4).sum()
    page.locator("label[for=color-phase]").click()
    entry("think").locator(".entry").click()
    left = int(((ids == 4) & (phases != "think")).sum())
    assert drawn(page) == left
    assert page.locator("#map-status").inner_text() == f"{left} of {total} points"
    row = lonely_rows(inputs, 1, noise=True)[0]
    page.mouse.move(*pixel_of(page, row))
    assert row["request_id"] not in page.locator("#tip").inner_text()
    page.locator("#show-all").click()
    assert drawn(page) == total


@pytest.mark.slow
def test_the_wheel_zooms_once_the_map_was_clicked_and_scrolls_the_page_before(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    page = show(inputs)
    row = lonely_rows(inputs, 1)[0]
    at = pixel_of(page, row)
    page.mouse.move(*at)
    page.mouse.wheel(0, 200)
    page.wait_for_function("scrollY > 0")
    assert zoom(page) == 1
    page.locator("#map").focus()
    page.mouse.move(*(at := pixel_of(page, row)))
    for _ in range(5):
        page.mouse.wheel(0, -240)
    page.wait_for_function("document.getElementById('map').dataset.zoom > 3")
    # The position under the pointer, which a wheel event gives in whole pixels, stays under it.
    assert np.allclose(pixel_of(page, row), at, atol=5)
    in_view = int(page.locator("#map").get_attribute("data-in-view"))
    assert 0 < in_view < drawn(page)
    page.keyboard.press("0")
    assert zoom(page) == 1


@pytest.mark.slow
def test_keys_and_drags_move_the_map(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    page = show(inputs)
    row = lonely_rows(inputs, 1)[0]
    x, y = pixel_of(page, row)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y - 30, steps=4)
    page.mouse.up()
    settled(page)
    assert np.allclose(pixel_of(page, row), (x + 40, y - 30), atol=1)
    # A drag is no click.
    assert page.locator(".card.chosen").count() == 0
    page.keyboard.press("ArrowLeft")
    settled(page)
    assert np.allclose(pixel_of(page, row), (x + 100, y - 30), atol=1)
    page.keyboard.press("+")
    assert zoom(page) == pytest.approx(1.5)
    page.locator("#zoom-out").click()
    assert zoom(page) == pytest.approx(1)


def test_a_card_and_its_cluster_on_the_map_are_chosen_together(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    page = show(inputs)
    before = pixels(page)["colors"]
    page.locator("#cluster-3 .pick").click()
    assert page.locator("#cluster-3 .pick").get_attribute("aria-pressed") == "true"
    assert pixels(page)["colors"] < before
    page.locator("#map").focus()
    page.keyboard.press("Escape")
    assert page.locator(".card.chosen").count() == 0
    page.keyboard.press("l")  # a click on a label would choose the label's cluster
    row = lonely_rows(inputs, 1)[0]
    page.mouse.click(*pixel_of(page, row))
    assert page.locator(".card.chosen").get_attribute("id") == f"cluster-{row['cluster_id']}"


@pytest.mark.slow
def test_cards_can_be_sorted(show, tmp_path: Path):
    page = show(later_run(tmp_path))

    def order() -> list[int]:
        return [int(c.get_attribute("id")[8:]) for c in page.locator(".card").all()]

    page.locator("label[for=sort-name]").click()
    assert order() == [0, 1, 2, 3, 4]
    page.locator("label[for=sort-age]").click()
    assert {*order()[:3]} == {0, 2, 4}


@pytest.mark.slow
def test_an_exemplar_shows_its_request_alone(show, tmp_path: Path):
    page = show(later_run(tmp_path))
    page.locator("#cluster-0 .exemplars button").click()
    assert drawn(page) == 50


def test_what_changed_since_the_parent_is_drawn_and_listed(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    page = show(inputs)
    lead = page.locator(".lead").inner_text()
    assert lead.startswith("1 new, 1 split off, 1 merged and 1 gone; 2 clusters kept")
    lineage = inputs.manifest["lineage"]
    assert page.locator(".ribbon").count() == len(lineage["links"])
    nodes = len(lineage["parent_clusters"]) + inputs.clusters.num_rows
    assert page.locator(".lineage-node").count() == nodes
    listed = page.locator("#lineage .two-thirds .events").inner_text()
    for name in ("split", "merged", "born", "absorbed", "died"):
        assert f"{name} in words" in listed
    assert "kept in words" not in listed


@pytest.mark.slow
def test_the_gate_and_the_drift_are_shown(show, tmp_path: Path):
    inputs = later_run(tmp_path, passed=False)
    page = show(inputs)
    alert = page.get_by_role("alert").inner_text()
    assert "Gate not passed" in alert and "check the traffic" in alert
    failed = page.locator("#quality tr.failed")
    assert failed.count() == 1
    assert "0.011 to 0.034" in failed.inner_text()
    drift = page.locator(".drift").nth(1).inner_text()
    assert "PSI 0.021" in drift and "0.008" in drift
    assert "50.0%\t60.0%" in drift


@pytest.mark.slow
def test_the_badge_counts_the_checks_that_were_measured(show, tmp_path: Path):
    inputs = later_run(tmp_path)
    checks = inputs.manifest["quality"]["gate"]["checks"]
    badge = show(inputs).locator(".gate.passed")
    assert badge.locator("strong").inner_text() == "✓ Gate passed"
    assert badge.locator("a").inner_text() == "2 checks"
    assert badge.locator("a").get_attribute("href") == "#quality"
    # One that had nothing to compare with was not measured.
    checks[0]["value"] = None
    assert show(inputs).locator(".gate a").inner_text() == "1 check"
    checks[1]["value"] = None
    assert show(inputs).locator(".gate").inner_text() == "✓ Gate passed"


@pytest.mark.slow
def test_the_badge_of_a_run_that_did_not_pass_has_the_reasons(show, tmp_path: Path):
    inputs = later_run(tmp_path, passed=False)
    badge = show(inputs).locator(".gate.not")
    assert badge.locator("strong").inner_text() == "✕ Gate not passed"
    reasons = inputs.manifest["quality"]["gate"]["reasons"]
    assert badge.locator("li").all_inner_texts() == reasons and reasons
    assert badge.locator("a").count() == 0


@pytest.mark.slow
def test_the_zone_mix_and_the_axes_are_shown(show, tmp_path: Path):
    page = show(later_run(tmp_path))
    assert page.locator(".mix .volume").count() == 4
    assert "2026-01-09 06:00 UTC, 25 rows" in page.locator(".mix title").nth(2).text_content()
    step = page.locator(".mix g").nth(2).locator(".bar")
    tops = [float(part.get_attribute("y")) for part in step.all()]
    assert tops == pytest.approx([136, 102, 68, 34, 0])
    axes = page.locator("#axes").inner_text()
    assert "near" in axes and "far" in axes and "60.0%" in axes


def test_markup_in_a_run_is_shown_as_text(show, tmp_path: Path):
    inputs = hostile(later_run(tmp_path))
    page = show(inputs)
    page.mouse.move(*pixel_of(page, lonely_rows(inputs, 1)[0]))
    # A line separator is blank space to inner_text.
    plain = " ".join(HOSTILE.split())
    assert plain in " ".join(page.locator("#tip").inner_text().split())
    assert plain in " ".join(page.locator("h1").inner_text().split())
    page.locator("label[for=color-request]").click()
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img").count() == 0


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: Browser, tmp_path: Path):
    path = tmp_path / "report.html"
    path.write_bytes(first_run(tmp_path).html().replace(b"</body>", b"<script>hacked=1</script>"))
    page = browser.new_page()
    messages: list[str] = []
    page.on("console", lambda m: messages.append(m.text))
    page.goto(path.as_uri())
    page.wait_for_selector("#map[data-frames]")
    assert page.evaluate("typeof hacked") == "undefined"
    assert len(messages) == 1 and "Content Security Policy" in messages[0]
    page.close()


@pytest.mark.slow
def test_sharp_screens_and_dark_ones_are_supported(show, tmp_path: Path):
    inputs = first_run(tmp_path)
    plain = pixels(show(inputs))
    sharp = pixels(show(inputs, device_scale_factor=2))
    assert (sharp["width"], sharp["height"]) == (2 * plain["width"], 2 * plain["height"])
    dark = pixels(show(inputs, color_scheme="dark"))
    assert plain["ground"] == "255,255,255"
    assert max(map(int, dark["ground"].split(","))) < 40


@pytest.mark.slow
def test_print_is_on_white_and_without_controls(show, tmp_path: Path):
    page = show(later_run(tmp_path, rows=6_000, count=24), color_scheme="dark")
    pdf = page.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 4
    before = pixels(page)
    page.emulate_media(media="print")
    after = pixels(page)
    assert after["ground"] == "255,255,255"
    # The map as it was drawn, not one of another shape.
    assert (after["width"], after["height"]) == (before["width"], before["height"])
    for control in ("#color-by", "#sort-by", ".map-tools", "#map-help"):
        assert page.locator(control).is_hidden()
    assert page.locator(".card").last.is_visible()
    page.emulate_media(media="screen")
    assert pixels(page)["ground"] != "255,255,255"


@pytest.mark.slow
def test_a_hundred_thousand_points_are_drawn_panned_and_zoomed(show, tmp_path: Path):
    page = show(later_run(tmp_path, rows=120_000, count=60))
    assert "100,000 of 120,000 rows" in page.locator("#map-says").inner_text()
    assert drawn(page) == 100_000
    whole = pixels(page)
    page.locator("#map").focus()
    for key in ("+", "+", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
    assert zoom(page) == pytest.approx(2.25, abs=0.01)
    assert pixels(page)["sum"] != whole["sum"]
    assert 0 < int(page.locator("#map").get_attribute("data-in-view")) < 100_000
    page.keyboard.press("0")
    assert pixels(page)["sum"] == whole["sum"]


@pytest.mark.slow
def test_a_phone_shows_it_all_in_one_column(show, tmp_path: Path):
    page = show(later_run(tmp_path), viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert pixels(page)["drawn"] > 300
