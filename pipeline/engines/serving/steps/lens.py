"""The logit lens of hidden states, whichever engine kept them: their most likely tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.engines.serving.rows import Lens

# Of float32 logits that are computed at once.
LOGITS_BYTES = 32 << 20


class LikelyTokens(NamedTuple):
    """The n most likely tokens in P hidden states."""

    logprobs: Tensor  # float32[P, n], natural, falling
    tokens: Tensor  # int32[P, n]

    def lens(self, pair: int, count: int, text: Callable[[int], str]) -> Lens:
        """The first `count` of one hidden state, on the host. text: of a token."""
        tokens = self.tokens[pair, :count].tolist()
        return Lens(tokens, list(map(text, tokens)), self.logprobs[pair, :count].tolist())


def likely_tokens(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], count: int, vocabulary: int
) -> LikelyTokens:
    """The `count` most likely tokens of each hidden state, or all of the vocabulary.

    Args:
        hidden: [P, D]; logits_of: of some of its rows, float32[R, V].
    """
    room = max(1, LOGITS_BYTES // (4 * vocabulary))
    parts = [_most_likely(logits_of(own), min(count, vocabulary)) for own in hidden.split(room)]
    return LikelyTokens(*map(torch.cat, zip(*parts, strict=True)))


def _most_likely(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = logits.topk(count, dim=-1)
    logprobs = best.values - logits.logsumexp(dim=-1, keepdim=True)
    return logprobs, best.indices.to(torch.int32)


def deviation_of(found: Tensor, own: Tensor) -> Tensor:
    """Largest deviation of logits [V] from a model's own, as a share of the largest of these:
    float32[]; infinite where there are more or fewer of them."""
    if found.shape != own.shape:
        return torch.full((), torch.inf, device=own.device)
    own = own.float()
    return (found.float() - own).abs().max() / own.abs().max()
