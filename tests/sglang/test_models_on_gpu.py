"""Other models than the demo model on a real GPU, CUDA graphs on: tiny ones with random weights.

Against transformers in float64, with the same weights in half precision.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_server import NEW, ON_A_GPU, generate, prompts_of, start

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = ON_A_GPU
SHARE, LOGIT = 2e-2, 5e-2
SHAPE = {
    "vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "max_position_embeddings": 2048, "initializer_range": 0.1,
}  # fmt: skip


def saved(
    folder: Path, config: transformers.PretrainedConfig, *, sink: float | None = None
) -> Path:
    """A model with random weights in float16, as `save_random_model` takes its arguments."""
    from random_model import save_random_model

    return save_random_model(folder, config, torch.float16, sink=sink)


@pytest.mark.parametrize("keys", ["auto", "fp8_e4m3"])
def test_many_query_heads_on_one_key_head(tmp_path, keys):
    """Of 8-bit keys, which have three bits of mantissa, errors are bounded on average."""
    from attention_reference import AttentionReference

    model = saved(tmp_path / "model", transformers.LlamaConfig(
        **SHAPE, intermediate_size=512, num_hidden_layers=3, num_key_value_heads=1,
    ))  # fmt: skip
    prompts = prompts_of(3)
    with start(tmp_path, "--kv-cache-dtype", keys, model=model) as running:
        url = running.wait().url
        answers = asyncio.run(
            generate(url, prompts, return_attention_tokens=True, top_k_attention=8)
        )
        log = running.end_of_log(30)
    errors = []
    for prompt, answer in zip(prompts, answers, strict=True):
        entries = answer["meta_info"]["attention_tokens"]
        assert len(entries) == 3 * (NEW - 1), log
        truth = AttentionReference(model, prompt + answer["output_ids"])
        for entry in entries:
            p, logsumexp = truth.row(entry["layer_id"], entry["position"])
            found = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
            errors.append(np.abs(found - p.mean(axis=0)[entry["token_positions"]]).max())
            exact = LOGIT if keys == "auto" else 0.5
            assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=exact)
    # Attention that tells positions apart, or any answer would do.
    assert max(truth.p[0, :, -1].max(axis=1)) > 0.1
    most = (SHARE, SHARE) if keys == "auto" else (0.03, 0.3)
    assert np.mean(errors) < most[0] and max(errors) < most[1], (np.mean(errors), max(errors))


def checked(
    folder: Path, model: Path, layers: int, share: float, logit: float, *options: str,
    full: bool = False, count: int = 4,
) -> list[Any]:  # fmt: skip
    """Raw entries and fingerprints of rows of the prompt and of generated ones are the model's.

    `share` and `logit` bound the mean of the errors; of a single number, five times as much. With
    `full`, full scores of the longest prompt are looked at, too. Asked are the `count` shortest of
    four prompts. The `AttentionReference` of each answer is returned.
    """
    from attention_reference import AttentionReference

    from pipeline.analysis import extract_attention_from_response

    prompts, rows = sorted(prompts_of(4), key=len)[:count], 3
    with start(folder, *options, model=model) as running:
        url = running.wait().url
        # The prompts are in the prefix cache after the first, so that only it can have their rows.
        raw, vectors = (
            asyncio.run(generate(url, prompts, return_attention_tokens=True, **fields))
            for fields in (
                {"top_k_attention": 8, "include_prompt_attention": rows},
                {"attention_fingerprint_mode": True},
            )
        )
        longest = [max(prompts, key=len)] if full else []
        whole = asyncio.run(generate(url, longest, attn_capture=1))
        log = running.end_of_log(80)
    truths: list[Any] = []
    errors: dict[str, list[float]] = {"share": [], "logit": [], "fingerprint": []}
    if full:
        errors["full"] = []
    for prompt, answer, told in zip(prompts, raw, vectors, strict=True):
        truths.append(AttentionReference(model, prompt + answer["output_ids"]))
        entries = answer["meta_info"]["attention_tokens"]
        assert len(entries) == layers * (NEW - 1 + rows), log
        for entry in entries:
            p, logsumexp = truths[-1].row(entry["layer_id"], entry["position"])
            found = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
            errors["share"].append(np.abs(found - p.mean(axis=0)[entry["token_positions"]]).max())
            errors["logit"].append(abs(entry["logsumexp_candidates"] - logsumexp.mean()))
        own = AttentionReference(model, prompt + told["output_ids"])
        entries = told["meta_info"]["attention_tokens"]
        assert len(entries) == NEW - 1, log
        for entry in entries:
            vector = own.fingerprint(list(range(layers)), len(prompt) + entry["step"] - 1)
            errors["fingerprint"].append(np.abs(vector - entry["fingerprint"]).max())
    for prompt, answer in zip(longest, whole, strict=True):
        p = AttentionReference(model, prompt + answer["output_ids"]).p[:, :, :-1, :-1]
        found = extract_attention_from_response(answer)
        assert found is not None and sorted(found) == list(range(layers)), log
        for number, layer in found.items():
            off = np.abs(layer["scores"] - p[number].swapaxes(0, 1))
            errors["full"].extend(off.mean(axis=1).max(axis=1))
    for name, each in errors.items():
        found, most = np.array(each), logit if name == "logit" else share
        print(f"{name}: mean {found.mean():.2g}, largest {found.max():.2g}")
        assert found.mean() < most and found.max() < 5 * most, (name, found.mean(), found.max())
    # Attention that tells positions apart, or any answer would do.
    assert max(truths[0].p[0, :, -1].max(axis=1)) > 5 * share
    return truths


def test_soft_caps_and_sliding_windows(tmp_path):
    """Gemma 2: a cap on every layer's logits, a window on every other layer, one plain pool."""
    layers, window, cap = 3, 48, 3.0
    model = saved(tmp_path / "model", transformers.Gemma2Config(
        **SHAPE, intermediate_size=512, num_hidden_layers=layers, num_key_value_heads=2,
        query_pre_attn_scalar=64, attn_logit_softcapping=cap, sliding_window=window,
        hidden_act="gelu_pytorch_tanh",
    ))  # fmt: skip
    for truth in checked(tmp_path, model, layers, 4e-3, 2e-2):
        seen = truth.logits[:, :, -1]
        # Both do something here: logits near the cap, and keys that only the other layers see.
        assert 0.9 * cap < seen.max() < cap
        assert [int(np.isfinite(each[0]).sum()) for each in seen[:2]] == [
            min(window, seen.shape[2]), seen.shape[2],
        ]  # fmt: skip


