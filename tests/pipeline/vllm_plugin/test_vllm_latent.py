"""Latent keys (MLA) in a worker of vLLM, which runs some of a step's tokens over these and others
over keys made of these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from full_score_rows import check_scores, scored  # noqa: E402
from vllm_steps import DIM, DRAFTS, HEADS, LAYERS, SCALE, DraftSteps, Req, Steps  # noqa: E402

from capture_kernels.errors import OptionError  # noqa: E402
from pipeline.engines.vllm import model_hooks  # noqa: E402
from pipeline.engines.vllm.hooking import hook  # noqa: E402
from pipeline.engines.vllm.model_process.layers import (  # noqa: E402
    LATENT_BACKENDS,
    LayerKeys,
    attention_layers,
    block_table_of,
    kinds_of,
    seq_lens_of,
)
from pipeline.engines.vllm.model_process.queries import StepQueries, rounded  # noqa: E402

ROTARY = 2
LATENT = DIM - ROTARY


def latent_layer(number: int, cache: Any, **impl: Any) -> SimpleNamespace:
    """As far as the plug-in looks at vLLM's `MLAAttention`. Its weights are orthogonal, so that
    queries can be found that lead to given ones."""
    generator = torch.Generator().manual_seed(number)
    weights, _ = torch.linalg.qr(torch.randn((HEADS, LATENT, LATENT), generator=generator))
    return SimpleNamespace(
        layer_name=f"model.layers.{number}.self_attn.attn", num_heads=HEADS, num_kv_heads=1,
        head_size=DIM, sliding_window=None, kv_cache=cache, kv_lora_rank=LATENT, W_UK_T=weights,
        impl=SimpleNamespace(**{"scale": SCALE, "supports_quant_query_input": True} | impl),
    )  # fmt: skip


def before_weights(layer: Any, queries: Any) -> Any:
    """The queries [R, H, D] that a layer is given, of those that meet its latent keys."""
    plain = torch.einsum("rhl,hpl->rhp", queries[..., :LATENT], layer.W_UK_T)
    return torch.cat([plain, queries[..., LATENT:]], dim=-1)


def metadata_of(counts: list[int], table: Any, lengths: Any, most: int) -> SimpleNamespace:
    """vLLM's `MLACommonMetadata`, of requests with so many tokens in a step. most: tokens of a
    request that runs over latent keys."""
    first = sum(count <= most for count in counts)
    over_latent = SimpleNamespace(block_table=table[:first], seq_lens=lengths[:first])
    others = SimpleNamespace(block_table=table[first:])
    return SimpleNamespace(
        max_query_len=max(counts), num_decode_tokens=sum(counts[:first]), causal=True,
        decode=over_latent if first else None, prefill=others if counts[first:] else None,
    )  # fmt: skip


class LatentSteps(Steps):
    """Of a model with latent keys. most: tokens of a request that runs over these."""

    most = 1

    def new_layer(self, number: int, pages: int, page: int, layout: str) -> Any:
        return latent_layer(number, torch.full((pages, page, DIM), torch.nan))

    def request(self, name: str, prompt: int, **wanted: Any) -> Req:
        req = super().request(name, prompt, **wanted)
        req.keys = req.keys[:, :, :1].contiguous()
        return req

    def metadata(self, counts: list[int], table: Any, lengths: Any) -> SimpleNamespace:
        return metadata_of(counts, table, lengths, self.most)

    def run_layer(self, layer: Any, query: Any, metadata: Any) -> None:
        super().run_layer(layer, before_weights(layer, query), metadata)

    def _write(self, req: Req, number: int, position: int) -> None:
        cache = self.layers[number].kv_cache
        page, at = divmod(position, cache.shape[1])
        cache[req.pages[0][page], at] = self._key(req, number, position)[0]


@pytest.fixture(params=[1, 16], ids=["", "short prompts over latent keys"])
def latent(request, steps, monkeypatch):
    monkeypatch.setattr(LatentSteps, "most", request.param)
    scores = {"enable_attention_instrumentation": True, "instrumentation_layers": "all"}
    return lambda kind=LatentSteps, **options: steps(kind=kind, **scores | options)


def test_entries_full_scores_and_hubs_are_the_models_attention(latent):
    """Prompts in chunks, of which some run over latent keys and some do not, beside generated
    tokens, and padding."""
    some = latent(hub_slots=1)
    rows = some.request("rows", 40, prompt_rows=25, hubs=True)
    last = some.request("last", 21, prompt_rows=1)
    full = some.request("full", 13, scores=[0, 1])
    some.run((rows, 20), (full, 9))()
    some.run((rows, 17), (last, 21), (full, 4))()
    some.run((rows, 3), (last, 1), (full, 1))()
    some.decode(full, rows, last, padding=1, times=3)
    for req in (rows, last, full):
        some.end(req)
    some.run()
    for req, prompt_rows, decoded in ((rows, 20, 3), (last, 1, 4)):
        entries, usage = some.said(req)
        begin = len(req.prompt) - prompt_rows
        found = some.check(req, entries)
        # A step has room for so many rows of prompts: those nearest to the answer are kept.
        assert found[-LAYERS * (prompt_rows + decoded) :] == [
            (position, number)
            for position in range(begin, begin + prompt_rows + decoded)
            for number in range(LAYERS)
        ]
        assert usage["rows"] == len(found) // LAYERS
        assert bool(usage.get("hubs")) == (req is rows)
    check_scores(some, full, scored(some, full), range(13 + 4))


def test_keys_are_seen_where_vllm_has_them():
    cache = torch.rand((5, 4, DIM))
    found = LayerKeys.of_layer(latent_layer(0, cache), 2, query_is_8_bit=False)
    assert (found.page, found.page_slots, found.group, found.scale) == (4, 4, 2, None)
    assert found.keys.shape == (20, 1, DIM) and found.values.shape[2] == 0
    assert torch.equal(found.keys.view(5, 4, DIM), cache)
    # Of several layers in one tensor.
    apart = torch.rand((5, 3, 4, DIM))[:, 1]
    found = LayerKeys.of_layer(latent_layer(0, apart), 0, query_is_8_bit=False)
    assert found.page_slots == 12
    assert torch.equal(found.keys[2 * 12 + 3, 0], apart[2, 3])
    layer = latent_layer(0, cache.to(torch.float8_e4m3fn).view(torch.uint8))
    layer._k_scale = torch.tensor(0.5)
    found = LayerKeys.of_layer(layer, 0, query_is_8_bit=False)
    assert (found.keys.dtype, found.scale.tolist()) == (torch.float8_e4m3fn, [0.5])


def test_a_kind_has_one_key_head_and_all_heads_of_this_rank():
    (kind,) = kinds_of({3: latent_layer(3, None)}, {3: 0})
    assert (kind.numbers, kind.heads, kind.key_heads, kind.head_dim) == ((3,), HEADS, 1, DIM)
    assert (kind.scale, kind.soft_cap, kind.window) == (SCALE, None, 0)


def test_only_queries_that_vllm_rounds_are_rounded():
    """Of keys of 8 bits those of a step's first tokens, which run over latent keys."""
    cache = torch.zeros((2, 4, DIM), dtype=torch.uint8)
    layer = latent_layer(0, cache)
    layer._q_scale = torch.tensor(0.5)
    exact = torch.randn((5, HEADS, DIM), generator=torch.Generator().manual_seed(0))
    given = before_weights(layer, exact)
    metadata = metadata_of([1, 4], torch.zeros((2, 1)), torch.ones(2), 1)
    queries = StepQueries(layer, given, metadata)
    near = rounded(exact, layer._q_scale)
    assert 0.01 < (near - exact).abs().max() < 0.3
    halves = near * 2
    assert torch.equal(halves, halves.to(torch.float8_e4m3fn).float())
    expected = torch.cat([near[:1], exact[1:]])
    for rows in (slice(0, 5), slice(3, 5), torch.tensor([0, 4]), torch.tensor([2])):
        # What is multiplied anew may be rounded to another number where it is about between two.
        found = queries[rows]
        assert ((found - expected[rows]).abs() > 1e-5).sum() <= 1
    metadata = metadata_of([1] * 5, torch.zeros((5, 1)), torch.ones(5), 1)
    assert ((StepQueries(layer, given, metadata, 5).of_decode - near).abs() > 1e-5).sum() <= 1
    for other in (
        latent_layer(0, cache, supports_quant_query_input=False),
        latent_layer(0, cache.float()),
    ):
        found = StepQueries(other, given, metadata, 5).of_decode
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-4)


