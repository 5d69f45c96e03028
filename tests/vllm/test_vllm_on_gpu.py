"""Capture in vLLM on a real GPU, CUDA graphs on: the numbers of transformers in float64."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import pytest
from shared import REPO
from vllm_server import MODEL, NEW, ON_A_GPU, generate, prompts_of, start

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = ON_A_GPU
# Half precision moves the hidden states of four layers.
SHARE, LOGIT = 2e-2, 5e-2
WAYS: dict[str, tuple[str, ...]] = {
    "": (), "triton": ("--attention-backend", "TRITON_ATTN"), "fused": ("--attention-fused-decode",)
}  # fmt: skip
SHAPE = {
    "vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "max_position_embeddings": 2048, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module", params=["FLASH_ATTN", "TRITON_ATTN"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    store = ["--attention-store", str(folder / "store")]
    hubs = ["--attention-hub-slots", "4"]
    with start(folder, "--attention-backend", request.param, *store, *hubs) as running:
        running.store = folder / "store"
        yield running.wait()


def check_raw(
    answer: dict[str, Any], truth: Any, layers: int, rows: int, share: float, logit: float
) -> list[float]:
    """The raw entries of a prompt's last rows and of generated tokens; returns errors of shares."""
    entries, errors = answer["entries"], []
    assert len(entries) == layers * (NEW - 1 + rows)
    for entry in entries:
        p, logsumexp = truth.row(entry["layer_id"], entry["position"])
        found = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
        mean = p.mean(axis=0)
        errors.append(np.abs(found - mean[entry["token_positions"]]).max())
        assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=logit)
        # The smallest of the named is no smaller than any other.
        assert min(found) >= np.sort(mean)[-len(found)] - share
    assert max(errors) < share, (np.mean(errors), max(errors))
    return errors


@pytest.mark.parametrize("count", [1, 3, 16])
def test_raw_entries_are_the_models_attention(server, count):
    """Prompts of several chunks, some of them beside generated tokens."""
    from attention_reference import AttentionReference

    prompts, rows = prompts_of(count), 3
    # A prefix cache would have rows of prompts that were asked before.
    fields = {"cache_salt": f"{count}", "include_prompt_attention": rows}
    answers = asyncio.run(
        generate(server.url, prompts, return_attention_tokens=True, top_k_attention=8, **fields)
    )
    for prompt, answer in list(zip(prompts, answers, strict=True))[:4]:
        assert answer["entries"] is not None, server.end_of_log(60)
        check_raw(
            answer, AttentionReference(Path(MODEL), prompt + answer["output_ids"]), 4, rows, SHARE,
            LOGIT,
        )  # fmt: skip
        assert answer["usage"]["rows"] == NEW - 1 + rows
        assert "off" not in answer["usage"]


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_fused_decode_is_the_models_attention(tmp_path, backend):
    """All layers: the queries of each come from the fused attention of those before. Half of the
    requests do not ask, and have theirs from it, too."""
    from attention_reference import AttentionReference

    prompts, rows = prompts_of(16), 3
    fused = ("--attention-fused-decode", "--attention-backend", backend)
    with start(tmp_path, *fused) as running:
        url = running.wait().url

        async def mixed() -> list[list[dict]]:
            return await asyncio.gather(
                generate(url, prompts[::2]),
                generate(url, prompts[1::2], return_attention_tokens=True, top_k_attention=8,
                         include_prompt_attention=rows),
            )  # fmt: skip

        silent, asking = asyncio.run(mixed())
        (again,) = asyncio.run(generate(url, prompts[2:3], return_attention_tokens=True,
                                        top_k_attention=8))  # fmt: skip
    assert not any(answer["entries"] for answer in silent)
    for prompt, answer in list(zip(prompts[1::2], asking, strict=True))[:4]:
        truth = AttentionReference(Path(MODEL), prompt + answer["output_ids"])
        check_raw(answer, truth, 4, rows, SHARE, LOGIT)
    # Of one that was silent: the tokens that the model itself finds likeliest.
    assert again["output_ids"] == silent[1]["output_ids"]
    truth = AttentionReference(Path(MODEL), prompts[2] + silent[1]["output_ids"])
    check_raw(again, truth, 4, 0, SHARE, LOGIT)


