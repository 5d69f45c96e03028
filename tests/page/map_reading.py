"""What the map of a page says of itself, and where its rows lie."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page, expect

ABOVE_ZERO = re.compile(r"^[1-9]")
NOT_ZOOMED = re.compile(r"^1(\.0*)?$")


def state(page: Page, name: str) -> str:
    """A fact of the map after what a change draws at the next frames."""
    page.evaluate("() => new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))")
    return page.locator("[data-map]").get_attribute(f"data-{name}") or ""


def expect_state(page: Page, name: str, value: str | re.Pattern[str]) -> None:
    """A fact of the map soon, however many frames the change takes on a busy machine."""
    expect(page.locator("[data-map]")).to_have_attribute(f"data-{name}", value)


def pixel_of(page: Page, row: dict[str, Any]) -> tuple[float, float]:
    """Where a row lies in the window."""
    x0, y0, x1, y1 = map(float, state(page, "view").split())
    box = page.locator("[data-map]").bounding_box()
    assert box
    across, down = (row["x"] - x0) / (x1 - x0), (y1 - row["y"]) / (y1 - y0)
    return box["x"] + across * box["width"], box["y"] + down * box["height"]