def test_tables_of_a_step_are_those_of_all_its_requests():
    table, lengths = torch.arange(12).view(4, 3), torch.arange(4)
    for counts in ([1, 1, 5, 6], [1] * 4, [5] * 4):
        found = metadata_of(counts, table, lengths, 1)
        assert torch.equal(block_table_of(found), table)
    assert torch.equal(seq_lens_of(metadata_of([1] * 4, table, lengths, 1)), lengths)


def test_layers_of_dense_backends_by_number(vllm):
    def latent(backend: str, kind: Any = vllm.MLAAttention) -> Any:
        named = SimpleNamespace(get_name=lambda: backend)
        return kind(attn_backend=named, **vars(latent_layer(0, None)))

    layers = {name: latent(name) for name in LATENT_BACKENDS}
    context = {f"model.layers.{at}.attn": one for at, one in enumerate(layers.values())}
    context |= {
        "model.layers.7.attn": latent("FLASHMLA_SPARSE"),
        "model.layers.8.attn": latent("CUTLASS_MLA"),
        "model.layers.9.attn": latent("FLASHMLA", type("Other", (vllm.MLAAttention,), {})),
    }
    config = SimpleNamespace(static_forward_context=context)
    found = attention_layers(SimpleNamespace(compilation_config=config))
    assert list(found.values()) == list(layers.values())


