"""Attention in SGLang's responses: every number is that of transformers on the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import CHAT, COMPLETIONS, GENERATE, MODES, ask
from attention_checks import check
from running_sglang import SGLangServer, require_sglang

pytestmark = pytest.mark.slow
LAYERS = [0, 1, 2, 3]
TOKENS = 8
# Prompts of which no two begin alike: a prefix that is cached has no rows.
NUMBERS = itertools.count(11)


def fresh_prompt() -> str:
    n = next(NUMBERS)
    return f"{n}{n} is alpha{n}: 17{n}\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha{n}:"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records") / "fingerprints.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory, store) -> Iterator[SGLangServer]:
    require_sglang()
    options = ("--return-attention-tokens", "--attention-capture-layers", "all",
               "--attention-store", store, "--reasoning-parser", "qwen3")  # fmt: skip
    with SGLangServer(tmp_path_factory.mktemp("sglang"), *options) as running:
        yield running


@pytest.fixture
def known(tokenizer, greedy, reference):
    """All tokens of a prompt and its answer, how many are the prompt's, and their attention."""

    def of(prompt: str, count: int = TOKENS):
        ids = tokenizer(prompt)["input_ids"]
        tokens = [*ids, *greedy(ids, count)]
        return tokens, len(ids), reference(tokens)

    return of


def decoded(tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_every_number_of_every_mode(server, tokenizer, known, route, stream, mode):
    prompt = fresh_prompt()
    found = ask(server.url, route, prompt, TOKENS, stream=stream,
                return_attention_tokens=True, **MODES[mode])  # fmt: skip
    tokens, length, expected = known(prompt)
    assert found.text == decoded(tokenizer, tokens[length:])
    # The last generated token is never fed, so it has no row.
    rows = list(range(length, len(tokens) - 1))
    check(mode, found.entries, expected, length, rows, layers=LAYERS)
    assert found.attention["mode"] == mode
    assert found.attention["rows"] == len(rows)
    assert found.attention["bytes"] > 20 * len(rows)
    assert found.attention["overhead_ms"] > 0