def test_who_does_not_ask_is_answered_the_same_and_mixed_batches_are_right(server):
    prompts = prompts_of(12)
    plain = asyncio.run(generate(server.url, prompts))
    assert not any(answer["entries"] or answer["usage"] for answer in plain)

    async def mixed() -> list[list[dict]]:
        return await asyncio.gather(
            generate(server.url, prompts[::2]),
            generate(server.url, prompts[1::2], return_attention_tokens=True,
                     attention_fingerprint_mode=True, attention_mask_prefix=3),
        )  # fmt: skip

    silent, asking = asyncio.run(mixed())
    assert not any(answer["entries"] for answer in silent)
    for answer in asking:
        assert [entry["step"] for entry in answer["entries"]] == list(range(1, NEW))
        for entry in answer["entries"]:
            vector = entry["fingerprint"]
            assert sum(vector[4:]) == pytest.approx(1, abs=1e-3)
            assert 0 <= vector[3] <= 1


def test_a_request_that_stops_early_has_no_rows_past_its_end(server):
    """vLLM runs a step more than that, before it knows."""
    prompt = prompts_of(3)[2]
    (whole,) = asyncio.run(generate(server.url, [prompt], return_attention_tokens=True))
    for at in (1, 2, 7):
        stop = whole["output_ids"][at]
        first = whole["output_ids"].index(stop)
        (answer,) = asyncio.run(
            generate(server.url, [prompt], return_attention_tokens=True, ignore_eos=False,
                     attention_fingerprint_mode=True, stop_token_ids=[stop])
        )  # fmt: skip
        assert answer["output_ids"] == whole["output_ids"][: first + 1]
        assert [entry["step"] for entry in answer["entries"]] == list(range(1, first + 1))


def test_streams_bring_each_entry_once_and_usage_at_the_end(server):
    body = {
        "model": "demo", "prompt": prompts_of(1)[0], "max_tokens": NEW, "ignore_eos": True,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "return_attention_tokens": True, "attention_fingerprint_mode": True,
    }  # fmt: skip
    steps, usage, done = [], None, 0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    steps += [each["step"] for each in choice.get("attention_tokens", [])]
                usage = event.get("usage") or usage
    assert (steps, done) == (list(range(1, NEW)), 1)
    assert usage["attention"]["rows"] == NEW - 1


def test_records_of_every_request_are_stored(server):
    from pipeline.store.open import open_store

    prompts = prompts_of(5)
    answers = asyncio.run(generate(server.url, prompts))
    names = {answer["id"] for answer in answers}
    found: dict[str, list[tuple[int, int]]] = {}
    for _ in range(60):
        asyncio.run(asyncio.sleep(0.25))
        with open_store(server.store, read_only=True) as opened:
            for batch in opened.scan():
                columns = batch.to_pydict()
                for name, position, token in zip(
                    columns["request_id"], columns["position"], columns["token_id"], strict=True
                ):
                    if name in names:
                        found.setdefault(name, []).append((position, token))
        if sum(map(len, found.values())) >= 5 * (NEW - 1):
            break
        found.clear()
    for prompt, answer in zip(prompts, answers, strict=True):
        fed = answer["output_ids"][:-1]
        assert sorted(found[answer["id"]]) == [
            (len(prompt) + at, token) for at, token in enumerate(fed)
        ]


def saved(folder: Path, config: transformers.PretrainedConfig) -> Path:
    from random_model import save_random_model

    return save_random_model(folder, config, torch.float16)


