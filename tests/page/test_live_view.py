"""View Live: what an operator sees of traffic, losses, drift, runs and the job at work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from looks import assert_legible, hacked
from page_engine import HOSTILE
from planted import planted, planted_batch
from playwright.sync_api import Page, expect
from processes import AttnProcess
from running import Sidecar, post_rows, until
from served_runs import CAPTURE_ID, MODEL, publish, rows_of
from shared import START, free_port
from traffic import Traffic

from pipeline.store.open import open_store

SECOND = 1_000
# What a browser says of a server that is gone, which these tests bring about.
GONE = ("net::ERR_CONNECTION_REFUSED", "net::ERR_EMPTY_RESPONSE", "net::ERR_CONNECTION_RESET",
        "net::ERR_INCOMPLETE_CHUNKED_ENCODING")  # fmt: skip


@pytest.fixture(scope="module")
def traffic(sidecar: Sidecar) -> Iterator[Traffic]:
    with Traffic(sidecar) as found:
        yield found


def panel(page: Page, name: str):
    return page.locator(f"[data-panel={name}]")


def shares(page: Page) -> list[float]:
    """What `Zones now` says, in percent."""
    texts = panel(page, "zones").locator(".meter .value").all_inner_texts()
    return [float(text.strip("<%")) for text in texts]


def test_what_arrives_is_seen_in_every_panel(show: Callable[..., Page], traffic: Traffic):
    page = show("/live")
    expect(panel(page, "zones").get_by_role("meter")).to_have_count(5)
    assert sum(shares(page)) == pytest.approx(100, abs=0.5)
    expect(panel(page, "mix").locator("canvas")).to_be_visible()
    expect(panel(page, "mix").get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(r"syntax floor \d")
    )
    expect(panel(page, "clusters").locator("tbody tr").first).to_be_visible()
    expect(panel(page, "nightly")).to_contain_text("Served run")
    gate = panel(page, "nightly").locator("details")
    measured = gate.locator("li:not(.quiet)").count()
    # Checks that had nothing to compare with have not passed.
    assert measured and gate.locator("li.quiet").count() == 1
    expect(gate.locator("summary")).to_have_text(
        f"Its gate: {measured} of {measured} checks passed"
    )
    expect(panel(page, "ingest")).to_contain_text("Nothing was lost")
    received = panel(page, "ingest").locator("dd").first
    before = received.inner_text()
    expect(received).not_to_have_text(before, timeout=20 * SECOND)


def test_a_request_is_one_click_away(show: Callable[..., Page], traffic: Traffic):
    page = show("/live")
    row = panel(page, "latest").locator("tbody tr").first
    row.hover()  # what is under the pointer stays
    expect(panel(page, "latest")).to_contain_text("held")
    name = row.locator("a").inner_text()
    row.locator("a").click()
    expect(page.locator("main")).to_have_attribute("data-view", "inspect")
    assert f"request={name}" in page.url


def test_the_span_of_time_is_in_the_address(show: Callable[..., Page], traffic: Traffic):
    page = show("/live?span=600")
    expect(page.get_by_role("radio", name="10 min")).to_be_checked()
    page.get_by_role("radio", name="10 min").press("ArrowRight")
    expect(page.get_by_role("radio", name="1 h")).to_be_checked()
    assert "span=3600" in page.url


def test_lost_rows_are_counted_by_reason(
    show: Callable[..., Page], sidecar: Sidecar, traffic: Traffic
):
    vectors = planted(20, 0)[0].copy()
    vectors[:7, 0] = np.nan
    bad = planted_batch(vectors, START, "bad", model=MODEL, capture_id=CAPTURE_ID)
    assert post_rows(sidecar, bad).status_code in (200, 400)
    (reason,) = sidecar.get("/stats")["fingerprints"]["rejected"]
    page = show("/live")
    lost = panel(page, "ingest").locator(".losses tr").filter(has_text=reason)
    expect(lost.locator("b")).to_have_text("7")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1_920])
def test_it_is_legible_on_any_screen(
    show: Callable[..., Page], traffic: Traffic, scheme: str, width: int
):
    page = show("/live", color_scheme=scheme, viewport={"width": width, "height": 900})
    expect(panel(page, "latest").locator("tbody tr").first).to_be_visible()
    expect(panel(page, "ingest")).to_contain_text("Received")
    assert_legible(page)


def test_a_new_run_is_shown_without_a_refresh(watched, tmp_path: Path):
    runs = tmp_path / "runs"
    first = publish(runs)
    with watched.beside(tmp_path, runs=runs) as sidecar:
        page = watched.open(f"{sidecar.url}/live")
        expect(page.locator(f"[data-served='{first}']")).to_be_visible()
        page.evaluate("window.sameDocument = true")
        second = publish(runs, 1)
        expect(page.locator(f"[data-swapped='{second}']")).to_be_visible(timeout=30 * SECOND)
        expect(page.locator(f"[data-served='{second}']")).to_be_visible()
        page.get_by_role("link", name="What changed").first.click()
        expect(page.locator("main")).to_have_attribute("data-view", "compare")
        assert f"a=run%3A{first}" in page.url and f"b=run%3A{second}" in page.url
        expect(page.locator("[data-similarity]")).to_be_visible()
        assert page.evaluate("window.sameDocument")


def test_a_killed_sidecar_is_said_and_its_return_seen(watched, tmp_path: Path):
    watched.allowed += GONE
    runs, port = tmp_path / "runs", str(free_port())
    publish(runs)
    sidecar = Sidecar(tmp_path, "--page", "--port", port, runs=runs)
    try:
        page = watched.open(f"{sidecar.url}/live")
        expect(page.locator("[data-connection=open]")).to_be_visible()
        expect(panel(page, "nightly")).to_contain_text("Served run")
        sidecar.kill()
        expect(page.locator("[data-connection=lost]")).to_be_visible(timeout=20 * SECOND)
        expect(page.get_by_role("alert").first).to_contain_text("tries again by itself")
        expect(panel(page, "nightly")).to_contain_text("Served run")  # what was seen stays
    finally:
        sidecar.close()
    with watched.beside(tmp_path, "--port", port, runs=runs) as again:
        expect(page.locator("[data-connection=open]")).to_be_visible(timeout=30 * SECOND)
        with Traffic(again):
            expect(panel(page, "zones").get_by_role("meter")).to_have_count(5, timeout=30 * SECOND)


def test_without_runs_and_rows_it_says_what_to_do(watched, tmp_path: Path):
    with watched.beside(tmp_path) as sidecar:
        page = watched.open(f"{sidecar.url}/live")
        expect(panel(page, "nightly")).to_contain_text("attn discover")
        expect(panel(page, "drift")).to_contain_text("No run is served")
        expect(panel(page, "mix")).to_contain_text("attn send")
        assert_legible(page)


def test_the_drift_panel_says_in_words_what_was_measured(watched, tmp_path: Path):
    publish(tmp_path / "runs")
    with watched.beside(tmp_path, runs=tmp_path / "runs") as sidecar:
        box = panel(watched.open(f"{sidecar.url}/live"), "drift")
        state = box.locator(".mark-word")
        expect(state).to_have_text("too few rows")
        expect(box).to_contain_text("0 requests in the window, ")
        expect(box).to_contain_text(
            "Drift is measured from whole requests, so that one long answer is not taken for a "
            "change; 0 rows of 0 requests came so far."
        )
        # All of one behaviour.
        vectors = planted(2_000, 0, 0.0, shares=np.eye(12)[6])[0]
        batch = planted_batch(
            vectors, START, "far", rows_per_request=10, model=MODEL, capture_id=CAPTURE_ID
        )
        assert post_rows(sidecar, batch).status_code == 200
        expect(state).to_have_text("drifting", timeout=30 * SECOND)
        drift = sidecar.get("/stats")["drift"]
        expect(box).to_contain_text(f"{drift['reason']}.")
        expect(box).to_contain_text(re.compile(r"the last \d.* against the run, by request"))
        for kind in ("zones", "clusters"):
            found, limit = drift[kind], drift["limits"][kind]
            said = box.locator(".psi tr").filter(has_text=kind)
            expect(said).to_contain_text(f"PSI {found['psi']:.3f}")
            expect(said).to_contain_text(f"{found['low']:.3f}–{found['high']:.3f}, limit {limit:g}")
        expect(box.get_by_role("columnheader", name="What moved the most")).to_be_visible()


def test_the_running_job_is_followed_paused_and_stopped(watched, tmp_path: Path):
    store, runs = tmp_path / "planted.db", tmp_path / "runs"
    with open_store(str(store), create=True) as opened:
        opened.append(planted_batch(planted(6_000, 0)[0], START))
    with watched.beside(tmp_path, runs=runs) as sidecar:
        page = watched.open(f"{sidecar.url}/live")
        job = AttnProcess("discover", "--db", store, "--output", runs, "--hours", "0",
                          "--websocket-port", "0")  # fmt: skip
        try:
            box = page.locator("[data-job]")
            expect(box.get_by_role("meter")).to_be_visible(timeout=60 * SECOND)
            box.get_by_role("button", name="Pause").click()
            expect(box).to_contain_text("paused", timeout=60 * SECOND)
            box.get_by_role("button", name="Resume").click()
            expect(box.get_by_role("button", name="Pause")).to_be_visible(timeout=60 * SECOND)
            box.get_by_role("button", name="Stop").click()
            box.get_by_role("button", name="Stop it: sure?").click()
            expect(box).to_have_count(0, timeout=60 * SECOND)
            expect(panel(page, "nightly")).to_contain_text("unfinished")
        except BaseException:
            job.end()
            raise
        assert job.finish(120).returncode == 4


def test_hostile_names_are_text(watched, tmp_path: Path):
    texts = [text.encode()[:1_000].decode(errors="ignore") for text in HOSTILE]
    runs = tmp_path / "runs"
    publish(runs, change=lambda manifest: manifest.update(model=MODEL))
    with watched.beside(tmp_path, runs=runs) as sidecar:
        page = watched.open(f"{sidecar.url}/live", viewport={"width": 400, "height": 800})
        expect(page.locator("[data-connection=open]")).to_be_visible()

        def send() -> int:
            for number, text in enumerate(texts):
                batch = rows_of(10, f"hostile-{number}", seed=number)
                for name in ("request_id", "session_id"):
                    at = batch.schema.get_field_index(name)
                    column = pa.array([text] * batch.num_rows)
                    batch = batch.set_column(at, batch.schema.field(name), column)
                assert post_rows(sidecar, batch).status_code == 200
            return panel(page, "latest").locator("tbody tr").count()

        until(lambda: send() >= len(texts), "not every request is shown")
        expect(panel(page, "latest")).to_contain_text("<img src=x onerror")
        expect(panel(page, "latest")).to_contain_text("‹202e›")
        assert_legible(page)
        page.goto(f"{sidecar.url}/router")
        expect(page.locator("[data-panel=decisions]")).to_be_visible()
        assert hacked(page) is None


def test_a_key_is_asked_for_and_kept_in_the_tab(watched, tmp_path: Path):
    watched.allowed += ("401 (Unauthorized)",)
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-or-more\n")
    keys.chmod(0o600)
    publish(tmp_path / "runs")
    with watched.beside(tmp_path, "--api-key-file", keys, runs=tmp_path / "runs") as sidecar:
        page = watched.open(f"{sidecar.url}/live")
        dialog = page.get_by_role("dialog", name=re.compile("API key"))
        dialog.get_by_label("API key").fill("not-the-key-of-this-one")
        dialog.get_by_role("button", name="Use it").click()
        expect(page.get_by_role("dialog")).to_be_visible()
        dialog.get_by_label("API key").fill("a-key-of-sixteen-or-more")
        dialog.get_by_role("button", name="Use it").click()
        expect(page.locator("[data-served]")).to_be_visible(timeout=20 * SECOND)
        page.reload()
        expect(page.locator("[data-served]")).to_be_visible(timeout=20 * SECOND)
        expect(page.get_by_role("dialog")).to_have_count(0)
