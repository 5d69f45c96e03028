"""The torch fingerprints, against `fingerprint.fingerprint` of the float64 rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.eager import (  # noqa: E402
    combine,
    first_in_window,
    head_logits,
    layer_statistics,
    plan_rows,
)
from capture_kernels.fingerprint.reference import attention_rows  # noqa: E402
from capture_kernels.fingerprint.vector import Layout, Visibility, fingerprint  # noqa: E402

# Tiny tensors: on a busy machine a second thread only waits.
torch.set_num_threads(1)
LAYOUTS = list(Layout)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers"),
        ],
    ),
]


def make_layers(
    tokens, heads, key_heads, depth, layers=2, size=1.0, dtype=torch.float32, seed=0, device="cpu"
):
    """Queries and keys of some layers: [(float[T, H, D], float[T, Hkv, D])]."""
    random = torch.Generator().manual_seed(seed)

    def tensor(count, factor):
        values = torch.randn(tokens, count, depth, generator=random) * factor
        return values.to(device, dtype)

    return [(tensor(heads, size), tensor(key_heads, 1.0)) for _ in range(layers)]


def assert_agrees(
    layers,
    positions,
    *,
    layout=Layout.LOG16,
    visibility=None,
    heads=None,
    soft_cap=None,
    window=0,
    sinks=None,
    scratch_bytes=1 << 16,
    atol=1e-5,
):
    """The vectors of some rows are the reference's, within `atol`."""
    visibility = visibility or Visibility()
    rows = torch.tensor(positions, dtype=torch.int64)
    scale = layers[0][0].shape[2] ** -0.5
    device = layers[0][0].device
    first = first_in_window(rows, window) if window else None
    plan = plan_rows(rows, device, layout=layout, visibility=visibility, first_keys=first)
    statistics = [
        layer_statistics(
            q[rows.to(device)],
            k,
            plan,
            scale=scale,
            heads=heads,
            soft_cap=soft_cap,
            scratch_bytes=scratch_bytes,
        )
        for q, k in layers
    ]
    ours = combine(statistics, plan)
    assert ours.vector.shape == (len(positions), 20)
    assert ours.vector.dtype == ours.sink_mass.dtype == torch.float32
    exact = [
        attention_rows(
            q.float().cpu().numpy()[rows.numpy()],
            k.float().cpu().numpy(),
            scale=scale,
            positions=rows.numpy(),
            soft_cap=soft_cap,
            sinks=sinks,
            window=window,
        )
        for q, k in layers
    ]
    chosen = slice(None) if heads is None else list(heads)
    vectors, masses = ours.vector.cpu().numpy(), ours.sink_mass.cpu().numpy()
    for r, t in enumerate(positions):
        seen = None if first is None else [int(first[r])] * len(layers)
        truth = fingerprint([e[r][chosen, : t + 1] for e in exact], t, layout, visibility, seen)
        assert bool(ours.valid[r]) == (truth is not None)
        if truth is None:
            assert not vectors[r].any() and masses[r] == 0
            continue
        np.testing.assert_allclose(vectors[r], truth.vector, atol=atol, rtol=0)
        assert masses[r] == pytest.approx(truth.sink_mass, abs=atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 2), (3, 1), (8, 8)])
