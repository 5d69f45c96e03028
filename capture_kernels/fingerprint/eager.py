"""Fingerprints from queries and keys, in plain torch operations on any device.

No [T, T] tensor is made: rows are taken in chunks of bounded scratch memory.

Mathematics. With the logits x_j of one head in float32, and V the visible keys of a row,

    lse = logsumexp over V of x;   p_j = exp(x_j - lse);   entropy = -sum p ln p / ln n,

so a row whose visible mass underflows in a softmax, which `vector.fingerprint` cannot describe,
still has exact statistics. Learned sinks cancel, in the sink mass as well, and are not an argument.
Bands and bins are differences of one cumulative sum of the mean over heads, at each row's edges.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from capture_kernels.errors import OptionError

from .vector import (
    DIMENSIONS,
    HIST_BINS,
    LAYERED_BAND_EDGES,
    LOG16_BAND_EDGES,
    PLACE_BINS,
    Layout,
    Visibility,
    at_depths,
    chosen_heads,
)

# As much as a CPU's cache holds, and enough to keep a GPU busy.
CPU_SCRATCH_BYTES = 8 << 20
GPU_SCRATCH_BYTES = 256 << 20
# Entropy is divided by ln n; one key has none, and 0 / ln 2 = 0.
_LN_2 = math.log(2.0)


class LayerStatistics(NamedTuple):
    """Statistics of R rows of one layer, means over the chosen heads, on the queries' device. A row
    that sees no key holds finite numbers without meaning, which `combine` drops."""

    bands: Tensor  # float32[R, 3]: local, mid and long mass, by the layout's own edges
    entropy: Tensor  # float32[R], in [0, 1]
    shape: Tensor  # float32[R, 16] offset bins (log16) or float32[R, 8] place bins (layered)
    sink_mass: Tensor  # float32[R], in [0, 1]


class Vectors(NamedTuple):
    """Fingerprints of R rows: a row that is not `valid` sees no key, and is zero."""

    vector: Tensor  # float32[R, 20]
    sink_mass: Tensor  # float32[R]
    valid: Tensor  # bool[R]


class _Chunk(NamedTuple):
    """Some rows of a plan over the keys low..high-1, on the device."""

    low: int
    high: int
    hidden: Tensor  # bool[r, high - low]: not visible
    no_sink: Tensor | None  # bool[r, s]: of the first s keys, all but real sink tokens
    edges: Tensor  # int64[r, E], from 0 at `low`
    log_count: Tensor  # float32[r]: ln n


@dataclass(eq=False)
class RowPlan:
    """The keys and edges of R rows, worked out once for all layers that share them."""

    layout: Layout
    key_offset: int
    sink_tokens: int
    position: Tensor  # int64[R] on the host
    real: Tensor  # int64[R] on the host: the first key with mass, sink tokens included
    # int64[R, 4 + E] on the device: position, real, first visible key, whether it is seen; edges.
    _table: Tensor
    _log_count: Tensor  # float32[R] on the device: ln n
    _last: tuple[slice, _Chunk] | None = None

    @property
    def rows(self) -> int:
        return len(self.position)

    @property
    def valid(self) -> Tensor:
        """Which rows see a key: bool[R]."""
        return self._table[:, 3] != 0

    def chunks(self, cells: int) -> Iterator[slice]:
        """Slices of rows, each of at most `cells` rows x keys, or of a single row."""
        begin, take = 0, self.rows
        while begin < self.rows:
            take = min(2 * take, self.rows - begin)
            while take > 1:
                part = slice(begin, begin + take)
                width = int(self.position[part].max()) + 1 - int(self.real[part].min())
                if take * width <= cells:
                    break
                take = (take + 1) // 2
            yield slice(begin, begin + take)
            begin += take

    def chunk(self, rows: slice) -> _Chunk:
        """The chunk of a slice. The last one is kept: layers ask for the same, step by step."""
        if self._last is None or self._last[0] != rows:
            low, high = int(self.real[rows].min()), int(self.position[rows].max()) + 1
            table = self._table[rows]
            position, real, start = (table[:, i, None] for i in range(3))
            keys = torch.arange(low, high, device=table.device)
            # Sink tokens are the first of the sequence: few columns, if any.
            sinks = max(0, min(high, self.sink_tokens) - low)
            chunk = _Chunk(
                low,
                high,
                (keys < start) | (keys > position),
                (keys[:sinks] < real) | (keys[:sinks] >= start) if sinks else None,
                (table[:, 4:] - low).clamp(0, high - low),
                self._log_count[rows],
            )
            self._last = (rows, chunk)
        return self._last[1]


def plan_rows(
    positions: Tensor,
    device: torch.device | str = "cpu",
    *,
    layout: Layout = Layout.LOG16,
    visibility: Visibility | None = None,
    first_keys: Tensor | None = None,
    key_offset: int = 0,
) -> RowPlan:
    """The keys and edges of some rows, for `layer_statistics`.

    Args:
        positions: int64[R], best on the host: the logical position of each query.
        device: where the queries and keys are.
        layout: which bands and which shape histogram to take.
        visibility: which keys a fingerprint describes.
        first_keys: int64[R], the first key that the model lets each row see (`first_in_window`);
            None where it sees them all. Keys before it are not visible.
        key_offset: the logical position of the first key given; keys before it are not visible.

    Raises:
        OptionError: a position before the first key.
    """
    position = positions.to("cpu", torch.int64)
    if len(position) and int(position.min()) < key_offset:
        raise OptionError(f"positions must be {key_offset} or more, got {int(position.min())}")
    visibility = visibility or Visibility()
    first_real = torch.full_like(position, max(visibility.mask_prefix, key_offset))
    if visibility.window:
        first_real = torch.maximum(first_real, first_in_window(position, visibility.window))
    if first_keys is not None:
        first_real = torch.maximum(first_real, first_keys.to("cpu", torch.int64))
    visible = first_real.clamp(min=visibility.sink_tokens)
    # A row that sees no key is given its own, so that its numbers stay finite.
    start, real = torch.minimum(visible, position), torch.minimum(first_real, position)
    count = position - start + 1
    edges = _edges(position, start, count, layout)
    columns = [position, real, start, (visible <= position).long()]
    # One small copy to the device instead of many.
    table = torch.cat([torch.stack(columns, 1), edges], dim=1).to(device)
    log_count = torch.log(count.to(torch.float32)).clamp(min=_LN_2).to(device)
    return RowPlan(layout, key_offset, visibility.sink_tokens, position, real, table, log_count)


def layer_statistics(
    query: Tensor,
    key: Tensor,
    plan: RowPlan,
    *,
    scale: float,
    heads: Sequence[int] | None = None,
    soft_cap: float | None = None,
    scratch_bytes: int | None = None,
) -> LayerStatistics:
    """The statistics of some rows of one layer.

    Args:
        query: float[R, H, D], any float type and strides; computed in float32.
        key: float[T, Hkv, D] on the same device; H is a multiple of Hkv.
        plan: that of these rows.
        scale: what q . k is multiplied by.
        heads: the query heads to average over; None for all.
        soft_cap: the bound that tanh puts on the logits; None for none.
        scratch_bytes: a bound on the temporary memory; None for what suits the device. One row
            always runs: it needs about 12 * H * T bytes.

    Raises:
        OptionError: shapes, heads or positions that do not fit together.
    """
    if scratch_bytes is None:
        scratch_bytes = CPU_SCRATCH_BYTES if query.device.type == "cpu" else GPU_SCRATCH_BYTES
    total, key_heads = key.shape[0], key.shape[1]
    if query.shape[1] % key_heads or query.shape[2] != key.shape[2]:
        raise OptionError(f"queries {list(query.shape)} do not fit keys {list(key.shape)}")
    if plan.rows != query.shape[0]:
        raise OptionError(f"{query.shape[0]} queries need as many positions, got {plan.rows}")
    if plan.rows and int(plan.position.max()) >= plan.key_offset + total:
        raise OptionError(f"positions must be below {plan.key_offset + total}")
    if heads is not None:
        order = chosen_heads(query.shape[1], key_heads, heads)
        read = Counter(head // (query.shape[1] // key_heads) for head in order)
        # Key heads once each if all have equally many of the chosen heads, else one for each.
        read_heads = list(read if len(set(read.values())) == 1 else read.elements())
        query = query.index_select(1, torch.tensor(order, device=query.device))
        if read_heads != list(range(key_heads)):
            key = key.index_select(1, torch.tensor(read_heads, device=key.device))

    cells = scratch_bytes // (12 * query.shape[1] + 40)
    parts = []
    for rows in plan.chunks(cells):
        chunk = plan.chunk(rows)
        keys = key[chunk.low - plan.key_offset : chunk.high - plan.key_offset]
        logits = head_logits(query[rows].to(torch.float32) * scale, keys, scratch_bytes)
        if soft_cap is not None:
            logits.div_(soft_cap).tanh_().mul_(soft_cap)
        parts.append(_row_statistics(logits, chunk))
        del logits
    if not parts:
        bins = HIST_BINS if plan.layout is Layout.LOG16 else PLACE_BINS
        empty = query.new_zeros((0, 5 + bins), dtype=torch.float32)
        return LayerStatistics(empty[:, :3], empty[:, 3], empty[:, 5:], empty[:, 4])
    entropy, sink_mass, masses = (torch.cat(column) for column in zip(*parts, strict=True))
    # `_edges` says which ranges these are.
    shape = masses[:, 4:]
    if plan.layout is Layout.LAYERED:
        shape = shape.flip(1)
    return LayerStatistics(masses[:, :3], entropy, shape, sink_mass)


def combine(layers: Sequence[LayerStatistics], plan: RowPlan) -> Vectors:
    """Vectors of R rows from the statistics of their captured layers, shallowest first.

    Args:
        layers: at least one; all of the same rows and layout.
        plan: that of these rows; if layers differ in the keys that the model lets them see, any of
            theirs.
    """
    columns = zip(*layers, strict=True)
    bands, entropy, shape, sink_mass = (torch.stack(column).mean(0) for column in columns)
    parts = [bands, entropy[:, None], shape]
    if plan.layout is Layout.LAYERED:
        entropies = torch.stack([layer.entropy for layer in layers], dim=1)
        # `at_depths` is linear: its matrix float32[L, 8] is what it makes of the unit vectors.
        weights = np.stack([at_depths(unit) for unit in np.eye(len(layers))])
        parts.append(entropies @ torch.from_numpy(weights).to(entropies))
    vector = torch.cat(parts, dim=1)
    assert vector.shape[1] == DIMENSIONS
    # `where`, not a product, which would keep the NaN of a row without keys.
    zero, valid = torch.zeros((), device=vector.device), plan.valid
    return Vectors(
        torch.where(valid[:, None], vector, zero), torch.where(valid, sink_mass, zero), valid
    )


def first_in_window(positions: Tensor, window: int) -> Tensor:
    """The first key of each row under a model's sliding window of `window` keys: int64[R]."""
    return (positions - window + 1).clamp(min=0)


