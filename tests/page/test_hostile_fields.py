"""Hostile text in the fields of Router, Compare and Overhead, each tried whole and cut to 900."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from page_engine import HOSTILE, hacked, overflow
from playwright.sync_api import Page, expect

SECOND = 1_000
# Of a measurement that has an answer: it may have more when it is looked at.
ANSWERED = re.compile(r"[1-9]\d*/")
NARROW = {"width": 400, "height": 860}
# What a request or a session that is not there, or cannot be, is answered with.
REFUSED = ["400", "404", "422"]
TEXTS = [*HOSTILE, HOSTILE[-1][:900]]
NAMES = ("markup", "directions", "controls", "templates", "huge", "long")
# How each begins where it is shown: nothing in it is hidden.
SEEN = (
    "<img src=x onerror",
    "‹202e›gnihton",
    "NUL ␀ bell ␇",
    "${window.hacked",
    "long xxx",
    "long xxx",
)
hostile = pytest.mark.parametrize("text", TEXTS, ids=NAMES)


def assert_harmless(page: Page) -> None:
    assert hacked(page) is None
    assert overflow(page) <= 0
    assert page.locator("main img[src=x]").count() == 0


@pytest.mark.parametrize(("text", "seen"), list(zip(TEXTS, SEEN, strict=True)), ids=NAMES)
def test_a_request_of_router(show: Callable[..., Page], watched, text: str, seen: str):
    watched.allowed += REFUSED
    page = show("/router", viewport=NARROW)
    field = page.get_by_label("Request id")
    field.fill(text)
    field.press("Enter")
    panel = page.locator("[data-panel=request]")
    expect(panel.locator("[data-state=empty], [data-state=error]")).to_be_visible()
    expect(panel.locator("bdi.given").first).to_contain_text(seen)
    assert_harmless(page)


@hostile
def test_a_session_of_compare(show: Callable[..., Page], watched, text: str):
    watched.allowed += REFUSED
    page = show("/compare?a=session:x&b=session:y", viewport=NARROW)
    field = page.get_by_label("Which session, side A")
    expect(field).to_have_value("x")
    field.fill(text)
    field.press("Enter")
    page.wait_for_url(lambda url: "a=session%3Ax&" not in url)
    expect(page.locator("[data-state=error], [data-state=empty]").first).to_be_visible()
    assert_harmless(page)


@hostile
def test_a_question_of_overhead(watched, with_engine, text: str):
    sidecar, _ = with_engine
    page = watched.open(f"{sidecar.url}/overhead", viewport=NARROW)
    box = page.locator("[data-panel=modes]")
    box.get_by_label("Question").fill(text)
    box.get_by_role("button", name="Measure").click()
    # Its first answer is the whole way of the text, to the engine and back; the rest is the same.
    expect(box.get_by_role("meter", name="Progress")).to_contain_text(ANSWERED, timeout=60 * SECOND)
    box.get_by_role("button", name="Stop").click()
    expect(box).to_contain_text("It was stopped")
    assert_harmless(page)
