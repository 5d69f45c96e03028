"""One request's queries over a paged cache, and what their full scores are in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from paged import DEVICE, as_float64, paged_case

from capture_kernels.fingerprint.reference import attention_rows

NAN = float("nan")
EXACT = {"largest": 1e-3, "rms": 2e-4}
# One float16 alone may be off by half of its last place, which below 1 is 2.44e-4.
FEW = {"largest": 1e-3, "rms": 2.5e-4}


class Prompt(NamedTuple):
    """One request's queries, and its keys at random slots of a cache that is NaN elsewhere."""

    query: torch.Tensor  # [T, H, D]
    keys: torch.Tensor  # [slots, Hkv, D]
    table: torch.Tensor  # int32[T + 5]; what follows T is no slot
    descale: torch.Tensor | None
    exact_query: np.ndarray  # float64[T, H, D]
    exact_keys: np.ndarray  # float64[T, Hkv, D]


def prompt(tokens, heads=2, key_heads=1, head_dim=32, *, size=1.0, seed=0, **cache):
    case = paged_case([tokens], heads, key_heads, head_dim, seed=seed, **cache)
    random = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(tokens, heads, head_dim, generator=random) * size
    query = query.to(case.queries.dtype)
    table = case.req_to_token[case.req_pool_indices[0].item()]
    keys, exact = case.k_cache, case.keys[0]
    return Prompt(query.to(DEVICE), keys, table, case.descale, query.double().numpy(), exact)


def truth(
    case, positions, *, scale, mask_prefix=0, chosen=None, soft_cap=None, window=0, sinks=None
):
    """float64[R, H, T] of some queries: masked keys are removed before the softmax."""
    positions = np.asarray(positions, np.int64)
    heads, tokens = case.exact_query.shape[1], len(case.exact_keys)
    rows = np.zeros((len(positions), heads, tokens))
    seeing = positions >= mask_prefix
    if seeing.any():
        rows[seeing, :, mask_prefix:] = attention_rows(
            case.exact_query[positions[seeing]],
            case.exact_keys[mask_prefix:],
            scale=scale,
            positions=positions[seeing] - mask_prefix,
            soft_cap=soft_cap,
            sinks=None if sinks is None else as_float64(sinks),
            window=window,
        )
    return rows if chosen is None else rows[:, sorted(chosen)]


def poisoned(rows, heads, columns):
    """A view of [rows, heads, columns] with NaN in it and around it, and the whole."""
    whole = torch.full((rows + 2, heads + 1, columns + 3), NAN, dtype=torch.float16, device=DEVICE)
    return whole[1 : rows + 1, :heads, 2 : columns + 2], whole


def assert_all_written(out, whole):
    """Every element of a `poisoned` view is a number, and what is around it is still NaN."""
    assert not out.isnan().any()
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()
