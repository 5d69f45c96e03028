"""What each attention entry of a response says, as arrays: raw, sketch and fingerprint modes.

An entry belongs to one captured row (and in raw mode to one of its layers). Its fields are in
DESIGN.md, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from .responses import ResponseError, convert, parts

# Numbers are rounded on the wire; what is beyond this is not a probability.
_ROUNDING = 0.02
_Position = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


@dataclass(frozen=True)
class HeadAttention:
    """The keys that one head attends to most.

    Attributes:
        token_positions: int64[k], absolute, the largest probability first.
        probabilities: float64[k], true ones: over all keys, not only these.
    """

    token_positions: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    @property
    def mass_captured(self) -> float:
        """The share of the attention that these keys get."""
        return float(self.probabilities.sum())


@dataclass(frozen=True)
class RawAttention(HeadAttention):
    """A raw entry: the keys that a layer attends to most, on average over its heads.

    Attributes:
        layer: of the model.
        step: decode step, 1 for the first generated token; None if the server does not say it.
        position: of the query, absolute; None if the server does not say it.
        phase: `think` or `output`; None if the server does not say it.
        heads: the same of single heads, by number, if the request asked for them.
    """

    layer: int
    step: int | None
    position: int | None
    phase: str | None
    heads: dict[int, HeadAttention] = field(default_factory=dict)


@dataclass(frozen=True)
class Sketch:
    """A layer of a sketch entry.

    Attributes:
        layer, step, phase: as of `RawAttention`.
        hub_positions: int64[n], the keys with the largest probabilities, the largest first.
        hub_masses: float64[n], their probabilities.
        histogram: float64[16], mass by distance: 0-1, 2-3, 4-7, ..., 32768 and more.
        entropy: of the row, as the server defines it (attn: 0 to 1).
        mass_captured: the share of the attention that the hubs get.
    """

    layer: int
    step: int | None
    phase: str | None
    hub_positions: NDArray[np.int64]
    hub_masses: NDArray[np.float64]
    histogram: NDArray[np.float64]
    entropy: float
    mass_captured: float


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprint entries of a response, n of them.

    Attributes:
        vectors: float32[n, 20].
        steps: int64[n], decode steps.
        phases: `think` or `output`, None if the server does not say it.
        zones: names, None if the server does not say them.
        confidences: float32[n], of the zones; NaN if the server does not say them.
    """

    vectors: NDArray[np.float32]
    steps: NDArray[np.int64]
    phases: list[str | None]
    zones: list[str | None]
    confidences: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.vectors)


class _Head(msgspec.Struct):
    token_positions: list[_Position]
    topk_logits: list[float]
    logsumexp_candidates: float


class _Raw(_Head, kw_only=True):
    layer_id: int
    decode_step: int | None = None
    position: _Position | None = None
    think_phase: str | None = None
    heads: dict[int, _Head] = {}


class _LayerSketch(msgspec.Struct):
    top_hubs: list[tuple[_Position, float]]
    dist_hist: Annotated[list[float], Meta(min_length=16, max_length=16)]
    entropy: float
    mass_captured: float


class _Sketch(msgspec.Struct):
    layer_sketches: dict[int, _LayerSketch]
    decode_step: int | None = None
    think_phase: str | None = None


class _Fingerprint(msgspec.Struct):
    fingerprint: Annotated[list[float], Meta(min_length=20, max_length=20)]
    step: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
    manifold: str | None = None
    confidence: float | None = None
    think_phase: str | None = None


class _AttentionUsage(msgspec.Struct):
    hubs: list[tuple[_Position, float]] | None = None


class _Usage(msgspec.Struct):
    attention: _AttentionUsage | None = None


def read_raw(entries: Iterable[dict[str, Any]]) -> list[RawAttention]:
    """The raw entries among `entries` (of `collect_entries`), with true probabilities.

    The probability of a key is exp(logit - logsumexp): it is over all keys, whatever k is.

    Raises:
        ResponseError: an entry is of no known mode, or damaged.
    """
    found = []
    for number, entry in _of_mode(entries, "raw"):
        what = f"raw entry {number}"
        raw = convert(entry, _Raw, what)
        best = _attention(raw, what)
        heads = {head: _attention(of, f"{what}, head {head}") for head, of in raw.heads.items()}
        found.append(
            RawAttention(
                best.token_positions, best.probabilities, raw.layer_id, raw.decode_step,
                raw.position, raw.think_phase, heads,
            )
        )  # fmt: skip
    return found