def test_a_layer_is_handed_on_after_it_has_run(vllm):
    for _ in range(2):
        hook(
            "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl",
            model_hooks.with_latent_layer,
        )
    layer, seen = vllm.MLAAttention(), []
    query, output = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)

    def layer_ran(*given: Any) -> None:
        assert torch.equal(output, query)
        seen.append(given)

    rest = (None, None, None)
    assert layer.forward_impl(query, *rest, "metadata", output=output) is output
    layer._attn_recorder = SimpleNamespace(layer=layer_ran)
    # As in the run that measures memory, in which there is no step.
    layer.forward_impl(query, *rest, None, output=output)
    assert seen == []
    assert layer.forward_impl(query, *rest, "metadata", output=output, output_scale=None) is output
    assert seen == [(layer, query, "metadata")]


def test_fused_decode_is_refused(latent):
    with pytest.raises(OptionError, match=r"^--attention-fused-decode does not run latent keys"):
        latent(fused_decode=True)


class LatentDraftSteps(DraftSteps, LatentSteps):
    pass


def test_drafts_over_latent_keys_and_over_keys_made_of_these(latent):
    some = latent(kind=LatentDraftSteps)
    one, two = some.request("one", 9, prompt_rows=2), some.request("two", 30, prompt_rows=1)
    some.run((one, 9))()
    some.verify((one, 2), padding=1)()
    some.run((one, 4), (two, 30), drafts={one: (DRAFTS, 1)})()
    some.verify((one, 0), (two, 3))()
    for req in (one, two):
        some.end(req)
    some.run()
    for req, prompt_rows, decoded in ((one, 2, 6), (two, 1, 4)):
        some.check_rows(req, prompt_rows, decoded)
