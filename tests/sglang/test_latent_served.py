"""Latent attention (MLA), of a tiny DeepSeek V2 with random weights: transformers' in float64.

SGLang runs prompts over latent keys here, as it does after a prefix from the cache; prompts over
keys made of latent ones need a GPU (`test_models_on_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asking import MODES
from attention_checks import check
from running_sglang import SGLangServer, require_sglang

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from attention_reference import AttentionReference  # noqa: E402
from latent_model import LAYERS, save_latent_model  # noqa: E402

from pipeline.analysis import extract_attention_from_response  # noqa: E402
from pipeline.engines.sglang.model_process.latent import LatentLayers  # noqa: E402

NEW = 12
PROMPTS = [
    np.random.default_rng(seed).integers(3, 2048, size).tolist()
    for seed, size in enumerate((5, 83, 150))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_latent_model(tmp_path_factory.mktemp("latent") / "model", torch.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory, model) -> Iterator[SGLangServer]:
    require_sglang()
    options = ("--return-attention-tokens", "--attention-capture-layers", "all",
               "--enable-attention-instrumentation",
               "--attention-instrumentation-layers", "all")  # fmt: skip
    with SGLangServer(tmp_path_factory.mktemp("sglang"), *options, model=model) as running:
        yield running


def generate(server: SGLangServer, prompt: list[int], **fields: Any) -> dict[str, Any]:
    limits = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": limits, **fields}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_number_is_that_of_transformers(server, model, mode):
    """The first time with prompts as they are, then with prompts from the prefix cache."""

    def run(prompt: list[int]) -> dict[str, Any]:
        return generate(server, prompt, return_attention_tokens=True, **MODES[mode])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [*pool.map(run, PROMPTS), *map(run, PROMPTS)]
    for prompt, answer in zip(PROMPTS * 2, answers, strict=True):
        tokens = [*prompt, *answer["output_ids"]]
        rows = list(range(len(prompt), len(tokens) - 1))
        entries = answer["meta_info"]["attention_tokens"]
        check(mode, entries, AttentionReference(model, tokens), len(prompt), rows, layers=LAYERS)


@pytest.mark.slow
def test_chosen_heads_of_prompts_and_full_scores(server, model):
    prompt, heads, rows = PROMPTS[1][::-1], [3, 1], 7
    answer = generate(server, prompt, return_attention_tokens=True, include_prompt_attention=rows,
                      attention_capture_head_ids=heads, attn_capture=1)  # fmt: skip
    tokens = [*prompt, *answer["output_ids"]]
    truth = AttentionReference(model, tokens)
    positions = list(range(len(prompt) - rows, len(tokens) - 1))
    check("raw", answer["meta_info"]["attention_tokens"], truth, len(prompt), positions,
          layers=LAYERS, heads=sorted(heads))  # fmt: skip
    found = extract_attention_from_response(answer)
    assert sorted(found) == LAYERS
    for number, layer in found.items():
        expected = truth.p[number, sorted(heads), :-1, :-1].transpose(1, 0, 2)
        np.testing.assert_allclose(layer["scores"], expected, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_queries_over_made_keys_meet_the_latent_ones(dtype):
    """The weights of latent keys may be of another type than queries, with a scale."""
    heads, nope, rope, latent, rows, keys = 3, 8, 4, 16, 5, 7
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    prompts, others = torch.nn.Identity(), torch.nn.Identity()
    owner = torch.nn.Module()
    owner.attn_mha, owner.attn_mqa = prompts, others
    owner.qk_nope_head_dim, owner.qk_rope_head_dim = nope, rope
    made_of = random(heads, nope, latent)
    owner.w_kc, owner.w_scale = (made_of / 2).to(dtype), 2.0
    if dtype is torch.float64:
        owner.w_kc = made_of
    layers = LatentLayers(torch.nn.Sequential(owner))
    query, latents = random(rows, heads, nope + rope), random(keys, latent + rope)

    assert layers.queries(others, query) is query
    found = layers.queries(prompts, query) @ latents.T
    keys_of_heads = torch.einsum("hdl,kl->hkd", made_of, latents[:, :latent])
    turned = latents[None, :, latent:].expand(heads, -1, -1)
    expected = torch.einsum("rhd,hkd->rhk", query, torch.cat([keys_of_heads, turned], dim=-1))
    tolerance = 1e-12 if dtype is torch.float64 else 0.1
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"use_dsa": True}, "DSA"), ({"dcp_size": 2}, "--dcp-size"),
     ({"use_deep_gemm_bmm": True}, "SGLANG_USE_DEEPGEMM_BMM"), ({}, None)],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused_by_name(given, says):
    owner = SimpleNamespace(attn_mha=torch.nn.Identity(), attn_mqa=torch.nn.Identity(),
                            use_deep_gemm_bmm=False)  # fmt: skip
    vars(owner).update(given)
    found = LatentLayers(SimpleNamespace(modules=lambda: [owner])).refusal
    assert found is None if says is None else says in found
