"""Which rows of a step have a record, and the words that a ring slot holds of each.

Mathematics, for one row with the statistics s_l of its L captured layers (means over heads):

    log16    hist = mean_l hist_l;  local, mid, long = hist[0:3].sum(), [3:8].sum(), [8:16].sum();
             entropy = mean_l entropy_l
    layered  local, mid = mean_l mass_l(d < 10), mean_l mass_l(10 <= d < 100);  long is the rest;
             entropy and position bins = mean_l of each;  depth i of 0..7 = sum_l w_il entropy_l
             with w_il = max(0, 1 - |i (L - 1) / 7 - l|), as `fingerprint.at_depths` interpolates

So each number but the bands is a weighted sum over the layers of one column of the statistics. A
record per layer is the same with L = 1.

Tensors: those of `append`; words as `ring` has them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_recorded(
    item, items, statistics, position, request, enabled, layer_stride, LAYERS: tl.constexpr,
    PER_LAYER: tl.constexpr, BLOCK_L: tl.constexpr, BY_REQUEST: tl.constexpr,
):  # fmt: skip
    """Which items have a record: enabled, and with a visible key in all of their layers."""
    # No load waits for another but those by request: all of them are one way to memory, or two.
    there = item < items
    row = item // LAYERS if PER_LAYER else item
    at = tl.load(position + row, mask=there, other=-1)
    own = row.to(tl.int64)
    if BY_REQUEST:
        at -= 1
        own = tl.load(request + row, mask=there, other=0).to(tl.int64)
    recorded = there & (tl.load(enabled + own, mask=there, other=0) != 0) & (at >= 0)
    valid = statistics + row.to(tl.int64) * 32 + 28
    if PER_LAYER:
        layer = (item % LAYERS).to(tl.int64)
        # Not `!= 0`, which a NaN would pass.
        recorded = recorded & (tl.load(valid + layer * layer_stride, mask=there, other=0.0) > 0.5)
    else:
        for first in range(0, LAYERS, BLOCK_L):
            layer = (first + tl.arange(0, BLOCK_L)).to(tl.int64)
            found = tl.load(
                valid[:, None] + layer[None, :] * layer_stride,
                mask=there[:, None] & (layer < LAYERS)[None, :],
                other=1.0,
            )
            recorded = recorded & (tl.sum((found > 0.5).to(tl.int32), 1) == BLOCK_L)
    return recorded


@triton.jit
def record_words(
    item, there, statistics, position, request, handle, phase, layer_numbers, layer_stride,
    LAYERS: tl.constexpr, PER_LAYER: tl.constexpr, LAYERED: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_L: tl.constexpr, BY_REQUEST: tl.constexpr,
):  # fmt: skip
    """What a ring slot holds of each item that is there, but seq: int32[BLOCK, 32]."""
    group: tl.constexpr = 1 if PER_LAYER else LAYERS
    word = tl.arange(0, 32)
    c = word - 8
    is_vector = (c >= 0) & (c < 20)
    if LAYERED:
        depth = tl.where((c >= 12) & is_vector, c - 12, -1)
        column = tl.where(c < 2, 24 + c, tl.where(c < 4, 27, tl.where(c < 12, c + 12, 27)))
        is_loaded = is_vector & (c != 2)
    else:
        depth = tl.full([32], -1, tl.int32)
        column = tl.where(c < 4, 27, c - 4)
        is_loaded = is_vector & (c >= 3)
    column = tl.where(word == 6, 26, tl.where(is_loaded, column, 0))
    is_loaded = is_loaded | (word == 6)

    row = item // LAYERS if PER_LAYER else item
    own_layer = item % LAYERS if PER_LAYER else tl.zeros([BLOCK], tl.int32)
    source = statistics + row.to(tl.int64) * 32 + own_layer.to(tl.int64) * layer_stride

    value = tl.zeros([BLOCK, 32], tl.float32)
    for first_layer in range(0, group, BLOCK_L):
        layer = first_layer + tl.arange(0, BLOCK_L)
        part = tl.load(
            source[:, None, None]
            + layer.to(tl.int64)[None, :, None] * layer_stride
            + column[None, None, :],
            mask=there[:, None, None] & (layer < group)[None, :, None] & is_loaded[None, None, :],
            other=0.0,
        )
        # In whole sevenths: a captured layer exactly at one of the depths has all the weight.
        away = tl.abs(depth[None, :] * (group - 1) - 7 * layer[:, None])
        near = tl.maximum(7 - away, 0).to(tl.float32) * (1.0 / 7.0)
        weight = tl.where(depth[None, :] < 0, 1.0 / group, near)
        value += tl.sum(part * weight[None, :, :], 1)

    if LAYERED:
        near = tl.sum(tl.where(((c == 0) | (c == 1))[None, :], value, 0.0), 1)
        value = tl.where((c == 2)[None, :], tl.maximum(1.0 - near, 0.0)[:, None], value)
    else:
        bin = c - 4
        local = tl.sum(tl.where(((bin >= 0) & (bin < 3))[None, :], value, 0.0), 1)
        mid = tl.sum(tl.where(((bin >= 3) & (bin < 8))[None, :], value, 0.0), 1)
        long = tl.sum(tl.where(((bin >= 8) & (bin < 16))[None, :], value, 0.0), 1)
        value = tl.where((c == 0)[None, :], local[:, None], value)
        value = tl.where((c == 1)[None, :], mid[:, None], value)
        value = tl.where((c == 2)[None, :], long[:, None], value)

    own = row.to(tl.int64)
    t = tl.load(position + row, mask=there, other=0).to(tl.int32)
    if BY_REQUEST:
        t -= 1
        own = tl.load(request + row, mask=there, other=0).to(tl.int64)
    handles = tl.load(handle + own, mask=there, other=0)
    low, high = handles.to(tl.int32), (handles >> 32).to(tl.int32)
    phases = tl.load(phase + own, mask=there, other=0).to(tl.int32)
    kind = tl.full([BLOCK], 0xFFFF, tl.int32)
    if PER_LAYER:
        kind = tl.load(layer_numbers + own_layer, mask=there, other=0) & 0xFFFF
    kind = kind | (LAYOUT << 16) | (phases << 24)
    words = tl.where((is_vector | (word == 6))[None, :], value, 0.0).to(tl.int32, bitcast=True)
    words = tl.where((word == 2)[None, :], low[:, None], words)
    words = tl.where((word == 3)[None, :], high[:, None], words)
    words = tl.where((word == 4)[None, :], t[:, None], words)
    words = tl.where((word == 5)[None, :], kind[:, None], words)
    return words
