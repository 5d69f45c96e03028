"""View Overhead: what capture costs, by the page's clock and by the engine's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from looks import assert_legible
from page_engine import ask
from playwright.sync_api import Page, expect

SECOND = 1_000


def test_an_answer_is_accounted_for(watched, with_engine):
    sidecar, _ = with_engine
    page = watched.open(f"{sidecar.url}/chat")
    ask(page, "What does Felix's badge say?", max_tokens="8")
    page.get_by_role("link", name="Overhead").click()
    last = page.locator("[data-panel=last]")
    for name in ("Tokens a second", "First token after", "Attention", "Capture took"):
        expect(last).to_contain_text(name)
    tokens = last.locator("dd").first.inner_text()
    assert 1 <= int(tokens) <= 8
    expect(page.locator("[data-panel=answers] tbody tr")).to_have_count(1)
    assert_legible(page)


def test_the_modes_are_measured_on_the_engine(watched, with_engine):
    sidecar, _ = with_engine
    page = watched.open(f"{sidecar.url}/overhead")
    box = page.locator("[data-panel=modes]")
    box.get_by_role("button", name="Measure").click()
    rows = box.locator("tbody tr")
    expect(box.get_by_role("button", name="Measure")).to_be_visible(timeout=150 * SECOND)
    names = [rows.nth(i).locator("b").inner_text() for i in range(rows.count())]
    assert names == ["nothing", "fingerprint", "sketch", "raw links"]
    attention = [rows.nth(i).locator("td").nth(6).inner_text() for i in range(4)]
    assert attention[0] == "0 B" and "0 B" not in attention[1:]
    page.reload()
    expect(rows).to_have_count(4)  # kept in the tab


def test_a_measurement_is_stopped(watched, with_engine):
    sidecar, _ = with_engine
    page = watched.open(f"{sidecar.url}/overhead")
    box = page.locator("[data-panel=modes]")
    box.get_by_role("button", name="Measure").click()
    box.get_by_role("button", name="Stop").click()
    expect(box).to_contain_text("It was stopped")


def test_without_an_engine_it_says_what_to_do(show: Callable[..., Page]):
    page = show("/overhead")
    expect(page.locator("[data-panel=engine]")).to_contain_text("--engine-url")
    expect(page.locator("[data-panel=sidecar]")).to_contain_text("a row")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1_920])
def test_it_is_legible_on_any_screen(watched, with_engine, scheme: str, width: int):
    sidecar, _ = with_engine
    page = watched.open(f"{sidecar.url}/overhead", color_scheme=scheme,
                        viewport={"width": width, "height": 900})  # fmt: skip
    expect(page.locator("[data-panel=engine]")).to_contain_text("captures")
    expect(page.locator("[data-panel=sidecar]")).to_contain_text("Classified in")
    assert_legible(page)
