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

# Steps that may be under way when one is prepared; their drafts count as accepted there. vLLM has
# one at most.
MOST_AHEAD = 4


def rows_of_tokens(tokens: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
    """Of each token of a step, its request and how many keys it sees: int64[n] and int32[n]; 0 for
    one that pads the batch. It neither copies nor waits, so that a CUDA graph can hold it.

    Args:
        tokens: int64[n], 0 to before n; metadata: of a layer of the step.
    """
    ends = metadata.query_start_loc[1 : len(metadata.seq_lens) + 1]
    found = torch.searchsorted(ends, tokens.to(ends.dtype), right=True)
    requests = found.clamp(max=len(ends) - 1)
    lengths = lengths_of(requests, tokens, metadata)
    return requests, torch.where(found < len(ends), lengths, 0)


def lengths_of(requests: Tensor, tokens: Tensor, metadata: Any) -> Tensor:
    """How many keys tokens of a step see, the last of a request all that it has: int32[n]."""
    behind = metadata.query_start_loc[requests + 1] - 1 - tokens
    return (metadata.seq_lens[requests] - behind).to(torch.int32)
