"""Which layers of vLLM's are captured, where their keys lie, and what is refused in which words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_steps import DIM, HEADS, KEY_HEADS, SCALE, cache_of, layer_of, runner_of  # noqa: E402

from capture_kernels.errors import OptionError  # noqa: E402
from pipeline.engines.vllm.model_process.layers import (  # noqa: E402
    CACHE_TYPES,
    LayerKeys,
    attention_layers,
    graph_refusal,
    kinds_of,
    ranks_of_this_process,
    refusal,
)

NUM_PAGES, PAGE = 5, 4


def filled(layout: str, heads: int = KEY_HEADS, dtype: Any = torch.float32) -> Any:
    cache = cache_of(NUM_PAGES, PAGE, layout, heads)
    random = torch.rand(cache.shape, generator=torch.Generator().manual_seed(0))
    cache.copy_(random)
    return cache.to(dtype)


# Where keys lie ----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, KEY_HEADS])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_are_seen_where_vllm_has_them(layout, heads):
    cache = filled(layout, heads)
    found = LayerKeys.of_layer(layer_of(0, cache), 3, query_is_8_bit=False)
    assert (found.page, found.group, found.scale) == (PAGE, 3, None)
    assert found.page_slots == PAGE * (heads if layout == "HND" else 1)
    assert found.keys.data_ptr() == cache.data_ptr()
    assert found.keys.shape[1:] == (heads, DIM)
    for page in range(NUM_PAGES):
        for at in range(PAGE):
            slot = page * found.page_slots + at
            assert torch.equal(found.keys[slot], cache[page, :, at, :DIM])
    # The last one is the last key, and no memory behind it.
    assert len(found.keys) == slot + 1


def test_keys_of_a_cache_that_begins_within_a_tensor_of_several_layers():
    whole = torch.rand((NUM_PAGES, 3, PAGE, KEY_HEADS, 2 * DIM))
    cache = whole[:, 1].transpose(1, 2)
    found = LayerKeys.of_layer(layer_of(0, cache), 0, query_is_8_bit=False)
    assert found.page_slots == 3 * PAGE
    assert torch.equal(found.keys[2 * found.page_slots + 3], cache[2, :, 3, :DIM])


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5, 2.0])])
@pytest.mark.parametrize("query", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_of_8_bits_have_a_scale_and_that_of_queries_of_8_bits_is_in_it(layout, query, scale):
    cache = filled(layout, dtype=torch.float8_e4m3fn).view(torch.uint8)
    layer = layer_of(0, cache)
    layer._k_scale, layer._q_scale = scale, torch.tensor(4.0)
    found = LayerKeys.of_layer(layer, 0, query_is_8_bit=query)
    assert found.keys.dtype == torch.float8_e4m3fn
    slot = 2 * found.page_slots + 1
    expected = filled(layout)[2, :, 1, :DIM].to(torch.float8_e4m3fn).float()
    assert torch.equal(found.keys[slot].float(), expected)
    assert found.scale.dtype == torch.float32
    assert found.scale.tolist() == (scale * (4 if query else 1)).reshape(-1).tolist()


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros((NUM_PAGES, KEY_HEADS, PAGE, 4 * DIM))[..., ::2],
        torch.zeros((NUM_PAGES, KEY_HEADS * PAGE * 2 * DIM + 1))[:, 1:].view(
            NUM_PAGES, KEY_HEADS, PAGE, 2 * DIM
        ),
    ],
    ids=["numbers of a key apart", "pages at other distances than keys"],
)
def test_keys_that_do_not_lie_at_equal_distances_are_refused(cache):
    with pytest.raises(OptionError, match=r"layer model\.layers\.7\.\S+ has its keys at strides"):
        LayerKeys.of_layer(layer_of(7, cache), 0, query_is_8_bit=False)


# Kinds of layers ---------------------------------------------------------------------------------


ONE = dict.fromkeys(range(9))  # one table


def kinds(*layers: Any, tables: tuple[tuple[int, str], ...] = ()) -> list[tuple[int, ...]]:
    """The numbers of the layers of each kind. tables: group and layout of each layer's keys."""
    keys = {
        number: LayerKeys.of_layer(
            SimpleNamespace(**vars(layers[number]) | {"kv_cache": filled(layout)}), group,
            query_is_8_bit=False,
        )
        for number, (group, layout) in enumerate(tables)
    }  # fmt: skip
    known = {number: own.table for number, own in keys.items()}
    return [kind.numbers for kind in kinds_of(dict(enumerate(layers)), ONE | known)]


