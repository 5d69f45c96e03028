"""Inspect: a request row by row, from the conversation, from the store, or measured again."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from looks import assert_legible
from page_engine import HOSTILE, NEEDLE, ask, hacked, overflow, token, tokens
from playwright.sync_api import Page, expect
from running import post_rows
from served_runs import rows_of

Chat = Callable[..., Page]
GREEDY = {"temperature": "0", "max_tokens": "8"}
MANY = 100_000


def to_inspect(page: Page) -> None:
    page.get_by_role("link", name="Inspect", exact=True).click()
    page.wait_for_selector("main[data-view=inspect]")


def test_layers_heads_and_modes_of_a_row_stand_side_by_side(chat: Chat):
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    at = tokens(page) - 4
    token(page, at).click()
    to_inspect(page)
    expect(page.locator(f"[data-row='{at}']")).to_be_in_viewport()
    layers = page.get_by_role("table", name="Layers")
    expect(layers.locator("tbody tr")).to_have_count(4)
    expect(page.get_by_role("region", name="Heads")).to_contain_text("mean of the heads")
    # The same tokens once more: nothing is sampled, so the links are those of the answer's row.
    page.get_by_role("button", name="Measure the same tokens again").click()
    exact = page.locator("[data-mode=exact] [data-off]")
    expect(exact).to_be_visible(timeout=60_000)
    assert float(exact.get_attribute("data-off")) < 2e-3  # four decimals, and float16
    for mode in ("raw", "sketch"):
        expect(page.locator(f"[data-mode={mode}] .few li").first).to_be_visible()
    heads = page.get_by_role("table", name=re.compile("^Heads of layer"))
    expect(heads.locator("tbody tr")).to_have_count(5)
    layers.get_by_role("button", name="layer 1").click()
    expect(page.get_by_role("table", name="Heads of layer 1")).to_be_visible()
    assert float(exact.get_attribute("data-off")) < 2e-3
    heads = page.get_by_role("table", name="Heads of layer 1")
    heads.get_by_role("button", name="head 3").click()
    expect(heads.locator("tr.chosen")).to_have_attribute("data-layer", "3")
    # Rows of the prompt were measured, too.
    page.get_by_role("list", name="Tokens").press("Home")
    page.locator("[data-row='5']").click()
    expect(page.get_by_role("region", name="Layers")).to_contain_text("token 5")
    expect(page.locator("[data-mode=exact] canvas")).to_be_visible()


def test_tokens_are_found_by_text_and_phase(chat: Chat):
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    whole = tokens(page)
    to_inspect(page)
    items = page.get_by_role("list", name="Tokens")
    expect(items).to_have_attribute("data-length", str(whole))
    page.get_by_label("Find a token").fill("alph")
    expect(items).to_have_attribute("data-length", re.compile("^[2-9]$"))
    page.get_by_label("Find a token").fill("")
    page.get_by_label("Which tokens").select_option("output")
    expect(items.locator("[data-row]").first).not_to_have_attribute("data-row", "0")
    items.focus()
    page.keyboard.press("End")
    expect(page.get_by_role("region", name="Layers")).to_contain_text(f"token {whole - 1}")


def test_a_stored_request_is_read_page_by_page(chat: Chat, with_engine):
    sidecar = with_engine[0]
    step = 10_000
    rows = rows_of(MANY, "long", rows_per_request=MANY)
    for start in range(0, MANY, step):
        assert post_rows(sidecar, rows.slice(start, step)).status_code == 200
    request = rows.column("request_id")[0].as_py()
    page = chat(f"/inspect?request={request}")
    items = page.get_by_role("list", name="Rows")
    expect(items).to_have_attribute("data-length", str(MANY), timeout=30_000)
    items.focus()
    page.keyboard.press("End")
    last = sidecar.get(f"/requests/{request}?vectors=true&limit=1&offset={MANY - 1}")["records"][0]
    expect(items.locator(f"[data-row='{MANY - 1}']")).to_contain_text(
        last["zone"].replace("_", " "), timeout=20_000
    )
    assert items.locator("[data-row]").count() < 120  # of 100,000
    heading = page.get_by_role("region", name=re.compile("^Row at position"))
    expect(heading).to_contain_text(f"{last['position']:,}")
    local = heading.get_by_role("meter", name=re.compile("^local"))
    assert float(local.get_attribute("aria-valuenow")) == pytest.approx(last["vector"][0], abs=1e-5)
    # The address leads to the same row again.
    page.reload()
    page.wait_for_selector("main[data-view]")
    expect(page.get_by_role("region", name=re.compile("^Row at position"))).to_contain_text(
        f"{last['position']:,}", timeout=20_000
    )


def test_requests_are_found_by_their_session(chat: Chat):
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    session = page.evaluate("sessionStorage.getItem('attn.session')")
    page.wait_for_timeout(1_500)
    page.goto(page.url.replace("/chat", "/inspect"))
    page.get_by_role("table", name="Sessions").get_by_text(session).click()
    page.get_by_role("table", name="Requests").locator("tbody tr").first.click()
    expect(page.get_by_role("list", name="Rows")).to_be_visible()
    expect(page.locator("[data-request^=chatcmpl]")).to_be_visible()


def test_a_request_that_is_not_there_says_what_to_do(chat: Chat, watched):
    watched.allowed.append("404")
    page = chat("/inspect?request=nobody")
    expect(page.get_by_role("alert")).to_contain_text("There is no such request")


@pytest.mark.parametrize(
    "text", HOSTILE, ids=("markup", "directions", "controls", "templates", "long")
)
def test_hostile_ids_are_shown_as_they_are(chat: Chat, text: str, watched):
    watched.allowed += ["404", "400", "422"]
    page = chat("/inspect", viewport={"width": 400, "height": 860})
    page.get_by_label("Request id").fill(text[:900])
    page.get_by_role("button", name="Open", exact=True).click()
    expect(page.get_by_role("alert")).to_be_visible()
    assert hacked(page) is None
    assert overflow(page) <= 0


@pytest.mark.parametrize("width", [400, 1_000, 1_920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_its_window(chat: Chat, width: int, scheme: str):
    page = chat("/inspect", viewport={"width": width, "height": 1_000}, color_scheme=scheme)
    assert_legible(page)
    page.goto(page.url.replace("/inspect", "/chat"))
    page.wait_for_selector(".view-head .says bdi")
    ask(page, NEEDLE, **GREEDY)
    token(page, tokens(page) - 2).click()
    to_inspect(page)
    expect(page.get_by_role("table", name="Layers")).to_be_visible()
    assert_legible(page)
