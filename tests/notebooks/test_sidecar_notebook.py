"""A sidecar and an engine of a notebook, and the page's token view as a widget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Frame, Page, expect
from served_runs import publish

from capture_kernels.errors import OptionError
from discovery.notebook import NotebookData, Run
from pipeline.traces import Trace, read_trace, write_trace
from sidecar.notebook import LocalEngine, LocalSidecar, TokenView, compared, stored_rows
from sidecar.notebook.local import LocalError
from sidecar.notebook.tables import NotStoredError
from sidecar.notebook.token_view import ENTRY, modules

pytest.importorskip("torch")
PROMPT = "alpha: 1729\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha:"


@pytest.fixture(scope="module")
def sidecar(
    notebook_data: NotebookData, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalSidecar]:
    folder = tmp_path_factory.mktemp("asked")
    with LocalSidecar(folder / "fingerprints.db", notebook_data.runs) as found:
        yield found


@pytest.fixture(scope="module")
def asked(sidecar: LocalSidecar) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A response of the demo model, and its rows in the sidecar."""
    with LocalEngine(sidecar) as engine:
        response = engine.ask(PROMPT, max_tokens=6)
        with pytest.raises(LocalError, match="max_tokens"):
            engine.ask(PROMPT, max_tokens=-1)
    return response, stored_rows(sidecar.client, response["id"], rows=6)


def test_an_answer_is_recorded_row_by_row(asked: Any, sidecar: LocalSidecar) -> None:
    response, rows = asked
    assert response["choices"][0]["text"].startswith(" 1729")
    prompt = response["usage"]["prompt_tokens"]
    assert [row["position"] for row in rows] == list(range(prompt - 1, prompt + 5))
    assert all(len(row["vector"]) == 20 for row in rows)
    with pytest.raises(NotStoredError, match="0 rows of request nobody"):
        stored_rows(sidecar.client, "nobody", wait_s=0.2)


def test_what_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text("this is no store " * 100)
    with pytest.raises(LocalError, match="does not answer"):
        LocalSidecar(tmp_path / "no.db", tmp_path)


def test_a_comparison_is_a_frame_by_falling_difference() -> None:
    answer = {"zones": [{"zone": "a", "a": 0.5, "b": 0.4}, {"zone": "b", "a": 0.1, "b": 0.6}],
              "clusters": None}  # fmt: skip
    found = compared(answer)
    assert found["zone"].to_list() == ["b", "a"]
    assert found["difference"].to_list() == pytest.approx([0.5, -0.1])
    assert compared(answer, "clusters").empty


def framed(browser: Browser, view: TokenView) -> tuple[Page, Frame, list[str]]:
    """The widget's document in a frame, as the widget shows it, and what went wrong in it."""
    page = browser.new_page(viewport={"width": 1000, "height": 640})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda sent: wrong.append(sent.url) if "://" in sent.url else None)
    page.evaluate(
        """text => {
          window.heard = [];
          addEventListener("message", ({ data }) => window.heard.push(data));
          const frame = document.createElement("iframe");
          frame.style.cssText = "width: 960px; height: 600px";
          frame.srcdoc = text;
          document.body.append(frame);
        }""",
        view.document,
    )
    page.wait_for_timeout(0)
    return page, page.frames[-1], wrong


def test_the_token_view_shows_the_links_of_the_pinned_token(
    asked: Any, notebook_data: NotebookData, browser: Browser
) -> None:
    response, rows = asked
    first = response["usage"]["prompt_tokens"]
    view = TokenView(response, records=rows, run=Run(notebook_data.runs), layer=2, pinned=first + 1)
    page, frame, wrong = framed(browser, view)
    lens = frame.get_by_role("region", name="Token Lens")
    expect(lens).to_have_attribute("data-token", str(first + 1))
    expect(frame.locator(".flow")).to_have_attribute("data-tokens", str(first + 6))
    # Layer 2 reads the digit off the line that has the answer.
    expect(lens.locator(".link .tk-name").first).to_have_text("7")
    expect(frame.locator(".arcs path")).not_to_have_count(0)
    frame.get_by_role("tab", name="Signal").click()
    expect(lens).to_contain_text("Zone")
    cluster = int(lens.locator("[data-cluster]").get_attribute("data-cluster") or -2)
    vector = next(row["vector"] for row in rows if row["position"] == first)
    assert cluster == Run(notebook_data.runs).classifier.classify(vector).cluster_id[0]
    frame.get_by_role("tab", name="MoE").click()
    expect(lens).to_contain_text("No experts are known")
    # Both ends know what is pinned.
    frame.locator(f"[data-i='{first + 3}']").click()
    page.wait_for_function(f"window.heard.some(({{ index }}) => index === {first + 3})")
    page.evaluate(f"frames[0].postMessage({{ attn: 'pin', index: {first} }}, '*')")
    expect(lens).to_have_attribute("data-token", str(first))
    assert not wrong


def test_a_trace_and_texts_that_would_be_markup_are_shown_as_they_are(
    browser: Browser, tmp_path: Path
) -> None:
    hostile = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    trace = Trace({"version": "1.0", "trace_id": "t"})
    trace.segments = [{"id": "assistant-1-final", "type": "assistant_final", "base": 0}]
    trace.tokens = [
        {"index": 0, "text": "begin", "segmentId": None},
        {"index": 1, "text": hostile, "segmentId": "assistant-1-final"},
    ]
    write_trace(tmp_path / "trace.jsonl", trace)
    view = TokenView(read_trace(tmp_path / "trace.jsonl"))
    _, frame, wrong = framed(browser, view)
    expect(frame.locator(".flow")).to_have_attribute("data-tokens", "2")
    expect(frame.locator("[data-i='1']")).to_contain_text("</script>")
    assert frame.evaluate("window.hacked") is None and not wrong
    view.save(tmp_path / "view.html")
    assert (tmp_path / "view.html").read_text() == view.document


def test_a_response_without_tokens_is_refused() -> None:
    with pytest.raises(OptionError, match="return_prompt_tokens"):
        TokenView({"id": "x", "choices": []})
    with pytest.raises(OptionError, match="no tokens"):
        TokenView(Trace({"version": "1.0", "trace_id": "t"}))


def test_the_view_is_made_of_the_pages_own_modules() -> None:
    found = modules()
    assert {ENTRY, "app/tokens/flow.js", "app/lens/lens.js", "vendor/preact.js"} <= set(found)
    # Views, and what asks a sidecar, stay out.
    assert not any(name.startswith("app/views/") for name in found)
    assert all("fetch(" not in source for source in found.values())


def test_the_sidecar_of_a_notebook_serves_a_run(tmp_path: Path) -> None:
    publish(tmp_path / "runs")
    with LocalSidecar(tmp_path / "fingerprints.db", tmp_path / "runs") as found:
        assert found.client.discovery_status()["serving"]["run_id"]
        pid = found._child.process.pid
    assert found._child.code is not None and not Path(f"/proc/{pid}").exists()