def checked(
    folder: Path, model: Path, layers: int, share: float, logit: float, *options: str,
    mean: float | None = None, of_head: float | None = None, hubs: bool = False,
) -> list[Any]:  # fmt: skip
    """Raw entries and fingerprints of rows of the prompt and of generated ones are the model's, and
    full scores of the longest prompt, and, with `hubs`, those of two others; the
    `AttentionReference` of each answer. `mean` bounds errors of shares on average, `of_head` those
    of a single head."""
    from attention_reference import AttentionReference
    from engine_checks import check_hubs

    prompts, rows, errors, truths = prompts_of(4), 3, [], []
    longest, others = [max(prompts, key=len)], [each[::-1] for each in prompts[1:3] if hubs]
    slots = ("--attention-hub-slots", "2") if hubs else ()
    with start(folder, *options, *slots, model=model) as running:
        url = running.wait().url
        # The prompts are in the prefix cache after the first, so that only it can have their rows.
        raw, vectors = (
            asyncio.run(generate(url, prompts, return_attention_tokens=True, **fields))
            for fields in (
                {"top_k_attention": 8, "include_prompt_attention": rows},
                {"attention_fingerprint_mode": True},
            )
        )
        whole = asyncio.run(generate(url, longest, attn_capture=1))
        of_hubs = asyncio.run(
            generate(url, others, return_attention_tokens=True, include_prompt_attention=True,
                     attention_hubs=True, attention_fingerprint_mode=True)
        )  # fmt: skip
    for prompt, answer in zip(others, of_hubs, strict=True):
        check_hubs(model, prompt, answer["output_ids"], answer["usage"])
    errors += check_full_scores(whole, longest, model, list(range(layers)), share, of_head=of_head)
    for prompt, answer, said in zip(prompts, raw, vectors, strict=True):
        truths.append(AttentionReference(model, prompt + answer["output_ids"]))
        errors += check_raw(answer, truths[-1], layers, rows, share, logit)
        own = AttentionReference(model, prompt + said["output_ids"])
        assert len(said["entries"]) == NEW - 1
        for entry in said["entries"]:
            vector = own.fingerprint(list(range(layers)), len(prompt) + entry["step"] - 1)
            errors.append(np.abs(vector - entry["fingerprint"]).max())
    print(f"shares: mean {np.mean(errors):.2g}, largest {max(errors):.2g}")
    assert max(errors) < share and np.mean(errors) < (mean or share)
    # Attention that tells positions apart, or any answer would do.
    assert max(truths[0].p[0, :, -1].max(axis=1)) > 3 * (mean or share)
    return truths


def check_full_scores(
    answers: list[dict[str, Any]], prompts: list[list[int]], model: Path, layers: list[int],
    share: float, hidden: int = 0, of_head: float | None = None,
) -> list[float]:  # fmt: skip
    """Every row of the prompt and of all generated tokens but the last, in each of `layers`;
    returns errors of the heads' mean."""
    from attention_reference import AttentionReference

    from pipeline.analysis import extract_attention_from_response

    errors = []
    for prompt, answer in zip(prompts, answers, strict=True):
        # A row whose query no graph kept would be missing, and named.
        assert "missing_score_rows" not in answer["usage"], answer["usage"]
        assert not answer["entries"]
        found = extract_attention_from_response(answer["whole"])
        assert found is not None and list(found) == layers
        fed = len(prompt) + NEW - 1
        truth = AttentionReference(model, prompt + answer["output_ids"])
        for number, layer in found.items():
            scores = layer["scores"]
            assert scores.shape[::2] == (fed - hidden, fed - hidden)
            for position in range(hidden, fed):
                p, _ = truth.row(number, position, mask=hidden)
                row = scores[position - hidden]
                off = row[:, : p.shape[1]] - p
                errors.append(np.abs(off.mean(axis=0)).max())
                assert errors[-1] < share, (number, position, off)
                # The first layer's are moved by nothing but its own rounding.
                most = of_head if of_head and number else share
                assert np.abs(off).max() < most, (number, position, off)
                assert not row[:, p.shape[1] :].any()
    return errors


@pytest.mark.parametrize("count", [1, 3, 16])
def test_full_scores_are_the_models_attention_in_chunks_and_in_graphs(server, count):
    prompts, layers, hidden = prompts_of(count), [0, 3], 2
    fields = {"attn_capture": 1, "attn_capture_layers": layers, "attention_mask_prefix": hidden}
    # Asked for twice: the prefix cache must not have its rows.
    for _ in range(1 + (count == 3)):
        answers = asyncio.run(generate(server.url, prompts, **fields))
        check_full_scores(answers[:4], prompts[:4], Path(MODEL), layers, SHARE, hidden)
    plain = asyncio.run(generate(server.url, prompts))
    assert not any(answer["usage"] for answer in plain)


