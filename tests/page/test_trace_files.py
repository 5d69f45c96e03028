"""Traces: what Chat exports is read again, here and in Python; wrong lines are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from page_engine import HOSTILE, NEEDLE, ask, hacked, overflow, token, tokens
from playwright.sync_api import Page, expect
from shared import possible_vectors
from trace_lines import entry, header, import_file, lines_of, trace_of

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules
from pipeline.traces import read_trace, write_trace

Chat = Callable[..., Page]
Show = Callable[..., Page]
GREEDY = {"temperature": "0", "max_tokens": "8"}
MANY = 100_000


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
