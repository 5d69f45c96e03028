"""Chat, against an engine: what a reader sees of an answer, does with it, and is told of faults."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from looks import assert_legible
from page_engine import HOSTILE, NEEDLE, Engine, ask, hacked, overflow, texts, token, tokens, use
from playwright.sync_api import Page, expect
from running import Sidecar, until

Chat = Callable[..., Page]
GREEDY = {"temperature": "0", "max_tokens": "8"}


def lens(page: Page):
    return page.get_by_role("region", name="Token Lens")


def test_an_answer_shows_its_tokens_and_where_each_looked(chat: Chat, with_engine):
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    expect(page.locator(".flow")).to_contain_text("alpha")
    whole = texts(page, 0, tokens(page))
    assert "alpha: 1729⏎beta: 2048⏎" in whole
    answer = whole[whole.rindex("alpha:") + len("alpha:") :]
    assert answer.startswith(" 1729")

    body = {"model": "m", "messages": [{"role": "user", "content": NEEDLE}], "temperature": 0,
            "max_tokens": 2, "return_attention_tokens": True, "top_k_attention": 16,
            "return_prompt_tokens": True, "include_prompt_attention": 1}  # fmt: skip
    said = with_engine[1].post("chat/completions", **body)
    first = len(said["prompt_tokens"])
    # The row that led to the first token, in the last layer, which is shown unless another is.
    entry = next(
        one for one in said["choices"][0]["attention_tokens"]
        if one["decode_step"] == 0 and one["layer_id"] == 3
    )  # fmt: skip
    p = [math.exp(x - entry["logsumexp_candidates"]) for x in entry["topk_logits"]]
    wanted = dict(zip(entry["token_positions"], p, strict=True))
    wanted.pop(0, None)  # a sink, which is left out
    best = max(wanted, key=lambda position: wanted[position])

    token(page, first).hover()
    expect(page.locator("[data-p='1.000']")).to_have_attribute("data-i", str(best))
    expect(page.locator(".arcs path")).not_to_have_count(0)
    assert page.locator(".arcs path").count() <= 8
    link = lens(page).locator("[data-to]").first
    expect(link).to_have_attribute("data-to", str(best))
    expect(link).to_contain_text(f"{100 * wanted[best]:.1f}%")
    mass = float(lens(page).locator("[data-mass]").get_attribute("data-mass"))
    assert mass == pytest.approx(sum(p), abs=2e-4)


def test_tokens_are_those_that_the_engine_names_in_whichever_chunk(show: Chat):
    """SGLang names the first token in a chunk before the one that has its text."""
    page = show("/chat")
    first = {"prompt_tokens": [{"id": 5, "text": "a"}], "output_tokens": [{"id": 7, "text": " 1"}]}
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], **first},
        {"choices": [{"delta": {"content": " 1"}, "logprobs": {"content": [
            {"token": " 1", "logprob": -0.1, "top_logprobs": []}]}}]},
        {"choices": [{"delta": {"content": "7"}}], "output_tokens": [{"id": 8, "text": "7"}]},
        {"choices": [{"delta": {"content": None}, "finish_reason": "stop"}],
         "output_tokens": [{"id": 0, "text": "<|eos|>"}]},
    ]  # fmt: skip
    found = page.evaluate(
        """async (chunks) => {
          const { Collector } = await import("/static/app/chat/collect.js");
          const { Trace } = await import("/static/app/trace/model.js");
          const collector = new Collector(new Trace({ id: "t" }));
          for (const chunk of chunks) collector.take(chunk);
          return [collector.trace.outputTexts, collector.trace.outputIds, collector.text];
        }""",
        chunks,
    )
    assert found == [[" 1", "7", "<|eos|>"], [7, 8, 0], " 17"]


def test_a_click_pins_a_token_and_sinks_can_be_shown(chat: Chat):
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    last = tokens(page) - 1
    token(page, last).click()
    token(page, 3).hover()
    expect(lens(page)).to_have_attribute("data-token", str(last))  # it stays
    page.get_by_role("tab", name="Links").click()
    lens(page).get_by_label("Layer").select_option("1")
    sinks = lens(page).locator("[data-sinks]")
    expect(sinks).to_have_attribute("data-sinks", re.compile(r"0\.[0-9]*[1-9]"))
    expect(lens(page).locator("[data-to='0']")).to_have_count(0)
    lens(page).get_by_label("leave sinks out").uncheck()
    expect(lens(page).locator("[data-to='0']")).to_have_count(1)
    lens(page).get_by_role("button", name="Unpin").click()
    token(page, 3).hover()
    expect(lens(page)).to_have_attribute("data-token", "3")


def test_signal_is_what_the_sidecar_stored_and_classifies(chat: Chat, with_engine):
    page = chat("/chat?lens=signal")
    ask(page, NEEDLE, **GREEDY)
    token(page, tokens(page) - 1).click()
    cluster = lens(page).locator("[data-cluster]")
    expect(cluster).to_be_visible(timeout=20_000)
    sidecar = with_engine[0]
    session = page.evaluate("sessionStorage.getItem('attn.session')")
    request = sidecar.get(f"/sessions/{session}")["requests"][-1]["request_id"]
    row = sidecar.get(f"/requests/{request}?vectors=true")["records"][-1]
    said = sidecar.client.post("/classify", json={"vector": row["vector"]}).json()["manifold"]
    expect(cluster).to_have_attribute("data-cluster", str(said["cluster_id"]))
    assert said["zone"].replace("_", " ") in lens(page).inner_text()
    local = lens(page).get_by_role("meter", name=re.compile("^local"))
    assert float(local.get_attribute("aria-valuenow")) == pytest.approx(row["vector"][0], abs=1e-4)
    page.get_by_role("tab", name="MoE").click()
    expect(lens(page).locator("[data-moe=none]")).to_contain_text("No experts")


def test_everything_can_be_done_with_the_keyboard_alone(chat: Chat):
    page = chat()
    use(page, **GREEDY)
    page.get_by_label("Question").focus()
    page.keyboard.type("beta: 31")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("beta:")
    page.keyboard.press("Enter")
    expect(page.locator("[data-turn-state=done]")).to_be_visible(timeout=60_000)
    flow = page.get_by_role("grid", name="The request, token by token")
    for _ in range(40):
        if flow.evaluate("flow => flow === document.activeElement"):
            break
        page.keyboard.press("Shift+Tab")
    else:
        raise AssertionError("the text is not reached by Tab")
    page.keyboard.press("End")
    last = tokens(page) - 1
    expect(lens(page)).to_have_attribute("data-token", str(last))
    active = flow.get_attribute("aria-activedescendant")
    assert page.locator(f"[id='{active}']").get_attribute("data-i") == str(last)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(token(page, last - 1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowUp")
    expect(lens(page)).to_have_attribute("data-token", str(last - 1))  # pinned
    page.keyboard.press("Escape")
    expect(page.locator("[aria-selected=true][data-i]")).to_have_count(0)
    page.keyboard.press("Home")
    expect(lens(page)).to_have_attribute("data-token", "0")
    settings = page.get_by_role("button", name="Settings")
    settings.focus()
    page.keyboard.press("Enter")
    expect(settings).to_have_attribute("aria-expanded", "true")
    flow.focus()
    for _ in range(40):
        if page.evaluate("document.activeElement.getAttribute('role')") == "tab":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Signal")).to_have_attribute("aria-selected", "true")


def test_thinking_folds(chat: Chat):
    page = chat()
    prompt = "future: 97\nitem: 7\nQuestion: which is smaller, item or future?\nAnswer:"
    ask(page, prompt, temperature="0", max_tokens="60")
    fold = page.get_by_role("button", name="Fold thinking")
    expect(fold).to_be_visible()
    before = page.locator("[data-i]").count()
    fold.click()
    expect(page.get_by_role("button", name="Unfold thinking")).to_be_visible()
    assert page.locator("[data-i]").count() < before
    assert "think" in page.locator(".timeline").inner_text().lower()


def test_stop_ends_the_request_and_keeps_what_came(chat: Chat, with_engine):
    page = chat()
    use(page, temperature="1", max_tokens="3000")
    page.get_by_label("Question").fill("def parse(text):\n    for line in text:\n")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("[data-turn-state=streaming]")).to_be_visible(timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("[data-turn-state=stopped]")).to_be_visible()
    kept = tokens(page)
    assert kept > 5
    until(lambda: with_engine[1].active() == 0, "the engine goes on")
    assert tokens(page) == kept
    ask(page, NEEDLE, **GREEDY)


def test_settings_are_what_the_engine_is_asked_with(chat: Chat):
    page = chat()
    bodies = []
    page.on(
        "request", lambda asked: bodies.append(asked.post_data) if asked.method == "POST" else None
    )
    ask(page, NEEDLE, temperature="0.3", top_p="0.8", max_tokens="3", seed="7", layers="0, 2",
        heads="1,3", top_k="5")  # fmt: skip
    body = json.loads(next(one for one in bodies if one and "messages" in one))
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.3, "top_p": 0.8, "max_tokens": 3, "seed": 7,
    }  # fmt: skip
    assert body["attention_capture_layers"] == "0, 2" and body["top_k_attention"] == 5
    heads = page.locator(".toolbar").get_by_label("Head")
    assert heads.locator("option").all_inner_texts() == ["mean", "1", "3"]
    layers = page.locator(".toolbar").get_by_label("Layer", exact=True)
    assert layers.locator("option").all_inner_texts() == ["0", "2"]
    # A value that cannot be is said to be one, and not used.
    page.get_by_role("button", name="Settings").click()
    page.locator("[name=top_p]").fill("7")
    expect(page.get_by_role("alert")).to_contain_text("from 0.01 to 1")
    page.reload()
    page.wait_for_selector("main[data-view]")
    expect(page.locator(".composer")).to_contain_text("top_p 0.8")


def test_a_fingerprint_comes_with_the_answer(chat: Chat):
    page = chat("/chat?lens=signal")
    page.get_by_role("button", name="Settings").click()
    page.locator(".settings select").nth(1).select_option("fingerprint")
    page.get_by_role("button", name="Settings").click()
    ask(page, NEEDLE, **GREEDY)
    token(page, tokens(page) - 2).click()
    expect(lens(page).get_by_role("meter", name=re.compile("^local"))).to_be_visible()
    page.get_by_role("tab", name="Links").click()
    expect(lens(page)).to_contain_text("fingerprints, and no links")


def test_what_the_engine_refuses_is_said_in_its_words(chat: Chat, watched):
    watched.allowed.append("400")
    page = chat()
    ask(page, "alpha " * 5_000, state="failed")
    expect(page.locator("[data-outcome=failed]")).to_contain_text("context of 4096")
    ask(page, NEEDLE, **GREEDY)
    expect(page.locator("[data-outcome]")).to_have_count(0)


def test_an_engine_that_was_killed_is_said_and_comes_back(chat: Chat, with_engine, watched):
    watched.allowed += ["502", "504"]
    engine = with_engine[1]
    page = chat()
    engine.kill()
    ask(page, NEEDLE, state="failed", **GREEDY)
    expect(page.locator("[data-outcome=failed]")).to_contain_text("cannot be reached")
    engine.start()
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator("[data-turn-state=done]")).to_be_visible(timeout=60_000)


@pytest.mark.slow
def test_an_engine_that_dies_while_it_answers_leaves_what_came(chat: Chat, with_engine, watched):
    watched.allowed += ["502", "ERR_"]
    engine = with_engine[1]
    page = chat()
    use(page, temperature="1", max_tokens="3000")
    page.get_by_label("Question").fill("def parse(text):\n    for line in text:\n")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("[data-turn-state=streaming]")).to_be_visible(timeout=60_000)
    try:
        engine.kill()
        expect(page.locator("[data-turn-state=failed]")).to_be_visible(timeout=30_000)
        expect(page.locator("[data-outcome=failed]")).to_contain_text("broke")
        assert tokens(page) > 5
    finally:
        engine.start()


@pytest.mark.slow
def test_a_sidecar_that_was_killed_is_said_and_comes_back(
    runs, tmp_path: Path, watched, with_engine
):
    """The engine is another sidecar's: what counts is the page's own."""
    watched.allowed += ["ERR_", "Failed to fetch"]
    engine: Engine = with_engine[1]
    options = ("--page", "--engine-url", engine.url, "--port", "0")
    first = Sidecar(tmp_path, *options, runs=runs)
    page = watched.open(f"{first.url}/chat")
    page.wait_for_selector("[data-connection=open]")
    page.get_by_text("with ").first.wait_for()
    ask(page, NEEDLE, **GREEDY)
    seen = tokens(page)
    port = str(first.host_port[1])
    first.kill()
    expect(page.locator("[data-connection=lost]")).to_be_visible(timeout=30_000)
    assert tokens(page) == seen
    page.get_by_label("Question").fill("alpha: 3\nalpha:")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("[data-outcome=failed]")).to_contain_text("Disconnected")
    second = Sidecar(tmp_path, *options[:3], "--port", port, runs=runs)
    try:
        expect(page.locator("[data-connection=open]")).to_be_visible(timeout=30_000)
        page.get_by_role("button", name="Ask again").click()
        expect(page.locator("[data-turn-state=done]")).to_be_visible(timeout=60_000)
    finally:
        page.close()
        second.stop()


@pytest.mark.parametrize(
    "text", HOSTILE, ids=("markup", "directions", "controls", "templates", "long")
)
def test_hostile_questions_are_shown_as_they_are(chat: Chat, text: str, watched):
    watched.allowed.append("400")  # of the settings' text, if the engine is asked with it
    page = chat(viewport={"width": 400, "height": 860})
    page.get_by_label("Question").fill(text)
    use(page, temperature="0", max_tokens="4")
    page.get_by_role("button", name="Send").click()
    turn = page.locator("[data-turn-state=done], [data-turn-state=failed]")
    expect(turn).to_be_visible(timeout=60_000)
    page.get_by_role("button", name="Settings").click()
    for name in ("layers", "heads"):
        page.locator(f"[name={name}]").fill(text[:2_000])
    expect(page.locator(".settings [role=alert]")).to_have_count(2)
    assert hacked(page) is None
    assert page.locator(".chat-text img, .chat-text script").count() == 0
    assert overflow(page) <= 0


@pytest.mark.parametrize("width", [400, 1_000, 1_920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_its_window(chat: Chat, width: int, scheme: str):
    page = chat(viewport={"width": width, "height": 1_000}, color_scheme=scheme)
    assert_legible(page)
    ask(page, NEEDLE, **GREEDY)
    token(page, tokens(page) - 1).click()
    expect(lens(page)).to_be_visible()
    last = tokens(page) - 1

    def is_clear() -> bool:
        box, over = token(page, last).bounding_box(), lens(page).bounding_box()
        return width >= 1_000 or box["y"] + box["height"] <= over["y"]

    until(is_clear, "the lens hides the pinned token")
    assert_legible(page)


def test_without_an_engine_it_says_what_to_do(show: Callable[..., Page]):
    page = show("/chat")
    expect(page.locator("[data-obstacle]")).to_contain_text("--engine-url")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_a_conversation_goes_on_and_turns_can_be_looked_at(chat: Chat):
    page = chat()
    ask(page, "alpha: 1729\nalpha:", **GREEDY)
    first = tokens(page)
    ask(page, "beta: 2048\nbeta:", **GREEDY)
    assert tokens(page) > first
    turns = page.get_by_label("Turn")
    turns.select_option(index=0)
    expect(page.locator(".flow")).to_have_attribute("data-tokens", str(first))


def test_the_page_asks_the_sidecar_alone(chat: Chat, with_engine):
    """`watched` refuses other origins; the engine's own address is one."""
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    assert httpx.get(f"{with_engine[1].url}/health").status_code == 200


@pytest.mark.slow
def test_rows_of_an_answer_are_in_live_afterwards(chat: Chat):
    page = chat()
    ask(page, NEEDLE, **GREEDY)
    page.wait_for_timeout(3_000)  # they have been streamed, and are not again
    page.get_by_role("link", name="Live", exact=True).click()
    latest = page.locator("[data-panel=latest]")
    expect(latest.locator("tbody tr").first).to_be_visible()
    expect(page.locator("[data-panel=zones]").get_by_role("meter").first).to_be_visible()
