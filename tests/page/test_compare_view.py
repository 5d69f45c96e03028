"""View Compare: what differs between two sides, the same as the sidecar says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from looks import assert_legible
from playwright.sync_api import Page, expect
from running import Sidecar, post_rows, running
from served_runs import publish, rows_of

SIDES = "/compare?a=session:local&b=session:far"
JSON = {"accept": "application/json"}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar with two runs, and two sessions that behave differently."""
    runs: Path = tmp_path_factory.mktemp("runs")
    publish(runs)
    publish(runs, 1, change=lambda m: m.update(parent_run="2026-01-10T04-02-11-2"))
    with running(tmp_path_factory.mktemp("sidecar"), "--page", runs=runs) as found:
        rows = rows_of(6_000, "r")
        vectors = np.stack(rows.column("vector").to_pylist())
        near = vectors[:, 0] > np.median(vectors[:, 0])
        for session, chosen in (("local", near), ("far", ~near)):
            part = rows.filter(pa.array(chosen)).slice(0, 1_000)
            names = pc.binary_join_element_wise(part.column("request_id"), session, "-")
            at = part.schema.get_field_index("request_id")
            part = part.set_column(at, part.schema.field("request_id"), names)
            at = part.schema.get_field_index("session_id")
            column = pa.array([session] * part.num_rows)
            part = part.set_column(at, part.schema.field("session_id"), column)
            assert post_rows(found, part).status_code == 200
        yield found


def test_it_shows_what_the_sidecar_found(show: Callable[..., Page], sidecar: Sidecar):
    found = sidecar.client.get(SIDES, headers=JSON).json()
    page = show(SIDES)
    total = page.locator("[data-panel=similarity] .total")
    expect(total).to_have_text(f"{found['similarity']['total']:.3f}")
    parts = page.locator("[data-panel=similarity] .parts li")
    expect(parts).to_have_count(len(found["similarity"]["parts"]))
    words = page.locator(".differences li")
    assert words.all_inner_texts() == found["words"] and len(found["words"]) > 1
    differing = page.locator("[data-panel=zones] tr[data-differs]")
    assert differing.count() == sum(bool(zone["differs"]) for zone in found["zones"]) > 0
    bars = page.locator(".histograms .bar-a")
    expect(bars).to_have_count(16)
    label = page.locator(".histograms").get_attribute("aria-label")
    assert f"8–15: A {100 * found['histogram']['a'][3]:.1f}%" in label


def test_axes_name_a_shift_where_the_sidecar_has_evidence_of_one(
    show: Callable[..., Page], sidecar: Sidecar
):
    found = sidecar.client.get(SIDES, headers=JSON).json()["axes"]
    page = show(SIDES)
    panel = page.locator("[data-panel=axes]")
    expect(panel).to_contain_text("95% intervals, by request")
    if (rest := panel.get_by_role("button", name="All")).count():
        rest.click()
    shown = panel.locator(".axes > li")
    expect(shown).to_have_count(len(found))
    assert any(axis["differs"] for axis in found)
    for line, axis in zip(shown.all(), found, strict=True):
        assert line.locator("p").inner_text() == axis["words"]
        assert line.get_attribute("data-differs") == ("yes" if axis["differs"] else None)
        # Both intervals are drawn, and said.
        assert line.locator("svg .span").count() == 2
        assert line.locator("svg").get_attribute("aria-label").count(" to ") == 2


def test_a_question_is_one_click_and_sides_are_swapped(show: Callable[..., Page], sidecar: Sidecar):
    page = show("/compare")
    page.get_by_role("link", name="What changed since the run before?").click()
    expect(page.locator("[data-similarity]")).to_be_visible()
    first = page.get_by_label("Which run, side A").input_value()
    page.get_by_role("button", name="Swap the sides").click()
    expect(page.get_by_label("Which run, side B")).to_have_value(first)
    expect(page.locator("[data-similarity]")).to_be_visible()
    page.go_back()
    expect(page.get_by_label("Which run, side A")).to_have_value(first)


def test_sides_are_chosen_by_kind_and_name(show: Callable[..., Page], sidecar: Sidecar):
    page = show("/compare")
    page.get_by_label("Which session, side A").fill("local")
    page.get_by_label("Which session, side A").press("Enter")
    page.get_by_label("Kind of side B").select_option("run")
    expect(page.locator("[data-similarity]")).to_be_visible()
    assert "a=session%3Alocal" in page.url and "b=run%3Alatest" in page.url
    expect(page.locator("[data-panel=words]")).to_contain_text("session local")


def test_what_cannot_be_compared_says_why(show: Callable[..., Page], watched, sidecar: Sidecar):
    watched.allowed += ("404 (Not Found)",)
    page = show("/compare?a=session:nobody&b=run:latest")
    failure = page.locator("[data-state=error]")
    answer = sidecar.client.get("/compare?a=session:nobody&b=run:latest", headers=JSON)
    expect(failure).to_contain_text(answer.json()["error"])
    page.goto(f"{sidecar.url}/compare?a=trace:gone&b=run:latest")
    expect(page.locator("[data-state=empty]")).to_contain_text("import its file")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1_920])
def test_it_is_legible_on_any_screen(
    show: Callable[..., Page], sidecar: Sidecar, scheme: str, width: int
):
    page = show(SIDES, color_scheme=scheme, viewport={"width": width, "height": 900})
    expect(page.locator("[data-similarity]")).to_be_visible()
    assert_legible(page)