@pytest.mark.parametrize("pools", [[], ["--disable-hybrid-swa-memory"]], ids=["two", "one"])
def test_learned_sinks(tmp_path, pools):
    """gpt-oss: a learned sink for each head, which differ, and keys of windows in a pool of their
    own.

    Each token is for both experts, so that rounding cannot choose others. No row is as long as the
    window: SGLang 0.5.23's Triton decode leaves out the oldest key of one (sgl-project/sglang
    #32087), so that what is behind such a layer is not what the model makes of it.
    """
    layers, sink = 4, 8.0
    model = saved(tmp_path / "model", transformers.GptOssConfig(
        **SHAPE, intermediate_size=256, num_hidden_layers=layers, num_key_value_heads=2,
        num_local_experts=2, num_experts_per_tok=2, sliding_window=2048, swiglu_limit=7.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ), sink=sink)  # fmt: skip
    truths = checked(
        tmp_path, model, layers, 4e-3, 2e-2, *pools, "--moe-runner-backend", "triton", full=True
    )
    for truth in truths:
        # The sinks take a share that is far from the tolerance, and from all.
        assert 0.05 < 1 - truth.p[:, :, -1].sum(axis=2).mean() < 0.9


def test_windows_in_a_pool_of_their_own(tmp_path):
    """Mellum: keys that have left the window have no slot any more in the pool of its layers.

    The layer with a window is the last one, as SGLang's decode leaves out a key of it (as above).
    """
    from window_model import WINDOW, save_window_model

    kinds = ["full_attention", "sliding_attention"]
    model = save_window_model(tmp_path / "model", torch.float16, kinds)
    truths = checked(
        tmp_path, model, len(kinds), 1e-3, 5e-3, "--moe-runner-backend", "triton", full=True
    )
    assert "SWAKVPool mem usage" in (tmp_path / "log").read_text()
    tokens = max(truth.logits.shape[-1] for truth in truths)
    seen = [np.isfinite(truth.logits[:, 0, -1]).sum(axis=1).tolist() for truth in truths]
    assert [tokens, WINDOW] in seen


@pytest.mark.parametrize(
    ("heads", "dtype", "keys", "share", "logit"),
    [
        (32, "float16", "auto", 4e-4, 2e-3),
        (4, "float16", "fp8_e4m3", 6e-3, 3e-2),
        # SGLang puts keys of 128 heads together in bfloat16 alone.
        (128, "bfloat16", "auto", 4e-4, 2e-3),
    ],
)
def test_latent_keys(tmp_path, heads, dtype, keys, share, logit):
    """DeepSeek V2 (MLA): a prompt's first chunk runs over keys made of latent ones, the others and
    generated tokens over these."""
    from latent_model import LAYERS, save_latent_model

    model = save_latent_model(tmp_path / "model", getattr(torch, dtype), heads=heads)
    options = "--dtype", dtype, "--kv-cache-dtype", keys
    # The two long prompts have more full scores of 128 heads than a request may have.
    few = {"full": True} if heads < 128 else {"count": 2}
    checked(tmp_path, model, len(LAYERS), share, logit, *options, **few)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_latent_keys_of_heads_on_two_ranks(tmp_path):
    """Each rank has half of the heads, and all latent keys; the top k of the mean is of both."""
    from latent_model import LAYERS, save_latent_model

    model = save_latent_model(tmp_path / "model", torch.bfloat16, heads=64)
    options = "--dtype", "bfloat16", "--tp-size", "2"
    checked(tmp_path, model, len(LAYERS), 4e-4, 2e-3, *options, count=2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_latent_keys_of_requests_on_two_ranks(tmp_path):
    """With data-parallel attention: some ranks have prompts, or nothing, while others generate."""
    from latent_model import LAYERS, save_latent_model

    model = save_latent_model(tmp_path / "model", torch.float16, heads=32)
    ranks = "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"
    checked(tmp_path, model, len(LAYERS), 4e-4, 2e-3, *ranks, full=True)


def test_experts_are_those_of_the_models_routers(tmp_path):
    """Of rows of the prompt, and of generated ones, which pass in graphs."""
    from engine_checks import count_clear_experts

    layers, used = 3, 2
    model = saved(tmp_path / "model", transformers.Qwen3MoeConfig(
        **SHAPE, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=layers,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=used, mlp_only_layers=[],
    ))  # fmt: skip
    prompts, rows = prompts_of(4), 3
    with start(tmp_path, model=model) as running:
        url = running.wait().url
        answers = asyncio.run(
            generate(url, prompts, return_attention_tokens=True, attention_moe_routing=True,
                     include_prompt_attention=rows)
        )  # fmt: skip
        log = running.end_of_log(40)
    clear = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        entries = answer["meta_info"]["attention_tokens"]
        assert len(entries) == layers * (NEW - 1 + rows), log
        clear += count_clear_experts(model, prompt + answer["output_ids"], entries, used)
    assert clear > len(prompts) * layers * NEW / 2