def read_sketches(entries: Iterable[dict[str, Any]]) -> list[Sketch]:
    """The layers of the sketch entries among `entries` (of `collect_entries`).

    Raises:
        ResponseError: an entry is of no known mode, or damaged.
    """
    found = []
    for number, entry in _of_mode(entries, "sketch"):
        sketch = convert(entry, _Sketch, f"sketch entry {number}")
        for layer, of in sketch.layer_sketches.items():
            what = f"sketch entry {number}, layer {layer}"
            masses = np.array([mass for _, mass in of.top_hubs], np.float64)
            histogram = np.array(of.dist_hist, np.float64)
            for shares in (masses, histogram, np.array([of.mass_captured])):
                _check_shares(shares, what)
            if not np.isfinite(of.entropy):
                raise ResponseError(f"{what} has an entropy that is not a number")
            positions = np.array([position for position, _ in of.top_hubs], np.int64)
            found.append(
                Sketch(
                    layer, sketch.decode_step, sketch.think_phase, positions, masses, histogram,
                    of.entropy, of.mass_captured,
                )
            )  # fmt: skip
    return found


def read_fingerprints(entries: Iterable[dict[str, Any]]) -> Fingerprints:
    """The fingerprint entries among `entries` (of `collect_entries`).

    Raises:
        ResponseError: an entry is of no known mode, or damaged.
    """
    read = [
        convert(entry, _Fingerprint, f"fingerprint entry {number}")
        for number, entry in _of_mode(entries, "fingerprint")
    ]
    vectors = np.array([each.fingerprint for each in read], np.float64).reshape(-1, 20)
    # Beyond 1 a float64 may become an infinity of float32.
    if not ((vectors >= -_ROUNDING) & (vectors <= 1 + _ROUNDING)).all():
        raise ResponseError("a fingerprint has numbers that are not from 0 to 1")
    return Fingerprints(
        vectors.astype(np.float32),
        np.array([each.step for each in read], np.int64),
        [each.think_phase for each in read],
        [each.manifold for each in read],
        np.array([np.nan if r.confidence is None else r.confidence for r in read], np.float32),
    )


def read_hubs(source: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """The keys that a whole request attended to most (`attention_hubs`); None if the response does
    not say them.

    Args:
        source: as of `collect_entries`. A stream can be read once: for entries and hubs, make a
            list of it.

    Returns:
        Positions int64[n], the most attended first, and float64[n], their probabilities added up
        over the captured rows, of the mean head and layer.

    Raises:
        ResponseError: the hubs cannot be read.
    """
    found = None
    for part in parts(source):
        usage = convert(part.get("usage") or {}, _Usage, "usage")
        if usage.attention is not None and usage.attention.hubs is not None:
            found = usage.attention.hubs
    if found is None:
        return None
    masses = np.array([mass for _, mass in found], np.float64)
    if not (np.isfinite(masses) & (masses >= 0)).all():
        raise ResponseError("usage.attention.hubs has numbers that are no sums of probabilities")
    return np.array([position for position, _ in found], np.int64), masses


def _of_mode(entries: Iterable[dict[str, Any]], mode: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """The entries of a mode, each with its number among all."""
    for number, entry in enumerate(entries):
        found = _mode(entry)
        if found is None:
            raise ResponseError(f"attention entry {number} is neither raw, sketch nor fingerprint")
        if found == mode:
            yield number, entry


def _mode(entry: Any) -> str | None:
    keys = {"fingerprint": "fingerprint", "layer_sketches": "sketch", "token_positions": "raw"}
    return next((mode for key, mode in keys.items() if key in convert(entry, dict, "entry")), None)


def _attention(head: _Head, what: str) -> HeadAttention:
    if len(head.token_positions) != len(head.topk_logits):
        raise ResponseError(
            f"{what} has {len(head.token_positions)} positions and {len(head.topk_logits)} logits"
        )
    logits = np.array(head.topk_logits, np.float64)
    if not np.isfinite([*logits, head.logsumexp_candidates]).all():
        raise ResponseError(f"{what} has logits that are not numbers")
    with np.errstate(over="ignore"):
        probabilities = np.exp(logits - head.logsumexp_candidates)
    _check_shares(probabilities, what)
    return HeadAttention(np.array(head.token_positions, np.int64), probabilities)


def _check_shares(shares: NDArray[np.float64], what: str) -> None:
    # False for NaN as well.
    if not ((shares >= 0).all() and shares.sum() <= 1 + _ROUNDING):
        raise ResponseError(f"{what} has numbers that are not probabilities")
