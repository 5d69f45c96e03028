"""An imported trace opens in every view: here in Live, Manifold, Router, Compare and Overhead, in
test_trace_files.py in Chat and Inspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from looks import assert_legible
from map_reading import expect_state, pixel_of
from page_engine import HOSTILE, hacked
from playwright.sync_api import Page, expect
from running import Sidecar
from trace_lines import header, import_file, kept_of_the_run, lines_of, measured_trace, trace_of

from capture_kernels.fingerprint.zones import ZONES
from sidecar.http.compare.axes import NOT_KNOWN

Show = Callable[..., Page]


def test_an_imported_trace_is_a_way_over_the_map(show: Show, sidecar: Sidecar, watched: Any):
    watched.allowed.append("404")  # the request is not in the store
    vectors = kept_of_the_run(12)
    run = sidecar.get("/discovery/status")["serving"]["run_id"]
    place = f"/discovery/runs/{run}/place"
    placed = sidecar.client.post(place, json={"vectors": vectors}).json()["rows"]
    page = show("/manifold?scope=saved")
    page.wait_for_selector("[data-map][data-frames]")
    expect(page.locator("[data-scope-says]")).to_contain_text("No trace is open: import one")
    page.locator("[data-import]").set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": measured_trace(vectors)}
    )
    expect(page.locator("[data-scope-says]")).to_have_text("12 rows of 1 trace")
    expect_state(page, "ways", "1")
    expect_state(page, "marked", "12")
    expect(page.locator("[data-map-status]")).to_contain_text("12 marked · 1 trace")
    # A row of it opens it; its rows are where the sidecar puts them, and lead to its tokens.
    last = placed[-1]
    page.mouse.click(*pixel_of(page, last))
    pane = page.locator("[data-request='t-1']")
    expect(pane).to_contain_text("12 rows of an open trace, where this run puts them")
    lines = pane.locator(".row-line")
    expect(lines).to_have_count(12)
    at = [int(one.split("@")[1].split()[0]) for one in lines.all_inner_texts()]
    assert at == [*range(1, 13)]
    for line, row in zip(lines.all_inner_texts(), placed, strict=True):
        assert row["zone"].replace("_", " ") in line
        assert ("noise" if row["cluster_id"] < 0 else f"\n{row['cluster_id']} ") in line
    lines.nth(4).click()
    page.get_by_role("link", name="Open in Inspect").click()
    expect(page.locator("main")).to_have_attribute("data-view", "inspect")
    expect(page.locator("main")).to_contain_text("imported trace t-1")
    # The row at position 5 is the one that led to token 6.
    expect(page.locator("main")).to_contain_text("token 6")


def test_traces_that_cannot_be_placed_say_why(show: Show):
    page = show("/manifold?scope=saved")
    page.wait_for_selector("[data-map][data-frames]")
    content = lines_of(*trace_of(["a ", "b ", "c"], 2, {1: {0: 0.5}}))
    page.locator("[data-import]").set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": content}
    )
    expect(page.locator("[data-scope-says]")).to_contain_text("1 trace open, without fingerprints")
    expect_state(page, "ways", "0")
    page.goto(page.url.split("/manifold")[0] + "/compare?a=trace:t-1&b=run:latest")
    page.locator("[data-import]").first.set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": content}
    )
    expect(page.locator("[data-state=empty]")).to_contain_text("this trace has no fingerprints")


def test_an_imported_trace_is_compared_with_a_run(show: Show, sidecar: Sidecar):
    vectors = kept_of_the_run(20)
    page = show("/compare")
    page.get_by_label("Kind of side A").select_option("trace")
    page.locator("[data-import]").set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": measured_trace(vectors)}
    )
    page.get_by_label("Which trace, side A").select_option("t-1")
    page.get_by_label("Kind of side B").select_option("run")
    expect(page.locator("[data-similarity]")).to_be_visible()
    given = {"name": "t-1", "vectors": vectors, "model": "m", "phases": ["output"] * 20}
    given["phases"][0] = "prompt"  # the row that led to the answer's first token
    found = sidecar.client.post("/compare", json={"a": given, "b": "run:latest"}).json()
    total = page.locator("[data-panel=similarity] .total")
    expect(total).to_have_text(f"{found['similarity']['total']:.3f}")
    assert page.locator(".differences li").all_inner_texts() == found["words"]
    phases = page.locator("[data-panel=phases] tbody tr")
    assert [row.split()[:2] for row in phases.all_inner_texts()] == [
        [row["phase"], f"{100 * row['a']:.1f}%"] for row in found["phases"]
    ]
    expect(page.locator("[data-panel=words]")).to_contain_text("20 rows of 1 request")
    expect(page.locator("[data-panel=words]")).to_contain_text("A is one request")
    expect(page.locator("[data-panel=axes]")).to_contain_text(NOT_KNOWN)
    expect(page.locator("[data-panel=axes] [data-differs]")).to_have_count(0)


def test_the_router_looks_at_an_imported_trace(show: Show, sidecar: Sidecar):
    vectors = kept_of_the_run(20)
    records = [{"vector": vector} for vector in vectors]
    answer = sidecar.client.post("/classify", json={"records": records}).json()["results"]
    said = [one["manifold"] for one in answer]
    page = show("/router")
    import_file(page, measured_trace(vectors))
    assert "trace=t-1" in page.url
    expect(page.get_by_label("Whose rows")).to_have_value("trace:t-1")
    evidence = page.locator("[data-panel=evidence]")
    expect(evidence).to_contain_text("mean of 20 rows of the trace")
    expect(evidence.get_by_role("meter")).to_have_count(5)
    # The zones and clusters of its rows are those that the sidecar finds.
    path = page.locator("[data-panel=request]")
    spans = 1 + sum(a["zone"] != b["zone"] for a, b in pairwise(said))
    expect(path.locator("svg.path rect")).to_have_count(spans)
    last = page.locator("[data-panel=decisions] tbody tr")
    expect(last).to_have_count(10)
    for line, one in zip(last.all_inner_texts(), reversed(said), strict=False):
        assert one["zone"].replace("_", " ") in line and f"{100 * one['confidence']:.0f}%" in line
    hints = {one["cluster_id"] for one in sidecar.get("/centroids")["run_clusters"]}
    known = {one["cluster_id"] for one in said} & hints
    expect(page.locator("[data-panel=hints] tbody tr")).to_have_count(min(10, len(known)))
    page.get_by_role("button", name="Apply to next run").click()
    page.get_by_label("Whose rows").select_option("")
    expect(path).to_have_count(0)
    assert "trace=" not in page.url


def test_live_shows_an_imported_trace_beside_the_run(show: Show, sidecar: Sidecar):
    vectors = kept_of_the_run(20)
    records = [{"vector": vector} for vector in vectors]
    answer = sidecar.client.post("/classify", json={"records": records}).json()["results"]
    said = [one["manifold"] for one in answer]
    page = show("/live")
    import_file(page, measured_trace(vectors))
    assert "trace=t-1" in page.url
    meters = page.locator("[data-panel=zones]").get_by_role("meter")
    expect(meters).to_have_count(5)
    shares = [float(meters.nth(i).get_attribute("aria-valuenow")) for i in range(5)]
    zones = Counter(one["zone"] for one in said)
    assert shares == pytest.approx([zones[zone] / 20 for zone in ZONES], abs=0.001)
    clusters = Counter(one["cluster_id"] for one in said if one["cluster_id"] >= 0)
    lines = page.locator("[data-panel=clusters] tbody tr")
    expect(lines).to_have_count(min(9, len(clusters)))
    expect(lines.first).to_contain_text(f"{5 * clusters.most_common(1)[0][1]:.1f}%")
    expect(page.locator("[data-panel=request] svg.path")).to_be_visible()
    assert_legible(page)
    page.get_by_role("button", name="What arrives").click()
    expect(page.locator("[data-panel=ingest]")).to_be_visible()
    assert "trace=" not in page.url


def test_live_says_why_a_trace_shows_nothing(show: Show):
    page = show("/live?trace=gone")
    expect(page.locator("[data-panel=zones]")).to_contain_text("import its file")


def test_the_router_says_why_a_trace_has_no_evidence(show: Show):
    page = show("/router?trace=gone")
    expect(page.locator("[data-panel=evidence]")).to_contain_text("import its file")
    import_file(page, lines_of(*trace_of(["a ", "b ", "c"], 2, {1: {0: 0.5}})))
    expect(page.locator("[data-panel=evidence]")).to_contain_text("no fingerprints")


def test_overhead_says_what_an_imported_trace_holds(show: Show):
    page = show("/overhead")
    import_file(page, measured_trace(kept_of_the_run(20)))
    cells = page.locator("[data-panel=imported] tbody tr td, [data-panel=imported] tbody tr th")
    assert [one.strip() for one in cells.all_inner_texts()[2:6]] == ["22", "20", "0", "20"]
    expect(cells.nth(6)).to_contain_text("KB")


@pytest.mark.parametrize("view", ["live", "router", "overhead"])
def test_hostile_names_of_traces_are_text(show: Show, view: str):
    records = trace_of(["a ", "b ", "c"], 2, {1: {0: 0.5}}, {1: kept_of_the_run(1)[0]})
    records[0] = header(trace_id=HOSTILE[0], model=HOSTILE[2])
    page = show(f"/{view}")
    import_file(page, lines_of(*records))
    expect(page.locator("main")).to_contain_text("<img src=x")
    assert hacked(page) is None
