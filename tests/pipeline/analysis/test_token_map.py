"""Token texts of a request: the prompt's from the tokenizer, the answer's from the logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from capture_kernels.errors import OptionError
from pipeline.analysis import ResponseError, build_token_map, find_tokens, generated_tokens

pytest.importorskip("transformers")
from demo_server import FOLDER, TEMPLATE
from transformers import AutoTokenizer

PROMPT = "alpha: 1729\nbeta: 2048\nalpha:"
# <|bos|> and "alpha", ":", " 1", "7", "2", "9", "\n" and so on.
LENGTH = 17
ANSWER = [" 1", "7"]


def answer(chat: bool = False, prompt_tokens: int | None = LENGTH, **other: Any) -> dict:
    if chat:
        content = [{"token": text, "logprob": 0.0} for text in ANSWER]
        choice = {"message": {"content": "17"}, "logprobs": {"content": content}}
    else:
        choice = {"text": " 17", "logprobs": {"tokens": ANSWER}}
    usage = {} if prompt_tokens is None else {"usage": {"prompt_tokens": prompt_tokens}}
    return {"choices": [{"index": 0, **choice}], **usage, **other}


def scores(prompt_len: int) -> list[dict]:
    return [{"token_meta": {"prompt_len": prompt_len}}]


@pytest.mark.parametrize("counts", [{}, {"prompt_tokens": None}])
def test_a_map_has_the_texts_of_prompt_and_answer(counts: dict) -> None:
    texts, prompt_len = build_token_map(str(FOLDER), PROMPT, answer(**counts))
    assert prompt_len == LENGTH
    assert list(texts) == list(range(LENGTH + 2))
    assert texts[0] == "<|bos|>" and "".join(texts[i] for i in range(1, LENGTH)) == PROMPT
    assert [texts[LENGTH], texts[LENGTH + 1]] == ANSWER


def test_a_chat_has_the_tokens_that_its_template_makes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = "{{ bos_token }}user: " + TEMPLATE
    messages = [{"role": "user", "content": PROMPT}]
    counted = len(tokenizer.encode(f"user: {PROMPT}"))
    for prompt in (PROMPT, messages):
        texts, prompt_len = build_token_map(tokenizer, prompt, answer(True, counted))
        assert prompt_len == counted
        assert "".join(texts[i] for i in range(counted)) == f"<|bos|>user: {PROMPT}"
        assert texts[counted] == " 1"


def test_a_template_that_refuses_the_messages_is_an_error() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(OptionError, match="no such role"):
        build_token_map(tokenizer, PROMPT, answer(True))


def test_without_a_template_the_one_text_is_what_was_sent() -> None:
    texts, _ = build_token_map(str(FOLDER), PROMPT, answer(True))
    assert "".join(texts[i] for i in range(1, LENGTH)) == PROMPT
    two = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(OptionError, match="no chat template"):
        build_token_map(str(FOLDER), two, answer(True))


def test_indices_begin_after_a_prefix_that_the_server_hides() -> None:
    hidden = answer(attn_capture_data=scores(LENGTH - 8))
    texts, prompt_len = build_token_map(str(FOLDER), PROMPT, hidden)
    assert prompt_len == LENGTH - 8
    assert "".join(texts[i] for i in range(prompt_len)) == "beta: 2048\nalpha:"
    assert texts[prompt_len] == " 1"


def test_without_a_tokenizer_there_are_the_texts_of_the_answer() -> None:
    assert build_token_map(None, PROMPT, answer()) == ({LENGTH: " 1", LENGTH + 1: "7"}, LENGTH)
    only_scores = answer(prompt_tokens=None, attn_capture_data=scores(5))
    assert build_token_map(None, PROMPT, only_scores) == ({5: " 1", 6: "7"}, 5)
    with pytest.raises(ResponseError, match="how many tokens"):
        build_token_map(None, PROMPT, answer(prompt_tokens=None))


def test_another_models_tokenizer_is_noticed() -> None:
    with pytest.raises(OptionError, match=f"makes {LENGTH} tokens .* counted 5"):
        build_token_map(str(FOLDER), PROMPT, answer(prompt_tokens=5))


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path) -> None:
    with pytest.raises(OptionError, match="cannot load the tokenizer") as refused:
        build_token_map(str(tmp_path), PROMPT, answer())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "logprobs",
    [5, {"content": "text"}, {"content": [{"logprob": 0.0}]}, {"tokens": [1]}, {"tokens": "abc"}],
)
def test_damaged_logprobs_are_refused(logprobs: Any) -> None:
    with pytest.raises(ResponseError, match="logprobs cannot be read"):
        generated_tokens({"choices": [{"logprobs": logprobs}]})


@pytest.mark.parametrize("without", [{}, {"logprobs": None}, {"logprobs": {"content": None}}])
def test_an_answer_without_logprobs_has_no_texts(without: dict) -> None:
    assert generated_tokens({"choices": [without]}) == []


def test_tokens_of_a_line_are_found_whatever_a_tokenizer_does_with_blanks() -> None:
    kept = dict(enumerate(["<s>", "alpha", ":", " 17", "29", "\n", "alpha", ":", " 17", "29"]))
    dropped = {index: text.strip() for index, text in kept.items()}
    for texts in (kept, dropped):
        assert find_tokens(texts, "alpha: 1729", 0, 10) == [1, 2, 3, 4]
        assert find_tokens(texts, "alpha: 1729", 2, 10) == [6, 7, 8, 9]
        assert find_tokens(texts, "beta", 0, 10) == find_tokens(texts, " ", 0, 10) == []


def test_a_line_is_not_found_across_tokens_without_a_text() -> None:
    assert find_tokens({0: "al", 2: "pha"}, "alpha", 0, 3) == []
