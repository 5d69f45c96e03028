"""SGLang itself, unmodified, on a CPU: what the tests of its plug-in stand on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from plain_answers import answer_shapes, expected_shapes
from running_sglang import MODEL, SGLangServer, require_sglang
from shared import REPO

pytestmark = pytest.mark.slow
NEW_TOKENS = 64
ASKED = {"model": "demo", "max_tokens": NEW_TOKENS, "temperature": 0}
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (REPO / "examples/sample/prompts.jsonl").read_text().splitlines()[::60]
]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SGLangServer]:
    require_sglang()
    # SGLang's own way to leave plug-ins out: to name those that are wanted.
    without = {"SGLANG_PLUGINS": "other"}
    with SGLangServer(tmp_path_factory.mktemp("sglang"), environment=without) as running:
        yield running


@pytest.fixture(scope="module")
def greedy() -> dict[str, tuple[list[int], list[int], str]]:
    """What transformers generates, by prompt: ids of the prompt, ids of the answer and its text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        length = ids["input_ids"].shape[1]
        with torch.inference_mode():
            row = model.generate(**ids, do_sample=False, max_new_tokens=NEW_TOKENS)[0].tolist()
        text = tokenizer.decode(row[length:], skip_special_tokens=True)
        found[prompt] = row[:length], row[length:], text
    return found


def streamed(server: SGLangServer, path: str, body: dict) -> list[dict]:
    """The choices of a stream's events, in order."""
    choices = []
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                choices += json.loads(line.removeprefix("data: "))["choices"]
    return choices


def test_generates_the_tokens_that_transformers_does(server, greedy):
    assert len(greedy) >= 4
    for ids, generated, _ in greedy.values():
        limits = {"max_new_tokens": NEW_TOKENS, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": limits}
        answer = server.client.post("/generate", json=body).json()
        assert answer["output_ids"] == generated


def test_completions_are_transformers_text_streamed_or_not(server, greedy):
    for prompt, (ids, generated, text) in greedy.items():
        body = {**ASKED, "prompt": prompt}
        answer = server.client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["completion_tokens"] == len(generated)
        events = streamed(server, "/v1/completions", body)
        assert len(events) > 1
        assert "".join(choice["text"] for choice in events) == text


def test_chat_is_the_same_text_streamed_or_not(server, greedy):
    for prompt, (ids, _, text) in greedy.items():
        body = {**ASKED, "messages": [{"role": "user", "content": prompt}]}
        answer = server.client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"]["prompt_tokens"] == len(ids)
        events = streamed(server, "/v1/chat/completions", body)
        assert "".join(choice["delta"].get("content") or "" for choice in events) == text


def test_the_expected_answers_are_those_of_sglang_alone(server):
    # `test_guarded.py` and `test_attention.py` compare them with answers of servers that capture.
    assert answer_shapes(server.url) == expected_shapes()


def test_a_server_without_the_plug_in_knows_nothing_of_it(server):
    assert server.client.get("/v1/attention/capabilities").status_code == 404
    body = {**ASKED, "prompt": PROMPTS[0], "return_attention_tokens": True}
    assert "attention" not in server.client.post("/v1/completions", json=body).text
