"""Logits of a tile of keys, for the query heads of one or several key heads.

Mathematics, for the query of one head and key k:

    x = scale * descale * (q . k);    x := cap * tanh(x / cap) if logits are capped

A product of matrices has at least 8 columns, more than the query heads of one key head often fill.
So several key heads may be joined: a key is then their dims in turn, and a query is 0 outside those
of its own key head. (A key that is not finite then spoils all joined heads.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.launch import LOG2_E
from capture_kernels.layer_plan import LARGEST_HEAD_DIM


@triton.jit
def query_dims(
    query, head, joined, stride_qh, FIRST: tl.constexpr, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Dims FIRST to FIRST + COUNT of a row's queries: [COUNT, heads]. `joined` is the number of
    each head's key head among the joined ones; other dims are 0."""
    dims = FIRST + tl.arange(0, COUNT)[:, None]
    there = dims // HEAD_DIM == joined[None, :]
    return tl.load(query + head[None, :] * stride_qh + dims % HEAD_DIM, mask=there, other=0.0)


@triton.jit
def key_dims(
    keys, slot, stride_kh, STRIDE_KS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEY_HEADS: tl.constexpr,
):  # fmt: skip
    """Dims FIRST to FIRST + COUNT of the keys in some KV slots: [keys, COUNT]."""
    dims = FIRST + tl.arange(0, COUNT)[None, :]
    at = keys + slot[:, None] * STRIDE_KS
    if KEY_HEADS > 1:
        at += (dims // HEAD_DIM).to(tl.int64) * stride_kh + dims % HEAD_DIM
    else:
        at += dims
    if FIRST + COUNT <= KEY_HEADS * HEAD_DIM:
        return tl.load(at)
    return tl.load(at, mask=dims < KEY_HEADS * HEAD_DIM, other=0.0)


@triton.jit
def products(k, q, y, UPCAST: tl.constexpr):
    """y float32[keys, heads] + k [keys, D] @ q [D, heads].

    Keys are the rows because a product of matrices may have few columns, but not few rows.
    """
    if UPCAST:
        return y + tl.dot(k.to(tl.float32), q.to(tl.float32), input_precision="ieee")
    return tl.dot(k.to(q.dtype), q, y)


@triton.jit
def scaled_logits(y, factor, soft_cap, SOFT_CAP: tl.constexpr):
    """Logits in units of ln 2, of products."""
    y *= factor
    if SOFT_CAP:
        # cap * tanh(x / cap), from exp2 alone: it reaches both ends without overflow.
        y = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(y * (2.0 / soft_cap))))
        y *= LOG2_E
    return y


def whole_dims(head_dim: int) -> tuple[int, int]:
    """One power of two, 16 or more, that covers a head's dims, and 0; of latent keys, `split_dims`,
    because twice as many would have no room."""
    if head_dim > LARGEST_HEAD_DIM:
        return split_dims(head_dim)
    return max(16, triton.next_power_of_2(head_dim)), 0


def split_dims(head_dim: int) -> tuple[int, int]:
    """One or two powers of two, 16 or more, that cover a head's dims: two (the second is not 0) if
    that reads and multiplies fewer dims than one."""
    whole = max(16, triton.next_power_of_2(head_dim))
    half = whole // 2
    rest = max(16, triton.next_power_of_2(head_dim - half)) if half >= 16 else whole
    return (half, rest) if rest < half else (whole, 0)
