"""The float64 rows, against the definition written with loops."""

import math

import numpy as np
import pytest

from capture_kernels.errors import OptionError
from capture_kernels.reference import attention_rows


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_row_is_the_softmax_of_its_definition(soft_cap, window, with_sinks):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 4, 5)), rng.normal(size=(9, 2, 5))
    sinks = rng.normal(size=4) if with_sinks else None
    positions = [0, 5, 8]
    rows = attention_rows(
        q, k, scale=0.7, positions=positions, soft_cap=soft_cap, sinks=sinks, window=window
    )
    assert rows.shape == (3, 4, 9)
    assert rows.dtype == np.float64
    for r, t in enumerate(positions):
        for h in range(4):
            weights = {}
            for j in range(t + 1):
                if window and j <= t - window:
                    continue
                x = 0.7 * sum(q[r, h, d] * k[j, h // 2, d] for d in range(5))
                weights[j] = math.exp(soft_cap * math.tanh(x / soft_cap) if soft_cap else x)
            total = sum(weights.values()) + (math.exp(sinks[h]) if with_sinks else 0.0)
            expected = [weights.get(j, 0.0) / total for j in range(9)]
            np.testing.assert_allclose(rows[r, h], expected, atol=1e-12)


def test_huge_logits_do_not_overflow():
    q, k = np.full((1, 1, 1), 1e4), np.arange(3.0).reshape(3, 1, 1)
    rows = attention_rows(q, k, scale=1.0, positions=[2], sinks=[5e4])
    np.testing.assert_allclose(rows[0, 0], [0, 0, 0], atol=1e-300)
    assert attention_rows(q, k, scale=1.0, positions=[2])[0, 0].tolist() == [0, 0, 1]


def test_no_rows_and_wrong_shapes():
    k = np.zeros((4, 2, 3))
    assert attention_rows(np.zeros((0, 2, 3)), k, scale=1, positions=[]).shape == (0, 2, 4)
    with pytest.raises(OptionError, match="3 query heads over 2"):
        attention_rows(np.zeros((1, 3, 3)), k, scale=1, positions=[0])
    with pytest.raises(OptionError, match=r"0\.\.3"):
        attention_rows(np.zeros((1, 2, 3)), k, scale=1, positions=[4])