def test_hubs_are_where_each_request_looked_most(server):
    """Several at once."""
    from engine_checks import check_hubs

    prompts = [prompt[::-1] for prompt in prompts_of(3)]
    fields = {"attention_hubs": True, "attention_fingerprint_mode": True}
    answers = asyncio.run(
        generate(server.url, prompts, return_attention_tokens=True, include_prompt_attention=True,
                 **fields)
    )  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        usage = answer["usage"]
        assert usage["rows"] == NEW and "hubs_missing" not in usage, usage
        check_hubs(Path(MODEL), prompt, answer["output_ids"], usage)


def check_lens(url: str, model: Path) -> None:
    """Prompts in several chunks, batches of other sizes than the graphs', some that do not ask."""
    from engine_checks import LensReference

    prompts, rows = prompts_of(10), 40

    async def mixed() -> list[list[dict]]:
        return await asyncio.gather(
            generate(url, prompts[::2], return_attention_tokens=True),
            generate(url, prompts[1::2], return_attention_tokens=True, cache_salt="lens",
                     include_prompt_attention=rows, attention_logit_lens=4),
        )  # fmt: skip

    silent, asking = asyncio.run(mixed())
    reference, seen = LensReference(model), 0
    for prompt, answer in zip(prompts[1::2], asking, strict=True):
        assert "rows_without_logit_lens" not in answer["usage"], answer["usage"]
        reference.check(prompt + answer["output_ids"], answer["entries"], 4)
        seen += len(answer["entries"])
    # A step has room for 16 rows more than there are requests at once.
    left = [answer["usage"].get("missing_prompt_rows", 0) for answer in asking]
    asked = [NEW - 1 + min(rows, len(each)) for each in prompts[1::2]]
    assert seen == 4 * (sum(asked) - sum(left)) > 4 * len(asked) * NEW
    entries = [entry for each in silent for entry in each["entries"]]
    assert entries and not any("logit_lens" in entry for entry in entries)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_the_logit_lens_is_the_models_head_in_chunks_and_in_graphs(tmp_path, options):
    with start(tmp_path, "--attention-logit-lens", *options) as running:
        check_lens(running.wait().url, Path(MODEL))


def check_experts(url: str, model: Path, layers: int, used: int) -> None:
    """Of rows of the prompt, some of them in pieces that are graphs, and of generated ones."""
    from engine_checks import count_clear_experts

    # The last is so short that its prompt runs in a graph of a piece.
    prompts, rows = [*prompts_of(4), [7, 8, 9, 11]], 3
    fields = {
        "return_attention_tokens": True, "attention_moe_routing": True,
        "include_prompt_attention": rows,
    }  # fmt: skip
    answers = [
        answer
        for some in (prompts[:4], prompts[4:])
        for answer in asyncio.run(generate(url, some, **fields))
    ]
    clear = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer["entries"]) == layers * (NEW - 1 + rows), answer["usage"]
        clear += count_clear_experts(model, prompt + answer["output_ids"], answer["entries"], used)
    assert clear > len(prompts) * layers * NEW / 2


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_experts_are_those_of_the_models_routers(tmp_path, backend):
    layers, used = 3, 2
    model = saved(tmp_path / "model", transformers.Qwen3MoeConfig(
        **SHAPE, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=layers,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=used, mlp_only_layers=[],
    ))  # fmt: skip
    with start(tmp_path, "--attention-backend", backend, model=model) as running:
        check_experts(running.wait().url, model, layers, used)


