"""What a response says of captured rows: raw, sketch and fingerprint entries, and full scores.

How numbers are rounded: `entry_numbers`.

Source: DESIGN.md section 7.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Floats

from .entry_numbers import (
    LOGIT,
    SHARE,
    FingerprintNumbers,
    RawNumbers,
    SketchNumbers,
    rounded,
)
from .rows import HeadRows, LayerRow, Lens, Routing

Entry = dict[str, Any]
# Of positions, without their ends.
Ranges = Sequence[tuple[int, int]]
Bools = NDArray[np.bool_]
HUBS = 32
# Fast: attention hardly gets smaller with more effort.
_GZIP_LEVEL = 1


def raw_entry(
    row: LayerRow, numbers: RawNumbers, k: int, *, step: int, position: int, phase: str
) -> Entry:
    """The k most attended positions of one layer of a row.

    Args:
        step: the decode step, position - prompt_len + 1.
        position: of the query, counted from the end of the masked prefix.
    """
    entry: Entry = {
        "token_positions": numbers.positions,
        "attention_scores": numbers.shares,
        "topk_logits": numbers.logits,
        "logsumexp_candidates": numbers.logsumexp,
        "layer_id": row.layer,
        "decode_step": step,
        "position": position,
        "think_phase": phase,
    }
    if row.heads is not None:
        entry["heads"] = _heads(row.heads, k)
    return entry | _inside(row)


def sketch_entry(
    rows: Sequence[tuple[LayerRow, SketchNumbers]], *, step: int, phase: str
) -> Entry:  # fmt: skip
    """Where each layer of a row attends to: at most k positions, and a histogram of distance."""
    sketches = {
        str(row.layer): {
            "top_hubs": numbers.hubs,
            "dist_hist": numbers.distances,
            "entropy": numbers.entropy,
            "mass_captured": numbers.captured,
            **_inside(row),
        }
        for row, numbers in rows
    }
    return {
        "mode": "sketch",
        "layer_sketches": sketches,
        "decode_step": step,
        "think_phase": phase,
    }


def fingerprint_entry(
    numbers: FingerprintNumbers, *, step: int, phase: str, rows: Sequence[LayerRow] = ()
) -> Entry:
    """A row's fingerprint and its zone; of its layers the routing, as in its record, and the logit
    lens by layer."""
    lenses = {str(row.layer): _lens(row.lens) for row in rows if row.lens is not None}
    return {
        "fingerprint": numbers.vector,
        "manifold": numbers.zone,
        "confidence": numbers.confidence,
        "step": step,
        "think_phase": phase,
        **_routing(*routing_of(rows)),
        **({"logit_lens": lenses} if lenses else {}),
    }


def decoded(entries: Sequence[bytes]) -> list[Entry]:
    """Entries that `RequestCollector.add_encoded` made."""
    return [msgspec.json.decode(entry) for entry in entries]


def routing_of(rows: Sequence[LayerRow]) -> tuple[list[int] | None, float | None]:
    """The routing of a row for its record: the experts of its deepest layer with a router, and the
    mean entropy over those layers; None without any."""
    return mean_routing([row.routing for row in rows if row.routing is not None])


def mean_routing(found: Sequence[Routing]) -> tuple[list[int] | None, float | None]:
    """`routing_of` layers with a router."""
    if not found:
        return None, None
    entropy = sum(routing.entropy for routing in found) / len(found)
    return found[-1].experts.tolist(), entropy


def hub_list(hubs: Floats, layers: int, count: int = HUBS) -> list[list[float]]:
    """The most attended positions of a request, best first: [position, mass].

    Args:
        hubs: float32[n], sums over its rows and layers of the heads' mean probability, by position
            as counted from the end of the masked prefix.
        layers: how many layers were added up; the mass is of the mean layer.
    """
    order = np.argsort(-hubs, kind="stable")[:count]
    order = order[hubs[order] > 0]
    masses = rounded(hubs[order].astype(np.float64) / layers, SHARE)
    return [list(pair) for pair in zip(order.tolist(), masses, strict=True)]


def capture_data(
    layer: int, scores: NDArray[np.float16], prompt_len: int, vision: Ranges = (),
    audio: Ranges = (),
) -> Entry:  # fmt: skip
    """One layer's entry of `attn_capture_data`.

    The last generated token is never fed to the model, so it has no row: T is one less than the
    tokens of prompt and answer. `token_meta` says so as `last_token_fed`.

    Args:
        scores: float16[T, H, T], query, head and key, without the masked prefix.
        prompt_len: tokens of the prompt, without the masked prefix.
        vision, audio: where the prompt's images, videos and sounds stand, from the end of the
            masked prefix; the rest of it is language.
    """
    text = np.ones(prompt_len, bool)
    for begin, end in (*vision, *audio):
        text[begin:end] = False
    packed = gzip.compress(np.ascontiguousarray(scores).data, _GZIP_LEVEL, mtime=0)
    return {
        "layer_idx": layer,
        "data": base64.b64encode(packed).decode(),
        "shape": list(scores.shape),
        "token_meta": {
            "prompt_len": prompt_len,
            "total_len": len(scores),
            "vision_ranges": named_ranges(vision),
            "lang_ranges": named_ranges(ranges_of(text)),
            "last_token_fed": False,
        },
    }


def ranges_of(there: Bools) -> list[tuple[int, int]]:
    """Where bool[n] is True: ranges without their ends."""
    edges = np.flatnonzero(np.diff(np.r_[False, there, False]))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def named_ranges(ranges: Ranges) -> list[Entry]:
    """Ranges as responses have them."""
    return [{"start": begin, "end": end} for begin, end in ranges]


def _inside(row: LayerRow) -> Entry:
    """What an entry says of a layer besides its attention."""
    found = _routing(*routing_of([row]))
    if row.lens is not None:
        found["logit_lens"] = _lens(row.lens)
    return found


def _routing(experts: list[int] | None, entropy: float | None) -> Entry:
    if experts is None or entropy is None:
        return {}
    return {"top_experts": experts, "router_entropy": round(entropy, SHARE)}


def _lens(lens: Lens) -> list[Entry]:
    return [
        {"token_id": token, "token": text, "logprob": round(logprob, LOGIT)}
        for token, text, logprob in zip(*lens, strict=True)
    ]


def _heads(heads: HeadRows, k: int) -> Entry:
    found = {}
    for number, positions, logits, lse in zip(*heads, strict=True):
        kept = (positions[:k] >= 0) & np.isfinite(logits[:k])
        found[str(number)] = {
            "token_positions": positions[:k][kept].tolist(),
            "topk_logits": rounded(logits[:k][kept].astype(np.float64), LOGIT),
            "logsumexp_candidates": round(float(lse), LOGIT),
        }
    return found
