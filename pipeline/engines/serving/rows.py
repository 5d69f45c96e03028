"""One captured row, as an engine hands it to `collect.RequestCollector`: numpy, on the host."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from capture_kernels.arrays import Floats, Int32s


class HeadRows(NamedTuple):
    """The top k of each chosen head. Positions are counted from the end of the masked prefix; -1
    where a head has fewer keys."""

    numbers: list[int]  # query heads, ascending
    positions: Int32s  # int32[H, k], best first
    logits: Floats  # float32[H, k], natural; -inf where there are fewer
    logsumexp: Floats  # float32[H], natural


class Routing(NamedTuple):
    """Where one layer's router sent the token of a row."""

    experts: Int32s  # int32[k], the largest weight first
    entropy: float  # of the softmax of the router's logits over E experts, divided by ln E


class Lens(NamedTuple):
    """What the model's last norm and its head make of a row's hidden state after one layer: the
    most likely tokens."""

    tokens: list[int]  # the most likely first
    texts: list[str]
    logprobs: list[float]  # natural


class LayerRow(NamedTuple):
    """One layer of a row. With p the mean of the chosen heads' probabilities:"""

    layer: int
    mean: Floats  # float32[32]: the columns of `capture_kernels.decode.plan`
    logsumexp: float  # natural, mean over the chosen heads
    positions: Int32s  # int32[k]: of the largest p, from the end of the masked prefix; -1: fewer
    masses: Floats  # float32[k]: p there, falling; 0 where there are fewer
    heads: HeadRows | None = None
    routing: Routing | None = None  # of a layer with a router, if the engine gives it
    lens: Lens | None = None  # if asked for


class Row(NamedTuple):
    """What one query row did in the layers of its request."""

    position: int  # of the query, absolute
    token_id: int | None  # the token fed there
    layers: list[LayerRow]  # ascending
    captured_at: datetime
    # What its entries say, as `EntryNumbers.of_rows` has it; None: it is yet to be made.
    entry_numbers: list[Any] | None = None
