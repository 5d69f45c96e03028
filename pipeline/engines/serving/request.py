"""What one request wants captured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from capture_kernels.errors import AttnError

Mode = Literal["raw", "sketch", "fingerprint"]


class CaptureRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one request wants captured, as JSON inside custom_params["attn"] (DESIGN.md section 7).

    Args:
        mode: what an entry of the response holds.
        top_k: how many positions a raw entry names, 1..64.
        layers: model layer numbers, a subset of the server's.
        heads: query heads; None for all.
        mask_prefix: how many tokens at the start are hidden.
        mask_system: hide the system prompt, however many tokens it has.
        prompt_rows: how many of the prompt's last rows are wanted.
        hubs: whether probabilities are added up by position over the request.
        scores: layers of which all probabilities are wanted; None for none.
        stride: the generated rows whose positions are multiples of this.
        max_steps: the most generated rows; 0 for all.
        window: only the last `window` keys count; 0 for all.
        stream_entries: whether the response has entries; False if only records are wanted.
    """

    mode: Mode = "raw"
    top_k: int = 32
    layers: list[int]
    heads: list[int] | None = None
    mask_prefix: int = 0
    mask_system: bool = False
    prompt_rows: int = 0
    hubs: bool = False
    scores: list[int] | None = None
    stride: int = 1
    max_steps: int = 0
    window: int = 0
    traceparent: str | None = None
    session_id: str | None = None
    stream_entries: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """What requests may ask of the served model."""

    name: str
    num_layers: int
    layers: tuple[int, ...]  # captured by the server, ascending
    heads: int
    max_context: int | None
    reasons: dict[str, str] = field(default_factory=dict)  # feature -> why it is not available
    moe: bool = False


class RequestError(AttnError):
    """A request that cannot be served as it is: HTTP 400, with the field that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
