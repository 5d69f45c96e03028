"""What the kernel benchmarks share: paged batches, their float64 truth, and how time is taken.

A batch is one decode step over several layers. Every layer has a key cache of its own, so that the
keys of one are out of the L2 cache before the next round comes to them; the slots are random, page
size 1, and shared by the layers as in an engine. Slots that no key lies in hold NaN.

Times are of CUDA graphs or of calls queued one behind another, between two events, divided by the
layers; the ways that are compared take turns. Nothing but torch and capture_kernels is imported: a
GPU host may have no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from capture_kernels.fingerprint.vector import HIST_BINS, Visibility

DEVICE = torch.device("cuda")
TOP_K = 16
# What is asked of our pass: how many of each head, and of the heads' mean.
VARIANTS = {"statistics": (0, 0), "heads": (TOP_K, 0), "mean": (TOP_K, TOP_K)}
# Slots of a cache that no request has; the first of them is where an engine's padding points.
SPARE_SLOTS = 64
# By how much, in all, the logits of a "rising" batch grow from the first key to the last.
RISE = 8.0
# What rounding in float32 may move: logits (and logsumexp, that or 1e-5 of it), masses, and outputs
# in half precision.
LOGIT_ERROR, LOGIT_SHARE, MASS_ERROR, MASS_RMS, OUTPUT_ERROR = 1e-3, 1e-5, 5e-3, 1e-3, 1e-2
# Of a mean of probabilities, relative to the smallest that is among the top k.
MEAN_SHARE = 1e-3
WARM_UP_SECONDS, TIMED_SECONDS = 0.1, 0.25
LEAST_ROUNDS, MOST_ROUNDS = 5, 100


@dataclass(frozen=True)
class Shape:
    """One layer's geometry and the requests of a step.

    `ragged` lengths are spread evenly over context / 16 .. context; `rising` logits grow towards
    the newest key, so that every key is a candidate for the top k when it is reached.
    """

    batch: int = 32
    context: int = 8192
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    lengths: Literal["full", "ragged"] = "full"
    logits: Literal["normal", "rising"] = "normal"

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        odd = "".join(
            f", {word}" for word in (self.lengths, self.logits) if word in ("ragged", "rising")
        )
        return (
            f"B={self.batch}, {self.context:,} keys, {self.heads}/{self.key_heads} heads, "
            f"D={self.head_dim}, {dtype}{odd}"
        )

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def query_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype

    @property
    def key_bytes_a_token(self) -> int:
        return self.key_heads * self.head_dim * self.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """Of the keys of one layer, whatever the lengths are."""
        return (self.batch * self.context + SPARE_SLOTS) * self.key_bytes_a_token

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}


@dataclass
class Batch:
    """One step's requests: queries [B, H, D], keys and values [slots, Hkv, D] of each layer."""

    shape: Shape
    lengths: list[int]
    seq_lens: Tensor  # int32[B]
    req_pool_indices: Tensor  # int64[B]
    req_to_token: Tensor  # int32[B + 1, context]; row 0 is nobody's
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def key_bytes(self) -> int:
        """What one layer's pass reads, if it reads every key once."""
        return sum(self.lengths) * self.shape.key_bytes_a_token

    def slots(self, row: int) -> Tensor:
        """Where the keys of one row lie: int64[length]."""
        table = self.req_to_token[int(self.req_pool_indices[row])]
        return table[: self.lengths[row]].long()

    def indptr(self) -> tuple[Tensor, Tensor]:
        """The same table as kv_indptr int32[B + 1] and kv_indices int64[keys]."""
        ends = torch.tensor([0, *self.lengths], device=DEVICE).cumsum(0).to(torch.int32)
        return ends, torch.cat([self.slots(row) for row in range(self.shape.batch)])