@pytest.mark.parametrize("depth", [32, 64, 80, 256])
def test_every_shape_agrees_with_the_reference(heads, key_heads, depth, layout, device):
    layers = make_layers(311, heads, key_heads, depth, size=2.0, device=device)
    assert_agrees(layers, list(range(0, 311, 7)), layout=layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("positions", [[], [0], [1], [310], [310, 0, 17], list(range(101))])
def test_any_rows_in_any_order(positions, layout, device):
    assert_agrees(make_layers(311, 4, 2, 32, device=device), positions, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("visibility", [Visibility(), Visibility(0)])
def test_a_sequence_of_one_token(layout, visibility):
    assert_agrees(make_layers(1, 3, 1, 32), [0], layout=layout, visibility=visibility)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [0, 1, 2, 40])
@pytest.mark.parametrize(
    "visibility",
    [
        Visibility(0),
        Visibility(4, 2),
        Visibility(1, 100),
        Visibility(1, 0, 1),
        Visibility(3, 5, 64),
        Visibility(0, 500),
    ],
)
def test_windows_and_masks_agree_with_the_reference(window, visibility, layout, device):
    layers = make_layers(211, 4, 2, 32, device=device)
    assert_agrees(
        layers, list(range(0, 211, 5)), layout=layout, visibility=visibility, window=window
    )


@pytest.mark.parametrize("heads", [(0,), (3,), (1, 2), (0, 1, 2), (0, 1, 4, 5), tuple(range(8))])
def test_any_heads_over_shared_keys(heads):
    assert_agrees(make_layers(97, 8, 2, 32), list(range(97)), heads=heads)


def test_learned_sinks_cancel():
    layers = make_layers(97, 4, 2, 32)
    assert_agrees(layers, list(range(97)), sinks=[-3.0, 0.0, 2.0, 9.0])


@pytest.mark.parametrize("soft_cap", [1.0, 5.0, 50.0])
def test_soft_caps(soft_cap):
    assert_agrees(make_layers(97, 4, 2, 64, size=10.0), list(range(97)), soft_cap=soft_cap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_inputs_are_widened_before_anything_is_computed(dtype, device):
    layers = make_layers(311, 4, 2, 64, size=4.0, dtype=dtype, device=device)
    assert_agrees(layers, list(range(0, 311, 3)), scratch_bytes=1 << 14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_big_logits(layout):
    # Logits of some hundreds are exact to about 1e-5 in float32, and so are the masses.
    assert_agrees(make_layers(97, 4, 2, 64, size=30.0), list(range(97)), layout=layout)
    assert_agrees(make_layers(97, 4, 2, 64, size=100.0), list(range(97)), layout=layout, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_logits_are_uniform_rows(layout):
    layers = make_layers(700, 2, 1, 32, size=0.0)
    assert_agrees(layers, [1, 2, 8, 9, 100, 257, 699], layout=layout)


@given(
    tokens=st.integers(1, 400),
    shape=st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 2)]),
    layout=st.sampled_from(LAYOUTS),
    visibility=st.builds(
        Visibility,
        sink_tokens=st.integers(0, 5),
        mask_prefix=st.integers(0, 50),
        window=st.one_of(st.just(0), st.integers(1, 300)),
    ),
    window=st.one_of(st.just(0), st.integers(1, 300)),
    layers=st.integers(1, 9),
    size=st.sampled_from([0.1, 1.0, 8.0]),
    scratch_bytes=st.sampled_from([1, 1 << 12, 1 << 18, 1 << 26]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_capture_agrees_with_the_reference(
    tokens, shape, layout, visibility, window, layers, size, scratch_bytes, seed, data
):
    positions = data.draw(st.lists(st.integers(0, tokens - 1), max_size=12))
    assert_agrees(
        make_layers(tokens, *shape, 16, layers=layers, size=size, seed=seed),
        positions,
        layout=layout,
        visibility=visibility,
        window=window,
        scratch_bytes=scratch_bytes,
    )


def test_keys_that_the_cache_dropped_are_not_visible():
    (q, k), *_ = make_layers(200, 4, 2, 32)
    rows = torch.tensor([150, 199])
    first = first_in_window(rows, 30)
    whole = layer_statistics(q[rows], k, plan_rows(rows, first_keys=first), scale=0.2)
    plan = plan_rows(rows, first_keys=first, key_offset=110)
    cut = layer_statistics(q[rows], k[110:], plan, scale=0.2)
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    # The newest query needs no mask over a cache that holds its window alone.
    last = layer_statistics(q[199:], k[170:], plan_rows(rows[1:], key_offset=170), scale=0.2)
    for a, b in zip(whole, last, strict=True):
        torch.testing.assert_close(a[1:], b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uniform_attention_within_a_models_window_has_an_entropy_of_one(layout):
    (q, k), *_ = make_layers(3000, 2, 1, 16, size=0.0)
    rows = torch.tensor([2999])
    plan = plan_rows(rows, layout=layout, first_keys=first_in_window(rows, 48))
    (vector,) = combine([layer_statistics(q[rows], k, plan, scale=1.0)], plan).vector
    assert vector[3] == pytest.approx(1.0, abs=1e-6)
    if layout is Layout.LAYERED:
        assert vector[4:12].tolist() == pytest.approx([1 / 8] * 8, abs=1e-6)


def test_visible_mass_that_underflows_is_still_described():
    # The sink's logit is 2,000 above the rest: a softmax gives the visible keys exactly 0.
    q = torch.ones(1, 1, 1)
    k = torch.tensor([2000.0, 0.0, 0.0, 0.0, 0.0]).reshape(5, 1, 1)
    plan = plan_rows(torch.tensor([4]))
    found = combine([layer_statistics(q, k, plan, scale=1.0)], plan)
    assert bool(found.valid[0])
    assert found.sink_mass[0] == 1.0
    assert found.vector[0, 3] == pytest.approx(1.0)  # the four visible keys are alike
    assert found.vector[0, 4:].sum() == pytest.approx(1.0)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_memory_is_bounded_whatever_the_length(dtype):
    tokens, bound = 4096, 8 << 20
    random = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, 4, 16, generator=random).to(dtype)
    k = torch.randn(tokens, 2, 16, generator=random).to(dtype)
    rows = torch.arange(0, tokens, 3)
    inputs = max(q.untyped_storage().nbytes(), len(rows) * 24 * 8)
    with LargestTensor() as largest:
        layer_statistics(q[rows], k, plan_rows(rows), scale=0.25, scratch_bytes=bound)
    assert largest.bytes <= max(bound, inputs)
    assert largest.bytes < tokens * len(rows) * 4  # one head's rows would be more


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers")
def test_peak_memory_on_the_device_is_bounded():
    bound = 64 << 20
    (q, k), *_ = make_layers(16384, 8, 2, 64, layers=1, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(16384)
    # From its first product on torch keeps a workspace for them.
    layer_statistics(q, k, plan_rows(rows, "cuda"), scale=0.125, scratch_bytes=bound)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer_statistics(q, k, plan_rows(rows, "cuda"), scale=0.125, scratch_bytes=bound)
    assert torch.cuda.max_memory_allocated() - before <= bound + (8 << 20)


def test_head_logits_are_the_products_of_each_head_with_its_keys():
    (q, k), *_ = make_layers(33, 6, 2, 16)
    expected = torch.einsum("rhd,thd->hrt", q, k.repeat_interleave(3, dim=1))
    torch.testing.assert_close(head_logits(q, k), expected)
    blocks = head_logits(q, k.bfloat16(), scratch_bytes=1)
    widened = torch.einsum("rhd,thd->hrt", q, k.bfloat16().float().repeat_interleave(3, dim=1))
    torch.testing.assert_close(blocks, widened)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (4,)}, r"0\.\.3"),
        ({"heads": (1, 1)}, "different numbers"),
        ({"heads": ()}, "different numbers"),
        ({"plan": [9]}, "below 9"),
        ({"plan": [-1]}, "0 or more"),
        ({"plan": [1, 2]}, "as many positions"),
        ({"key": torch.zeros(9, 3, 8)}, "do not fit"),
        ({"key": torch.zeros(9, 2, 9)}, "do not fit"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message):
    arguments = {
        "query": torch.zeros(1, 4, 8),
        "key": torch.zeros(9, 2, 8),
        "plan": [3],
        **change,
    }
    with pytest.raises(OptionError, match=message):
        arguments["plan"] = plan_rows(torch.tensor(arguments["plan"]))
        layer_statistics(**arguments, scale=1.0)
