"""Speculative decoding: the rows of a step in which requests have drafts of their next tokens.

A request's last token and its drafts are rows of one step. How many drafts are accepted is known
once the step is sampled, and while that is under way the next one is prepared: its lengths are on
the device alone, where each row's is taken from here.

Source: vLLM 0.33.0, v1/worker/gpu/model_runner.py (prepare_inputs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TokenRows:
    """The tokens of a step as rows. Its methods neither copy nor wait, so that a CUDA graph can
    hold them.

    Args:
        buffers: vLLM's `InputBuffers`, which all steps share: of each request its first token in
            the step, int32[most requests + 1], and how many keys it has, int32[most requests].
    """

    def __init__(self, buffers: Any) -> None:
        self._starts: Tensor = buffers.query_start_loc
        self._seq_lens: Tensor = buffers.seq_lens

    def of_tokens(self, tokens: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Of each token its request and how many keys it sees: int64[n] and int32[n], 0 keys for
        one that pads the batch.

        Args:
            tokens: int64[n], 0 to before n; requests: how many the step's table of pages has.
        """
        found = torch.searchsorted(self._starts[1:], tokens.to(self._starts.dtype), right=True)
        own = found.clamp(max=requests - 1)
        return own, torch.where(found < len(self._seq_lens), self.lengths(own, tokens), 0)

    def lengths(self, requests: Tensor, tokens: Tensor) -> Tensor:
        """How many keys tokens see, the last one of a request all that it has: int32[n]."""
        behind = self._starts[requests + 1] - 1 - tokens
        return (self._seq_lens[requests] - behind).to(torch.int32)
