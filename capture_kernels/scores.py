"""Full attention probabilities of a layer for the queries of a prompt, from a paged key cache.

Mathematics, for the query of one head at position t and the keys j that it sees,

    x_j = scale * descale * (q . k_j);    x_j := cap * tanh(x_j / cap) where logits are capped;
    m = max(max x_j, sink);    L = sum exp(x_j - m) + exp(sink - m);    p_j = exp(x_j - m) / L,

and p_j = 0 where a key is not seen: j > t, j < mask_prefix, or j <= t - window. A learned sink is
in L only. Positions are logical, and sink tokens are keys like others (DESIGN.md section 2).
Exponents, in units of ln 2, are taken in one fused multiply-add: what m lost by rounding is the
same for all keys of a row and cancels, so huge logits cost no more than their products' rounding.

L must be known before anything is written, so there are two launches. The first finds m and L by
tiles of keys, as flash attention does, and writes the zeros of tiles that no query of a block sees,
which cost memory time while the products cost the processor's. The second computes the tiles that
are seen once more, and writes them.

Tensors (R queries, H chosen query heads in ascending order, T keys):
    query    float[R, heads, D]          at positions start..start + R - 1
    keys     float[slots, key_heads, D]  query head h reads key head h // (heads / key_heads)
    table    int32/int64[T]              the slot of each position
    heads    int32[H]                    the chosen query heads
    partial  float32[splits, 2, packs, max_rows * group]
                                         of each share of a row's keys: m, in units of ln 2, and L
    out      float16[R, H, columns]

A program has a block of `BLOCK_M` lanes. A lane is one query of one head: of a pack, that is
`group` heads that read the same key head, lane i is head i % group of query i // group. So a few
queries fill a block where many heads share a key head, and each key is read once for all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_pass import LOG2_E
from .errors import OptionError
from .launch import (
    FLOAT8_TYPES,
    FLOAT32,
    QUERY_TYPES,
    check,
    check_layer,
    chosen_heads,
    interpreted,
    processors,
)

INTEGERS = {torch.int32, torch.int64}
# Columns of `ScoresPlan.output` are padded to whole lines of memory: 128 bytes.
LINE = 64
# Keys of a tile: with 128, registers and shared memory leave room for one block a processor only.
BLOCK_KEYS = 64
PROGRAMS_A_PROCESSOR = 2
# Tiles of keys that are worth a program of their own where queries are few.
TILES_A_SPLIT = 4


@triton.jit
def _load_queries(query, row, head, rows, stride_qr, stride_qh, dims, DEPTH: tl.constexpr):
    """Some components of each lane's query: [lanes, dims]."""
    at = row.to(tl.int64) * stride_qr + head.to(tl.int64) * stride_qh
    there = (row < rows)[:, None] & (dims < DEPTH)[None, :]
    return tl.load(query + at[:, None] + dims[None, :], mask=there, other=0.0)


@triton.jit
def _add_products(y, q, keys, there, dims, DEPTH: tl.constexpr, UPCAST: tl.constexpr):
    """y + q . k over some components: float32[lanes, keys]; `keys` are pointers [1, keys]."""
    inside = there[None, :] & (dims < DEPTH)[:, None]
    k = tl.load(keys + dims[:, None], mask=inside, other=0.0)
    if UPCAST:
        return tl.dot(q.to(tl.float32), k.to(tl.float32), y, input_precision="ieee")
    return tl.dot(q, k.to(q.dtype), y, input_precision="ieee")


