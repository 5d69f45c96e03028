"""The space that neighbours, landmarks and the classifier share."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from planted import planted
from published import layered

from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.octaves import weighted_median
from discovery.algorithms.pca import EXPLAINED, MAX_COMPONENTS, Moments
from discovery.artifacts.projection import POWER, Projection, context_octave, powers

VECTORS = arrays(
    np.float32,
    st.tuples(st.integers(1, 40), st.just(20)),
    elements=st.floats(0, 1, width=32),
)


def fitted(vectors, layout=Layout.LOG16, requests=None) -> Projection:
    return Moments.of(vectors, layout, requests).projection()


@given(vectors=VECTORS, cuts=st.lists(st.integers(0, 40), max_size=6), data=st.data())
def test_moments_of_chunks_add_up_to_those_of_all_rows(vectors, cuts, data):
    ends = sorted(min(cut, len(vectors)) for cut in cuts)
    # Chunks that cut no request, whose rows are in any order.
    requests = np.searchsorted(ends, np.arange(len(vectors)), side="right") * 3
    requests += data.draw(arrays(np.int64, len(vectors), elements=st.integers(0, 2)))
    whole = Moments.of(vectors, Layout.LOG16, requests)
    chunks = zip(np.split(vectors, ends), np.split(requests, ends), strict=True)
    in_chunks = reduce(add, (Moments.of(v, Layout.LOG16, r) for v, r in chunks))
    assert in_chunks.rows == whole.rows == len(vectors)
    np.testing.assert_array_equal(in_chunks.counts, whole.counts)
    np.testing.assert_array_equal(in_chunks.contrasts.octave, whole.contrasts.octave)
    np.testing.assert_allclose(in_chunks.centre, whole.centre, atol=1e-6)
    np.testing.assert_allclose(
        in_chunks.covariance(whole.centre), whole.covariance(whole.centre), atol=1e-12
    )


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rows", [23, 501, 3_000])
def test_the_covariance_is_that_of_the_powers_about_their_octaves_centres(rows, layout):
    vectors = planted(rows, rows)[0] if layout is Layout.LOG16 else layered(rows, rows)
    moments = Moments.of(vectors, layout, np.arange(rows) // 9)
    left = vectors.astype(np.float64) ** POWER - moments.centre[context_octave(vectors, layout)]
    np.testing.assert_allclose(left.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(moments.covariance(moments.centre), left.T @ left / rows, atol=1e-12)


@pytest.mark.parametrize("power", [0.5, 0.75, 1.0, 0.6])
def test_a_power_is_numpys_and_of_negative_numbers_zero(power):
    vectors = planted(50, 1)[0]
    found = powers(np.concatenate([vectors, -vectors]), power)
    np.testing.assert_allclose(found[:50], vectors.astype(np.float64) ** power, rtol=1e-6)
    assert not found[50:].any()


def by_octaves(random, requests: int, rows: int, behaviour, drawn):
    """Rows of requests over the octaves `drawn(request)`: `behaviour(request)` in the first bins,
    and as much in the last as the octave says."""
    request = np.repeat(np.arange(requests), rows)
    octave = np.concatenate([random.choice(drawn(one), rows) for one in range(requests)])
    vectors = np.zeros((len(request), 20), np.float32)
    vectors[np.arange(len(request)), 4 + octave] = 0.02 * octave
    for one in range(requests):
        own = request == one
        vectors[own, 4 : 4 + 4] = behaviour(one) * (1 - 0.02 * octave[own, None])
    return vectors, request, octave


KINDS = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7], [0.25, 0.25, 0.25, 0.25]])


def test_what_a_length_does_to_rows_of_a_request_is_taken_out():
    random = np.random.default_rng(1)
    vectors, requests, octave = by_octaves(
        random, 120, 30, lambda one: KINDS[one % 3], lambda one: range(5, 12)
    )
    projected = fitted(vectors, requests=requests)(vectors, Layout.LOG16)
    uncentred = fitted(vectors)(vectors, Layout.LOG16)

    def explained(rows, words):
        """Share of the rows' squares that the words' means hold."""
        own = [rows[words == one] for one in np.unique(words)]
        return sum(len(o) * np.square(o.mean(axis=0)).sum() for o in own) / np.square(rows).sum()

    assert explained(projected, octave) < 0.02 < 0.2 < explained(uncentred, octave)


def test_requests_that_have_a_length_of_their_own_stay_apart():
    """Each kind has its octave: nothing says that the length made it, and nothing is taken out."""
    random = np.random.default_rng(2)
    vectors, requests, _ = by_octaves(
        random, 90, 20, lambda one: KINDS[one % 3], lambda one: [6 + 2 * (one % 3)]
    )
    projection = fitted(vectors, requests=requests)
    assert np.ptp(projection.mean, axis=0).max() == 0
    projected = projection(vectors, Layout.LOG16)
    centres = np.array([projected[requests % 3 == kind].mean(axis=0) for kind in range(3)])
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=2)
    assert apart[np.triu_indices(3, 1)].min() > 0.3


def test_a_row_that_ends_nearer_than_it_could_look_says_nothing_of_a_length():
    random = np.random.default_rng(4)
    vectors, requests, octave = by_octaves(
        random, 120, 30, lambda one: KINDS[one % 3], lambda one: range(5, 12)
    )
    known = Moments.of(vectors, Layout.LOG16, requests)
    effect = np.ptp(known.centre, axis=0).max()
    # At the last position of their octaves, or where the position means something else.
    for positions in (2 ** (octave + 1), np.zeros_like(octave)):
        same = Moments.of(vectors, Layout.LOG16, requests, positions=positions)
        np.testing.assert_array_equal(same.centre, known.centre)
    # All could look as far, and look at a few keys, of which one happens to be the last.
    few = Moments.of(vectors, Layout.LOG16, requests, positions=np.full_like(octave, 2**12))
    assert np.ptp(few.centre, axis=0).max() == 0 < 0.1 < effect
    # Only those of two octaves show how far they could look.
    shown = np.isin(octave, (7, 8))
    some = Moments.of(vectors, Layout.LOG16, requests, positions=2 ** (octave + ~shown) + 1)
    assert set(some.contrasts.octave) == {7}


def test_of_more_contrasts_than_asked_for_every_so_manieth_is_kept():
    random = np.random.default_rng(3)
    vectors, requests, _ = by_octaves(
        random, 400, 30, lambda one: KINDS[one % 3], lambda one: range(5, 12)
    )
    whole = Moments.of(vectors, Layout.LOG16, requests).contrasts
    some = Moments.of(vectors, Layout.LOG16, requests, 500).contrasts
    assert 250 <= len(some.octave) <= 500 < len(whole.octave)
    step = -(-len(whole.octave) // 500)
    for kept, every in zip(some, whole, strict=True):
        np.testing.assert_array_equal(kept, every[::step])


@given(
    arrays(
        np.float32, st.tuples(st.integers(1, 30), st.just(3)), elements=st.floats(-9, 9, width=32)
    ),
    st.data(),
)
def test_a_weighted_median_has_half_of_the_weight_at_or_below_it(values, data):
    weight = data.draw(arrays(np.float64, len(values), elements=st.floats(0.5, 40)))
    found = weighted_median(values, weight)
    for column, median in zip(values.T, found, strict=True):
        assert median in column
        half = weight.sum() / 2
        assert weight[column <= median].sum() >= half * (1 - 1e-9)
        assert weight[column < median].sum() <= half * (1 + 1e-9)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rows", [1, 2, 23, 3_000])
def test_components_are_orthonormal_ordered_and_enough(rows, layout):
    vectors = planted(rows, 2)[0] if layout is Layout.LOG16 else layered(rows, 2)
    projection = fitted(vectors, layout)
    components = projection.components.astype(np.float64)
    count = components.shape[1]
    assert 2 <= count <= MAX_COMPONENTS
    assert projection.explained.shape == (count,)
    np.testing.assert_allclose(components.T @ components, np.eye(count), atol=1e-6)
    assert np.all(np.diff(projection.explained) <= 1e-12)
    assert projection.explained.sum() >= EXPLAINED or count == MAX_COMPONENTS
    # The sign of a component does not depend on the linear algebra library.
    largest = np.abs(components).argmax(axis=0)
    assert np.all(components[largest, np.arange(count)] > 0)


def test_distances_of_the_projection_are_those_of_the_centred_powers():
    vectors, _ = planted(400, 3)
    projection = fitted(vectors, requests=np.arange(400) // 7)
    centred = vectors**POWER - projection.mean[context_octave(vectors, Layout.LOG16)]
    before = np.linalg.norm(centred[:, None] - centred[None], axis=2)
    projected = projection(vectors, Layout.LOG16)
    after = np.linalg.norm(projected[:, None] - projected[None], axis=2)
    assert np.all(after <= before + 1e-5)
    assert np.square(after).sum() >= 0.98 * np.square(before).sum()


@pytest.mark.parametrize("octave", range(16))
def test_the_octave_is_the_last_bin_with_any_mass(octave):
    vector = np.zeros((2, 20), np.float32)
    vector[:, 4] = 1.0
    vector[1, 4 + octave] = 1e-30
    found = context_octave(vector, Layout.LOG16)
    assert found.tolist() == [0, octave]


def test_the_layered_layout_has_one_octave_and_all_zeros_the_first():
    assert context_octave(layered(9, 0), Layout.LAYERED).tolist() == [0] * 9
    assert context_octave(np.zeros((3, 20), np.float32), Layout.LOG16).tolist() == [0] * 3


@given(arrays(np.float32, (5, 20), elements=st.floats(-1e6, 1e6, width=32)))
def test_any_finite_vector_has_a_finite_projection(vectors):
    projection = fitted(planted(300, 4)[0])
    vectors[0] = 0.0
    vectors[1] = -np.abs(vectors[1])
    for layout in Layout:
        assert np.isfinite(projection(vectors, layout)).all()


@pytest.mark.parametrize("value", [0.0, 0.05, 1.0])
def test_rows_that_are_all_alike_have_a_finite_projection_at_the_origin(value):
    vectors = np.full((17, 20), value, np.float32)
    projection = fitted(vectors)
    projected = projection(vectors, Layout.LOG16)
    assert projected.shape[0] == 17
    np.testing.assert_allclose(projected, 0, atol=1e-6)
