"""View Manifold: the map of a run, its points, rows, clusters and nights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from map_reading import ABOVE_ZERO, NOT_ZOOMED, expect_state, pixel_of, state
from map_runs import lonely, publish_map
from playwright.sync_api import Page, expect
from running import Sidecar, post_rows, running, until
from served_runs import rows_of

from discovery.artifacts.memberships import BETWEEN

HOSTILE = "<img src=x onerror=hacked=1>\u202e\u0000" + "long " * 2_000


def lasso(page: Page, corners: list[tuple[float, float]]) -> None:
    page.keyboard.down("Shift")
    page.mouse.move(*corners[0])
    page.mouse.down()
    for corner in corners[1:]:
        page.mouse.move(*corner, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")


def test_the_map_of_the_served_run_has_every_point_and_a_card_of_each_cluster(manifold, nights):
    page = manifold()
    last = nights[1][-1]
    expect_state(page, "run", last.run_id)
    expect_state(page, "drawn", str(last.rows.num_rows))
    expect(page.locator(".card")).to_have_count(len(last.clusters))
    expect(page.locator("[data-map-status]")).to_contain_text("600 points")


def test_a_point_says_whose_it_is_and_leads_to_its_request(manifold, nights, watched):
    watched.allowed.append("404")  # the request is on the map, and not in the store
    page = manifold()
    page.keyboard.press("m")
    page.keyboard.press("l")  # a click on a label would choose the label's cluster
    for row in lonely(nights[1][-1], 3):
        page.mouse.move(*pixel_of(page, row))
        tip = page.locator(f".map-tip[data-point='{row['row']}']")
        expect(tip).to_contain_text(row["request_id"])
        expect(tip).to_contain_text(row["zone"].replace("_", " "))
        expect(tip).to_contain_text(f"{row['cluster_id']}  label {row['cluster_id']}")
        second = f"{row['second_cluster_id']}  label {row['second_cluster_id']} ("
        if row["second_probability"] >= BETWEEN * row["probability"]:
            expect(tip).to_contain_text(f"{second}{row['second_probability']:.2f})")
        else:
            expect(tip).not_to_contain_text("second cluster")
    page.mouse.click(*pixel_of(page, row))
    expect(page.locator(f"[data-request='{row['request_id']}']")).to_contain_text(
        "50 rows on this map"
    )
    link = page.locator("[data-inspect]")
    assert link.get_attribute("href") == (
        f"/inspect?request={row['request_id']}&position={row['position']}"
    )
    assert f"request={row['request_id']}" in page.url
    link.click()
    expect(page.locator("main")).to_have_attribute("data-view", "inspect")


def test_what_the_lasso_takes_is_listed_row_by_row(manifold, nights):
    page = manifold()
    last = nights[1][-1]
    row = lonely(last, 1)[0]
    x, y = pixel_of(page, row)
    corners = [(x - 60, y - 60), (x + 60, y - 60), (x + 60, y + 60), (x - 60, y + 60)]
    expected = 0
    x0, y0, x1, y1 = map(float, state(page, "view").split())
    box = page.locator("[data-map]").bounding_box()
    px = box["x"] + (last.rows["x"].to_numpy() - x0) / (x1 - x0) * box["width"]
    py = box["y"] + (y1 - last.rows["y"].to_numpy()) / (y1 - y0) * box["height"]
    expected = int(np.sum((np.abs(px - x) < 60) & (np.abs(py - y) < 60)))
    lasso(page, corners)
    expect(page.locator("[data-rows]")).to_have_attribute("data-rows", str(expected))
    expect(page.locator(".rows-pane .row-line").first).to_contain_text("chat-")
    assert int(state(page, "zoom").split(".")[0]) == 1, "a lasso does not pan"
    page.keyboard.press("m")
    page.keyboard.press("Escape")
    expect(page.locator("[data-rows]")).to_have_count(0)


def test_request_ids_of_rows_can_be_saved(manifold, nights):
    page = manifold()
    page.get_by_role("button", name="Take the rows in view").click()
    # The first view leaves out a few points at the edge.
    assert int(page.locator("[data-rows]").get_attribute("data-rows")) > 500
    with page.expect_download() as download:
        page.get_by_role("button", name="Save request ids").click()
    saved = Path(download.value.path()).read_text().split()
    assert set(saved) <= set(nights[1][-1].rows["request_id"].to_pylist())
    assert len(saved) == 12


def test_the_keyboard_alone_selects_lists_and_follows(manifold, nights):
    page = manifold()
    page.keyboard.press("/")
    page.keyboard.type("label 3")
    expect(page.locator("[data-found='1']")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#cluster-3.chosen")).to_be_visible()
    assert "cluster=3" in page.url
    ids = np.array(nights[1][-1].rows["cluster_id"].to_pylist())
    expect_state(page, "lit", str(int((ids == 3).sum())))
    page.get_by_role("button", name="List its rows").focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-rows]")).to_have_attribute("data-rows", str((ids == 3).sum()))
    page.locator(".rows-pane .row-line").first.focus()
    page.keyboard.press("Enter")
    page.locator("[data-map]").focus()
    for key in ("+", "+", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
    expect_state(page, "zoom", re.compile(r"^2\.25"))
    page.keyboard.press("0")
    expect_state(page, "zoom", NOT_ZOOMED)
    page.keyboard.press("[")
    expect(page.locator(f".manifold[data-run='{nights[1][1].run_id}']")).to_be_visible()


def test_the_card_of_a_chosen_cluster_is_scrolled_into_sight(manifold, nights):
    last = min(nights[1][-1].clusters, key=lambda one: one["share"])["cluster_id"]
    page = manifold(f"?cluster={last}")
    expect(page.locator(f"#cluster-{last}.chosen")).to_be_visible()
    pane, card = (page.locator(one).bounding_box() for one in ("[data-cards]", f"#cluster-{last}"))
    assert pane["y"] - 2 <= card["y"] < pane["y"] + pane["height"] - 100


def test_words_that_are_no_clusters_are_looked_for_as_a_request(manifold, watched):
    watched.allowed.append("404")
    page = manifold()
    box = page.get_by_role("searchbox")
    box.fill("chat-00003")
    box.press("Enter")
    expect(page.locator("[data-request='chat-00003']")).to_contain_text("50 rows on this map")
    box.fill("no such request")
    box.press("Enter")
    expect(page.locator("[data-request]")).to_contain_text("neither on this map nor in the store")


def test_the_slider_shows_other_nights_in_the_same_colours(manifold, nights):
    page = manifold("?cluster=2")
    _, made = nights
    slider = page.get_by_role("slider", name="Runs in the order of time")
    assert slider.get_attribute("aria-valuetext").startswith("2026-01-10 04:02:11 (4): 7 clusters")
    color = page.locator("#cluster-2").evaluate("n => n.style.getPropertyValue('--ink')")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(f".manifold[data-run='{made[1].run_id}']")).to_be_visible()
    assert f"run={made[1].run_id}" in page.url
    expect(page.locator("#cluster-2.chosen")).to_be_visible()
    assert page.locator("#cluster-2").evaluate("n => n.style.getPropertyValue('--ink')") == color
    expect(page.locator(".card")).to_have_count(5)
    page.keyboard.press("ArrowRight")
    expect(page.locator(f".manifold[data-run='{made[2].run_id}']")).to_be_visible()
    assert "run=" not in page.url


def test_zones_can_be_hidden_and_clusters_grouped(manifold, nights):
    page = manifold("?color=zone")
    zones = np.array(nights[1][-1].rows["zone"].to_pylist())
    page.locator("[data-zones]").get_by_role("button", name="long range").click()
    expect_state(page, "drawn", str(int((zones != "long_range").sum())))
    page.get_by_role("radio", name="By zone").click()
    expect(page.locator("details.group")).to_have_count(
        len({c["zone"] for c in nights[1][-1].clusters})
    )
    page.locator("details.group summary").first.click()
    expect(page.locator("details.group[open] .card").first).to_be_visible()
    clusters = nights[1][-1].clusters
    page.get_by_role("radio", name="By family").click()
    families = {c["family"] for c in clusters}
    expect(page.locator("details.group")).to_have_count(len(families))
    # A family is named after the largest of its clusters, and holds all of them.
    largest = max(
        clusters, key=lambda c: sum(o["share"] for o in clusters if o["family"] == c["family"])
    )
    own = [c for c in clusters if c["family"] == largest["family"]]
    first = page.locator("details.group").first
    expect(first.locator("summary")).to_contain_text(max(own, key=lambda c: c["share"])["label"])
    first.locator("summary").click()
    expect(first.locator(".card")).to_have_count(len(own))
    expect(first.locator(".card").first).to_contain_text(
        "found again in half of the requests by 70.0%"
    )


def test_requests_appear_as_they_arrive_and_leave_a_trail(
    watched, runs: Path, tmp_path: Path, site, sidecar: Sidecar
):
    page = watched.open(f"{site}/manifold")
    page.wait_for_selector("[data-map][data-frames]")
    page.get_by_role("tab", name="Live").click()
    expect(page.locator(".map-side")).to_contain_text("Nothing has arrived")
    arriving = rows_of(40, "arriving")
    assert post_rows(sidecar, arriving).status_code == 200
    expect(page.locator(".arrivals .row-line").first).to_contain_text("arriving")
    expect_state(page, "marked", ABOVE_ZERO)
    page.locator(".arrivals .row-line").first.click()
    expect(page.locator("[data-request^='arriving']")).to_contain_text(
        "10 of 10 rows from the store"
    )
    expect(page.locator("[data-request] .row-line")).to_have_count(10)


def test_the_scope_shows_the_requests_of_a_session(watched, site, sidecar: Sidecar):
    batch = rows_of(30, "insession")
    at = batch.schema.get_field_index("session_id")
    batch = batch.set_column(at, batch.schema.field(at), pa.array(["s-1"] * 30))
    assert post_rows(sidecar, batch).status_code == 200
    sidecar.flush()
    page = watched.open(f"{site}/manifold?scope=session&session=s-1")
    page.wait_for_selector("[data-map][data-frames]")
    expect(page.locator("[data-scope-says]")).to_have_text("30 rows of 3 requests")
    expect_state(page, "marked", "30")
    expect_state(page, "lit", "0")
    page.get_by_role("radio", name="Recent").click()
    expect(page.locator("[data-scope-says]")).to_contain_text("rows of")
    page.get_by_role("radio", name="Saved").click()
    expect(page.locator("[data-scope-says]")).to_contain_text("No trace is open")
    page.get_by_role("radiogroup", name="Scope").get_by_role("radio", name="All").click()
    expect_state(page, "lit", ABOVE_ZERO)


@pytest.mark.parametrize("rows", [0, 1, 2, 997])
def test_maps_of_hardly_any_points_are_shown(watched, tmp_path: Path, rows: int):
    publish_map(tmp_path / "runs", rows=rows, count=0 if rows < 3 else 3)
    with running(tmp_path, "--page", runs=tmp_path / "runs") as sidecar:
        page = watched.open(f"{sidecar.url}/manifold")
        page.wait_for_selector("[data-map][data-frames]")
        expect_state(page, "drawn", str(rows))
        page.get_by_role("button", name="Take the rows in view").click()
        taken = int(page.locator("[data-rows]").get_attribute("data-rows"))
        assert taken == rows if rows < 3 else taken > 900
        page.locator("[data-map]").focus()
        for key in ("+", "ArrowLeft", "0"):
            page.keyboard.press(key)
        expect_state(page, "zoom", NOT_ZOOMED)
        page.close()


def test_texts_of_others_stay_texts(watched, tmp_path: Path):
    night = publish_map(tmp_path / "runs", text=HOSTILE[:1_000])
    publish_map(tmp_path / "runs", 1, text=HOSTILE[:1_000], parent=night)
    with running(tmp_path, "--page", runs=tmp_path / "runs") as sidecar:
        page = watched.open(f"{sidecar.url}/manifold?cluster=%3Cimg%3E&session={HOSTILE[:28]}")
        page.wait_for_selector("[data-map][data-frames]")
        page.mouse.move(*pixel_of(page, lonely(night, 1)[0]))
        page.locator(".card .exemplars button").first.click()
        expect(page.locator("[data-request]")).to_contain_text("<img src=x onerror=hacked=1>")
        page.get_by_role("searchbox").fill(f"none {HOSTILE}")
        page.get_by_role("searchbox").press("Enter")
        expect(page.locator("[data-request]")).to_contain_text("neither on this map nor in")
        assert page.evaluate("typeof hacked") == "undefined"
        assert page.locator("img[src=x]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1440
        page.close()


def test_a_run_that_is_swapped_in_is_shown_without_a_refresh_and_a_deleted_one_says_so(
    watched, tmp_path: Path
):
    runs = tmp_path / "runs"
    first = publish_map(runs, 0)
    with running(tmp_path, "--auto-reload-interval", "1", "--page", runs=runs) as sidecar:
        followed = watched.open(f"{sidecar.url}/manifold")
        pinned = watched.open(f"{sidecar.url}/manifold?run={first.run_id}")
        for page in (followed, pinned):
            page.wait_for_selector(f"[data-map][data-run='{first.run_id}'][data-frames]")
        second = publish_map(runs, 1, rows=997, parent=first, seed=1)
        followed.wait_for_selector(f"[data-map][data-run='{second.run_id}']", timeout=60_000)
        expect(followed.locator("[data-map-status]")).to_contain_text("997 points")
        expect_state(pinned, "run", first.run_id)
        shutil.rmtree(runs / first.run_id)
        watched.allowed += ["404", "410"]
        expect(pinned.locator(".notice[role=alert]").first).to_contain_text(
            "no longer on the sidecar's disk", timeout=60_000
        )
        pinned.get_by_role("link", name="Show the run that is served").first.click()
        pinned.wait_for_selector(f"[data-map][data-run='{second.run_id}']")
        followed.close()
        pinned.close()


def test_a_run_that_does_not_exist_says_what_to_do(watched, lineage_site):
    watched.allowed.append("404")
    page = watched.open(f"{lineage_site[0]}/manifold?run=2020-01-01T00-00-00")
    expect(page.get_by_role("alert")).to_contain_text("there is no run")
    page.get_by_role("link", name="Show the run that is served").click()
    page.wait_for_selector("[data-map][data-frames]")


def test_without_a_run_the_view_says_how_one_is_made(watched, tmp_path: Path):
    with running(tmp_path, "--page", runs=tmp_path / "none") as sidecar:
        page = watched.open(f"{sidecar.url}/manifold")
        expect(page.locator("[data-state=empty]")).to_contain_text("attn discover")
        page.close()


PICTURE = """() => {
  const image = document.createElement("canvas");
  const points = document.querySelector("canvas.points");
  Object.assign(image, {width: points.width, height: points.height});
  const pen = image.getContext("2d");
  pen.drawImage(points, 0, 0);
  const {data} = pen.getImageData(0, 0, image.width, image.height);
  let colored = 0;
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b, a] = [data[i], data[i + 1], data[i + 2], data[i + 3]];
    if (a > 20 && Math.max(r, g, b) - Math.min(r, g, b) > 40) colored++;
  }
  return colored;
}"""


@pytest.mark.parametrize("painter", ["image", "webgl"])
def test_both_painters_draw_the_points_where_they_lie(manifold, nights, painter: str):
    page = manifold(f"?painter={painter}")
    expect_state(page, "painter", painter)
    until(lambda: page.evaluate(PICTURE) > 300, "no points are drawn")
    page.keyboard.press("m")
    page.keyboard.press("l")
    row = lonely(nights[1][-1], 1)[0]
    x, y = pixel_of(page, row)
    box = page.locator("[data-map]").bounding_box()
    at = """([x, y]) => {
      const points = document.querySelector("canvas.points");
      const scale = points.width / points.clientWidth;
      const image = document.createElement("canvas");
      Object.assign(image, {width: points.width, height: points.height});
      const pen = image.getContext("2d");
      pen.fillStyle = "white";
      pen.fillRect(0, 0, image.width, image.height);
      pen.drawImage(points, 0, 0);
      return Math.min(...pen.getImageData(x * scale, y * scale, 1, 1).data.slice(0, 3));
    }"""
    here = page.evaluate(at, [x - box["x"], y - box["y"]])
    beside = page.evaluate(at, [x - box["x"] + 12, y - box["y"]])
    assert here < 220 < beside


@pytest.mark.parametrize("width", [400, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(manifold, width: int, scheme: str):
    page = manifold(viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect_state(page, "drawn", "600")
