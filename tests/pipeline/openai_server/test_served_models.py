"""Models of other kinds: sliding windows, soft caps, learned sinks; templates and thinking."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

import numpy as np
import pytest
from capture_models import make_tokenizer, save_model, words
from live_server import LiveServer, entries_of, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout, Visibility, fingerprint
from pipeline.engines.openai_server.model import ServedModel
from pipeline.engines.serving.options import ServeOptions

ALL = ServeOptions(
    return_attention_tokens=True,
    layers="all",
    enable_attention_instrumentation=True,
    instrumentation_layers="all",
)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A server of a tiny model with random weights, and the model with eager attention."""
    folder = save_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    with running(folder, ALL) as live:
        yield live, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def attentions(live: LiveServer, model, found: dict) -> np.ndarray:
    """float64[L, H, T, T] of transformers, of the tokens of a completion."""
    import torch

    prompt = live.model.prompt_tokens(words(30))
    texts = found["choices"][0]["logprobs"]["tokens"]
    tokens = [*prompt, *make_tokenizer().convert_tokens_to_ids(texts)]
    with torch.inference_mode():
        found = model(torch.tensor([tokens[:-1]]), output_attentions=True).attentions
    return torch.stack(found)[:, 0].double().numpy()


@pytest.mark.parametrize("mask", [0, 3])
def test_scores_of_every_kind_of_layer_are_transformers_own(other, mask):
    live, model = other
    found = live.complete(
        words(30), attn_capture=1, logprobs=0, max_tokens=9, attention_mask_prefix=mask
    )
    p = attentions(live, model, found)
    assert [layer["layer_idx"] for layer in found["attn_capture_data"]] == [0, 1, 2, 3]
    for layer in found["attn_capture_data"]:
        scores = np.frombuffer(gzip.decompress(base64.b64decode(layer["data"])), np.float16)
        scores = scores.reshape(layer["shape"]).transpose(1, 0, 2)
        assert scores.shape[1] == 38 - mask
        expected = p[layer["layer_idx"]][:, mask:, mask:]
        if mask:
            # Where a sink takes mass its share is not known from p: then nothing is compared.
            if not np.allclose(p[layer["layer_idx"]].sum(axis=2), 1, atol=1e-3):
                continue
            expected = expected / expected.sum(axis=2, keepdims=True)
        np.testing.assert_allclose(scores, expected, atol=1e-3)


def test_entries_of_every_kind_of_layer_are_transformers_own(other):
    live, model = other
    asked = {"logprobs": 0, "max_tokens": 9, "return_attention_tokens": True,
             "include_prompt_attention": 30, "top_k_attention": 8}  # fmt: skip
    found = live.complete(words(30), **asked)
    p = attentions(live, model, found)
    assert len(entries_of(found)) == 4 * 38
    for entry in entries_of(found):
        mean = p[entry["layer_id"], :, entry["position"]].mean(axis=0)
        shares = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
        np.testing.assert_allclose(shares, mean[entry["token_positions"]], rtol=2e-3, atol=1e-6)
        np.testing.assert_allclose(shares, np.sort(mean)[::-1][: len(shares)], rtol=2e-3, atol=1e-6)
    found = live.complete(words(30), **asked, attention_fingerprint_mode=True)
    windows = live.model.windows
    assert entries_of(found)
    for entry in entries_of(found):
        position = entry["step"] + 29
        first = [max(0, position - window + 1) if window else 0 for window in windows]
        rows = [p[layer, :, position, : position + 1] for layer in range(4)]
        vector = fingerprint(rows, position, Layout.LOG16, Visibility(1), first)
        np.testing.assert_allclose(entry["fingerprint"], vector.vector, atol=2e-4)


