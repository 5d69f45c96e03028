"""From logits to the next token: greedy, or by temperature and top_p from a seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """A token, and with logprobs asked for its own and the likeliest tokens': natural."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class Sampler:
    """Chooses the tokens of one request.

    Args:
        temperature: 0 for the likeliest token.
        top_p: only the likeliest tokens that together have this probability.
        seed: None for another sequence each time.
        alternatives: how many of the likeliest tokens to name beside each; None for no logprobs.
    """

    def __init__(
        self, temperature: float, top_p: float, seed: int | None, alternatives: int | None
    ) -> None:
        self._temperature, self._top_p, self._alternatives = temperature, top_p, alternatives
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed % (1 << 63))

    def choose(self, logits: Tensor) -> Chosen:
        """The next token, of logits float[V]."""
        logits = logits.float().cpu()
        token = int(logits.argmax()) if self._temperature == 0 else self._sample(logits)
        if self._alternatives is None:
            return Chosen(token)
        logprobs = logits.log_softmax(dim=0)
        values, tokens = logprobs.topk(min(self._alternatives, len(logprobs)))
        top = list(zip(tokens.tolist(), values.tolist(), strict=True))
        return Chosen(token, float(logprobs[token]), top)

    def _sample(self, logits: Tensor) -> int:
        p = (logits / self._temperature).softmax(dim=0)
        if self._top_p < 1:
            falling, order = p.sort(descending=True, stable=True)
            # Those before which less than top_p lies: at least one.
            kept = falling.cumsum(dim=0) - falling < self._top_p
            p = torch.zeros_like(p).index_put((order[kept],), falling[kept])
        return int(torch.multinomial(p, 1, generator=self._generator))