def test_a_kind_is_of_layers_that_compute_alike_over_one_table():
    plain = layer_of(0, None)
    assert kinds(plain, layer_of(1, None), plain) == [(0, 1, 2)]
    assert kinds(plain, layer_of(1, None, 9), plain, layer_of(3, None, 9)) == [(0, 2), (1, 3)]
    assert kinds(plain, layer_of(1, None, scale=0.5), layer_of(2, None, logits_soft_cap=30)) == [
        (0,), (1,), (2,)
    ]  # fmt: skip
    # Group and layout say where a table's pages are.
    assert kinds(plain, plain, plain, tables=((0, "NHD"), (1, "NHD"), (0, "NHD"))) == [(0, 2), (1,)]
    assert kinds(plain, plain, tables=((0, "NHD"), (0, "HND"))) == [(0,), (1,)]


def test_a_kind_says_how_its_layers_compute():
    layer = layer_of(1, None, 9, logits_soft_cap=30.0)
    (kind,) = kinds_of({4: layer}, ONE)
    assert kind.numbers == (4,)
    assert (kind.heads, kind.key_heads, kind.head_dim) == (HEADS, KEY_HEADS, DIM)
    assert (kind.scale, kind.soft_cap, kind.window, kind.mapped) == (SCALE, 30.0, 9, True)
    (kind,) = kinds_of({0: layer_of(0, None)}, ONE)
    assert (kind.soft_cap, kind.window) == (None, 0)
    with pytest.raises(OptionError, match="layer 2 has chunks in place of a window"):
        kinds_of({2: layer_of(2, None, chunk_lookback=4)}, ONE)
    images = layer_of(1, None)
    images.use_mm_prefix = True
    with pytest.raises(OptionError, match="layer 1 attends to images on both sides"):
        kinds_of({1: images}, ONE)
    with pytest.raises(OptionError, match="layer 3 has ALiBi"):
        kinds_of({3: layer_of(3, None, alibi_slopes=[0.5])}, ONE)


# What is refused ---------------------------------------------------------------------------------


def test_a_plain_model_is_not_refused():
    assert refusal(runner_of([], [])) is None
    for name in CACHE_TYPES:
        runner = runner_of([], [])
        runner.vllm_config.cache_config.cache_dtype = name
        assert refusal(runner) is None


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("vllm_config.parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
        ("vllm_config.parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("vllm_config.parallel_config.prefill_context_parallel_size", 2, "context parallelism"),
        ("vllm_config.parallel_config.use_ubatching", True, "--enable-dbo, --ubatch-size"),
        ("vllm_config.parallel_config.nnodes", 2, "several nodes"),
        ("vllm_config.model_config.rswa_window", 64, "R-SWA"),
        ("vllm_config.diffusion_config", object(), "diffusion"),
        ("vllm_config.cache_config.cache_dtype", "nvfp4", "--kv-cache-dtype nvfp4 was not tried"),
        ("vllm_config.cache_config.cache_dtype", "fp8_e5m2", "use auto, float16"),
        ("is_pooling_model", True, "the model does not generate"),
        ("is_encoder_decoder", True, "an encoder beside it"),
    ],
)
def test_what_was_not_tried_is_refused_in_words(path, value, reason):
    runner = place = runner_of([], [])
    *parents, name = path.split(".")
    for parent in parents:
        place = getattr(place, parent)
    setattr(place, name, value)
    assert reason in (refusal(runner) or "")


