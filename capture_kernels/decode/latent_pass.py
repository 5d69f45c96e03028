"""The pass over latent keys (MLA) of 16 bits for more than 16 query heads, on Hopper GPUs; without
a top k of heads.

Mathematics, results and tensors: those of `key_pass`, without values. `head_pass` does the same on
any GPU, but multiplies tiles of 32 keys, as the queries of 128 heads take two thirds of a
multiprocessor's shared memory, and with so few columns a product waits for its operands. Here keys
are the rows, 64 at a time. Twelve warps share the work: four load keys, a third of a tile as soon
as it has been multiplied, up to two tiles ahead where fewer heads leave room; twice four multiply
them with half of the heads each, and take in what they got while the others multiply. This is
written in Gluon, where that is the program's to say.

The maximum m of a head is only made larger if a logit exceeds it by SLACK (in units of ln 2), which
float32 has room for; at the end of a split, m becomes the logsumexp of all its keys. A range of
distances ends between two keys: sums are closed there and added to the columns of all ranges that
the keys since the last end lie in.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from capture_kernels.decode.step.layers import layer_inputs, note_layer
from capture_kernels.decode.step.logits import scaled_logits
from capture_kernels.decode.step.schedule import POSITION, REAL, SEEN, VISIBLE, row_field
from capture_kernels.launch import LN_2, LOWEST, after_last_kernel

from .key_pass import PARTIAL, column_ranges
from .tuning import LATENT_PASS_KEYS as KEYS
from .tuning import LATENT_PASS_WARPS as WARPS

# Keys of a tile, and the numbers of a key that are one chunk of shared memory.
TILE, CHUNK = tl.constexpr(KEYS), tl.constexpr(64)
# Warps and threads of each group, and the registers of a thread that multiplies and that loads.
GROUP, THREADS = tl.constexpr(WARPS), tl.constexpr(32 * WARPS)
MOST_REGISTERS, FEW_REGISTERS = tl.constexpr(232), tl.constexpr(40)
# Chunks that are loaded and waited for together, and how many times as many a key has.
THIRD, THIRDS = tl.constexpr(3), tl.constexpr(3)
# Query heads that leave room for a second tile in shared memory.
FEW_HEADS = tl.constexpr(64)
# By how many powers of two a logit may exceed the maximum that is known.
SLACK = tl.constexpr(64.0)
NOWHERE = tl.constexpr(2147483647)

# Its name before and since Triton 3.8.
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def copied():
    """A thread copies 8 numbers, 16 bytes, at a time."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def unknown_zero():
    """0, which the compiler does not know: what is computed of it stays where it is used. Addresses
    of all chunks, computed ahead of a loop, would not have room in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def paired_distance(lane):
    """The distance, from the tile's first key, of the key in a lane: a row of the product. A thread
    has the rows r and r + 8, so that two neighbours are put there, whose logits are written
    together."""
    return (lane & -16) | ((lane & 7) << 1) | ((lane >> 3) & 1)


@gluon.jit
def next_edge(distance, first, after):
    """The next distance above this one at which a range begins or ends."""
    begins = gl.min(gl.where(first > distance, first, NOWHERE), 0)
    ends = gl.min(gl.where(after > distance, after, NOWHERE), 0)
    return gl.minimum(begins, ends)


@gluon.jit
def split_at(
    block, end, rows, TILES: gl.constexpr, NO_KEYS: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """The split that begins at a block: its row, the block after it, its first tile and the one
    after its last, the distance after its last key, and where the row's newest key is listed."""
    kv_slots, base, row_table, block_ptr, num_rows = rows
    lane = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    row_ends = gl.load(block_ptr + 1 + lane, mask=lane < num_rows, other=NOWHERE)
    row = gl.sum((row_ends <= block).to(gl.int32), 0)
    row_block = gl.load(block_ptr + row)
    stop = gl.minimum(end, gl.load(block_ptr + row + 1))
    row_block += NO_KEYS
    first_tile = gl.maximum(block - row_block, 0) * TILES
    after_tile = gl.maximum(stop - row_block, 0) * TILES
    seen = row_field(row_table, SEEN, row, num_rows)
    split_end = gl.minimum(after_tile * TILE, seen)
    newest = kv_slots + gl.load(base + row) + row_field(row_table, POSITION, row, num_rows)
    return row, stop, first_tile, after_tile, split_end, newest