def test_a_layer_in_chunks_is_refused_when_its_tokens_show_it(tmp_path: Path):
    folder = save_model("llama4", tmp_path / "llama4")
    with running(folder, ALL) as live:
        status, error = live.refused(
            prompt=words(30), return_attention_tokens=True, include_prompt_attention=2
        )
        assert status == 400
        assert "cannot be captured" in error["message"]
        # Without capture the model is served as any other.
        assert live.complete(words(30))["usage"]["completion_tokens"] == 6


TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'answer: ' }}"
    "{% if enable_thinking %}{{ '<think>' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def templated(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    folder = tmp_path_factory.mktemp("templated")
    for file in demo.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_chat_goes_through_the_models_template(templated):
    tokenizer = AutoTokenizer.from_pretrained(templated)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1, 2,"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("answer: ")
    with running(templated, ALL) as live:
        found = live.chat(messages=messages)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found["usage"]["prompt_tokens"] == len(tokens)
        plain = live.complete(tokens)
        assert found["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


def test_the_system_prompt_is_hidden_in_chats(templated):
    system = {"role": "system", "content": "alpha: 77 and more words"}
    user = {"role": "user", "content": "beta: 3\nbeta:"}
    options = ServeOptions(
        return_attention_tokens=True, layers="all", mask_system_prompt=True, layout=Layout.LAYERED,
        enable_attention_instrumentation=True,
    )  # fmt: skip
    with running(templated, options) as live:
        entries = {"return_attention_tokens": True, "include_prompt_attention": 100}
        hidden = len(live.model._template([system], {}, False))
        found = live.chat(messages=[system, user], **entries, attn_capture=1)
        prompt = found["usage"]["prompt_tokens"]
        assert hidden >= 6
        first = entries_of(found)[0]
        # The first row that is seen is the first token after the system prompt: its only key.
        assert first["position"] == 0
        assert first["decode_step"] == hidden - prompt + 1
        assert first["token_positions"] == [0]
        shape = found["attn_capture_data"][0]["shape"]
        assert shape[0] == prompt - hidden + found["usage"]["completion_tokens"] - 1
        # As a mask of so many tokens does it.
        tokens = live.model.chat_tokens([system, user], {})
        same = live.complete(tokens, **entries, attention_mask_prefix=hidden)
        assert entries_of(same) == entries_of(found)
        status, error = live.refused(
            "chat/completions", messages=[user, system], return_attention_tokens=True
        )
        assert (status, error["param"]) == (400, "messages")
        assert live.chat(messages=[user, system])["usage"]["completion_tokens"]


@pytest.mark.slow
def test_thinking_begins_where_the_template_or_the_parser_has_it(templated):
    body = {"return_attention_tokens": True, "attention_fingerprint_mode": True,
            "include_prompt_attention": True, "max_tokens": 30, "ignore_eos": True}  # fmt: skip
    content = "alpha: 1729\nWhat is alpha?"
    phases = {}
    for parser in (None, "qwen3", "deepseek-r1"):
        with running(templated, ALL, reasoning_parser=parser) as live:
            for thinks in (False, True):
                arguments = {"enable_thinking": thinks}
                found = live.chat(content, chat_template_kwargs=arguments, logprobs=True, **body)
                said = [entry["think_phase"] for entry in entries_of(found)]
                assert said[0] == "prompt"
                tokens = [c["token"] for c in found["choices"][0]["logprobs"]["content"]]
                phases[parser, thinks] = said[1:], tokens
    for (parser, thinks), (said, tokens) in phases.items():
        inside = parser is not None and (thinks or parser == "deepseek-r1")
        expected = []
        for token in tokens[:-1]:
            inside = inside or (parser is not None and token == "<think>")
            expected.append("think" if inside else "output")
            inside = inside and token != "</think>"
        assert said == expected, (parser, thinks)
    assert "think" in phases["qwen3", True][0]
    assert "think" not in phases[None, True][0]


def test_an_unknown_parser_is_refused(demo):
    with pytest.raises(OptionError, match="unknown reasoning parser 'gpt'"):
        ServedModel(str(demo), ALL, reasoning_parser="gpt", device="cpu")
