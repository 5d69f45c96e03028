"""How an attention call of a `transformers` model computed its scores.

A fingerprint needs the exact logits, so everything that can change them must be known: the scale, a
soft cap, learned sinks, and a mask that lets each row see one contiguous range of keys that ends at
itself (causal, sliding window or chunk). Any other argument is refused by name, and `check_output`
compares one row with the output of the model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.eager import head_logits

from .attention_tap import AttentionCall

# Arguments that do not change the scores: the mask has the window, the rest is bookkeeping of the
# model's forward.
_HARMLESS = frozenset(
    {
        "cache_position", "deterministic", "is_causal", "logits_to_keep", "output_attentions",
        "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
        "position_ids", "return_dict", "sliding_window", "use_cache",
    }
)  # fmt: skip
_UNDERSTOOD = frozenset({"dropout", "scaling", "softcap", "s_aux"})
# Largest relative RMS error between our row and the model's: the model may round logits and weights
# to its type, and TF32 keeps 10 bits.
_TOLERANCE = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.15}
# Rows of a mask are read in blocks of this many cells.
_MASK_CELLS = 32 << 20


class Scores(NamedTuple):
    """How a call computed its logits: cap * tanh(scale q.k / cap), and sinks in the denominator."""

    scale: float
    soft_cap: float | None
    sinks: Tensor | None  # [H]


def read_scores(call: AttentionCall) -> Scores:
    """How `call` computed its logits; OptionError if it did something that is not known here."""
    options = {name: value for name, value in call.options.items() if value is not None}
    if unknown := sorted(set(options) - _HARMLESS - _UNDERSTOOD):
        raise _refusal(call, f"changes its scores with {unknown[0]!r}, which is not supported")
    if options.get("dropout"):
        raise _refusal(call, "uses dropout: put the model in evaluation mode")
    if call.query.shape[0] != 1:
        raise _refusal(call, "runs a batch: prompts are captured one at a time")
    depth, heads = call.query.shape[-1], call.query.shape[1]
    if call.key.shape[-1] != depth or heads % call.key.shape[1]:
        raise _refusal(call, "has queries that do not fit its keys")
    scale = options.get("scaling", depth**-0.5)
    sinks = options.get("s_aux")
    if sinks is not None and sinks.numel() != heads:
        raise _refusal(call, "has learned sinks that are not one for each head")
    return Scores(float(scale), options.get("softcap"), sinks)


def read_first_keys(call: AttentionCall, queries: Tensor) -> Tensor | None:
    """The first key that some queries see: int64[R] indices into the call's keys; None for key 0.

    Args:
        queries: int64[R] on the host, indices into the call's queries.

    Raises:
        OptionError: a row sees anything but one range of keys that ends at itself.
    """
    rows, keys = call.query.shape[2], call.key.shape[2]
    mask = call.mask
    if mask is None:
        causal = call.options.get("is_causal")
        if causal is None:
            causal = getattr(call.module, "is_causal", True)
        if rows > 1 and not (causal and call.base == "sdpa" and rows == keys):
            raise _refusal(call, "is not causal")
        return None
    if mask.dim() != 4 or mask.shape[:2] != (1, 1) or mask.shape[2:] != (rows, keys):
        raise _refusal(call, f"has a mask of shape {list(mask.shape)}, which is not supported")
    found = []
    for chunk in queries.split(max(1, _MASK_CELLS // keys)):
        block = mask[0, 0].index_select(0, chunk.to(mask.device))
        seen = block if block.dtype == torch.bool else block == 0
        own = (chunk + keys - rows).to(mask.device)
        marks = seen.to(torch.uint8)
        first, last = marks.argmax(dim=1), keys - 1 - marks.flip(1).argmax(dim=1)
        good = (last == own) & (seen.sum(dim=1) == own - first + 1)
        if block.dtype != torch.bool:
            good &= (seen | (block <= torch.finfo(block.dtype).min / 2)).all(dim=1)
        found.append(torch.stack([first, good.long()]))
    first, good = torch.cat(found, dim=1).cpu()
    if not bool(good.all()):
        raise _refusal(call, "lets a token see keys outside one range that ends at itself")
    return first


def check_output(call: AttentionCall, scores: Scores, first_key: int) -> None:
    """Compare the last query's output, made from these scores, with what the model computed.

    Args:
        first_key: index of the first key that the last query sees.

    Raises:
        OptionError: they differ by more than the rounding of the model's type.
    """
    query = call.query[0, :, -1].float()[None] * scores.scale
    logits = head_logits(query, call.key[0].transpose(0, 1))[:, 0]
    if scores.soft_cap is not None:
        logits = scores.soft_cap * torch.tanh(logits / scores.soft_cap)
    logits[:, :first_key] = -math.inf
    if scores.sinks is not None:
        logits = torch.cat([logits, scores.sinks.reshape(-1, 1).to(logits)], dim=1)
    weights = logits.softmax(dim=1)[:, : call.key.shape[2]]
    groups = call.value.shape[1]
    ours = weights.view(groups, -1, weights.shape[1]).to(call.value.dtype) @ call.value[0]
    theirs = call.output[0, -1].reshape(weights.shape[0], -1).float()
    if theirs.shape[1] != ours.shape[2]:
        raise _refusal(call, "changes its values before the output")
    error = (ours.reshape(theirs.shape).float() - theirs).square().mean().sqrt()
    bound = _TOLERANCE.get(call.query.dtype, 0.15) * theirs.square().mean().sqrt()
    if not bool(error <= bound + 1e-6):
        raise _refusal(call, "does not compute softmax attention over its keys")


def _refusal(call: AttentionCall, reason: str) -> OptionError:
    return OptionError(f"layer {call.layer} ({type(call.module).__name__}) {reason}")