def make_batch(shape: Shape, layers: int, *, values: bool = False, seed: int = 0) -> Batch:
    """A batch of random keys and queries whose logits have a standard deviation of 1."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    batch, context = shape.batch, shape.context
    lengths = [context] * batch
    if shape.lengths == "ragged":
        step = (context - context // 16) / max(1, batch - 1)
        lengths = [round(context // 16 + row * step) for row in range(batch)]
    order = torch.randperm(batch * context, generator=random, device=DEVICE) + SPARE_SLOTS
    table = torch.zeros(batch + 1, context, dtype=torch.int32, device=DEVICE)
    pool = torch.randperm(batch, generator=random, device=DEVICE) + 1
    table[pool] = order.view(batch, context).to(torch.int32)
    for row, length in enumerate(lengths):
        table[int(pool[row]), length:] = 0

    slots = batch * context + SPARE_SLOTS
    # A direction that all queries share, and that the newest keys point to.
    drift = (RISE / shape.scale) ** 0.5 * shape.head_dim**-0.5 if shape.logits == "rising" else 0.0
    place = torch.zeros(slots, device=DEVICE)
    if drift:
        place[table[pool].long()] = torch.arange(context, device=DEVICE) / context

    def tensor(count: int, heads: int, dtype: torch.dtype) -> Tensor:
        wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
        made = torch.empty(count, heads, shape.head_dim, dtype=wide, device=DEVICE)
        return made.normal_(generator=random)

    def cache(rise: bool) -> Tensor:
        made = tensor(slots, shape.key_heads, shape.dtype)
        if rise:
            made.add_((place * drift).to(made.dtype)[:, None, None])
        made[:SPARE_SLOTS] = math.nan
        return made.to(shape.dtype)

    return Batch(
        shape=shape,
        lengths=lengths,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        req_pool_indices=pool,
        req_to_token=table,
        queries=[tensor(batch, shape.heads, shape.query_dtype) + drift for _ in range(layers)],
        keys=[cache(bool(drift)) for _ in range(layers)],
        values=[cache(False) for _ in range(layers if values else 0)],
    )


class Answer(NamedTuple):
    """What a way of taking statistics says of a layer's rows; None for what it was not asked."""

    logsumexp: Tensor  # float32[R, H], natural
    entropy: Tensor  # float32[R, H], in [0, 1]
    hist: Tensor  # float32[R, H, 16]
    top_positions: Tensor | None = None  # int[R, H, k], logical
    top_logits: Tensor | None = None  # float32[R, H, k]
    mean_top_positions: Tensor | None = None  # int[R, k], of the mean over heads
    mean_top_mass: Tensor | None = None  # float32[R, k]


class Truth(NamedTuple):
    """One row of one layer in float64: DESIGN.md section 2, with the default `Visibility`."""

    logits: Tensor  # float64[H, t + 1]
    logsumexp: Tensor  # float64[H]
    entropy: Tensor  # float64[H]
    hist: Tensor  # float64[H, 16]
    mean: Tensor  # float64[t + 1], mean over heads of the probabilities
    values: Tensor | None  # float64[H, D], the attention's output


def truth_of(batch: Batch, layer: int, row: int, slots: Tensor | None = None) -> Truth:
    """The truth of one row, whose keys lie in `slots` int64[t + 1] where they are given."""
    slots = batch.slots(row) if slots is None else slots
    shape, count = batch.shape, len(slots)
    query = batch.queries[layer][row].double().view(shape.key_heads, -1, shape.head_dim)
    keys = batch.keys[layer][slots].double()
    logits = shape.scale * torch.einsum("gmd,tgd->gmt", query, keys).reshape(shape.heads, count)
    del keys
    logsumexp = torch.logsumexp(logits, 1)
    start = Visibility().start(count - 1)
    logs = torch.log_softmax(logits[:, start:], 1)
    p = logs.exp()
    bins = torch.nn.functional.one_hot(log2_bins(count)[start:], HIST_BINS).double()
    output = None
    if batch.values:
        weights = torch.softmax(logits, 1).view(shape.key_heads, -1, count)
        values = batch.values[layer][slots].double()
        output = torch.einsum("gmt,tgd->gmd", weights, values).reshape(shape.heads, -1)
    return Truth(
        logits=logits,
        logsumexp=logsumexp,
        entropy=-(p * logs).sum(1) / math.log(max(2, count - start)),
        hist=p @ bins,
        mean=torch.exp(logits - logsumexp[:, None]).mean(0),
        values=output,
    )


def log2_bins(count: int) -> Tensor:
    """Histogram bin of each of `count` keys, oldest first: int64[count] on the device."""
    distance = torch.arange(count - 1, -1, -1, device=DEVICE).clamp(min=1)
    # frexp is exact where log2 rounds.
    return (torch.frexp(distance.double()).exponent.long() - 1).clamp(max=HIST_BINS - 1)


class Errors(NamedTuple):
    """The largest differences from the truth, over the rows and heads that were looked at."""

    rows: int = 0
    logsumexp: float = 0.0
    entropy: float = 0.0
    mass: float = 0.0
    mass_rms: float = 0.0
    logit: float = 0.0
    mean_share: float = 0.0  # of a mean probability, relative
    output: float = 0.0  # norm of the difference, relative
    wrong_positions: int = 0

    def worst(self, other: Errors) -> Errors:
        # A NaN is the worst of all, and max() may lose it.
        larger = [
            a + b if name == "rows" else b if b != b or b > a else a
            for name, a, b in zip(self._fields, self, other, strict=True)
        ]
        return Errors(*larger)  # type: ignore[arg-type]

    def problems(self) -> list[str]:
        """What is further from the truth than rounding takes it, in words."""
        bounds = {
            "logsumexp": 1.0,
            "entropy": MASS_ERROR,
            "mass": MASS_ERROR,
            "mass_rms": MASS_RMS,
            "logit": 1.0,
            "mean_share": MEAN_SHARE,
            "output": OUTPUT_ERROR,
            "wrong_positions": 0,
        }
        found = self._asdict()
        return [
            f"{name} off by {found[name]:.3g} (at most {bound:g})"
            for name, bound in bounds.items()
            if not found[name] <= bound
        ]


