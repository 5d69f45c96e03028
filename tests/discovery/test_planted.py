"""The planted truth that other tests and benchmarks lean on is neither trivial nor unfair."""

from __future__ import annotations

import numpy as np
from planted import BEHAVIOURS, NOISE, planted
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import KNeighborsClassifier


def test_planted_behaviours_overlap_and_can_be_told_apart():
    vectors, truth = planted(12_000, seed=0)
    clean = truth != NOISE
    roots, wanted = np.sqrt(vectors[clean]), truth[clean]
    told = KNeighborsClassifier(15).fit(roots[:8000], wanted[:8000])
    ari = adjusted_rand_score(wanted[8000:], told.predict(roots[8000:]))
    assert 0.97 < ari < 0.995
    assert set(wanted) == set(range(len(BEHAVIOURS)))
    assert abs((~clean).mean() - 0.05) < 0.01


def test_planted_rows_are_fingerprints():
    vectors, _ = planted(5_000, seed=1)
    masses = vectors[:, 4:].astype(np.float64)
    np.testing.assert_allclose(masses.sum(axis=1), 1, atol=1e-5)
    for column, bins in ((0, slice(0, 3)), (1, slice(3, 8)), (2, slice(8, 16))):
        np.testing.assert_allclose(vectors[:, column], masses[:, bins].sum(axis=1), atol=1e-5)
    assert ((vectors[:, 3] >= 0) & (vectors[:, 3] <= 1)).all()