@pytest.mark.parametrize("mixed", ["NONE", "PIECEWISE", "FULL"])
def test_graphs_that_hold_whole_steps_over_prompts_are_refused(mixed):
    mode = SimpleNamespace(name="THE_MODE", mixed_mode=lambda: SimpleNamespace(name=mixed))
    runner = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    found = graph_refusal(runner)
    assert (found is None) == (mixed != "FULL")
    if found is not None:
        assert "whole graphs of prompts (THE_MODE)" in found
        assert "FULL_AND_PIECEWISE" in found


# In vLLM's model ---------------------------------------------------------------------------------


def test_layers_that_decode_over_keys_of_their_own_by_number(vllm):
    from pipeline.engines.vllm.model_process.backends import CapturedFlashImpl, CapturedTritonImpl

    def attention(impl: Any, **given: Any) -> Any:
        own = {"attn_type": "decoder", "kv_sharing_target_layer_name": None, "impl": impl()}
        return vllm.Attention(**own | given)

    class Latent(vllm.Attention):
        """As MLA's."""

    twelve, three = attention(CapturedTritonImpl), attention(CapturedFlashImpl)
    context = {
        "model.layers.12.attn": twelve,
        "model.layers.3.attn": three,
        "model.layers.4.attn": attention(CapturedFlashImpl.__mro__[2]),
        "model.layers.5.attn": attention(CapturedFlashImpl, attn_type="encoder_only"),
        "model.layers.6.attn": attention(CapturedFlashImpl, kv_sharing_target_layer_name="x"),
        "model.layers.7.attn": Latent(**vars(three)),
        "model.layers.8.mamba": SimpleNamespace(),
        "draft_model.layers.3.attn": attention(CapturedFlashImpl, is_draft_layer=True),
    }
    config = SimpleNamespace(static_forward_context=context)
    found = attention_layers(SimpleNamespace(compilation_config=config))
    assert list(found.items()) == [(3, three), (12, twelve)]


@pytest.mark.parametrize("name", ["Flash", "Triton"])
def test_an_implementation_hands_on_each_layer_after_it_has_run(vllm, name):
    from pipeline.engines.vllm.model_process import backends

    backend = getattr(backends, f"Captured{name}Backend")
    impl, seen = backend.get_impl_cls()(), []
    assert isinstance(impl, backends.IMPLEMENTATIONS)
    query, output = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)

    def layer_ran(*given: Any) -> None:
        assert torch.equal(output, query)
        seen.append(given)

    layer = SimpleNamespace()
    rest = (None, None, None)
    assert impl.forward(layer, query, *rest, "metadata", output) is output

    def decodes(layer: Any, query: Any, metadata: Any, output: Any) -> bool:
        if metadata == "decode":
            output.copy_(2 * query)
        return metadata == "decode"

    layer._attn_recorder = SimpleNamespace(layer=layer_ran, decodes=decodes)
    # As in the run that measures memory, in which there is no step.
    impl.forward(layer, query, *rest, None, output)
    assert seen == []
    assert impl.forward(layer, query, *rest, "metadata", output, output_scale=None) is output
    assert seen == [(layer, query, "metadata")]
    # The recorder did it in its place.
    assert impl.forward(layer, query, *rest, "decode", output) is output
    assert torch.equal(output, 2 * query)
    assert len(seen) == 1


def test_ranks_are_those_of_tensor_parallelism(vllm):
    assert ranks_of_this_process().alone
    vllm.group.world_size, vllm.group.rank_in_group = 2, 1
    vllm.group.all_reduce = lambda part: 3 * part
    found = ranks_of_this_process()
    assert (found.count, found.number, found.answers) == (2, 1, False)
    assert found.heads.all_reduce(torch.ones(2)).tolist() == [3, 3]
