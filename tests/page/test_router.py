"""View Router: evidence of zones, and settings that are taken over for the next question."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from looks import assert_legible
from playwright.sync_api import Page, expect
from running import Sidecar
from traffic import Traffic

from capture_kernels.fingerprint.zones import ZONES
from sidecar.traits import BY_ZONE


@pytest.fixture(scope="module")
def traffic(sidecar: Sidecar) -> Iterator[Traffic]:
    with Traffic(sidecar) as found:
        yield found


def kept_settings(page: Page) -> dict:
    return json.loads(page.evaluate("localStorage.getItem('attn.settings')"))


def test_each_zone_has_a_meter_of_its_evidence(show: Callable[..., Page], traffic: Traffic):
    page = show("/router")
    meters = page.locator("[data-panel=evidence]").get_by_role("meter")
    expect(meters).to_have_count(len(ZONES))
    values = [float(meters.nth(i).get_attribute("aria-valuenow")) for i in range(len(ZONES))]
    assert all(0 <= value <= 1 for value in values) and max(values) > 0.4
    decisions = page.locator("[data-panel=decisions] tbody tr")
    expect(decisions.first).to_be_visible()
    expect(decisions.first.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(r"Evidence: syntax floor \d")
    )


def test_recommended_settings_are_applied_to_the_next_run_and_undone(
    show: Callable[..., Page], traffic: Traffic
):
    page = show("/router")
    box = page.locator("[data-panel=settings]")
    expect(box.locator("tbody tr")).to_have_count(3)
    before = kept_settings(page)
    box.get_by_role("button", name="Apply to next run").click()
    expect(box.get_by_role("button", name="Undo")).to_be_visible()
    applied = kept_settings(page)
    assert applied != before
    # What is applied is a hint of the sidecar: that of a zone, or one which traits have changed.
    assert 0.1 <= applied["temperature"] <= 1 and 0.5 <= applied["top_p"] <= 1
    assert applied["mode"] in ("raw", "sketch", "fingerprint")
    assert {name for name in before if before[name] != applied[name]} <= {
        "temperature", "top_p", "mode",
    }  # fmt: skip
    page.get_by_role("link", name="Ask in Chat").click()
    expect(page.locator("main")).to_have_attribute("data-view", "chat")
    expect(page.locator("main")).to_contain_text(f"temperature {applied['temperature']:g}")
    page.go_back()
    page.reload()
    page.wait_for_selector("main[data-view=router]")
    assert kept_settings(page) == applied


def test_the_reason_of_a_hint_is_shown(show: Callable[..., Page], traffic: Traffic):
    page = show("/router")
    hints = page.locator("[data-panel=hints]")
    expect(hints.locator("tbody tr").first).to_be_visible()
    whys = [setting.why for setting in BY_ZONE.values()]
    assert any(why in hints.inner_text() for why in whys)


@pytest.mark.slow
def test_one_session_and_one_request_can_be_looked_at(
    show: Callable[..., Page], sidecar: Sidecar, traffic: Traffic
):
    page = show("/router")
    expect(page.locator("[data-panel=decisions] tbody tr").first).to_be_visible()
    page.get_by_label("Whose rows").select_option("session:shop")
    assert "session=shop" in page.url
    expect(page.locator("[data-panel=evidence]").get_by_role("meter")).to_have_count(5)
    sidecar.flush()
    page.get_by_label("Request id").fill("stored-0000000")
    # What is typed stays while rows arrive and draw the view again.
    shown = page.locator("[data-panel=decisions] tbody").inner_text()
    expect(page.locator("[data-panel=decisions] tbody")).not_to_have_text(
        shown, use_inner_text=True
    )
    page.get_by_role("button", name="Show").click()
    path = page.locator("[data-panel=request]")
    expect(path.get_by_role("img").first).to_be_visible()
    facts = sidecar.get("/requests/stored-0000000?limit=0")
    expect(path.locator("svg rect")).to_have_count(facts["zone_spans"])
    page.get_by_role("button", name="All requests").click()
    expect(path).to_have_count(0)


def test_a_request_that_is_not_stored_says_so(show: Callable[..., Page], watched):
    watched.allowed.append("404 (Not Found)")
    page = show("/router?request=nobody%3Cb%3E")
    box = page.locator("[data-panel=request] [data-state=empty]")
    expect(box).to_contain_text("no request 'nobody<b>'")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1_920])
def test_it_is_legible_on_any_screen(
    show: Callable[..., Page], traffic: Traffic, scheme: str, width: int
):
    page = show("/router?request=stored-0000000", color_scheme=scheme,
                viewport={"width": width, "height": 900})  # fmt: skip
    expect(page.locator("[data-panel=request]").get_by_role("img").first).to_be_visible()
    assert_legible(page)
