"""A cache of pages of 16 tokens: the numbers are those of transformers, also after a prefix hit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import COMPLETIONS, MODES, ask
from attention_checks import check
from running_sglang import SGLangServer, require_sglang

pytestmark = pytest.mark.slow
LAYERS = [0, 1, 2, 3]
TOKENS = 20
PREFIX = "alpha: 1729\nbeta: 2048\ngamma: 3141\ndelta: 4096\nepsilon: 5050\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SGLangServer]:
    require_sglang()
    options = ("--page-size", "16", "--return-attention-tokens",
               "--attention-capture-layers", "all")  # fmt: skip
    with SGLangServer(tmp_path_factory.mktemp("sglang"), *options) as running:
        yield running


@pytest.mark.parametrize("mode", MODES)
def test_every_number_is_that_of_transformers(server, tokenizer, greedy, reference, mode):
    assert server.client.get("/get_server_info").json()["page_size"] == 16
    # Of each prompt pages are shared with the one before; its last one is not full.
    prompts = [f"{PREFIX}{name}:" for name in ("alpha", "gamma", "epsilon", "zeta 16, 17, 18")]

    def run(prompt: str):
        return ask(server.url, COMPLETIONS, prompt, TOKENS, return_attention_tokens=True,
                   **MODES[mode])  # fmt: skip

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [run(prompts[0]), *pool.map(run, prompts[1:])]
    for prompt, found in zip(prompts, answers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        tokens = [*ids, *greedy(ids, TOKENS)]
        rows = list(range(len(ids), len(tokens) - 1))
        check(mode, found.entries, reference(tokens), len(ids), rows, layers=LAYERS)
