"""Exact attention rows in float64: the reference of every kernel's tests. NumPy only.

For the query at logical position t and the keys j the model lets it see,

    x_j = scale * (q . k_j);    x_j := cap * tanh(x_j / cap) where logits are soft-capped;
    p_j = exp(x_j) / (sum over seen i of exp(x_i) + exp(sink)),

where a learned sink adds to the denominator only. It is written for reading, not for speed.
`decode_statistics` subtracts logarithms, as masses underflow beside a huge sink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from capture_kernels.arrays import Doubles, Ints
from capture_kernels.errors import OptionError

from .vector import (
    HIST_BINS,
    LAYERED_BAND_EDGES,
    LOG16_BAND_EDGES,
    PLACE_BINS,
    Visibility,
    log2_bins,
    place_bins,
)


def attention_rows(
    q: ArrayLike,
    k: ArrayLike,
    *,
    scale: float,
    positions: ArrayLike,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    window: int = 0,
) -> Doubles:
    """The softmax rows of some queries: float64[R, H, T], 0 where a key is not seen.

    Args:
        q: float[R, H, D]. Query head h reads the key head h // (H / Hkv).
        k: float[T, Hkv, D], the keys of positions 0..T-1.
        scale: what q . k is multiplied by.
        positions: int[R], the logical position of each query, in 0..T-1: the last key it sees.
        soft_cap: the bound that tanh puts on the logits; None for none.
        sinks: float[H], a learned logit for each head; with it a row sums to less than 1.
        window: the model's own sliding window, the query's own key included; 0 for none.

    Raises:
        OptionError: the shapes do not fit together.
    """
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    t = np.asarray(positions, np.int64)[:, None]
    logits = _head_logits(queries, keys, scale, soft_cap)
    if t.size and not 0 <= t.min() <= t.max() < len(keys):
        raise OptionError(f"positions must lie in 0..{len(keys) - 1}")

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


class DecodeStatistics(NamedTuple):
    """Statistics of one query row, per query head: the reference of the decode kernels.

    Real keys are those that the row sees, neither masked nor outside a window, the visibility's or
    the model's own. Visible keys are these without the sink tokens; entropy, bins and bands
    describe them alone, renormalised, and n is their number.
    Positions of a top k are counted from the first token after the masked prefix.
    """

    valid: bool  # whether a key is visible
    logits: Doubles  # float64[H, t + 1], -inf where a key is not real
    logsumexp: Doubles  # float64[H], natural: real keys and the learned sink
    entropy: Doubles  # float64[H], in [0, 1]: -sum p ln p / ln n, 0 where n = 1
    hist: Doubles  # float64[H, 16], log2 bins of distance (`log2_bins`)
    places: Doubles  # float64[H, 8], relative position, oldest first (`place_bins`)
    bands_log16: Doubles  # float64[H, 3]: d < 8, 8 <= d < 256, d >= 256
    bands_layered: Doubles  # float64[H, 3]: d < 10, 10 <= d < 100, d >= 100
    sink_mass: Doubles  # float64[H], the sink tokens' share of the real keys' mass
    top_positions: Ints  # int64[H, top_k], -1 where there are fewer real keys
    top_logits: Doubles  # float64[H, top_k], falling, -inf where there are fewer
    top_mass: Doubles  # float64[H], sum of exp(logit - logsumexp) over the top k
    mean: Doubles  # float64[t + 1], mean over (chosen) heads of p = exp(logit - logsumexp)
    mean_top_positions: Ints  # int64[mean_top_k], -1 where there are fewer real keys
    mean_top_mass: Doubles  # float64[mean_top_k], falling, 0 where there are fewer


def decode_statistics(
    q: ArrayLike,
    k: ArrayLike,
    *,
    scale: float,
    position: int,
    visibility: Visibility,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    window: int = 0,
    top_k: int = 0,
    mean_top_k: int = 0,
    mean_heads: Sequence[int] | None = None,
) -> DecodeStatistics:
    """The statistics of one query row over its keys, in logical positions.

    A row with no real key has logsumexp -inf and is 0, -1 and -inf elsewhere; one that sees sink
    tokens only has a logsumexp, a top k and a sink mass of 1, and no other mass.

    Args:
        q, scale, soft_cap, sinks, window: as `attention_rows` takes them, q for one query.
        k: float[t + 1, Hkv, D], the keys of positions 0..t.
        position: t, the query's logical position; -1 for a row without keys.
        visibility: which keys a fingerprint describes.
        top_k, mean_top_k: how many real keys to name of the largest logits of a head, and of the
            largest `mean`; of equals, those of lower position first.
        mean_heads: query heads that `mean` is over; None for all.

    Raises:
        OptionError: the shapes do not fit together.

    Source: DESIGN.md sections 2 and 7.
    """
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    t, heads = position, len(queries)
    if len(keys) != t + 1:
        raise OptionError(f"position {t} needs {t + 1} keys, got {len(keys)}")
    first_real = max(visibility.first_real(t), t - window + 1 if window else 0)
    start = max(first_real, visibility.sink_tokens)
    j = np.arange(t + 1)
    real, visible = j >= first_real, j >= start
    logits = _head_logits(queries[None], keys, scale, soft_cap)[0]
    logits = np.where(real, logits, -np.inf)

    visible_lse = np.logaddexp.reduce(logits[:, visible], axis=1)
    sink_lse = np.logaddexp.reduce(logits[:, real & ~visible], axis=1)
    logsumexp = keys_lse = np.logaddexp(sink_lse, visible_lse)
    top_positions, top_logits = _largest(logits, top_k, visibility.mask_prefix)
    sink_mass, top_mass, mean = np.zeros(heads), np.zeros(heads), np.zeros(t + 1)
    if real.any():
        if sinks is not None:
            logsumexp = np.logaddexp(keys_lse, np.asarray(sinks, np.float64))
        sink_mass = np.exp(sink_lse - keys_lse)
        top_mass = np.exp(top_logits - logsumexp[:, None]).sum(axis=1)
        chosen = slice(None) if mean_heads is None else list(mean_heads)
        mean = np.exp(logits - logsumexp[:, None])[chosen].mean(axis=0)
    mean_top = largest_masses(mean, first_real, mean_top_k, visibility.mask_prefix)

    entropy, count, distances = np.zeros(heads), max(t - start + 1, 0), t - j[start:]
    logs = logits[:, start:] - visible_lse[:, None]
    p = np.exp(logs)
    if count > 1:
        terms = np.multiply(p, logs, out=np.zeros_like(p), where=p > 0)
        entropy = np.clip(-terms.sum(axis=1) / math.log(count), 0.0, 1.0)
    return DecodeStatistics(
        valid=count > 0,
        logits=logits,
        logsumexp=logsumexp,
        entropy=entropy,
        hist=_masses(p, log2_bins(distances), HIST_BINS),
        places=_masses(p, place_bins(count), PLACE_BINS),
        bands_log16=_masses(p, np.digitize(distances, LOG16_BAND_EDGES), 3),
        bands_layered=_masses(p, np.digitize(distances, LAYERED_BAND_EDGES), 3),
        sink_mass=sink_mass,
        top_positions=top_positions,
        top_logits=top_logits,
        top_mass=top_mass,
        mean=mean,
        mean_top_positions=mean_top[0],
        mean_top_mass=mean_top[1],
    )


def largest_masses(mean: Doubles, first_real: int, count: int, masked: int) -> tuple[Ints, Doubles]:
    """The largest of a row's mean probabilities, as `DecodeStatistics` names them.

    Args:
        mean: float64[t + 1].
        first_real: the first real key.
        count: how many to name.
        masked: the length of the masked prefix, from whose end positions are counted.

    Returns:
        Positions int64[count], -1 where there are fewer, and masses float64[count], 0 there.
    """
    real = np.arange(len(mean)) >= first_real
    positions, masses = _largest(np.where(real, mean, -np.inf)[None], count, masked)
    return positions[0], np.maximum(masses[0], 0.0)


def _head_logits(queries: Doubles, keys: Doubles, scale: float, soft_cap: float | None) -> Doubles:
    """x of every query, query head and key, seen or not: float64[R, H, T]."""
    rows, heads, depth = queries.shape
    key_heads = keys.shape[1]
    if heads % key_heads:
        raise OptionError(f"{heads} query heads over {key_heads} key heads")
    grouped = queries.reshape(rows, key_heads, heads // key_heads, depth)
    logits = scale * np.einsum("rgmd,tgd->rgmt", grouped, keys).reshape(rows, heads, len(keys))
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    return logits


def _largest(values: Doubles, count: int, masked: int) -> tuple[Ints, Doubles]:
    """Positions int64[H, count], counted from `masked` on, and values float64[H, count] of the
    largest of float64[H, T], which fall; -1 and -inf where no more are above -inf."""
    positions = np.full((len(values), count), -1, np.int64)
    found = np.full((len(values), count), -np.inf)
    # A stable sort leaves equals in the order of their positions.
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    taken = np.take_along_axis(values, order, axis=1)
    positions[:, : order.shape[1]] = np.where(taken > -np.inf, order - masked, -1)
    found[:, : order.shape[1]] = taken
    return positions, found


def _masses(p: Doubles, bins: Ints, count: int) -> Doubles:
    """The mass of each head in each bin: float64[H, count], of float64[H, n] and int64[n]."""
    # Of no keys, bincount makes integers.
    return np.array([np.bincount(bins, row, count) for row in p], np.float64)
