"""Traces: what Chat exports is read again, here and in Python; wrong lines are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from map_reading import expect_state, pixel_of
from page_engine import HOSTILE, NEEDLE, ask, hacked, overflow, token, tokens
from playwright.sync_api import Page, expect
from running import Sidecar
from served_runs import GOLDEN
from shared import possible_vectors

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules
from pipeline.traces import read_trace, write_trace
from sidecar.http.compare.axes import NOT_KNOWN

Chat = Callable[..., Page]
Show = Callable[..., Page]
GREEDY = {"temperature": "0", "max_tokens": "8"}
MANY = 100_000


def lines_of(*records: dict[str, Any] | str) -> bytes:
    texts = (one if isinstance(one, str) else json.dumps(one) for one in records)
    return "".join(f"{text}\n" for text in texts).encode()


def header(**more: Any) -> dict[str, Any]:
    return {"record_type": "header", "version": "1.0", "trace_id": "t-1", "model": "m", **more}


def entry(step: int, prompt: int, links: dict[int, float], layer: int = 3) -> dict[str, Any]:
    """A raw entry of the row of a generated token."""
    return {
        "token_positions": list(links), "attention_scores": list(links.values()),
        "topk_logits": [float(np.log(p)) for p in links.values()], "logsumexp_candidates": 0.0,
        "layer_id": layer, "decode_step": step, "position": prompt + step - 1,
        "think_phase": "output",
    }  # fmt: skip


def trace_of(
    texts: list[str], prompt: int, steps: dict[int, dict[int, float]],
    vectors: dict[int, list[float]] | None = None,
) -> list[dict]:  # fmt: skip
    """Records of a trace: `steps` has the links of rows by the index of their token, `vectors`
    their fingerprints."""
    measured = {
        i: {"fingerprint": {"fingerprint": vector, "manifold": "diffuse"}}
        for i, vector in (vectors or {}).items()
    }
    question = "".join(texts[:prompt])
    segments = [
        {"id": "user-1", "type": "user", "startIndex": 0, "endIndex": prompt - 1},
        {"id": "a-1", "type": "assistant_final", "startIndex": prompt},
    ]
    metrics = {"avgEntropy": 0.4, "dominantZone": "diffuse", "tokenCount": len(texts)}
    return [
        header(),
        {"record_type": "message", "id": "user-1", "role": "user", "content": question},
        *({"record_type": "segment", **one} for one in segments),
        *(
            {"record_type": "token", "index": i, "text": text,
             "segmentId": segments[i >= prompt]["id"]}
            for i, text in enumerate(texts)
        ),
        *(
            {"record_type": "step", "tokenIndex": i,
             "attention": entry(i - prompt + 1, prompt, links), **measured.get(i, {})}
            for i, links in steps.items()
        ),
        {"record_type": "metrics", **metrics},
    ]  # fmt: skip


def import_file(page: Page, content: bytes, name: str = "trace.jsonl") -> None:
    page.locator("[data-import]").first.set_input_files(
        {"name": name, "mimeType": "application/x-ndjson", "buffer": content}
    )
    page.wait_for_selector(".file-note", timeout=60_000)
    if page.locator(".file-note.bad[role=alert]").count() == 0:
        page.wait_for_selector(".flow:not([data-lines='0'])")


def kept_of_the_run(count: int) -> list[list[float]]:
    """Fingerprints that the served run kept, so that it places them among its clusters."""
    kept = pq.read_table(GOLDEN / "run_v1" / "references.parquet").column("vector").to_pylist()
    return kept[:: len(kept) // count][:count]


def measured_trace(vectors: list[list[float]]) -> bytes:
    """A trace of two prompt tokens and an answer, each of whose rows has a fingerprint."""
    texts = ["Say ", "it: ", *(f"word{i} " for i in range(len(vectors)))]
    rows = range(1, len(vectors) + 1)
    records = trace_of(texts, 2, {i: {0: 0.5} for i in rows}, dict(zip(rows, vectors, strict=True)))
    return lines_of(*records)


def exported(page: Page) -> bytes:
    with page.expect_download() as started:
        page.get_by_role("button", name="Export").click()
    return Path(started.value.path()).read_bytes()


def links_shown(page: Page, index: int) -> list[tuple[str, str]]:
    token(page, index).hover()
    lens = page.get_by_role("region", name="Token Lens")
    expect(lens).to_have_attribute("data-token", str(index))
    return [
        (one.get_attribute("data-to"), one.locator(".link-p").inner_text())
        for one in lens.locator("[data-to]").all()
    ]


def test_an_exported_conversation_is_the_same_when_it_is_imported(chat: Chat):
    page = chat()
    ask(page, "alpha: 1729\nalpha:", **GREEDY)
    ask(page, NEEDLE, **GREEDY)
    page.wait_for_timeout(1_500)  # stored rows come after the answer
    last = tokens(page) - 1
    seen, whole = links_shown(page, last), page.locator(".flow").inner_text()
    content = exported(page)
    records = [json.loads(line) for line in content.decode().splitlines()]
    kinds = [one["record_type"] for one in records]
    assert kinds[0] == "header" and kinds[-1] == "metrics"
    assert set(kinds) == {"header", "message", "token", "step", "segment", "metrics"}
    assert {"version", "trace_id", "model", "run_id", "response_id"} <= records[0].keys()
    assert len({one["base"] for one in records if one["record_type"] == "segment"}) == 2

    page.get_by_role("button", name="New", exact=True).click()
    import_file(page, content)
    expect(page.locator(".file-note")).to_contain_text("2 responses")
    assert page.locator(".flow").inner_text() == whole
    assert links_shown(page, last) == seen
    # An imported trace exports to the same records, but for its header's name.
    again = [json.loads(line) for line in exported(page).decode().splitlines()]
    assert [one for one in again[1:] if one["record_type"] in ("token", "message")] == [
        one for one in records[1:] if one["record_type"] in ("token", "message")
    ]


def test_python_reads_what_the_page_exports(chat: Chat, tmp_path: Path):
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    path = tmp_path / "exported.jsonl"
    path.write_bytes(exported(page))
    trace = read_trace(path)
    assert len(trace.tokens) == tokens(page)
    assert "".join(one["text"] for one in trace.tokens).startswith("<|bos|>alpha: 1729")
    assert trace.metrics[0]["tokenCount"] == len(trace.tokens)
    # And the page reads what Python writes.
    write_trace(tmp_path / "written.jsonl", trace)
    import_file(page, (tmp_path / "written.jsonl").read_bytes())
    expect(page.locator(".file-note")).to_have_attribute("data-refused", "0")
    assert tokens(page) == len(trace.tokens)


def test_wrong_lines_are_refused_by_number_and_the_rest_is_shown(show: Show):
    page = show("/chat")
    good = trace_of(["a ", "b ", "c ", "d"], 2, {2: {0: 0.5, 1: 0.25}})
    wrong = ["{not json", '{"record_type": "dream"}', '{"index": 3}', '[1]',
             '{"record_type": "token", "index": -1, "text": "x"}',
             '{"record_type": "token", "index": 0, "text": "again"}',
             '{"record_type": "step", "tokenIndex": 3, "attention": {"token_positions": [1], '
             '"topk_logits": []}}', json.dumps(header())]  # fmt: skip
    content = lines_of(*good, *wrong) + b'{"record_type": "token", "index": 9, "text": "\xff"}\n'
    import_file(page, content)
    note = page.locator(".file-note")
    expect(note).to_have_attribute("data-refused", str(len(wrong) + 1))
    note.get_by_text("Which").click()
    reasons = ("not JSON", "unknown record_type", "no record_type", "not a JSON object",
               "index is not a whole number", "was on line", "as many numbers", "a second header",
               "not UTF-8")  # fmt: skip
    for number, reason in enumerate(reasons, len(good) + 1):
        expect(note.get_by_text(f"Line {number}:")).to_contain_text(reason)
    assert tokens(page) == 4
    assert links_shown(page, 3) == [("1", "25.0%")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"hello\n", "Line 1: not JSON"),
        (b'{"record_type": "token", "index": 0, "text": "a"}\n', "before the header"),
        (lines_of(header(version="2.0")), "version 2.0"),
        (b"\x1f\x8b\x08\x00 not text \xff\n", "Line 1"),
    ],
    ids=("empty", "prose", "headless", "newer", "binary"),
)
def test_a_file_that_is_no_trace_is_refused(show: Show, content: bytes, says: str):
    page = show("/chat")
    import_file(page, content)
    expect(page.get_by_role("alert").first).to_contain_text(says)
    expect(page.locator(".flow")).to_have_count(0)


def test_a_trace_without_segments_opens(show: Show):
    """As the seeds print it."""
    page = show("/chat")
    import_file(page, lines_of(
        header(),
        {"record_type": "message", "id": "user-1", "role": "user", "content": "Hello"},
        {"record_type": "token", "index": 0, "text": "Hi", "segmentId": "assistant-1-main"},
        {"record_type": "step", "tokenIndex": 0, "attention": entry(1, 0, {0: 0.9}),
         "fingerprint": {"fingerprint": [1, 0, 0, 0, 1] + [0] * 15, "manifold": "syntax_floor"}},
    ))  # fmt: skip
    expect(page.locator(".file-note")).to_have_attribute("data-refused", "0")
    assert tokens(page) == 1


@pytest.mark.slow
def test_100_000_tokens_scroll_and_answer(show: Show):
    rng = random.Random(1)
    words = ["the ", "lighthouse ", "keeper ", "\n", "finds ", "a ", "letter, ", "שלום ", "灯台"]
    texts = [rng.choice(words) for _ in range(MANY)]
    prompt = MANY - 1_000
    steps = {i: {rng.randrange(i): 0.6, i - 1: 0.3} for i in range(prompt, MANY - 1)}
    page = show("/chat")
    import_file(page, lines_of(*trace_of(texts, prompt, steps)))
    assert tokens(page) == MANY
    # Before the first layout there is nothing to go to the end of.
    expect(token(page, 0)).to_be_visible()
    flow = page.locator(".flow")
    flow.focus()
    page.keyboard.press("End")
    expect(token(page, MANY - 1)).to_be_visible()
    assert page.locator("[data-i]").count() < 3_000
    linked = links_shown(page, MANY - 1)
    far = max(steps[MANY - 2], key=lambda to: steps[MANY - 2][to])
    assert (str(far), "60.0%") in linked
    # To a token far away, and frames in between: a scroll by pages draws each of them.
    page.locator(f"[data-to='{far}']").click()
    expect(token(page, far)).to_be_visible()
    drawn = page.evaluate("""async () => {
        const flow = document.querySelector(".flow");
        const drawn = [];
        for (let i = 0; i < 60; i += 1) {
          flow.scrollTop = (i * 7919 * 24) % flow.scrollHeight;
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
          const { top, bottom } = flow.getBoundingClientRect();
          drawn.push([...flow.querySelectorAll("[data-i]")].filter((token) => {
            const { y } = token.getBoundingClientRect();
            return y >= top && y < bottom;
          }).length);
        }
        return drawn;
    }""")
    assert min(drawn) > 0 and max(drawn) < 3_000  # no frame is empty, and none has all of them
    page.get_by_role("link", name="Inspect", exact=True).click()
    items = page.get_by_role("list", name="Tokens")
    expect(items).to_have_attribute("data-length", str(MANY))
    items.focus()
    page.keyboard.press("End")
    expect(items.locator(f"[data-row='{MANY - 1}']")).to_be_visible()
    assert items.locator("[data-row]").count() < 120


def test_an_imported_trace_is_a_way_over_the_map(show: Show, sidecar: Sidecar, watched: Any):
    watched.allowed.append("404")  # the request is not in the store
    vectors = kept_of_the_run(12)
    run = sidecar.get("/discovery/status")["serving"]["run_id"]
    place = f"/discovery/runs/{run}/place"
    placed = sidecar.client.post(place, json={"vectors": vectors}).json()["rows"]
    page = show("/manifold?scope=saved")
    page.wait_for_selector("[data-map][data-frames]")
    expect(page.locator("[data-scope-says]")).to_contain_text("No trace is open: import one")
    page.locator("[data-import]").set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": measured_trace(vectors)}
    )
    expect(page.locator("[data-scope-says]")).to_have_text("12 rows of 1 trace")
    expect_state(page, "ways", "1")
    expect_state(page, "marked", "12")
    expect(page.locator("[data-map-status]")).to_contain_text("12 marked · 1 trace")
    # A row of it opens it; its rows are where the sidecar puts them, and lead to its tokens.
    last = placed[-1]
    page.mouse.click(*pixel_of(page, last))
    pane = page.locator("[data-request='t-1']")
    expect(pane).to_contain_text("12 rows of an open trace, where this run puts them")
    lines = pane.locator(".row-line")
    expect(lines).to_have_count(12)
    at = [int(one.split("@")[1].split()[0]) for one in lines.all_inner_texts()]
    assert at == [*range(1, 13)]
    for line, row in zip(lines.all_inner_texts(), placed, strict=True):
        assert row["zone"].replace("_", " ") in line
        assert ("noise" if row["cluster_id"] < 0 else f"\n{row['cluster_id']} ") in line
    lines.nth(4).click()
    page.get_by_role("link", name="Open in Inspect").click()
    expect(page.locator("main")).to_have_attribute("data-view", "inspect")
    expect(page.locator("main")).to_contain_text("imported trace t-1")
    # The row at position 5 is the one that led to token 6.
    expect(page.locator("main")).to_contain_text("token 6")


def test_traces_that_cannot_be_placed_say_why(show: Show):
    page = show("/manifold?scope=saved")
    page.wait_for_selector("[data-map][data-frames]")
    content = lines_of(*trace_of(["a ", "b ", "c"], 2, {1: {0: 0.5}}))
    page.locator("[data-import]").set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": content}
    )
    expect(page.locator("[data-scope-says]")).to_contain_text("1 trace open, without fingerprints")
    expect_state(page, "ways", "0")
    page.goto(page.url.split("/manifold")[0] + "/compare?a=trace:t-1&b=run:latest")
    page.locator("[data-import]").first.set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": content}
    )
    expect(page.locator("[data-state=empty]")).to_contain_text("this trace has no fingerprints")


def test_an_imported_trace_is_compared_with_a_run(show: Show, sidecar: Sidecar):
    vectors = kept_of_the_run(20)
    page = show("/compare")
    page.get_by_label("Kind of side A").select_option("trace")
    page.locator("[data-import]").set_input_files(
        {"name": "t.jsonl", "mimeType": "application/x-ndjson", "buffer": measured_trace(vectors)}
    )
    page.get_by_label("Which trace, side A").select_option("t-1")
    page.get_by_label("Kind of side B").select_option("run")
    expect(page.locator("[data-similarity]")).to_be_visible()
    given = {"name": "t-1", "vectors": vectors, "model": "m", "phases": ["output"] * 20}
    given["phases"][0] = "prompt"  # the row that led to the answer's first token
    found = sidecar.client.post("/compare", json={"a": given, "b": "run:latest"}).json()
    total = page.locator("[data-panel=similarity] .total")
    expect(total).to_have_text(f"{found['similarity']['total']:.3f}")
    assert page.locator(".differences li").all_inner_texts() == found["words"]
    phases = page.locator("[data-panel=phases] tbody tr")
    assert [row.split()[:2] for row in phases.all_inner_texts()] == [
        [row["phase"], f"{100 * row['a']:.1f}%"] for row in found["phases"]
    ]
    expect(page.locator("[data-panel=words]")).to_contain_text("20 rows of 1 request")
    expect(page.locator("[data-panel=words]")).to_contain_text("A is one request")
    expect(page.locator("[data-panel=axes]")).to_contain_text(NOT_KNOWN)
    expect(page.locator("[data-panel=axes] [data-differs]")).to_have_count(0)


def test_hostile_traces_are_shown_as_they_are(show: Show):
    page = show("/chat", viewport={"width": 400, "height": 860})
    texts = [*HOSTILE, "end"]
    records = trace_of(texts, 2, {2: {0: 0.5, 1: 0.2}, 4: {3: 0.9}})
    hostile = HOSTILE[0]
    records[0] |= {"trace_id": hostile, "model": HOSTILE[1], "response_id": hostile}
    records[2]["type"] = hostile
    records[1] |= {"role": hostile, "id": hostile, "content": HOSTILE[4]}
    import_file(
        page, lines_of(*records, '{"record_type": "<b onclick=hacked()>"}'), f"{hostile[:60]}.jsonl"
    )
    assert tokens(page) == len(texts)
    token(page, 3).click()
    for tab in ("Links", "Signal", "MoE"):
        page.get_by_role("tab", name=tab).click()
    assert page.locator("main img, main script, main b[onclick]").count() == 0
    assert hacked(page) is None
    assert overflow(page) <= 0
    page.get_by_role("link", name="Inspect", exact=True).click()
    page.wait_for_selector("main[data-view=inspect]")
    expect(page.locator("[data-row='0']")).to_contain_text("<img src=x")
    assert hacked(page) is None
    assert overflow(page) <= 0


def test_evidence_is_that_of_the_rules(show: Show):
    """The page decides zones of a vector as capture, runs and /classify do."""
    rng = np.random.default_rng(7)
    page = show("/chat")
    for layout in Layout:
        vectors = possible_vectors(np.full(200, int(layout)), rng)
        wanted = ZoneRules().evidence(vectors, layout)
        found = page.evaluate(
            """async ([vectors, layout]) => {
              const { evidenceOf } = await import("/static/app/tokens/evidence.js");
              return vectors.map((one) => evidenceOf(one, layout).map(({ evidence }) => evidence));
            }""",
            [vectors.tolist(), layout.label],
        )
        np.testing.assert_allclose(np.array(found), wanted, atol=2e-5)