def _edges(position: Tensor, start: Tensor, count: Tensor, layout: Layout) -> Tensor:
    """Keys that bound the bands and bins of each row, descending: int64[R, E].

    The masses between neighbours are: three bands, a range without meaning, and the bins of the
    shape (log16: nearest offset first; layered: newest place first).
    """
    bands = LOG16_BAND_EDGES if layout is Layout.LOG16 else LAYERED_BAND_EDGES
    end = (position + 1)[:, None]
    edges = [end - torch.tensor([0, *bands]), torch.zeros_like(end)]
    if layout is Layout.LOG16:
        # Bin b holds the offsets from 2**b (bin 0: from 0) to below 2**(b+1).
        powers = torch.tensor([0, *(2**b for b in range(1, HIST_BINS))])
        edges += [end - powers, torch.zeros_like(end)]
    else:
        # The first rank of bin b is the least r with (2r + 1) * 8 >= 2n * b (`place_bins`).
        b = torch.arange(PLACE_BINS + 1)
        ranks = (count[:, None] * b + PLACE_BINS // 2 - 1) // PLACE_BINS
        edges.append((start[:, None] + ranks).flip(1))
    return torch.cat(edges, dim=1)


def _row_statistics(logits: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk's entropy float32[r], sink mass float32[r], and masses between its edges.

    Args:
        logits: float32[H, r, keys], which is overwritten.
    """
    sink_lse = None
    if chunk.no_sink is not None:
        columns = logits[:, :, : chunk.no_sink.shape[1]]
        sink_lse = torch.logsumexp(columns.masked_fill(chunk.no_sink, -math.inf), dim=2)
    logits.masked_fill_(chunk.hidden, -math.inf)
    p = torch.softmax(logits, dim=2)
    entropy = torch.special.entr(p).sum(dim=2).mean(0) / chunk.log_count
    if sink_lse is None:
        sink_mass = torch.zeros_like(entropy)
    else:
        # The largest p is at least 1 / n, so its logarithm is exact.
        lse = logits.amax(dim=2) - torch.log(p.amax(dim=2))
        sink_mass = torch.sigmoid(sink_lse - lse).mean(0)
    cumulative = torch.cumsum(p.mean(0), dim=1, dtype=torch.float64)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, chunk.edges)
    masses = ((before[:, :-1] - before[:, 1:]) / cumulative[:, -1:]).float()
    return entropy.clamp(0.0, 1.0), sink_mass, masses.clamp_(0.0, 1.0)


def head_logits(queries: Tensor, key: Tensor, scratch_bytes: int = GPU_SCRATCH_BYTES) -> Tensor:
    """q . k in float32, with no scale: float32[H, R, T], contiguous.

    Args:
        queries: float32[R, H, D].
        key: float[T, Hkv, D], any float type; query head h reads key head h // (H / Hkv).
        scratch_bytes: a bound on the memory for widened keys, less than the result's own.
    """
    rows, heads, depth = queries.shape
    total, groups = key.shape[0], key.shape[1]
    grouped = queries.transpose(0, 1).reshape(groups, heads // groups * rows, depth)
    by_head = key.permute(1, 2, 0)
    # Keys in half precision are widened a block at a time, in a quarter of the scratch memory.
    block = scratch_bytes // (16 * groups * depth) if key.dtype != torch.float32 else total
    if block >= total:
        return (grouped @ by_head.to(torch.float32)).view(heads, rows, total)
    logits = queries.new_empty(groups, grouped.shape[1], total)
    for begin in range(0, total, max(1, block)):
        part = slice(begin, begin + max(1, block))
        logits[:, :, part] = grouped @ by_head[:, :, part].to(torch.float32)
    return logits.view(heads, rows, total)
