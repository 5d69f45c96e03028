"""Routing of experts, of a tiny model with random weights: transformers' routers on its tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_sglang import SGLangServer, require_sglang
from shared import REPO

from pipeline.store.open import open_store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
PROMPT, NEW = [7, 11, 13, 5, 9, 40, 41], 6
LAYERS = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    sys.path.insert(0, str(REPO / "tests" / "pipeline"))
    from capture_models import CONFIGS, make_tokenizer

    config = CONFIGS["qwen3_moe"]()
    # SGLang has experts in every layer of this kind.
    config.mlp_only_layers = []
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("moe") / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made)
    make_tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records") / "fingerprints.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder, store) -> Iterator[SGLangServer]:
    require_sglang()
    options = ("--return-attention-tokens", "--attention-capture-layers", "all",
               "--attention-store", store)  # fmt: skip
    with SGLangServer(tmp_path_factory.mktemp("sglang"), *options, model=folder) as running:
        yield running


def truth(folder: Path, tokens: list[int]) -> dict[int, tuple[list[list[int]], list[float]]]:
    """Experts by falling weight and entropies of each token, by layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for layer in LAYERS:

        def keep(module, given, output, layer=layer):
            logits, scores, experts = output
            order = scores.argsort(dim=1, descending=True)
            p = logits.softmax(dim=1)
            entropy = -(p * p.log()).sum(dim=1) / math.log(p.shape[1])
            found[layer] = experts.gather(1, order).tolist(), entropy.tolist()

        model.model.layers[layer].mlp.gate.register_forward_hook(keep)
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    return found


def generate(server: SGLangServer, prompt: list[int], **fields) -> tuple[list[int], list[dict]]:
    limits = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": limits, "return_attention_tokens": True}
    answer = server.client.post("/generate", json=body | fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [*prompt, *found["output_ids"]], found["meta_info"]["attention_tokens"]


def test_entries_and_records_name_the_experts(server, folder, store):
    """The last test of this server is part of it: it is stopped."""
    features = server.client.get("/v1/attention/capabilities").json()
    assert features["features"]["moe_routing"]
    assert not features["features"]["logit_lens"]
    assert features["reasons"]["logit_lens"] == "start the server with --attention-logit-lens"
    asking = {"input_ids": PROMPT, "return_attention_tokens": True, "attention_logit_lens": 5}
    refused = server.client.post("/generate", json=asking)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "attention_logit_lens")
    assert "start the server with --attention-logit-lens" in refused.text

    tokens, raw = generate(server, PROMPT, attention_moe_routing=True, include_prompt_attention=3)
    expected = truth(folder, tokens)
    rows = list(range(len(PROMPT) - 3, len(tokens) - 1))
    assert [entry["position"] for entry in raw] == [row for row in rows for _ in range(4)]
    for entry in raw:
        experts, entropies = expected[entry["layer_id"]]
        assert entry["top_experts"] == experts[entry["position"]]
        assert entry["router_entropy"] == pytest.approx(entropies[entry["position"]], abs=2e-4)

    other = [*PROMPT[::-1], 21]
    tokens, plain = generate(server, other, attention_fingerprint_mode=True)
    assert plain
    assert not any("top_experts" in entry for entry in plain)
    expected = truth(folder, tokens)
    server.stop()
    with open_store(store) as opened:
        records = [row for batch in opened.scan() for row in batch.to_pylist()]
    own = [row for row in records if row["prompt_len"] == len(other)]
    assert sorted(row["position"] for row in own) == list(range(len(other), len(tokens) - 1))
    for row in own:
        at = row["position"]
        # Of the deepest layer with a router; the entropy is the mean over these layers.
        assert row["top_experts"] == expected[3][0][at]
        mean = sum(expected[layer][1][at] for layer in LAYERS) / len(LAYERS)
        assert row["router_entropy"] == pytest.approx(mean, abs=1e-4)