# Arguments that change from run to run: a kernel for each value that divides well gains nothing.
@triton.jit(do_not_specialize=("rows", "start", "max_lanes", "mask_prefix", "window"))
def _scores(
    query,
    keys,
    table,
    heads,
    descale,
    sinks,
    partial,
    out,
    rows,
    start,
    columns,
    max_lanes,
    mask_prefix,
    window,
    bend,
    unit,
    stride_qr,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_table,
    stride_descale,
    stride_or,
    stride_oh,
    stride_oc,
    WRITE: tl.constexpr,
    GROUP: tl.constexpr,
    PER_KEY: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    DESCALE: tl.constexpr,
    SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    turn, blocks = tl.program_id(0), tl.num_programs(0)
    pack, packs = tl.program_id(1), tl.num_programs(1)
    split = tl.program_id(2)
    if WRITE:
        # The longest rows first, so that none of them is left alone at the end.
        block = blocks - 1 - turn
    else:
        # The last blocks multiply most, the first write most zeros: in turn, both go on at once.
        block = tl.where(turn % 2 == 0, blocks - 1 - turn // 2, turn // 2)
    lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row, place = lane // GROUP, lane % GROUP
    is_row = (row < rows)[:, None]
    position = start + row
    at = row.to(tl.int64) * stride_or + (pack * GROUP + place).to(tl.int64) * stride_oh
    line = out + at[:, None]
    lane_n = tl.arange(0, BLOCK_N)

    # Any query of the block sees the keys low..high - 1, in the tiles first..last - 1; all of them
    # see wholly the tiles inner..outer - 1.
    oldest = start + block * BLOCK_M // GROUP
    newest = start + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)
    low, all_low = mask_prefix, mask_prefix
    if WINDOWED:
        low = tl.maximum(low, oldest - window + 1)
        all_low = tl.maximum(all_low, newest - window + 1)
    high = newest + 1
    first = tl.where(low < high, low // BLOCK_N, 0)
    last = tl.where(low < high, tl.cdiv(high, BLOCK_N), 0)
    # Of these, the tiles begin..end - 1 are this program's.
    share = tl.cdiv(last - first, SPLITS)
    begin = tl.minimum(first + split * share, last)
    end = tl.minimum(begin + share, last)
    inner = tl.minimum(tl.maximum(tl.cdiv(all_low, BLOCK_N), begin), end)
    outer = tl.minimum(tl.maximum((oldest + 1) // BLOCK_N, inner), end)

    if not WRITE:
        zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float16)
        whole = columns // BLOCK_N
        unseen = first + tl.maximum(whole - last, 0)
        share = tl.cdiv(unseen, SPLITS)
        for i in range(split * share, tl.minimum(split * share + share, unseen)):
            column = tl.where(i < first, i, i - first + last) * BLOCK_N + lane_n
            to = line + column.to(tl.int64)[None, :] * stride_oc
            tl.store(to, zeros, mask=is_row, cache_modifier=".cs")
        if split == SPLITS - 1 and whole >= last:
            column = whole * BLOCK_N + lane_n
            to = line + column.to(tl.int64)[None, :] * stride_oc
            tl.store(to, zeros, mask=is_row & (column < columns)[None, :], cache_modifier=".cs")

    head = tl.load(heads + pack * GROUP + place)
    key_head = tl.load(heads + pack * GROUP) // PER_KEY
    keys += key_head.to(tl.int64) * stride_kh
    if DESCALE:
        factor = tl.load(descale + key_head * stride_descale)
        if SOFT_CAP:
            bend *= factor
        else:
            unit *= factor
    # Components in powers of two: 160 are 128 and 32.
    dims = tl.arange(0, BLOCK_D)
    q = _load_queries(query, row, head, rows, stride_qr, stride_qh, dims, DEPTH)
    if REST:
        dims_rest = BLOCK_D + tl.arange(0, REST)
        q_rest = _load_queries(query, row, head, rows, stride_qr, stride_qh, dims_rest, DEPTH)

    if WRITE:
        parts = tl.arange(0, SPLITS).to(tl.int64) * 2 * packs + pack
        at_parts = partial + parts[None, :] * max_lanes + lane[:, None]
        m_i = tl.load(at_parts, mask=is_row, other=0.0)
        total_i = tl.load(at_parts + packs.to(tl.int64) * max_lanes, mask=is_row, other=0.0)
        m = tl.max(m_i, 1)
        # A row that sees no key has no largest logit, and no mass.
        m = tl.where(m == float("-inf"), 0.0, m)
        total = tl.sum(total_i * tl.exp2(m_i - m[:, None]), 1)
        inverse = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            learned = tl.load(sinks + head).to(tl.float32) * LOG2_E
            m = tl.where(split == 0, learned, m)
            total += tl.where(split == 0, 1.0, 0.0)

    # First the tiles that need no mask, then those before and after them.
    for masked in tl.static_range(0, 2):
        count = inner - begin + end - outer if masked else outer - inner
        for i in range(0, count):
            if masked:
                tile = tl.where(i < inner - begin, begin + i, outer + i - (inner - begin))
            else:
                tile = inner + i
            column = tile * BLOCK_N + lane_n
            there = (column >= low) & (column < high)
            slot = tl.load(table + column.to(tl.int64) * stride_table, mask=there, other=0)
            to_key = keys + slot.to(tl.int64)[None, :] * stride_ks
            y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            y = _add_products(y, q, to_key, there, dims, DEPTH, UPCAST)
            if REST:
                y = _add_products(y, q_rest, to_key, there, dims_rest, DEPTH, UPCAST)
            if SOFT_CAP:
                # tanh, from exp2 alone; both ends are reached without overflow.
                y = 1.0 - 2.0 / (1.0 + tl.exp2(y * bend))
            if masked:
                seen = (column[None, :] <= position[:, None]) & (column >= mask_prefix)[None, :]
                if WINDOWED:
                    seen = seen & (column[None, :] > position[:, None] - window)
                y = tl.where(seen, y, float("-inf"))
            if WRITE:
                e = tl.exp2(tl.fma(y, unit, -m[:, None]))
                p = (e * inverse[:, None]).to(tl.float16)
                to = line + column.to(tl.int64)[None, :] * stride_oc
                # A mask that is not aligned would split the stores of the whole tile.
                if masked and tile * BLOCK_N + BLOCK_N > columns:
                    inside = is_row & (column < columns)[None, :]
                    tl.store(to, p, mask=inside, cache_modifier=".cs")
                else:
                    tl.store(to, p, mask=is_row, cache_modifier=".cs")
            else:
                m_new = tl.maximum(m, tl.max(y, 1) * unit)
                # A row that has seen no key yet: -inf - -inf would be NaN.
                finite = tl.where(m_new == float("-inf"), 0.0, m_new)
                e = tl.exp2(tl.fma(y, unit, -finite[:, None]))
                total = total * tl.exp2(m - finite) + tl.sum(e, 1)
                m = m_new

    if not WRITE:
        to_part = partial + (split * 2 * packs + pack).to(tl.int64) * max_lanes + lane
        tl.store(to_part, m, mask=row < rows)
        tl.store(to_part + packs.to(tl.int64) * max_lanes, total, mask=row < rows)


class ScoresTuning(NamedTuple):
    """How the kernels are cut into programs."""

    block_m: int  # lanes of a program: a power of two, 16 or more
    block_n: int  # keys of a tile: a power of two, 16 or more
    warps: int
    stages: int
    splits: int = 1  # programs that share a block's keys: a power of two


WIDE_TUNING = ScoresTuning(block_m=16, block_n=32, warps=8, stages=2)


class ScoresPlan:
    """Geometry and scratch memory of the scores of one kind of layer; `run` once a layer and chunk.

    A run allocates nothing, copies nothing and waits for nothing, so that a CUDA graph can hold it
    (after a first run, which compiles); the graph keeps the number of queries and `start`. Beside
    the output it needs `scratch_bytes`: 8 bytes a query and head, a few times that where queries
    are so few that several programs must share a row.

    Args:
        max_rows: the most queries of a run. Fewer cost less, but a plan for a few queries spreads
            their keys over the whole device.
        max_length: the most keys of a query.
        heads, key_heads, head_dim: the layer's shape; query head h reads key head
            h // (heads / key_heads).
        scale: what q . k is multiplied by, more than 0.
        device: where queries and keys are.
        chosen: the query heads to look at; None for all. Results are in ascending order of heads.
        soft_cap: the bound that tanh puts on the logits; None for none.
        window: the model's own sliding window, the query's own key included; 0 for none.
        mask_prefix: how many tokens at the start of the sequence are never looked at (privacy):
            their probability is 0, and the others' are of the softmax without them.
        tuning: how kernels are cut; None for what suits the shape.

    Raises:
        OptionError: options that do not fit together, or a head_dim above 256 (the latent keys of
            MLA among them).

    Source: DESIGN.md sections 2 and 7 (`attn_capture_data`).
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_length: int,
        heads: int,
        key_heads: int,
        head_dim: int,
        scale: float,
        device: torch.device | str,
        chosen: Sequence[int] | None = None,
        soft_cap: float | None = None,
        window: int = 0,
        mask_prefix: int = 0,
        tuning: ScoresTuning | None = None,
    ) -> None:
        check_layer(max_rows, max_length, head_dim, scale, soft_cap, window)
        order = chosen_heads(heads, key_heads, chosen)
        if mask_prefix < 0:
            raise OptionError(f"mask_prefix must be 0 or more, got {mask_prefix}")
        self.device = torch.device(device)
        self.max_rows, self.max_length = max_rows, max_length
        self.heads, self.key_heads, self.head_dim = heads, key_heads, head_dim
        self.scale, self.soft_cap = scale, soft_cap
        self.window, self.mask_prefix = window, mask_prefix
        self.order = order
        # A pack has as many heads as divide evenly what is chosen of each key head.
        per_key = heads // key_heads
        self.group = math.gcd(*Counter(head // per_key for head in order).values())
        self.packs = len(order) // self.group
        self.tuning = tuning or self._tuning()
        # In float32 nothing goes through tensor cores, and larger tiles would not fit registers.
        self._wide_tuning = tuning or WIDE_TUNING._replace(splits=self.tuning.splits)
        self._heads = torch.tensor(order, dtype=torch.int32, device=self.device)
        self._partial = torch.zeros(
            (self.tuning.splits, 2, self.packs, max_rows * self.group),
            dtype=torch.float32,
            device=self.device,
        )

    def _tuning(self) -> ScoresTuning:
        lanes = self.max_rows * self.group
        block_m = min(128, max(16, triton.next_power_of_2(lanes)))
        programs = triton.cdiv(lanes, block_m) * self.packs
        wanted = triton.cdiv(PROGRAMS_A_PROCESSOR * processors(self.device), programs)
        useful = triton.cdiv(self.max_length, TILES_A_SPLIT * BLOCK_KEYS)
        splits = max(1, triton.next_power_of_2(min(wanted, useful) + 1) // 2)
        if block_m == 128:
            return ScoresTuning(block_m, BLOCK_KEYS, warps=8, stages=3, splits=splits)
        # A few queries wait for keys only, and more keys must be on their way.
        return ScoresTuning(block_m, BLOCK_KEYS, warps=4, stages=4, splits=splits)

    @property
    def scratch_bytes(self) -> int:
        """Device memory that the plan holds."""
        return self._partial.nbytes + self._heads.nbytes

    def output(self, rows: int, columns: int) -> Tensor:
        """A new float16[rows, H, columns] for `run`, not initialised. Its rows begin at whole lines
        of memory, so that stores can be wide; for any `columns` that is a multiple of 64 it is
        contiguous."""
        padded = triton.cdiv(columns, LINE) * LINE
        shape = (rows, len(self.order), padded)
        return torch.empty(shape, dtype=torch.float16, device=self.device)[:, :, :columns]

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        table: Tensor,
        start: int,
        out: Tensor,
        *,
        last: int | None = None,
        descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Write the probabilities of some queries of one request, all of `out`.

        Args:
            query: float16/bfloat16/float32[R, heads, head_dim], the last axis contiguous: the
                queries at positions start..start + R - 1, such as one chunk of a prompt.
            keys: [slots, key_heads, head_dim] of the queries' type or float8, the last axis
                contiguous: the layer's paged cache, which holds the keys 0..start + R - 1.
            table: int32/int64[start + R or more], the slot of each position. Slots of keys that no
                query sees are not read.
            start: the position of the first query.
            out: float16[R, H, columns] of any strides, columns >= start + R; 0 is written where a
                key is not seen. A query that sees no key is 0 throughout.
            last: write only the last `last` queries: `out` is float16[min(last, R), H, columns].
            descale: float32[key_heads] or float32 of one element, above 0, what keys are
                multiplied by; None for 1.
            sinks: float[heads], a learned logit of every query head (chosen or not) that adds to
                the denominator only, so that a row may sum to less than 1.

        Raises:
            OptionError: shapes, types or devices that do not fit the plan.
        """
        rows = query.shape[0]
        if last is not None and last < rows:
            if last < 0:
                raise OptionError(f"last must be 0 or more, got {last}")
            query, start, rows = query[rows - last :], start + rows - last, last
        self._check(query, keys, table, start, out, descale, sinks)
        if rows == 0:
            return
        tuning = self._wide_tuning if query.dtype == torch.float32 else self.tuning
        depth, capped = self.head_dim, self.soft_cap is not None
        block_d = max(16, 1 << (depth.bit_length() - 1))
        rest = 0 if depth <= block_d else max(16, triton.next_power_of_2(depth - block_d))
        cap = self.soft_cap or 1.0
        grid = (triton.cdiv(rows * self.group, tuning.block_m), self.packs, tuning.splits)
        with torch.cuda.device_of(query):
            for write in (False, True):
                _scores[grid](
                    query,
                    keys,
                    table,
                    self._heads,
                    self._partial if descale is None else descale,
                    self._partial if sinks is None else sinks,
                    self._partial,
                    out,
                    rows,
                    start,
                    out.shape[2],
                    self.max_rows * self.group,
                    self.mask_prefix,
                    self.window,
                    2.0 * LOG2_E.value * self.scale / cap,
                    LOG2_E.value * (cap if capped else self.scale),
                    query.stride(0),
                    query.stride(1),
                    keys.stride(0),
                    keys.stride(1),
                    table.stride(0),
                    0 if descale is None or descale.numel() == 1 else 1,
                    *out.stride(),
                    WRITE=write,
                    GROUP=self.group,
                    PER_KEY=self.heads // self.key_heads,
                    DEPTH=depth,
                    BLOCK_D=block_d,
                    REST=rest,
                    SPLITS=tuning.splits,
                    SOFT_CAP=capped,
                    WINDOWED=self.window > 0,
                    DESCALE=descale is not None,
                    SINKS=sinks is not None,
                    UPCAST=interpreted(),
                    BLOCK_M=tuning.block_m,
                    BLOCK_N=tuning.block_n,
                    num_warps=tuning.warps,
                    num_stages=tuning.stages,
                )

    def _check(
        self,
        query: Tensor,
        keys: Tensor,
        table: Tensor,
        start: int,
        out: Tensor,
        descale: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Raise OptionError for what does not fit the plan."""
        rows, end = query.shape[0], start + query.shape[0]
        check(query, "query", [rows, self.heads, self.head_dim], QUERY_TYPES)
        shape = [keys.shape[0], self.key_heads, self.head_dim]
        check(keys, "keys", shape, {query.dtype, *FLOAT8_TYPES})
        if rows > self.max_rows:
            raise OptionError(f"{rows} queries in a plan for {self.max_rows}: raise max_rows")
        if start < 0 or end > self.max_length:
            raise OptionError(f"positions {start}..{end - 1} must lie in 0..{self.max_length - 1}")
        if table.dim() != 1 or len(table) < end or table.dtype not in INTEGERS:
            raise OptionError(f"table must be int32 or int64 [{end} or more]: one request's slots")
        columns = out.shape[2] if out.dim() == 3 else end
        if list(out.shape) != [rows, len(self.order), max(columns, end)]:
            shape = [rows, len(self.order), end]
            raise OptionError(f"out has the shape {list(out.shape)}, not {shape} or more columns")
        if out.dtype != torch.float16:
            raise OptionError(f"out is {out.dtype}, not torch.float16")
        named = {"query": query, "keys": keys, "table": table, "out": out}
        if descale is not None:
            shape = [1] if descale.numel() == 1 else [self.key_heads]
            check(descale.reshape(-1), "descale", shape, FLOAT32)
            named["descale"] = descale
        if sinks is not None:
            check(sinks, "sinks", [self.heads], QUERY_TYPES)
            named["sinks"] = sinks
        for name, tensor in named.items():
            if tensor.device != self._heads.device:
                raise OptionError(f"{name} is on {tensor.device}, the plan on {self._heads.device}")
