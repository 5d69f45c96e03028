"""The logit lens in SGLang: transformers' last norm and head over its hidden states, in float64.

Tolerance: the servers run in float32 and round to 4 decimals: 2e-4 for a natural logarithm, of
which 5e-5 are the rounding.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, GENERATE, MODES, ask
from running_sglang import MODEL, SGLangServer, require_sglang
from shared import REPO

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
LAYERS, TOKENS, EXACT = [0, 1, 2, 3], 6, 2e-4
OPTIONS = ("--return-attention-tokens", "--attention-logit-lens")
NUMBERS = itertools.count(11)
PROMPT, NEW = [7, 11, 13, 5, 9, 40, 41], 5
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.4,
}  # fmt: skip


def fresh_prompt() -> str:
    """Of about a hundred tokens; no two begin alike."""
    n = next(NUMBERS)
    return f"{n}{n} is alpha{n}: 17{n}\n" + "beta: 2048\ngamma: 3141\n" * 6 + f"alpha{n}:"


class Truth:
    """Log-probabilities of the lens float64[T, V] by layer, and texts of tokens."""

    def __init__(self, folder: Path, tokens: list[int]) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        head = model.eval().get_output_embeddings()
        scale = getattr(model.config, "logits_scaling", 1.0)
        with torch.inference_mode():
            found = model(torch.tensor([tokens]), output_hidden_states=True)
            # The last of transformers' hidden states is after the last norm, the others before it.
            *before, last = found.hidden_states[1:]
            normed = [*map(model.get_decoder().norm, before), last]
            self.logprobs = [(head(state[0]) / scale).log_softmax(-1) for state in normed]
            own = found.logits[0].log_softmax(-1)
        torch.testing.assert_close(self.logprobs[-1], own, rtol=0, atol=1e-9)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.text = lambda token: tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def check(self, lens: list[dict[str, Any]], layer: int, position: int, count: int) -> None:
        expected = self.logprobs[layer][position]
        said = [one["logprob"] for one in lens]
        assert said == pytest.approx(expected.topk(count).values.tolist(), abs=EXACT)
        for one in lens:
            assert list(one) == ["token_id", "token", "logprob"]
            assert one["logprob"] == pytest.approx(float(expected[one["token_id"]]), abs=EXACT)
            assert one["token"] == self.text(one["token_id"])

    def check_entries(
        self, entries: list[dict[str, Any]], rows: list[int], layers: list[int], count: int
    ) -> None:
        """Raw entries of these rows and layers."""
        wanted = [(row, layer) for row in rows for layer in layers]
        assert [(entry["position"], entry["layer_id"]) for entry in entries] == wanted
        for entry in entries:
            assert list(entry)[-2:] == ["think_phase", "logit_lens"]
            self.check(entry["logit_lens"], entry["layer_id"], entry["position"], count)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SGLangServer]:
    require_sglang()
    options = (*OPTIONS, "--attention-capture-layers", "all", "--chunked-prefill-size", "64")
    with SGLangServer(tmp_path_factory.mktemp("sglang"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def known(tokenizer, greedy) -> Callable[..., tuple[list[int], int, Truth]]:
    """All tokens of a prompt and its answer, how many are the prompt's, and their lens."""

    @cache
    def of(prompt: str, count: int = TOKENS) -> tuple[list[int], int, Truth]:
        ids = tokenizer(prompt)["input_ids"]
        tokens = [*ids, *greedy(ids, count)]
        return tokens, len(ids), Truth(MODEL, tokens)

    return of


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_rows_of_a_prompt_in_chunks_and_generated_ones(server, known, route, stream):
    """The prompt's rows lie in two chunks of it."""
    prompt = fresh_prompt()
    tokens, length, truth = known(prompt)
    assert length > 64 + 8
    asked = length - 64 + 8
    found = ask(server.url, route, prompt, TOKENS, stream=stream, return_attention_tokens=True,
                include_prompt_attention=asked, attention_logit_lens=3)  # fmt: skip
    rows = list(range(length - asked, len(tokens) - 1))
    truth.check_entries(found.entries, rows, LAYERS, 3)
    assert "rows_without_logit_lens" not in found.attention
    # After the last layer it is what the model samples from.
    last = [entry["logit_lens"][0]["token_id"] for entry in found.entries if entry["layer_id"] == 3]
    assert last[-TOKENS:] == tokens[length:]


