"""The frame of the page: views have addresses, keys and names, and faults are said in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

VIEWS = ("live", "chat", "inspect", "manifold", "router", "compare", "overhead")
# Of the views `make test` opens these.
DAILY = ("live", "inspect", "manifold")


@pytest.mark.parametrize(
    "view", [pytest.param(view, marks=() if view in DAILY else pytest.mark.slow) for view in VIEWS]
)
def test_every_view_has_an_address(show: Callable[..., Page], view: str):
    page = show(f"/{view}")
    expect(page.locator("main")).to_have_attribute("data-view", view)
    expect(page.locator("nav.views a[aria-current]")).to_have_text(view.capitalize())
    expect(page).to_have_title(f"{view.capitalize()} · attn")
    expect(page.locator("h1")).to_have_count(1)


def test_links_keys_and_the_history_change_the_view(show: Callable[..., Page]):
    page = show("/")
    expect(page.locator("main")).to_have_attribute("data-view", "live")
    page.get_by_role("link", name="Router", exact=True).click()
    expect(page.locator("main")).to_have_attribute("data-view", "router")
    page.keyboard.press("7")
    expect(page.locator("main")).to_have_attribute("data-view", "overhead")
    page.go_back()
    expect(page.locator("main")).to_have_attribute("data-view", "router")


def test_the_served_run_and_the_connection_are_shown(show: Callable[..., Page], sidecar):
    page = show("/live")
    run_id = sidecar.get("/discovery/status")["serving"]["run_id"]
    expect(page.locator(f"[data-served='{run_id}']")).to_be_visible()
    expect(page.locator("[data-connection=open]")).to_be_visible()


@pytest.mark.slow
def test_the_help_lists_the_keys_and_escape_closes_it(show: Callable[..., Page]):
    page = show("/live")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("Manifold")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.slow
def test_a_chosen_theme_stays(show: Callable[..., Page]):
    page = show("/live", color_scheme="light")
    body = page.locator("body")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    page.keyboard.press("t")
    expect(body).not_to_have_css("background-color", light)
    page.reload()
    page.wait_for_selector("main[data-view]")
    expect(body).not_to_have_css("background-color", light)


def test_an_address_that_is_no_view_says_so(show: Callable[..., Page]):
    page = show("/live")
    page.evaluate(
        "history.pushState(null, '', '/nothing'); dispatchEvent(new PopStateEvent('popstate'))"
    )
    expect(page.locator("main")).to_contain_text("There is no such view")