@pytest.mark.parametrize("keys", ["auto", "fp8"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_many_query_heads_on_one_key_head(tmp_path, keys, backend):
    """Of 8-bit keys and queries, which have three bits of mantissa, errors are larger, and most of
    all of a single head."""
    model = saved(tmp_path / "model", transformers.LlamaConfig(
        **SHAPE, intermediate_size=512, num_hidden_layers=3, num_key_value_heads=1,
    ))  # fmt: skip
    share, mean, of_head, logit, dtype = SHARE, SHARE / 4, SHARE, LOGIT, "float16"
    if keys == "fp8":  # FlashAttention 3 has it for bfloat16 alone
        share, mean, of_head, logit, dtype = 0.3, 0.03, 0.6, 0.5, "bfloat16"
    checked(tmp_path, model, 3, share, logit, "--kv-cache-dtype", keys,
            "--attention-backend", backend, "--dtype", dtype, mean=mean,
            of_head=of_head)  # fmt: skip


LATENT_BACKENDS = [
    # backend, heads, dtype, --max-num-batched-tokens
    ("TRITON_MLA", 16, "float16", 256),
    # This runs prompts of up to 512 tokens of a step over latent keys, and others not.
    ("FLASH_ATTN_MLA", 32, "bfloat16", 1024),
    # This up to 128, where all requests of a step have as many.
    ("FLASHMLA", 32, "float16", 256),
]


@pytest.mark.parametrize(("backend", "heads", "dtype", "step"), LATENT_BACKENDS)
def test_latent_keys(tmp_path, backend, heads, dtype, step):
    """DeepSeek V2 (MLA): of a step vLLM runs some tokens over latent keys, and others over keys
    made of these."""
    from latent_model import LAYERS, save_latent_model

    model = save_latent_model(tmp_path / "model", getattr(torch, dtype), heads=heads)
    checked(tmp_path, model, len(LAYERS), 1e-2, 2e-2, "--attention-backend", backend,
            "--dtype", dtype, "--max-num-batched-tokens", str(step), mean=4e-4, of_head=SHARE,
            hubs=True)  # fmt: skip


@pytest.mark.parametrize("backend", ["TRITON_MLA", "FLASHMLA"])
def test_latent_keys_of_8_bits(tmp_path, backend):
    """With FLASHMLA queries of generated tokens have 8 bits, too."""
    from latent_model import LAYERS, save_latent_model

    model = save_latent_model(tmp_path / "model", torch.bfloat16, heads=16)
    checked(tmp_path, model, len(LAYERS), 0.3, 0.5, "--attention-backend", backend,
            "--dtype", "bfloat16", "--kv-cache-dtype", "fp8", mean=2e-2, of_head=0.6)  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_latent_keys_of_heads_on_two_ranks(tmp_path):
    """Each rank has half of the heads, and all latent keys."""
    from attention_reference import AttentionReference
    from latent_model import LAYERS, save_latent_model

    prompts, rows = prompts_of(4), 3
    model = save_latent_model(tmp_path / "model", torch.float16, heads=64)
    with start(tmp_path, "--tensor-parallel-size", "2", model=model) as running:
        answers = asyncio.run(
            generate(running.wait().url, prompts, return_attention_tokens=True, top_k_attention=8,
                     include_prompt_attention=rows)
        )  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = AttentionReference(model, prompt + answer["output_ids"])
        check_raw(answer, truth, len(LAYERS), rows, 1e-2, 2e-2)


def test_the_logit_lens_of_a_model_with_latent_keys(tmp_path):
    """Its class in vLLM hands out hidden states, and is not an `EagleModelMixin`."""
    from latent_model import save_latent_model

    # A lens has four layers there.
    model = save_latent_model(tmp_path / "model", torch.float16, heads=16, num_hidden_layers=4,
                              first_k_dense_replace=4)  # fmt: skip
    with start(tmp_path, "--attention-logit-lens", model=model) as running:
        check_lens(running.wait().url, model)


def test_experts_of_a_model_with_latent_keys(tmp_path):
    from latent_model import LAYERS, save_latent_model

    model = save_latent_model(tmp_path / "model", torch.float16, heads=16, first_k_dense_replace=0,
                              n_routed_experts=8, n_group=1, topk_group=1)  # fmt: skip
    with start(tmp_path, model=model) as running:
        check_experts(running.wait().url, model, len(LAYERS), 2)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_soft_caps_and_windows_in_a_pool_of_their_own(tmp_path, options):
    """Gemma 2: a cap on every layer's logits, a window on every other layer."""
    layers, window, cap = 4, 48, 3.0
    model = saved(tmp_path / "model", transformers.Gemma2Config(
        **SHAPE, intermediate_size=512, num_hidden_layers=layers, num_key_value_heads=2,
        query_pre_attn_scalar=64, attn_logit_softcapping=cap, sliding_window=window,
        hidden_act="gelu_pytorch_tanh",
    ))  # fmt: skip
    # vLLM runs this model in bfloat16, which has three bits less than float16.
    truths = checked(
        tmp_path, model, layers, 0.1, 0.2, "--dtype", "bfloat16", *options, mean=SHARE / 2
    )
    for truth in truths:
        seen = truth.logits[:, :, -1]
        # Both do something here: logits near the cap, and keys that only the other layers see.
        assert 0.9 * cap < seen.max() < cap
        assert [int(np.isfinite(each[0]).sum()) for each in seen[:2]] == [
            min(window, seen.shape[2]), seen.shape[2],
        ]  # fmt: skip


def test_chosen_heads_put_back_requests_chats_and_records_at_the_end(tmp_path):
    """A cache so small that requests are put back; each has every row once. A SIGTERM delivers."""
    from attention_reference import AttentionReference

    from pipeline.store.open import open_store

    prompts, new, heads = prompts_of(16), 96, [1, 3]
    template = REPO / "tests" / "sglang" / "chat.jinja"
    with start(
        tmp_path, "--num-gpu-blocks-override", "140", "--block-size", "16",
        "--attention-head-lists", "--attention-store", str(tmp_path / "store"),
        "--chat-template", str(template), "--attention-mask-system-prompt",
    ) as running:  # fmt: skip
        url = running.wait().url
        answers = asyncio.run(
            generate(url, prompts, new=new, return_attention_tokens=True, top_k_attention=8,
                     attention_capture_head_ids=heads)
        )  # fmt: skip
        metrics = httpx.get(f"{url}/metrics").text
        (put_back,) = re.findall(r"^vllm:num_preemptions_total\{.*\} ([0-9.]+)$", metrics, re.M)
        messages = [{"role": "system", "content": "Be brief.\n"},
                    {"role": "user", "content": "alpha: 1729"}]  # fmt: skip
        body = {
            "model": "demo", "messages": messages, "max_tokens": 5, "temperature": 0,
            "ignore_eos": True, "return_attention_tokens": True, "return_prompt_tokens": True,
        }  # fmt: skip
        chat = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        log = running.end_of_log(40)
    assert float(put_back) > 0, log
    for prompt, answer in zip(prompts, answers, strict=True):
        entries = answer["entries"]
        assert [(e["layer_id"], e["position"]) for e in entries] == [
            (layer, position) for position in range(len(prompt), len(prompt) + new - 1)
            for layer in range(4)
        ]  # fmt: skip
    prompt, answer = min(zip(prompts, answers, strict=True), key=lambda pair: len(pair[0]))
    truth = AttentionReference(Path(MODEL), prompt + answer["output_ids"])
    for entry in answer["entries"]:
        p, logsumexp = truth.row(entry["layer_id"], entry["position"], heads)
        found = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
        mean = p.mean(axis=0)
        np.testing.assert_allclose(found, mean[entry["token_positions"]], atol=SHARE)
        assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=LOGIT)
        assert list(entry["heads"]) == ["1", "3"]
        for number, head in enumerate(("1", "3")):
            own = entry["heads"][head]
            shares = np.exp(np.array(own["topk_logits"]) - own["logsumexp_candidates"])
            np.testing.assert_allclose(shares, p[number][own["token_positions"]], atol=SHARE)
    # The chat hides its system prompt, and names only what is visible.
    choice = chat["choices"][0]
    assert choice["attention_tokens"] == choice["message"]["attention_tokens"], chat
    assert len(choice["attention_tokens"]) == 4 * 4
    said = "".join(token["text"] for token in chat["prompt_tokens"])
    assert "alpha: 1729" in said and "brief" not in said
    assert [token["step"] for token in chat["output_tokens"]] == [1, 2, 3, 4, 5]
    with open_store(tmp_path / "store", read_only=True) as opened:
        assert opened.counts().rows == 16 * (new - 1) + 4


def checked_drafts(
    folder: Path, model: Path, layers: int, drafts: dict[str, object], share: float, logit: float,
    *options: str,
) -> tuple[int, int]:  # fmt: skip
    """Raw entries of rows of prompts and of generated ones are the model's, each row is there once,
    and so is its record; gives how many drafts there were and how many were accepted. Requests take
    the likeliest token, and others at random, which few drafts are; together, and one alone."""
    from attention_reference import AttentionReference

    from pipeline.store.open import open_store

    rows = 3
    prompts = [(prompt * 8)[:300] for prompt in prompts_of(7)]
    asked = {
        "return_attention_tokens": True, "top_k_attention": 8, "include_prompt_attention": rows
    }  # fmt: skip
    config = {"num_speculative_tokens": 3} | drafts
    more = ("--speculative-config", json.dumps(config), "--attention-store", str(folder / "store"))
    graphs = ("--cudagraph-capture-sizes", "4", "16", "64")
    with start(folder, *more, *graphs, *options, model=model) as running:
        url = running.wait().url

        async def mixed() -> list[list[dict]]:
            return await asyncio.gather(
                generate(url, prompts[1:4], **asked),
                generate(url, prompts[4:], temperature=1, seed=1, **asked),
            )

        likeliest, random = asyncio.run(mixed())
        answers = asyncio.run(generate(url, prompts[:1], **asked)) + likeliest + random
        counts = dict(
            re.findall(
                r"^vllm:spec_decode_num_(\w+)_tokens_total\{.*\} (\S+)$",
                httpx.get(f"{url}/metrics").text, re.MULTILINE,
            )
        )  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = AttentionReference(model, prompt + answer["output_ids"])
        check_raw(answer, truth, layers, rows, share, logit)
        positions = [entry["position"] for entry in answer["entries"]][::layers]
        assert positions == list(range(len(prompt) - rows, len(prompt) + NEW - 1))
        assert answer["usage"]["rows"] == NEW - 1 + rows
    with open_store(folder / "store", read_only=True) as opened:
        assert opened.counts().rows == len(prompts) * (NEW - 1 + rows)
    drafted, accepted = int(float(counts["draft"])), int(float(counts["accepted"]))
    print(f"\n{drafts} {options}: {accepted} of {drafted} drafts accepted")
    return drafted, accepted


# Tokens that follow what the last ones followed before.
NGRAM = {"method": "ngram", "prompt_lookup_max": 4}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_drafts_are_rows_as_far_as_they_are_accepted(tmp_path, backend, method):
    drafts = NGRAM if method == "ngram" else {"method": method, "model": str(MODEL)}
    drafted, accepted = checked_drafts(
        tmp_path, MODEL, 4, drafts, SHARE, LOGIT, "--attention-backend", backend
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize("backend", ["TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA"])
def test_drafts_over_latent_keys(tmp_path, backend):
    from latent_model import LAYERS, save_latent_model

    dtype = "bfloat16" if backend == "FLASH_ATTN_MLA" else "float16"
    model = save_latent_model(tmp_path / "model", getattr(torch, dtype), heads=32)
    drafted, accepted = checked_drafts(
        tmp_path, model, len(LAYERS), NGRAM, 1e-2, 2e-2, "--attention-backend", backend,
        "--dtype", dtype,
    )  # fmt: skip
    assert 0 < accepted < drafted


def test_drafts_of_a_layer_of_the_model(tmp_path):
    """DeepSeek V3 (MTP), whose layer to draft with is not captured."""
    from latent_model import LAYERS, save_drafting_model

    model = save_drafting_model(tmp_path / "model", torch.float16)
    drafted, accepted = checked_drafts(
        tmp_path, model, len(LAYERS), {"method": "mtp", "num_speculative_tokens": 2}, 1e-2, 2e-2
    )
    assert accepted < drafted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--compilation-config", '{"cudagraph_mode": "FULL"}'],
         "whole graphs of prompts (FULL) cannot be captured"),
        (["--attention-fused-decode", "--kv-cache-dtype", "fp8", "--dtype", "bfloat16"],
         "--attention-fused-decode: --kv-cache-dtype fp8 was not tried"),
    ],
    ids=["graphs", "fused fp8"],
)  # fmt: skip
def test_what_cannot_be_captured_does_not_start(tmp_path, options, says):
    with start(tmp_path, *options) as running, pytest.raises(RuntimeError) as error:
        running.wait()
    assert says in str(error.value)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_two_ranks_have_the_means_of_all_heads(tmp_path):
    """The demo model's four heads and two key heads on two GPUs, in CUDA graphs."""
    from attention_reference import AttentionReference

    prompts, rows = prompts_of(6), 3
    with start(tmp_path, "--tensor-parallel-size", "2") as running:
        answers = asyncio.run(
            generate(running.wait().url, prompts, return_attention_tokens=True, top_k_attention=8,
                     include_prompt_attention=rows)
        )  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = AttentionReference(Path(MODEL), prompt + answer["output_ids"])
        check_raw(answer, truth, 4, rows, SHARE, LOGIT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("experts", [False, True], ids=["copies", "shared experts"])
def test_requests_on_two_ranks_of_data_parallelism(tmp_path, experts):
    """Copies of a model that know nothing of each other; and one whose ranks share their experts,
    where a rank without requests runs steps beside the other's. Two processes answer."""
    from attention_reference import AttentionReference
    from engine_checks import check_hubs

    from pipeline.store.open import open_store

    model, layers, rows = MODEL, 4, 3
    if experts:
        # Each token is for both experts, so that rounding cannot choose others.
        model = saved(tmp_path / "model", transformers.Qwen3MoeConfig(
            **SHAPE, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=layers,
            num_key_value_heads=2, num_experts=2, num_experts_per_tok=2, mlp_only_layers=[],
        ))  # fmt: skip
    prompts = prompts_of(16)
    with (
        TemporaryDirectory(prefix="attn-test-") as files,
        start(
            tmp_path, "--data-parallel-size", "2", "--attention-store", str(tmp_path / "store"),
            "--attention-hub-slots", "4", "--attention-logit-lens", model=model, TMPDIR=files,
        ) as running,
    ):  # fmt: skip
        url = running.wait().url
        said = httpx.get(f"{url}/v1/attention/capabilities").json()
        several = asyncio.run(
            generate(url, prompts, return_attention_tokens=True, top_k_attention=8,
                     include_prompt_attention=rows)
        )  # fmt: skip
        alone = asyncio.run(generate(url, prompts[:1], attn_capture=1))
        hubs = asyncio.run(
            generate(url, [prompt[::-1] for prompt in prompts[:3]], return_attention_tokens=True,
                     include_prompt_attention=True, attention_hubs=True,
                     attention_fingerprint_mode=True)
        )  # fmt: skip
        check_lens(url, model)
        metrics = httpx.get(f"{url}/metrics").text
        running.stop()
        assert not list(Path(files).glob("attn-*")), "files of the server are left"
    # Each rank has answered.
    generated = re.findall(r'^vllm:generation_tokens_total\{engine="(\d)".*\} ([0-9.]+)$', metrics,
                           re.M)  # fmt: skip
    assert {engine for engine, count in generated if float(count)} == {"0", "1"}, generated
    routing = "with data parallelism ranks route" if experts else "the model routes no experts"
    assert said["reasons"]["moe_routing"].startswith(routing)
    for prompt, answer in zip(prompts, several, strict=True):
        truth = AttentionReference(Path(model), prompt + answer["output_ids"])
        check_raw(answer, truth, layers, rows, SHARE, LOGIT)
    check_full_scores(alone, prompts[:1], Path(model), list(range(layers)), SHARE)
    for prompt, answer in zip(prompts, hubs, strict=False):
        check_hubs(Path(model), prompt[::-1], answer["output_ids"], answer["usage"])
    with open_store(tmp_path / "store", read_only=True) as opened:
        stored = [row for batch in opened.scan() for row in batch.to_pylist()]
    for prompt, answer in zip(prompts, several, strict=True):
        own = [row["position"] for row in stored if row["request_id"] == answer["id"]]
        fed = range(len(prompt), len(prompt) + NEW - 1)
        assert sorted(p for p in own if p >= len(prompt)) == list(fed)