def test_a_lens_of_every_mode_and_of_chosen_layers(server, known):
    prompt = fresh_prompt()
    tokens, length, truth = known(prompt)
    asked = {"return_attention_tokens": True, "attention_logit_lens": True,
             "attention_capture_layers": [1, 3]}  # fmt: skip
    raw = ask(server.url, COMPLETIONS, prompt, TOKENS, **asked)
    truth.check_entries(raw.entries, list(range(length, len(tokens) - 1)), [1, 3], 5)
    sketch = ask(server.url, COMPLETIONS, prompt, TOKENS, **asked, **MODES["sketch"]).entries
    prints = ask(server.url, COMPLETIONS, prompt, TOKENS, **asked, **MODES["fingerprint"]).entries
    shown = [{layer: found["logit_lens"] for layer, found in entry["layer_sketches"].items()}
             for entry in sketch]  # fmt: skip
    for lenses in (shown, [entry["logit_lens"] for entry in prints]):
        assert len(lenses) == TOKENS - 1
        for row, by_layer in enumerate(lenses, length):
            assert list(by_layer) == ["1", "3"]
            for layer, lens in by_layer.items():
                truth.check(lens, int(layer), row, 5)


def test_who_asks_shares_steps_with_who_does_not(server, tokenizer, known):
    """Each with a number of tokens and layers of its own; others with attention and no lens."""
    jobs = [(fresh_prompt(), 4 + n % 3, n) for n in range(9)]

    def run(job):
        prompt, count, n = job
        fields: dict[str, Any] = {}
        if n % 3:
            fields = {"return_attention_tokens": True, "include_prompt_attention": n}
        if n % 3 == 2:
            fields |= {"attention_logit_lens": 1 + n, "attention_capture_layers": [n % 2, 3]}
        return ask(server.url, COMPLETIONS, prompt, count, stream=n % 2 == 1, **fields)

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(run, jobs))
    for (prompt, count, n), found in zip(jobs, answers, strict=True):
        tokens, length, truth = known(prompt, count)
        assert found.text == tokenizer.decode(tokens[length:], skip_special_tokens=True)
        if n % 3 == 2:
            rows = list(range(length - n, len(tokens) - 1))
            truth.check_entries(found.entries, rows, [n % 2, 3], 1 + n)
        else:
            assert bool(found.entries) == bool(n % 3)
            assert not any("logit_lens" in entry for entry in found.entries)


def test_capabilities_say_it(server):
    said = server.client.get("/v1/attention/capabilities").json()
    assert said["features"]["logit_lens"]
    assert "logit_lens" not in said["reasons"]


def saved(folder: Path, config: Any) -> Path:
    sys.path.insert(0, str(REPO / "tests" / "pipeline"))
    from capture_models import make_tokenizer

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def generate(server: SGLangServer, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_attention_tokens": True,
            "attention_logit_lens": 4}  # fmt: skip
    answer = server.client.post("/generate", json=body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


OTHERS = {
    # The layers' residual stands beside the batch, and experts add to it.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **TINY, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    # A layer returns what is to be added and the residual; logits are scaled.
    "granite": lambda: transformers.GraniteConfig(
        **TINY, logits_scaling=3.0, residual_multiplier=0.5, attention_multiplier=0.3
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_that_keep_hidden_states_in_other_forms(kind, tmp_path):
    """Of the layers the last is not captured."""
    require_sglang()
    folder = saved(tmp_path / "model", OTHERS[kind]())
    with SGLangServer(tmp_path, *OPTIONS, "--attention-capture-layers", "0,2", model=folder) as one:
        found = generate(one, include_prompt_attention=3)
        log = one.end_of_log(20)
    entries, tokens = found["meta_info"]["attention_tokens"], [*PROMPT, *found["output_ids"]]
    assert all("logit_lens" in entry for entry in entries), log
    rows = list(range(len(PROMPT) - 3, len(tokens) - 1))
    Truth(folder, tokens).check_entries(entries, rows, [0, 2], 4)


def test_a_model_whose_lens_would_show_something_else_says_so(tmp_path):
    """SGLang's layers of this kind return the whole hidden state, and a residual that is part of
    it: their sum is not what the model goes on with."""
    require_sglang()
    config = transformers.StableLmConfig(**TINY, partial_rotary_factor=0.5)
    folder = saved(tmp_path / "model", config)
    with SGLangServer(tmp_path, *OPTIONS, model=folder) as one:
        found = generate(one)["meta_info"]
        assert len(found["attention_tokens"]) == NEW - 1
        assert not any("logit_lens" in entry for entry in found["attention_tokens"])
        assert found["attention_usage"][-1]["rows_without_logit_lens"] == NEW - 1
        said = one.client.get("/v1/attention/capabilities").json()
        assert not said["features"]["logit_lens"]
        assert "not its head over its last norm" in said["reasons"]["logit_lens"]
        refused = one.client.post(
            "/generate",
            json={"input_ids": PROMPT, "return_attention_tokens": True, "attention_logit_lens": 1},
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "attention_logit_lens"
