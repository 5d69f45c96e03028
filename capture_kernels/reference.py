"""Exact attention rows in float64: the truth that every kernel is tested against. NumPy only.

For the query at logical position t and the keys j the model lets it see,

    x_j = scale * (q . k_j);    x_j := cap * tanh(x_j / cap) where logits are soft-capped;
    p_j = exp(x_j) / (sum over seen i of exp(x_i) + exp(sink)),

where a learned sink adds to the denominator only. It is written for reading, not for speed: it
makes the whole [R, H, T] in memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import OptionError


def attention_rows(
    q: ArrayLike,
    k: ArrayLike,
    *,
    scale: float,
    positions: ArrayLike,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    window: int = 0,
) -> NDArray[np.float64]:
    """The softmax rows of some queries: float64[R, H, T], 0 where a key is not seen.

    Args:
        q: float[R, H, D], the queries.
        k: float[T, Hkv, D], the keys of positions 0..T-1. Query head h reads the key head
            h // (H / Hkv).
        scale: what q . k is multiplied by.
        positions: int[R], the logical position of each query, in 0..T-1; a query sees the keys up
            to its own position.
        soft_cap: the bound that tanh puts on the logits; None for none.
        sinks: float[H], a logit for each head that adds to the denominator and is no key, so that
            a row may sum to less than 1.
        window: the model's own sliding window, the query's own key included; 0 for none.

    Raises:
        OptionError: the shapes do not fit together.
    """
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    t = np.asarray(positions, np.int64)[:, None]
    if queries.shape[1] % keys.shape[1]:
        raise OptionError(f"{queries.shape[1]} query heads over {keys.shape[1]} key heads")
    if t.size and not 0 <= t.min() <= t.max() < len(keys):
        raise OptionError(f"positions must lie in 0..{len(keys) - 1}")
    keys = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    logits = scale * np.einsum("rhd,thd->rht", queries, keys)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)

    j = np.arange(len(keys))
    seen = j <= t
    if window:
        seen &= j > t - window
    logits = np.where(seen[:, None, :], logits, -np.inf)

    # The largest logit, sink included, is taken off first so that nothing overflows.
    top = logits.max(axis=2, keepdims=True)
    learned = np.full((1, queries.shape[1], 1), -np.inf)
    if sinks is not None:
        learned = np.asarray(sinks, np.float64).reshape(1, -1, 1)
    top = np.maximum(top, learned)
    weights = np.exp(logits - top)
    return weights / (weights.sum(axis=2, keepdims=True) + np.exp(learned - top))
