"""A paged cache to test kernels on, and what their answers must satisfy.

Everything that a kernel has no business to read is poisoned: cache slots that hold no key are NaN,
and table entries that belong to no key point far outside the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = pytest.mark.slow
Form = Literal["req_to_token", "kv_indptr"]
# A slot, a length and a table row that no cache of a test has: reading there is a fault.
HUGE = 2**30
HUGE_REQUEST = 2**40


def cases(*fast: tuple[Any, ...], slow: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    """Parameters for pytest from (id, values...); the slow ones are for make test-all."""
    made = [pytest.param(*values, id=name) for name, *values in fast]
    return made + [pytest.param(*values, id=name, marks=SLOW) for name, *values in slow]


@dataclass(frozen=True)
class PagedCase:
    """One decode step over a paged cache. Of R rows, the first `active` are requests; the rest pad
    the batch as a CUDA graph does. Tensors are on `DEVICE`, arrays hold the truth on the host.
    """

    queries: Tensor  # dtype[R, H, D]; float16 where the cache is 8 bits wide
    k_cache: Tensor  # dtype[slots, Hkv, D]
    v_cache: Tensor | None  # dtype[slots, Hkv, Dv]
    descale: Tensor | None  # float32[Hkv], what a cached number is multiplied by
    seq_lens: Tensor  # int32[R] or int64[R]
    req_pool_indices: Tensor | None  # int64[R], rows of `req_to_token`
    req_to_token: Tensor | None  # int32[max_requests, max_context]
    kv_indptr: Tensor | None  # int32[R + 1]
    kv_indices: Tensor | None  # int64[nnz + poisoned tail]
    lengths: tuple[int, ...]  # of the active rows; the query is at length - 1
    query_rows: NDArray[np.float64]  # float64[active, H, D], rounded as `queries`
    keys: list[NDArray[np.float64]]  # per active row float64[length, Hkv, D], rounded, descaled
    values: list[NDArray[np.float64]] | None  # per active row float64[length, Hkv, Dv]

    @property
    def active(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        return len(self.queries)

    @property
    def indices(self) -> dict[str, Tensor]:
        """The tensors that say where keys are, by name: either form's two."""
        names = ("req_pool_indices", "req_to_token", "kv_indptr", "kv_indices")
        named = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def paged_case(
    lengths: Sequence[int],
    heads: int,
    key_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    size: float = 1.0,
    form: Form = "req_to_token",
    poison: bool = True,
    max_context: int | None = None,
    padding_rows: int = 0,
    value_dim: int | None = None,
    descale: float | Sequence[float] | None = None,
    seq_dtype: torch.dtype = torch.int64,
    query_dtype: torch.dtype | None = None,
) -> PagedCase:
    """Random requests whose keys lie at random, distinct slots.

    Args:
        lengths: keys of each request, its query's own included; 0 for a request with none.
        size: what standard normal queries are multiplied by; logits are normal with a standard
            deviation of about `size` under the scale 1 / sqrt(D).
        form: whether `req_to_token` or `kv_indptr` says where keys are; the other is None.
        poison: whether unused slots are NaN and unused table entries huge; otherwise both are 0,
            and padding rows have no keys.
        max_context: the columns of `req_to_token`; None for a few more than the longest needs.
        padding_rows: rows after the active ones: garbage lengths and table rows, NaN queries.
        value_dim: Dv of a value cache; None for no value cache.
        descale: of the cache, one for all key heads or one each; keys are divided by it before
            they are rounded, so that it does not change their size.
        seq_dtype: of `seq_lens`: int32 or int64.
        query_dtype: of `queries`; None for `dtype`, or float16 where `dtype` is 8 bits wide.
    """
    random = torch.Generator().manual_seed(seed)
    active, used = len(lengths), sum(lengths)
    rows = active + padding_rows
    slots = used + used // 2 + 7
    order = torch.randperm(slots, generator=random)[:used]
    nan = float("nan") if poison else 0.0
    factor = None
    if descale is not None:
        factor = torch.tensor(descale, dtype=torch.float32).expand(key_heads).contiguous()

    def cache(depth: int) -> tuple[Tensor, NDArray[np.float64]]:
        """The cache, and its keys in the order of `order`, as float64."""
        numbers = torch.randn(used, key_heads, depth, generator=random)
        if factor is not None:
            numbers /= factor[:, None]
        if dtype.itemsize == 1:
            # Types without an infinity turn what is too large into NaN.
            numbers.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        rounded = numbers.to(dtype)
        whole = torch.full((slots, key_heads, depth), nan).to(dtype)
        whole[order] = rounded
        exact = rounded.double()
        if factor is not None:
            exact *= factor.double()[:, None]
        return whole.to(DEVICE), exact.numpy()

    if query_dtype is None:
        query_dtype = torch.float16 if dtype.itemsize == 1 else dtype
    queries = (torch.randn(rows, heads, head_dim, generator=random) * size).to(query_dtype)
    exact_queries = queries[:active].double().numpy()
    queries[active:] = nan
    k_cache, keys = cache(head_dim)
    v_cache, values = cache(value_dim) if value_dim is not None else (None, None)

    ends = np.cumsum(lengths, dtype=np.int64)
    begins = [end - length for end, length in zip(ends, lengths, strict=True)]
    seq_lens = torch.full((rows,), HUGE if poison else 0, dtype=seq_dtype)
    seq_lens[:active] = torch.tensor(lengths, dtype=seq_dtype)
    huge_slot = HUGE if poison else 0
    pool = table = indptr = indices = None
    if form == "req_to_token":
        columns = max(lengths, default=0) + 5 if max_context is None else max_context
        requests = active + 3
        pool = torch.full((rows,), HUGE_REQUEST if poison else 0, dtype=torch.int64)
        pool[:active] = torch.randperm(requests, generator=random)[:active]
        table = torch.full((requests, columns), huge_slot, dtype=torch.int32)
        for row, begin, end in zip(pool[:active].tolist(), begins, ends, strict=True):
            table[row, : end - begin] = order[begin:end].to(torch.int32)
    else:
        indptr = torch.full((rows + 1,), HUGE if poison else used, dtype=torch.int32)
        indptr[: active + 1] = torch.tensor([0, *ends], dtype=torch.int32)
        indices = torch.cat([order, torch.full((9,), huge_slot, dtype=torch.int64)])

    def on_device(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(DEVICE)

    def split(numbers: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        return [numbers[begin:end] for begin, end in zip(begins, ends, strict=True)]

    return PagedCase(
        queries=queries.to(DEVICE),
        k_cache=k_cache,
        v_cache=v_cache,
        descale=on_device(factor),
        seq_lens=seq_lens.to(DEVICE),
        req_pool_indices=on_device(pool),
        req_to_token=on_device(table),
        kv_indptr=on_device(indptr),
        kv_indices=on_device(indices),
        lengths=tuple(lengths),
        query_rows=exact_queries,
        keys=split(keys),
        values=None if values is None else split(values),
    )


def other_layer(case: PagedCase, seed: int, dtype: torch.dtype | None = None) -> PagedCase:
    """Other keys of the same requests, in the same slots, and other queries: float64 truth too.

    Args:
        dtype: of the keys, 8 bits wide; they are then descaled by 2. None for that of the case.
    """
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(case.queries.shape, generator=random).to(case.queries.dtype)
    exact_queries = queries[: case.active].double().numpy()
    queries[case.active :] = torch.nan
    numbers = torch.randn(case.k_cache.shape, generator=random).to(dtype or case.k_cache.dtype)
    keys = numbers.double() * (1.0 if dtype is None else 2.0)
    used = ~case.k_cache.isnan().cpu()
    assert case.req_to_token is not None and case.req_pool_indices is not None
    slots = [
        case.req_to_token[case.req_pool_indices[row], :length].long().cpu()
        for row, length in enumerate(case.lengths)
    ]
    return replace(
        case,
        queries=queries.to(DEVICE),
        k_cache=torch.where(used, numbers.float(), torch.nan).to(numbers.dtype).to(DEVICE),
        descale=None if dtype is None else torch.full((keys.shape[1],), 2.0, device=DEVICE),
        query_rows=exact_queries,
        keys=[keys[each].numpy() for each in slots],
    )


def without_waiting(step: Callable[[], Any]) -> Any:
    """Run a step, once compiled, that may neither allocate nor wait for the device: its result."""
    step()
    torch.cuda.synchronize()

    def allocated() -> tuple[int, int]:
        count = torch.cuda.memory_stats()["allocation.all.allocated"]
        return count, torch.cuda.memory_allocated()

    before = allocated()
    with waiting_is_an_error():
        found = step()
    assert allocated() == before
    return found


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """In here torch may not wait for the device, as far as it knows that it does."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def as_float64(numbers: Tensor | ArrayLike) -> NDArray[np.float64]:
    """A tensor of any type and device, or an array, as a NumPy array."""
    if isinstance(numbers, Tensor):
        return numbers.detach().double().cpu().numpy()
    return np.asarray(numbers, np.float64)


def assert_close(
    actual: Tensor | ArrayLike,
    expected: Tensor | ArrayLike,
    *,
    largest: float,
    rms: float,
    relative: float = 0.0,
) -> None:
    """The one tolerance of all kernel tests: a bound on the largest error and one on the RMS.

    Args:
        actual: of the same shape as `expected`, in any float type; NaN never passes, and an
            infinity only where the same one is expected.
        largest: the largest error that any element may have.
        rms: the largest root mean square of all elements' errors.
        relative: where this share of an expected value is more than `largest`, it is what the
            element's error may be, and the error counts for as much less in the RMS.
    """
    ours, truth = as_float64(actual), as_float64(expected)
    assert ours.shape == truth.shape, f"shape {ours.shape}, expected {truth.shape}"
    if not ours.size:
        return
    finite = np.isfinite(ours) & np.isfinite(truth)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(ours - truth), np.where(ours == truth, 0.0, np.inf))
    allowed = np.maximum(largest, relative * np.where(np.isfinite(truth), np.abs(truth), 0.0))
    scaled = np.divide(error * largest, allowed, out=error.copy(), where=allowed > 0)
    at = np.unravel_index(np.argmax(scaled), scaled.shape)
    where = f"worst at {tuple(int(i) for i in at)}: {ours[at]:.9g}, expected {truth[at]:.9g}"
    assert scaled[at] <= largest, (
        f"largest error {error[at]:.3g} > {allowed[at]:.3g} "
        f"({int((scaled > largest).sum())} of {scaled.size} are too far), {where}"
    )
    found = float(np.sqrt(np.mean(scaled**2)))
    assert found <= rms, f"RMS error {found:.3g} > {rms:.3g}, {where}"


def assert_top_k(
    positions: Tensor | ArrayLike,
    logits: Tensor | ArrayLike,
    expected: ArrayLike,
    k: int,
    tolerance: float,
    *,
    missing: float = -np.inf,
) -> None:
    """A top-k is the exact one wherever keys differ by more than `tolerance`.

    Args:
        positions: int[..., k], and -1 where there are fewer keys.
        logits: float[..., k], and `missing` where there are fewer keys.
        expected: float64[..., t + 1], the float64 logits (or masses), -inf where no key may be
            taken (`DecodeStatistics.logits`). Leading dimensions as those of `positions`.
        k: how many are asked for.
        tolerance: how far a logit may be off; keys this near to each other may change places.
        missing: what stands in `logits` where there is no key.
    """
    at, found, truth = as_float64(positions), as_float64(logits), as_float64(expected)
    assert at.shape == found.shape == (*truth.shape[:-1], k), (at.shape, found.shape, truth.shape)
    for row in np.ndindex(at.shape[:-1]):
        _assert_row_top_k(at[row].astype(np.int64), found[row], truth[row], tolerance, missing, row)


def _assert_row_top_k(
    at: NDArray[np.int64],
    found: NDArray[np.float64],
    truth: NDArray[np.float64],
    tolerance: float,
    missing: float,
    row: tuple[int, ...],
) -> None:
    """`assert_top_k` of one row."""
    keys = np.flatnonzero(truth > -np.inf)
    taken = min(len(at), len(keys))
    context = f"in row {row}: positions {at.tolist()}, logits {found.tolist()}"
    assert (at[taken:] == -1).all(), f"only {taken} keys, {context}"
    assert (found[taken:] == missing).all(), f"only {taken} keys, {context}"
    at, found = at[:taken], found[:taken]
    assert np.isin(at, keys).all(), f"{at[~np.isin(at, keys)].tolist()} are no keys, {context}"
    assert len(np.unique(at)) == taken, f"a position is there twice, {context}"
    assert (found[1:] <= found[:-1]).all() and not np.isnan(found).any(), f"unsorted, {context}"
    if not taken:
        return
    exact = truth[at]
    worst = int(np.argmax(np.abs(found - exact)))
    assert abs(found[worst] - exact[worst]) <= tolerance, (
        f"position {at[worst]} has {exact[worst]:.9g}, not {found[worst]:.9g}, {context}"
    )

    # No key, taken or not, stands behind one that is smaller by more than the tolerance.
    smallest_before = np.minimum.accumulate(exact)
    behind = np.flatnonzero(exact[1:] > smallest_before[:-1] + tolerance) + 1
    assert not len(behind), f"position {at[behind[:1]].tolist()} stands too far back, {context}"
    left = np.setdiff1d(keys, at)
    better = left[truth[left] > exact.min() + tolerance]
    assert not len(better), (
        f"left out position {better[:1].tolist()} of {truth[better[:1]].tolist()}, {context}"
    )

    # Of keys that are exactly alike, the lower position comes first.
    alike = (exact[:, None] == exact) & (found[:, None] == found) & np.tri(taken, k=-1, dtype=bool)
    later, earlier = np.nonzero(alike & (at[:, None] < at))
    assert not len(later), (
        f"position {at[later[:1]].tolist()} ties with {at[earlier[:1]].tolist()}, {context}"
    )
    for value in np.unique(exact[np.isin(exact, truth[left])]):
        ties = exact == value
        if np.ptp(found[ties]) == 0:
            lowest = left[truth[left] == value].min()
            assert lowest > at[ties].max(), (
                f"position {lowest} ties with {at[ties].max()} and is left out, {context}"
            )
