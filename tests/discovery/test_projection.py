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
from discovery.algorithms.pca import EXPLAINED, MAX_COMPONENTS, Moments, fit_projection
from discovery.artifacts.projection import Projection, context_octave

VECTORS = arrays(
    np.float32,
    st.tuples(st.integers(1, 40), st.just(20)),
    elements=st.floats(0, 1, width=32),
)


def fitted(moments: Moments) -> Projection:
    return fit_projection(moments.means, np.ones(20), moments.covariance)


@given(vectors=VECTORS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_moments_of_chunks_add_up_to_those_of_all_rows(vectors, cuts):
    whole = Moments.of(vectors, Layout.LOG16)
    chunks = np.split(vectors, sorted(min(cut, len(vectors)) for cut in cuts))
    in_chunks = reduce(add, (Moments.of(chunk, Layout.LOG16) for chunk in chunks))
    assert in_chunks.rows == whole.rows == len(vectors)
    np.testing.assert_array_equal(in_chunks.counts, whole.counts)
    np.testing.assert_allclose(in_chunks.means, whole.means, atol=1e-12)
    np.testing.assert_allclose(in_chunks.covariance, whole.covariance, atol=1e-12)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rows", [23, 501, 3_000])
def test_moments_are_the_means_and_the_covariance_of_the_roots(rows, layout):
    vectors = planted(rows, rows)[0] if layout is Layout.LOG16 else layered(rows, rows)
    roots = np.sqrt(vectors.astype(np.float64))
    octave = context_octave(vectors, layout)
    moments = Moments.of(vectors, layout)
    for one in np.unique(octave):
        roots[octave == one] -= roots[octave == one].mean(axis=0)
        np.testing.assert_allclose(
            moments.means[one], np.sqrt(vectors[octave == one].astype(np.float64)).mean(axis=0)
        )
    np.testing.assert_allclose(moments.covariance, roots.T @ roots / rows, atol=1e-12)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rows", [2, 23, 501, 3_000])
def test_projected_rows_have_mean_zero_within_each_octave(rows, layout):
    vectors = planted(rows, 1)[0] if layout is Layout.LOG16 else layered(rows, 1)
    projection = fitted(Moments.of(vectors, layout))
    projected = projection(vectors, layout)
    octave = context_octave(vectors, layout)
    assert len(np.unique(octave)) > 1 or layout is Layout.LAYERED or rows < 20
    for one in np.unique(octave):
        np.testing.assert_allclose(projected[octave == one].mean(axis=0), 0, atol=1e-5)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rows", [1, 2, 23, 3_000])
def test_components_are_orthonormal_ordered_and_enough(rows, layout):
    vectors = planted(rows, 2)[0] if layout is Layout.LOG16 else layered(rows, 2)
    projection = fitted(Moments.of(vectors, layout))
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


def test_distances_of_the_projection_are_those_of_the_centred_roots():
    vectors, _ = planted(400, 3)
    projection = fitted(Moments.of(vectors, Layout.LOG16))
    centred = np.sqrt(vectors) - projection.mean[context_octave(vectors, Layout.LOG16)]
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


def test_an_octave_without_rows_has_the_mean_of_the_nearest_one_that_has_some():
    vectors = np.zeros((3, 20), np.float32)
    vectors[0, [0, 4]] = 0.25  # octave 0
    vectors[1:, [1, 4 + 9]] = 0.64  # octave 9
    means = Moments.of(vectors, Layout.LOG16).means
    for octave in range(16):
        expected = np.zeros(20)
        if octave <= 4:
            expected[[0, 4]] = 0.5
        else:
            expected[[1, 13]] = 0.8
        np.testing.assert_allclose(means[octave], expected, atol=1e-6)


@given(arrays(np.float32, (5, 20), elements=st.floats(-1e6, 1e6, width=32)))
def test_any_finite_vector_has_a_finite_projection(vectors):
    projection = fitted(Moments.of(planted(300, 4)[0], Layout.LOG16))
    vectors[0] = 0.0
    vectors[1] = -np.abs(vectors[1])
    for layout in Layout:
        assert np.isfinite(projection(vectors, layout)).all()


@pytest.mark.parametrize("value", [0.0, 0.05, 1.0])
def test_rows_that_are_all_alike_have_a_finite_projection_at_the_origin(value):
    vectors = np.full((17, 20), value, np.float32)
    projection = fitted(Moments.of(vectors, Layout.LOG16))
    projected = projection(vectors, Layout.LOG16)
    assert projected.shape[0] == 17
    np.testing.assert_allclose(projected, 0, atol=1e-6)
