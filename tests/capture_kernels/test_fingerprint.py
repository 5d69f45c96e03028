"""What a fingerprint says, against a loop over single keys and against its invariants."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import (
    DIMENSIONS,
    Layout,
    Visibility,
    at_depths,
    fingerprint,
    log2_bins,
    place_bins,
)

LAYOUTS = list(Layout)
LENGTHS = st.integers(1, 600)
ALL_KEYS = Visibility(sink_tokens=0)


def slow_fingerprint(layers, t, layout, visibility, first_keys):
    """DESIGN.md section 2, one key at a time."""
    vectors, sinks, entropies = [], [], []
    for layer, first in zip(layers, first_keys, strict=True):
        per_head, layer_entropy = [], []
        for row in layer:
            visible, sink = [], 0.0
            for j in range(t + 1):
                if j < visibility.mask_prefix or j < first:
                    continue
                if visibility.window and t - j >= visibility.window:
                    continue
                if j < visibility.sink_tokens:
                    sink += row[j]
                else:
                    visible.append((j, row[j]))
            if not visible:
                return None
            total = sum(p for _, p in visible)
            sinks.append(sink / (sink + total))
            n = len(visible)
            bands, entropy = [0.0] * 3, 0.0
            shape = [0.0] * (16 if layout is Layout.LOG16 else 8)
            near, far = (8, 256) if layout is Layout.LOG16 else (10, 100)
            for rank, (j, mass) in enumerate(visible):
                p, d = mass / total, t - j
                bands[0 if d < near else 1 if d < far else 2] += p
                if p > 0:
                    entropy -= p * math.log(p)
                if layout is Layout.LOG16:
                    b = 0
                    while b < 15 and d >= 2 ** (b + 1):
                        b += 1
                else:
                    b = int((rank + 0.5) / n * 8)
                shape[b] += p
            entropy = entropy / math.log(n) if n > 1 else 0.0
            per_head.append([*bands, entropy, *shape])
            layer_entropy.append(entropy)
        vectors.append(np.mean(per_head, axis=0))
        entropies.append(np.mean(layer_entropy))
    vector = np.mean(vectors, axis=0)
    if layout is Layout.LAYERED:
        depths = []
        for i in range(8):
            place = i * (len(entropies) - 1) / 7
            low = min(int(place), len(entropies) - 1)
            high = min(low + 1, len(entropies) - 1)
            depths.append(entropies[low] + (place - low) * (entropies[high] - entropies[low]))
        vector = np.concatenate([vector, depths])
    return vector, float(np.mean(sinks))


@st.composite
def captured_rows(draw, tokens=LENGTHS):
    """Softmax rows float64[L, H, t + 1] of random sharpness, some keys at exactly 0."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = np.exp(rng.normal(size=shape) * draw(st.sampled_from([0.1, 1.0, 5.0])))
    weights[rng.random(shape) < draw(st.sampled_from([0.0, 0.5]))] = 0.0
    weights[..., -1] += 1e-3
    return weights / weights.sum(axis=2, keepdims=True)


visibilities = st.builds(
    Visibility,
    sink_tokens=st.integers(0, 4),
    mask_prefix=st.integers(0, 20),
    window=st.one_of(st.just(0), st.integers(1, 300)),
)


@given(
    rows=captured_rows(),
    visibility=visibilities,
    layout=st.sampled_from(LAYOUTS),
    windows=st.lists(st.one_of(st.just(600), st.integers(1, 300)), min_size=4, max_size=4),
)
def test_a_fingerprint_is_what_a_loop_over_single_keys_finds(rows, visibility, layout, windows):
    t = rows.shape[2] - 1
    first_keys = [max(0, t - window + 1) for window in windows[: len(rows)]]
    ours = fingerprint(rows, t, layout, visibility, first_keys)
    slow = slow_fingerprint(rows, t, layout, visibility, first_keys)
    assert (ours is None) == (slow is None) == (visibility.start(t) > t)
    if ours is not None:
        assert ours.vector.dtype == np.float32
        assert ours.vector.shape == (DIMENSIONS,)
        np.testing.assert_allclose(ours.vector, slow[0], atol=1e-6)
        assert ours.sink_mass == pytest.approx(slow[1], abs=1e-9)


@given(rows=captured_rows(tokens=st.integers(2, 300)), share=st.floats(0.01, 1.0))
def test_a_learned_sink_takes_mass_and_changes_nothing(rows, share):
    t = rows.shape[2] - 1
    whole, part = fingerprint(rows, t), fingerprint(rows * share, t)
    np.testing.assert_allclose(part.vector, whole.vector, atol=1e-6)
    assert part.sink_mass == pytest.approx(whole.sink_mass, abs=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [2, 3, 17, 1000])
def test_entropy_is_1_for_a_uniform_row_and_0_for_one_key(tokens, layout):
    uniform = np.full((2, 1, tokens), 1 / tokens)
    single = np.zeros((2, 1, tokens))
    single[..., -1] = 1.0
    assert fingerprint(uniform, tokens - 1, layout, ALL_KEYS).vector[3] == pytest.approx(1.0)
    assert fingerprint(single, tokens - 1, layout, ALL_KEYS).vector[3] == 0.0


def test_a_row_with_one_visible_key_has_no_entropy():
    row = np.array([[[0.7, 0.3]]])
    found = fingerprint(row, 1)
    assert found.vector[3] == 0.0
    assert found.vector[0] == 1.0
    assert found.sink_mass == pytest.approx(0.7)