def compare(found: Answer, row: int, exact: Truth) -> Errors:
    """How far one row of an answer is from the truth. `logsumexp` and `logit` count in units of
    what rounding may move."""
    masses = found.hist[row].double() - exact.hist
    given: dict[str, float] = {
        "logsumexp": in_rounding(found.logsumexp[row], exact.logsumexp),
        "entropy": largest(found.entropy[row].double() - exact.entropy),
        "mass": largest(masses),
        "mass_rms": float(masses.square().mean().sqrt()),
    }
    wrong = 0
    if found.top_positions is not None and found.top_logits is not None:
        picks = found.top_positions[row].long()
        allowed = allowed_error(exact.logits.max(1, keepdim=True).values)
        wrong += wrong_picks(picks, exact.logits, allowed)
        there = exact.logits.gather(1, picks.clamp(0, exact.logits.shape[1] - 1))
        given["logit"] = in_rounding(found.top_logits[row], there)
    if found.mean_top_positions is not None and found.mean_top_mass is not None:
        picks = found.mean_top_positions[row].long()[None]
        mean = exact.mean[None]
        least = mean.topk(picks.shape[1]).values[:, -1:]
        wrong += wrong_picks(picks, mean, MEAN_SHARE * least)
        there = mean.gather(1, picks.clamp(0, mean.shape[1] - 1))
        given["mean_share"] = largest(found.mean_top_mass[row].double()[None] / there - 1.0)
    return Errors(rows=1, wrong_positions=wrong, **given)


def compare_output(found: Tensor, exact: Truth) -> Errors:
    """How far one row's attention output [H, D] is from the truth."""
    assert exact.values is not None
    error = (found.double() - exact.values).norm() / exact.values.norm()
    return Errors(rows=1, output=float(error))


def wrong_picks(picks: Tensor, scores: Tensor, allowed: Tensor) -> int:
    """How many of the picks int64[H, k] are not the positions of the k largest of float64[H, T], in
    falling order, where scores differ by more than `allowed` float64[H, 1]."""
    total = scores.shape[1]
    there = scores.gather(1, picks.clamp(0, total - 1))
    least = scores.topk(picks.shape[1], dim=1).values[:, -1:]
    outside = (picks < 0) | (picks >= total)
    ordered = picks.sort(dim=1).values
    twice = ordered[:, 1:] == ordered[:, :-1]
    missed = (scores > least + allowed).sum(1) - (there > least + allowed).sum(1)
    disorder = there[:, 1:] > there[:, :-1] + allowed
    low = there < least - allowed
    counts = (outside.sum(), twice.sum(), missed.clamp(min=0).sum(), disorder.sum(), low.sum())
    return sum(int(count) for count in counts)


def allowed_error(logits: Tensor) -> Tensor:
    return (LOGIT_SHARE * logits.abs()).clamp(min=LOGIT_ERROR)


def in_rounding(found: Tensor, exact: Tensor) -> float:
    return largest((found.double() - exact) / allowed_error(exact))


def largest(errors: Tensor) -> float:
    return float(errors.abs().max())


def checked_rows(batch: Batch, count: int) -> list[int]:
    """Up to `count` rows spread over a batch, the first and the last among them."""
    rows = batch.shape.batch
    return sorted({round(i * (rows - 1) / max(1, count - 1)) for i in range(count)})


class Timing(NamedTuple):
    """Microseconds a layer: the median of the rounds, and what a tenth was below and above."""

    us: float
    low: float
    high: float
    rounds: int


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work as a CUDA graph. It runs three times first, so that all of it is compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def timed(
    ways: Mapping[str, Callable[[], object]],
    layers: int,
    *,
    before: Callable[[str], object] | None = None,
) -> dict[str, Timing]:
    """Times of some ways, which take turns, each of which works through so many layers.

    Args:
        before: called with a way's name before its turn, outside the time.
    """

    def once(name: str) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if before:
            before(name)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        ways[name]()
        end.record()
        return begin, end

    for name in ways:
        once(name)
    torch.cuda.synchronize()
    # The second round tells how many rounds there is time for, the first may have compiled.
    probe = [once(name) for name in ways]
    torch.cuda.synchronize()
    seconds = sum(begin.elapsed_time(end) for begin, end in probe) / 1e3
    for _ in range(min(MOST_ROUNDS, math.ceil(WARM_UP_SECONDS / seconds))):
        for name in ways:
            once(name)
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, math.ceil(TIMED_SECONDS / seconds)))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            events[name].append(once(name))
    torch.cuda.synchronize()
    return {name: timing_of(pairs, layers) for name, pairs in events.items()}


def timing_of(pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]], layers: int) -> Timing:
    each = torch.tensor([begin.elapsed_time(end) * 1e3 / layers for begin, end in pairs])
    low, middle, high = torch.quantile(each, torch.tensor([0.1, 0.5, 0.9])).tolist()
    return Timing(middle, low, high, len(pairs))


def free_bytes() -> int:
    """What can be allocated on the device now."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
