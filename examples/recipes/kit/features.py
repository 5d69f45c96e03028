"""Numbers of an answer that a detector looks at.

Each function takes full scores of rows, float32[n, heads, T] (`Answer.rows`), or an answer. What is
given per head has the 16 heads of the demo model's four layers, layer by layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .answers import Answer


def mass_on(rows: NDArray[np.float32], keys: ArrayLike) -> NDArray[np.float64]:
    """Probability that each head of each row gives to some keys: float64[n, heads]."""
    return rows[..., np.asarray(keys, np.int64)].sum(-1, dtype=np.float64)


def lookback_ratios(answer: Answer, count: int | None = None) -> NDArray[np.float64]:
    """Lookback Lens' features (arXiv 2407.07071, section 2): float64[n, heads] in [0, 1].

    Of a head at one step, the mean attention to a token of the context by itself plus the mean
    attention to a token of what was generated before. The first step is left out: nothing was
    generated before it, and its ratio is 1 by definition.
    """
    rows, prompt = answer.rows(count), answer.prompt_len
    found = []
    for step, row in enumerate(rows[1:], 1):
        context = row[:, :prompt].mean(-1, dtype=np.float64)
        new = row[:, prompt : prompt + step].mean(-1, dtype=np.float64)
        found.append(context / np.maximum(context + new, 1e-12))
    heads = rows.shape[1]
    return np.array(found, np.float64).reshape(-1, heads)


def head_entropies(rows: NDArray[np.float32], prompt_len: int) -> NDArray[np.float64]:
    """Entropy of each head's row by ln(its visible keys): float64[n, heads] in [0, 1].

    Args:
        rows: of `Answer.rows`: row i sees the prompt and i generated tokens.
        prompt_len: tokens of the prompt, two or more.
    """
    p = rows.astype(np.float64)
    plogp = np.where(p > 0, p * np.log(np.maximum(p, 1e-30)), 0.0).sum(-1)
    return -plogp / np.log(prompt_len + np.arange(len(rows)))[:, None]


def head_maxima(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """The largest probability that each head gives to one key but the first: float64[n, heads]."""
    return rows[..., 1:].max(-1).astype(np.float64)


def first_mean(values: ArrayLike) -> NDArray[np.float64]:
    """The first row and the mean of all rows, of [n, d]: float64[2 d]. One request, one vector."""
    rows = np.asarray(values, np.float64)
    return np.concatenate([rows[0], rows.mean(0)])


def certainty(answer: Answer, count: int | None = None) -> dict[str, float]:
    """What the log-probabilities of an answer say, larger where the model is surer.

    first: of the first token. lowest: of the least likely token. mean: over the tokens (the
    negative logarithm of perplexity). margin: the first token's lead over the second likeliest.
    """
    logprobs, best = answer.logprobs[:count], answer.alternatives[:count]
    return {
        "first": float(logprobs[0]),
        "lowest": float(logprobs.min()),
        "mean": float(logprobs.mean()),
        "margin": float(best[0, 0] - best[0, 1]),
    }