def test_heads_are_averaged_after_the_softmax_and_not_before():
    # Two sharp heads: each has no entropy, whatever their mean looks like.
    rows = np.zeros((1, 2, 64))
    rows[0, 0, 10] = rows[0, 1, 50] = 1.0
    assert fingerprint(rows, 63, visibility=ALL_KEYS).vector[3] == 0.0


@pytest.mark.parametrize(
    ("visibility", "position", "first_real", "start"),
    [
        (Visibility(), 0, 0, 1),
        (Visibility(), 1, 0, 1),
        (Visibility(0, 0, 0), 0, 0, 0),
        (Visibility(4, 0, 0), 3, 0, 4),
        (Visibility(1, 5, 0), 4, 5, 5),
        (Visibility(1, 5, 0), 5, 5, 5),
        (Visibility(1, 0, 1), 9, 9, 9),
        (Visibility(1, 0, 10), 9, 0, 1),
        (Visibility(1, 0, 9), 9, 1, 1),
        (Visibility(8, 2, 4), 9, 6, 8),
        (Visibility(8, 7, 4), 9, 7, 8),
    ],
)
def test_where_the_visible_keys_begin(visibility, position, first_real, start):
    assert visibility.first_real(position) == first_real
    assert visibility.start(position) == start


def test_sink_mass_is_the_share_of_the_keys_that_count():
    row = np.array([[[0.4, 0.1, 0.2, 0.3]]])
    assert fingerprint(row, 3, visibility=Visibility(1)).sink_mass == pytest.approx(0.4)
    assert fingerprint(row, 3, visibility=Visibility(2)).sink_mass == pytest.approx(0.5)
    # Masked and out of the window, the sink is no longer part of the whole.
    assert fingerprint(row, 3, visibility=Visibility(2, 1)).sink_mass == pytest.approx(1 / 6)
    assert fingerprint(row, 3, visibility=Visibility(1, 0, 2)).sink_mass == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_without_a_visible_key_has_no_fingerprint(layout):
    assert fingerprint(np.ones((1, 1, 1)), 0, layout) is None
    assert fingerprint(np.full((1, 1, 4), 0.25), 3, layout, Visibility(4)) is None
    assert fingerprint(np.full((1, 1, 4), 0.25), 3, layout, Visibility(0, 4)) is None
    underflowed = np.array([[[1.0, 0.0, 0.0]]])
    assert fingerprint(underflowed, 2, layout) is None


@pytest.mark.parametrize("edge", [2**b for b in range(1, 17)])
def test_offset_bins_change_exactly_at_the_powers_of_two(edge):
    below, at = log2_bins([edge - 1, edge])
    assert below == min(15, max(0, edge.bit_length() - 2))
    assert at == min(15, edge.bit_length() - 1)


def test_every_offset_has_the_bin_of_its_highest_bit():
    offsets = np.arange(70_000)
    expected = [min(15, max(1, int(d)).bit_length() - 1) for d in offsets]
    assert log2_bins(offsets).tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bands_change_exactly_at_their_edges(layout):
    near, far = (8, 256) if layout is Layout.LOG16 else (10, 100)
    t = 400
    for offset, band in [(0, 0), (near - 1, 0), (near, 1), (far - 1, 1), (far, 2), (t, 2)]:
        row = np.zeros((2, 1, t + 1))
        row[..., t - offset] = 1.0
        vector = fingerprint(row, t, layout, ALL_KEYS).vector
        assert vector[:3].tolist() == [float(band == b) for b in range(3)], offset


@given(count=st.integers(1, 3000))
def test_place_bins_are_eighths_of_the_visible_keys(count):
    bins = place_bins(count)
    assert bins.tolist() == [int((2 * r + 1) * 8 // (2 * count)) for r in range(count)]
    assert (np.diff(bins) >= 0).all() and bins.min() >= 0 and bins.max() <= 7
    if count >= 8:
        sizes = np.bincount(bins, minlength=8)
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("layers", [1, 2, 3, 8, 15, 32])
def test_depths_run_from_the_first_layer_to_the_last(layers):
    entropies = np.random.default_rng(layers).random(layers)
    depths = at_depths(entropies)
    assert depths.shape == (8,)
    assert depths[0] == entropies[0]
    assert depths[7] == pytest.approx(entropies[-1])
    if layers == 8:
        np.testing.assert_allclose(depths, entropies)
    if layers == 15:
        np.testing.assert_allclose(depths, entropies[::2])
    if layers == 2:
        np.testing.assert_allclose(depths, np.linspace(*entropies, 8))


def test_layouts_have_twenty_named_columns_each():
    for layout in LAYOUTS:
        assert len(layout.columns) == len(set(layout.columns)) == DIMENSIONS
        assert Layout.parse(layout.label) is layout
    assert Layout.parse("LOG16") is Layout.LOG16


def test_wrong_options_and_shapes_are_refused_by_name():
    with pytest.raises(OptionError, match="unknown layout 'log17'"):
        Layout.parse("log17")
    for name in ("sink_tokens", "mask_prefix", "window"):
        with pytest.raises(OptionError, match=name):
            Visibility(**{name: -1})
    with pytest.raises(OptionError, match=r"\[H, 5\]"):
        fingerprint(np.full((1, 2, 4), 0.25), 4)
