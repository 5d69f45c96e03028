"""The page against SGLang: a question in Chat, its tokens as they come, and what they looked at."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator

import pytest
from running_sglang import SGLangServer, require_sglang
from shared import REPO, free_port

sys.path[:0] = [str(REPO / "tests" / folder) for folder in ("page", "sidecar")]

playwright = pytest.importorskip("playwright.sync_api")

from browsing import Watched, chromium  # noqa: E402
from page_engine import NEEDLE, ask, texts, token, tokens  # noqa: E402
from playwright.sync_api import Browser, Page, expect  # noqa: E402
from running import Sidecar, running  # noqa: E402
from served_runs import publish  # noqa: E402

from sidecar.explore.demo import PROMPTS  # noqa: E402

pytestmark = pytest.mark.slow
# Keeps how many tokens of the answer were shown, each time that it changed.
WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const shown = document.querySelector("[data-output-tokens]")?.dataset.outputTokens;
    if (shown !== undefined && shown !== window.seen.at(-1)) window.seen.push(shown);
  }).observe(document.body, { subtree: true, childList: true, attributes: true });
}"""
TABLE = next(one["prompt"] for one in PROMPTS if one["name"] == "a table")
LONG = 160


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sidecar, SGLangServer]]:
    """SGLang, which sends its records to a sidecar, which serves the page and relays to SGLang."""
    require_sglang()
    runs, port = tmp_path_factory.mktemp("runs"), free_port()
    publish(runs)
    stream = f"tcp://127.0.0.1:{port}"
    options = (
        "--return-attention-tokens", "--attention-capture-layers", "all",
        "--attention-sidecar-url", stream,
    )  # fmt: skip
    with SGLangServer(tmp_path_factory.mktemp("sglang"), *options) as engine:
        folder = tmp_path_factory.mktemp("sidecar")
        given = ("--page", "--engine-url", engine.url, "--zmq-bind", stream)
        with running(folder, *given, runs=runs) as sidecar:
            yield sidecar, engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def chat(browser: Browser, served: tuple[Sidecar, SGLangServer]) -> Iterator[Callable[..., Page]]:
    """Open Chat once it knows of SGLang; at the end no page may have had an error."""
    watched = Watched(browser)

    def opened() -> Page:
        page = watched.open(f"{served[0].url}/chat")
        page.wait_for_selector("[data-connection=open]")
        page.wait_for_selector(".view-head .says bdi")
        return page

    yield opened
    watched.close()


def where_it_looked(engine: SGLangServer) -> tuple[int, dict[int, float]]:
    """The index of the answer's first token, and probabilities by index in the row that led to it,
    of the last layer: the page shows that one, and leaves out the first token."""
    body = {"model": "demo", "messages": [{"role": "user", "content": NEEDLE}], "temperature": 0,
            "max_tokens": 2, "return_attention_tokens": True, "return_prompt_tokens": True,
            "top_k_attention": 16, "include_prompt_attention": 1}  # fmt: skip
    answer = engine.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    entry = next(
        one for one in said["choices"][0]["attention_tokens"]
        if one["decode_step"] == 0 and one["layer_id"] == 3
    )  # fmt: skip
    p = [math.exp(x - entry["logsumexp_candidates"]) for x in entry["topk_logits"]]
    found = dict(zip(entry["token_positions"], p, strict=True))
    found.pop(0, None)
    return len(said["prompt_tokens"]), found


def test_the_page_shows_what_sglang_generates_and_looks_at(chat, served):
    sidecar, engine = served
    page = chat()
    page.evaluate(WATCH)
    ask(page, TABLE, temperature="0", max_tokens=str(LONG))
    # A long answer comes token by token, and not at its end.
    counts = [int(one) for one in page.evaluate("window.seen")]
    assert counts == sorted(counts) and counts[-1] == LONG
    assert len(set(counts) - {0, LONG}) >= 3, counts
    page.get_by_role("button", name="New", exact=True).click()

    ask(page, NEEDLE, max_tokens="8")
    whole = texts(page, 0, tokens(page))
    assert whole[whole.rindex("alpha:") + len("alpha:") :].startswith(" 1729")
    first, wanted = where_it_looked(engine)
    assert tokens(page) == first + 8
    best = max(wanted, key=lambda position: wanted[position])
    token(page, first).hover()
    lens = page.get_by_role("region", name="Token Lens")
    expect(lens).to_have_attribute("data-token", str(first))
    link = lens.locator("[data-to]").first
    expect(link).to_have_attribute("data-to", str(best))
    expect(link).to_contain_text(f"{100 * wanted[best]:.1f}%")
    expect(page.locator(".arcs path")).not_to_have_count(0)

    token(page, first).click()  # pinned
    page.get_by_role("tab", name="Signal").click()
    local = lens.get_by_role("meter", name=re.compile("^local"))
    expect(local).to_be_visible(timeout=20_000)
    session = page.evaluate("sessionStorage.getItem('attn.session')")
    request = sidecar.get(f"/sessions/{session}")["requests"][-1]["request_id"]
    records = sidecar.get(f"/requests/{request}?vectors=true")["records"]
    row = next(one for one in records if one["position"] == first - 1)
    assert float(local.get_attribute("aria-valuenow")) == pytest.approx(row["vector"][0], abs=1e-4)
    assert row["zone"].replace("_", " ") in lens.inner_text()
