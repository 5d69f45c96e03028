"""Three questions that an operator has, and in how many clicks the page answers them: what
docs/page.md says beside other tools."""

from __future__ import annotations

import re
from pathlib import Path

from page_engine import ask
from playwright.sync_api import Page, expect
from running import Sidecar
from served_runs import publish
from shared import REPO
from traffic import Traffic

SECOND = 1_000
COUNT = "window.clicks = 0; addEventListener('click', () => { window.clicks += 1; }, true)"


def counting(page: Page) -> None:
    """Count clicks from now on."""
    page.evaluate(COUNT)


def clicks(page: Page) -> int:
    return page.evaluate("window.clicks")


def promised(question: str) -> int:
    """The clicks that the documentation says of this page."""
    text = (REPO / "docs" / "page.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| {question}"))
    return int(re.match(r"\d+", row.split("|")[2].strip())[0])


def test_why_did_this_request_get_that_label(watched, runs: Path, tmp_path: Path):
    with watched.beside(tmp_path, runs=runs) as sidecar, Traffic(sidecar):
        page = watched.open(f"{sidecar.url}/live")
        latest = page.locator("[data-panel=latest] tbody tr")
        expect(latest.first).to_be_visible(timeout=20 * SECOND)
        sidecar.flush()
        counting(page)
        latest.first.locator("a").click()
        # The evidence of each zone, and the cluster with what its rows have in common.
        row = page.get_by_role("region", name=re.compile("Row at position"))
        expect(row.get_by_role("meter", name=re.compile("evidence for"))).to_have_count(
            5, timeout=20 * SECOND
        )
        expect(row).to_contain_text("strong from")
        assert clicks(page) == promised("Why did this request get that label?")


def test_what_changed_since_last_night(watched, tmp_path: Path):
    runs = tmp_path / "runs"
    before = publish(runs)
    publish(runs, 1, change=lambda manifest: manifest.update(parent_run=before))
    with watched.beside(tmp_path, runs=runs) as sidecar:
        page = watched.open(f"{sidecar.url}/live")
        link = page.locator("[data-panel=nightly]").get_by_role(
            "link", name=re.compile("What changed")
        )
        expect(link.first).to_be_visible()
        counting(page)
        link.first.click()
        expect(page.locator(".differences li").first).to_be_visible()
        expect(page.locator("[data-panel=clusters] tbody tr").first).to_be_visible()
        assert clicks(page) == promised("What changed since last night?")


def test_where_did_this_answer_look(watched, with_engine: tuple[Sidecar, object]):
    sidecar, _ = with_engine
    page = watched.open(f"{sidecar.url}/chat")
    ask(page, "What does Felix's badge say?", max_tokens="8")
    last = int(page.locator(".flow").get_attribute("data-tokens")) - 2
    counting(page)
    page.locator(f"[data-i='{last}']").click()
    links = page.get_by_role("tabpanel")
    expect(links).to_contain_text(re.compile(r"top links hold \d"))
    assert clicks(page) == promised("Where did this answer look?")