@gluon.jit
def load_keys(
    block, end, keys, rows, chunks, loaded, free, STRIDE_KS: gl.constexpr, TILES: gl.constexpr,
    NO_KEYS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Load all tiles of a program, a third of one after another."""
    HELD: gl.constexpr = loaded.shape[0] // THIRDS
    CHUNKS: gl.constexpr = chunks.shape[0] // HELD
    key = paired_distance(gl.arange(0, TILE, gl.SliceLayout(1, copied())))
    number = gl.arange(0, CHUNK, gl.SliceLayout(0, copied()))[None, :]
    turn = block - block
    while block < end:
        _, stop, first_tile, after_tile, split_end, newest = split_at(
            block, end, rows, TILES, NO_KEYS, ROWS
        )
        # Keys past the last are that key: cheaper than a mask.
        last_key = gl.maximum(split_end - 1, 0)
        slot = gl.load(newest - gl.minimum(first_tile * TILE + key, last_key))
        for tile in range(first_tile, after_tile):
            at = keys + slot.to(gl.int64)[:, None] * STRIDE_KS + number
            slot = gl.load(newest - gl.minimum((tile + 1) * TILE + key, last_key))
            here, again = turn % HELD, turn // HELD & 1
            for third in gl.static_range(THIRDS):
                mbarrier.wait(free.index(here * THIRDS + third), again ^ 1)
                for chunk in gl.static_range(third * THIRD, (third + 1) * THIRD):
                    load_async(chunks.index(here * CHUNKS + chunk), at + chunk * CHUNK)
                async_copy.mbarrier_arrive(
                    loaded.index(here * THIRDS + third), increment_count=False
                )
            turn += 1
        block = stop


@gluon.jit
def pairs(x):
    """[keys, heads] added up over keys 8 apart, which a thread has both of."""
    return gl.sum(gl.reshape(x, [TILE // 16, 2, 8, x.shape[1]]), 1)


@gluon.jit
def over_keys(paired, STORED_HEADS: gl.constexpr):
    """What `pairs` gave, added up over all keys: [heads]."""
    by_key = gl.reshape(paired, [TILE // 2, paired.shape[2]])
    return gl.convert_layout(gl.sum(by_key, 0), STORED_HEADS)


@gluon.jit
def write_logits(at, x, count, BLOCK: gl.constexpr):
    """Write a tile of logits [keys, heads] by distance, of `count` heads: two neighbours, as one
    number of 64 bits, at a time. `at` points to the first head's, BLOCK numbers before the next."""
    HALF: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [TILE // 16, 2, 8, HALF]), (0, 2, 3, 1))
    x, older = gl.split(gl.reshape(x, [TILE // 2, HALF, 2]))
    bits = x.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    bits |= older.to(gl.int32, bitcast=True).to(gl.int64) << 32
    STORED: gl.constexpr = bits.type.layout
    two = gl.arange(0, TILE // 2, gl.SliceLayout(1, STORED))
    head = gl.arange(0, HALF, gl.SliceLayout(0, STORED)) + unknown_zero()
    at = at.to(gl.pointer_type(gl.int64), bitcast=True)
    at += head[None, :] * (BLOCK // 2) + two[:, None]
    gl.store(at, bits, mask=(head < count)[None, :])


@gluon.jit
def raise_maximum(y, state, tile, visible, STORED_HEADS: gl.constexpr):
    """The sums with the largest logits so far as each head's maximum."""
    m, sums, weighted, masses, open_l, total_l, visible_l, visible_s = state
    largest = gl.maximum(m, gl.max(y, 0))
    down = gl.convert_layout(m - largest, STORED_HEADS)
    scale = gl.exp2(down)
    open_l += over_keys(sums, STORED_HEADS)
    # Of keys that are visible. Once these have ended, nothing that is open is.
    is_open = tile * TILE < visible
    all_l = visible_l + gl.where(is_open, open_l, 0.0)
    visible_s += gl.where(is_open, over_keys(weighted, STORED_HEADS), 0.0)
    visible_s = (visible_s + all_l * down) * scale
    return (
        largest, gl.zeros_like(sums), gl.zeros_like(weighted), masses * scale[:, None],
        open_l * scale, total_l * scale, visible_l * scale, visible_s,
    )  # fmt: skip


@gluon.jit
def take_in(
    y, state, edge, tile, split_end, visible, first, after, lane, STORED_HEADS: gl.constexpr
):  # fmt: skip
    """Add a tile of logits, and close the sums at the edges that lie in it or at its end."""
    shifted = y - state[0][None, :]
    if gl.max(gl.reshape(shifted, [TILE * y.shape[1]]), 0) > SLACK:
        state = raise_maximum(y, state, tile, visible, STORED_HEADS)
        shifted = y - state[0][None, :]
    m, sums, weighted, masses, open_l, total_l, visible_l, visible_s = state
    e = gl.exp2(shifted)
    shifted = gl.maximum(shifted, LOWEST)
    start = tile * TILE
    tile_end = gl.minimum(start + TILE, split_end)
    if edge > tile_end:
        sums += pairs(e)
        weighted += pairs(e * shifted)
    else:
        distance = start + lane
        while start < tile_end:
            stop = gl.minimum(edge, tile_end)
            inside = (distance >= start) & (distance < stop)
            part = gl.where(inside[:, None], e, 0.0)
            sums += pairs(part)
            weighted += pairs(part * shifted)
            if edge == stop:
                closed = open_l + over_keys(sums, STORED_HEADS)
                belongs = (first < stop) & (after >= stop)
                # A product, so that a key that is not finite spoils all columns.
                masses += closed[:, None] * gl.where(belongs, 1.0, 0.0)[None, :]
                total_l += closed
                visible_l += gl.where(stop <= visible, closed, 0.0)
                if stop == gl.minimum(visible, split_end):
                    visible_s += over_keys(weighted, STORED_HEADS)
                open_l = gl.zeros_like(open_l)
                sums = gl.zeros_like(sums)
                edge = gl.minimum(next_edge(stop, first, after), split_end)
            start = stop
    return (m, sums, weighted, masses, open_l, total_l, visible_l, visible_s), edge


@gluon.jit
def multiply_keys(
    block, end, query, rows, group, partial, kept, factor, soft_cap, stride_qr, stride_qh,
    first_split, queries, chunks, loaded, free, HEADS: gl.constexpr, SOFT_CAP: gl.constexpr,
    WHICH: gl.constexpr, TILES: gl.constexpr, NO_KEYS: gl.constexpr, ROWS: gl.constexpr,
    LOGITS: gl.constexpr,
):  # fmt: skip
    """Statistics of half of the heads: WHICH of the two."""
    CHUNKS: gl.constexpr = queries.shape[0]
    HALF: gl.constexpr = queries.shape[1]
    HELD: gl.constexpr = loaded.shape[0] // THIRDS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    # [heads, 32 columns], as they are stored.
    STORED: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    STORED_HEADS: gl.constexpr = gl.SliceLayout(1, STORED)
    row_table, block_ptr, num_rows = rows[2], rows[3], rows[4]
    # `HeadGroups`: how many heads lie before, and which these are.
    first_head = gl.load(group + 1) + WHICH * HALF
    group += 2 + WHICH * HALF
    # Lanes of no head take head 0, as what nobody wrote could make their maximum rise at each tile.
    head = gl.maximum(gl.load(group + gl.arange(0, HALF, gl.SliceLayout(1, copied()))), 0)[:, None]
    number = gl.arange(0, CHUNK, gl.SliceLayout(0, copied()))[None, :]
    lane = paired_distance(gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT)))
    stored_head = gl.arange(0, HALF, STORED_HEADS)
    chosen = gl.load(group + stored_head) >= 0
    columns = gl.arange(0, 32, gl.SliceLayout(0, STORED))
    logits, first_logits, logit_blocks = kept
    # How many of this half's heads there are, which come first.
    count = gl.sum(chosen.to(gl.int32), 0)
    turn = block - block
    while block < end:
        row, stop, first_tile, after_tile, split_end, _ = split_at(
            block, end, rows, TILES, NO_KEYS, ROWS
        )
        of_row = query + row.to(gl.int64) * stride_qr + head * stride_qh + number
        for chunk in gl.static_range(CHUNKS):
            load_async(queries.index(chunk), of_row + chunk * CHUNK)
        async_copy.commit_group()
        real = row_field(row_table, REAL, row, num_rows)
        visible = row_field(row_table, VISIBLE, row, num_rows)
        seen = row_field(row_table, SEEN, row, num_rows)
        first, after = column_ranges(columns, visible, real, seen)
        edge = gl.minimum(next_edge(first_tile * TILE, first, after), split_end)
        if LOGITS:
            # All of a row's logits have room, or none is written.
            has_logits = gl.load(block_ptr + row + 1) <= logit_blocks
            of_row_logits = first_logits + gl.load(block_ptr + row)
        no_logits = gl.zeros([TILE, HALF], gl.float32, PRODUCT)
        m = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(0, PRODUCT))
        nothing, no_heads = pairs(no_logits), gl.zeros([HALF], gl.float32, STORED_HEADS)
        masses = gl.zeros([HALF, 32], gl.float32, STORED)
        state = m, nothing, nothing, masses, no_heads, no_heads, no_heads, no_heads
        async_copy.wait_group(0)
        for tile in range(first_tile, after_tile):
            y = no_logits
            zero = unknown_zero()
            here, again = turn % HELD, turn // HELD & 1
            for third in gl.static_range(THIRDS):
                mbarrier.wait(loaded.index(here * THIRDS + third), again)
                fence_async_shared()
                for chunk in gl.static_range(third * THIRD, (third + 1) * THIRD):
                    y = warpgroup_mma(
                        chunks.index(zero + here * CHUNKS + chunk),
                        queries.index(zero + chunk).permute((1, 0)), y, use_acc=chunk > 0,
                        is_async=True,
                    )  # fmt: skip
                if third > 0:
                    y = warpgroup_mma_wait(THIRD, deps=(y,))
                    mbarrier.arrive(free.index(here * THIRDS + third - 1))
            y = warpgroup_mma_wait(0, deps=(y,))
            mbarrier.arrive(free.index(here * THIRDS + THIRDS - 1))
            turn += 1
            y = scaled_logits(y, factor, soft_cap, SOFT_CAP)
            if LOGITS:
                if has_logits:
                    of_tile = (of_row_logits + tile // TILES) * HEADS + first_head
                    of_tile = logits + of_tile * (TILES * TILE) + (tile % TILES) * TILE
                    is_key = (tile * TILE + lane < split_end)[:, None]
                    x = gl.where(is_key, y * LN_2, float("-inf"))
                    write_logits(of_tile, x, count, TILES * TILE)
            state, edge = take_in(
                y, state, edge, tile, split_end, visible, first, after, lane, STORED_HEADS
            )

        # Whatever m is, its largest key may weigh more than 1. All keys together weigh 1 now.
        m, _, _, masses, _, total_l, visible_l, visible_s = state
        size = gl.log2(total_l)
        logsumexp = gl.convert_layout(m, STORED_HEADS) + size
        at = partial + ((first_split + row) * HEADS + first_head + stored_head) * PARTIAL
        gl.store(at + 32, logsumexp, mask=chosen)
        gl.store(at + 33, visible_l / total_l, mask=chosen)
        gl.store(at + 34, (visible_s - visible_l * size) / total_l, mask=chosen)
        shares = masses / total_l[:, None]
        gl.store(at[:, None] + columns[None, :], shares, mask=chosen[:, None])
        block = stop


@gluon.jit(do_not_specialize=["num_rows"])
def latent_pass(
    query, keys, kv_slots, base, row_table, block_ptr, program_ptr, head_table, descale, sinks,
    partial, addresses, rescan_queue, logits, factor, soft_cap, stride_qr, stride_qh, stride_kh,
    num_rows, logit_blocks, programs, max_rows, STRIDE_KS: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_H: gl.constexpr, HEAD_DIM: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr,
    LOGITS: gl.constexpr, SOFT_CAP: gl.constexpr, DESCALE: gl.constexpr, NO_KEYS: gl.constexpr,
    LISTED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    after_last_kernel(EARLY)
    program = gl.program_id(1)
    if not LISTED:
        if (program == 0) & (gl.program_id(0) == 0):
            note_layer(addresses, keys, descale, sinks, query, rescan_queue, False)
    group = head_table + gl.program_id(0) * (BLOCK_H + 2)
    key_head = gl.load(group)
    block = gl.load(program_ptr + program)
    end = gl.load(program_ptr + program + 1)
    if block >= end:
        return

    layer = gl.to_tensor(0).to(gl.int64)
    if LISTED:
        layer += gl.program_id(2)
        query, keys, descale = layer_inputs(addresses, layer, query, keys)
    if DESCALE:
        factor *= gl.load(descale + key_head * (DESCALE - 1))
    keys += key_head.to(gl.int64) * stride_kh
    # From one split to the next the row or the program grows, so program + row is its own.
    first_split = layer * (programs + max_rows) + program

    HALF: gl.constexpr = BLOCK_H // 2
    CHUNKS: gl.constexpr = HEAD_DIM // CHUNK
    # Tiles that are in shared memory at a time.
    HELD: gl.constexpr = 2 if BLOCK_H <= FEW_HEADS else 1
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    key_type: gl.constexpr = keys.dtype.element_ty
    lower = gl.allocate_shared_memory(key_type, [CHUNKS, HALF, CHUNK], SHARED)
    upper = gl.allocate_shared_memory(key_type, [CHUNKS, HALF, CHUNK], SHARED)
    chunks = gl.allocate_shared_memory(key_type, [HELD * CHUNKS, TILE, CHUNK], SHARED)
    # For each third: its loads, and the two groups of warps that are through with it.
    loaded = gl.allocate_shared_memory(gl.int64, [HELD * THIRDS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [HELD * THIRDS, 1], mbarrier.MBarrierLayout())
    for third in gl.static_range(HELD * THIRDS):
        mbarrier.init(loaded.index(third), count=THREADS)
        mbarrier.init(free.index(third), count=2)
    rows = kv_slots, base, row_table, block_ptr, num_rows
    kept = logits, layer * logit_blocks, logit_blocks
    gl.warp_specialize(
        [
            (multiply_keys, (
                block, end, query, rows, group, partial, kept, factor, soft_cap, stride_qr,
                stride_qh, first_split, lower, chunks, loaded, free, HEADS, SOFT_CAP, 0, TILES,
                NO_KEYS, ROWS, LOGITS,
            )),
            (multiply_keys, (
                block, end, query, rows, group, partial, kept, factor, soft_cap, stride_qr,
                stride_qh, first_split, upper, chunks, loaded, free, HEADS, SOFT_CAP, 1, TILES,
                NO_KEYS, ROWS, LOGITS,
            )),
            (load_keys, (
                block, end, keys, rows, chunks, loaded, free, STRIDE_KS, TILES, NO_KEYS, ROWS,
            )),
        ],
        [GROUP, GROUP],
        [MOST_REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
