"""What the kernels are measured against: other ways to the same numbers, and the memory's speed.

Each is a function of a layer's number over the batches of `kernel_cases`:

    eager      plain torch over the whole batch: gather, products in float32, softmax, logsumexp,
               entropy, log2 histogram, topk of each head. What depends on the lengths alone (slots,
               masks, bins) is made once a step, outside the time.
    compiled   the same function through torch.compile
    seeds      what the published capture of SGLang does (PR 16398): request by request, logits
               averaged over the heads (another and wrong quantity, DESIGN.md section 2), the top k
               and the logsumexp of that, read to the host
    sglang     SGLang's own Triton decode attention, without any statistics (`load_sglang`)
    sdpa       torch's scaled_dot_product_attention on a cache that is not paged, likewise without

`check_peers` compares each with the float64 truth on a small batch.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernel_cases import (
    DEVICE,
    LOGIT_ERROR,
    SPARE_SLOTS,
    Answer,
    Batch,
    Errors,
    Shape,
    Timing,
    Truth,
    captured,
    compare,
    compare_output,
    in_rounding,
    log2_bins,
    make_batch,
    timed,
    truth_of,
    wrong_picks,
)
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import HIST_BINS, Visibility

FLOOR_BYTES = 1 << 32
# Blocks of a program and its warps: the fastest read counts.
READ_GEOMETRIES = [(block, warps) for block in (4096, 8192, 16384) for warps in (4, 8)]
SGLANG_SPLITS = (4, 8, 16)
# Fewer than the keys of the shortest row.
CHECKED_TOP_K = 8
SGLANG_MODULE = "sglang.kernels.ops.attention.decode_attention"
# Of decode_attention.py in SGLang 0.5.23's wheel.
SGLANG_0523 = "7a3b66ce3daabbb027efd860411cd9abe4b399b1f2cfc3ed5c6c01731eb9fa0a"


EAGER, COMPILED, SEEDS = "eager torch", "torch.compile of it", "the seeds' way"
# By whether the query heads of a key head are rows of one query, or torch is told of them.
SDPA = {
    "torch SDPA, contiguous cache, heads as rows": True,
    "torch SDPA, contiguous cache, enable_gqa": False,
}


class StepTables(NamedTuple):
    """What eager torch makes once a step of lengths and slots, for all layers."""

    slots: Tensor  # int64[R * T], padded with an unused slot
    padding: Tensor  # bool[R, 1, T]
    hidden: Tensor  # bool[R, 1, T]: no visible key
    bins: Tensor  # float32[R, T, 16], one-hot
    log_count: Tensor  # float32[R, 1]


def step_tables(batch: Batch) -> StepTables:
    rows, longest = batch.shape.batch, max(batch.lengths)
    start = Visibility().start(longest)
    length = batch.seq_lens[:, None].long()
    key = torch.arange(longest, device=DEVICE)
    padding = key >= length
    # A slot that holds a key, so that what is masked is no NaN.
    slots = batch.req_to_token[batch.req_pool_indices, :longest].long()
    slots = torch.where(padding, slots[:, :1], slots)
    of_longest = log2_bins(longest)
    bins = of_longest[(key + longest - length).clamp(max=longest - 1)]
    return StepTables(
        slots.reshape(-1),
        padding[:, None],
        (padding | (key < start))[:, None],
        torch.nn.functional.one_hot(bins, HIST_BINS).float().view(rows, longest, HIST_BINS),
        torch.log((length - start).clamp(min=2).float()),
    )


def eager_statistics(
    query: Tensor, keys: Tensor, tables: StepTables, scale: float, top_k: int
) -> Answer:
    """Logsumexp, entropy, histogram and top k of each head of a whole batch.

    Args:
        query: float[R, H, D].
        keys: float[slots, Hkv, D].
    """
    rows, heads, depth = query.shape
    key_heads = keys.shape[1]
    longest = tables.padding.shape[2]
    # By key head, so that the products below copy no keys a second time.
    gathered = torch.index_select(keys.transpose(0, 1), 1, tables.slots)
    by_head = query.view(rows, key_heads, -1, depth).transpose(0, 1)
    logits = products(
        by_head.reshape(key_heads * rows, -1, depth),
        gathered.view(key_heads * rows, longest, depth).transpose(1, 2),
    )
    logits = logits.view(key_heads, rows, -1, longest).transpose(0, 1).reshape(rows, heads, longest)
    logits = (logits * scale).masked_fill(tables.padding, float("-inf"))
    top = torch.topk(logits, top_k, dim=2)
    logsumexp = torch.logsumexp(logits, 2)
    p = torch.softmax(logits.masked_fill(tables.hidden, float("-inf")), 2)
    entropy = torch.special.entr(p).sum(2) / tables.log_count
    return Answer(logsumexp, entropy, torch.bmm(p, tables.bins), top.indices, top.values)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Products of half-precision matrices in float32, as the tensor cores add them up."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def eager_way(batch: Batch, top_k: int) -> Callable[[int], Answer]:
    tables, scale = step_tables(batch), batch.shape.scale
    return lambda layer: eager_statistics(
        batch.queries[layer], batch.keys[layer], tables, scale, top_k
    )


def compiled_way(batch: Batch, top_k: int) -> Callable[[int], Answer]:
    tables, scale = step_tables(batch), batch.shape.scale
    function = torch.compile(eager_statistics, dynamic=False)
    return lambda layer: function(batch.queries[layer], batch.keys[layer], tables, scale, top_k)


class SeedsRow(NamedTuple):
    positions: list[int]
    logits: list[float]
    logsumexp: float


def seeds_way(batch: Batch, top_k: int) -> Callable[[int], list[SeedsRow]]:
    shape = batch.shape

    def layer_rows(layer: int) -> list[SeedsRow]:
        rows = []
        torch.cuda.synchronize()
        for row, length in enumerate(batch.lengths):
            slots = batch.req_to_token[batch.req_pool_indices[row], :length].long()
            keys = batch.keys[layer][slots].float()
            query = batch.queries[layer][row].float().view(shape.key_heads, -1, shape.head_dim)
            logits = torch.einsum("gmd,tgd->gmt", query, keys) * shape.scale
            mean = logits.flatten(0, 1).mean(0)
            top = mean.topk(top_k)
            logsumexp = torch.logsumexp(mean, 0).item()
            rows.append(SeedsRow(top.indices.tolist(), top.values.tolist(), logsumexp))
        torch.cuda.synchronize()
        return rows

    return layer_rows


def compare_seeds(answer: list[SeedsRow], row: int, exact: Truth) -> Errors:
    """How far one row is from its own quantity, of the logits' mean."""
    found, mean = answer[row], exact.logits.mean(0)
    picks = torch.tensor(found.positions, device=DEVICE)
    given = torch.tensor(found.logits, device=DEVICE)
    allowed = torch.full((1, 1), LOGIT_ERROR, dtype=torch.float64, device=DEVICE)
    return Errors(
        rows=1,
        logsumexp=in_rounding(torch.tensor(found.logsumexp), torch.logsumexp(mean, 0).cpu()),
        logit=in_rounding(given, mean[picks]),
        wrong_positions=wrong_picks(picks[None], mean[None], allowed),
    )


class Sglang(NamedTuple):
    """SGLang's `decode_attention_fwd`, and whose it is; or why there is none."""

    decode: Callable[..., Any] | None
    told: str


def load_sglang(folder: Path | None) -> Sglang:
    """SGLang's Triton decode attention: as it is installed, or from an unpacked wheel.

    The module needs no more than torch, Triton and a sibling that is loaded with it. Of SGLang's
    packages it asks `is_hip` and the like, which are answered here for an NVIDIA GPU: the packages
    around it are stand-ins, and their own code does not run.

    Raises:
        OptionError: `folder` does not hold the module.
    """
    if folder is not None:
        path = folder.joinpath(*SGLANG_MODULE.split(".")).with_suffix(".py")
        if not path.exists():
            raise OptionError(f"{path} is not there: give the folder that holds sglang/")
        stand_in_packages(path.parent)
        return sglang_of(importlib.import_module(SGLANG_MODULE))
    try:
        return sglang_of(importlib.import_module(SGLANG_MODULE))
    except ImportError as error:
        missing = getattr(error, "name", None) == "sglang"
        return Sglang(None, "not installed" if missing else f"not installed whole: {error}")


def sglang_of(module: types.ModuleType) -> Sglang:
    assert module.__file__
    digest = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    version = "0.5.23" if digest == SGLANG_0523 else f"of unknown version, sha256 {digest[:12]}"
    return Sglang(module.decode_attention_fwd, f"SGLang {version}")


def stand_in_packages(folder: Path) -> None:
    """Packages that only lead to the folder of the module, and what it asks of others."""
    package = SGLANG_MODULE.rpartition(".")[0]
    names = [package]
    while "." in names[-1]:
        names.append(names[-1].rpartition(".")[0])
    for name in [*names, "sglang.srt"]:
        stand_in = types.ModuleType(name)
        stand_in.__path__ = [str(folder)] if name == package else []
        sys.modules[name] = stand_in
    environ, utils = types.ModuleType("sglang.srt.environ"), types.ModuleType("sglang.srt.utils")
    # Read where keys are latent (MLA) only.
    vars(environ)["envs"] = types.SimpleNamespace()
    for question in ("is_hip", "is_gfx95_supported", "is_gfx1250_supported"):
        vars(utils)[question] = lambda: False
    vars(utils)["get_device_core_count"] = lambda device=0: 0
    sys.modules[environ.__name__], sys.modules[utils.__name__] = environ, utils


def sglang_way(batch: Batch, decode: Callable[..., Any], splits: int) -> Callable[[int], Tensor]:
    """Decode attention [R, H, Dv] as SGLang's backend calls it, with so many splits of each row."""
    shape = batch.shape
    indptr, indices = batch.indptr()
    query = batch.queries[0]
    depth = batch.values[0].shape[2]
    partials = torch.empty(shape.batch, shape.heads, splits, depth, device=DEVICE)
    partials_lse = torch.empty(shape.batch, shape.heads, splits, device=DEVICE)
    each = torch.full((shape.batch,), splits, dtype=torch.int32, device=DEVICE)
    out = query.new_empty(shape.batch, shape.heads, depth)
    # As SGLang's backend decides it.
    use_pdl = DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE)[0] >= 9

    def attend(layer: int) -> Tensor:
        decode(
            batch.queries[layer],
            batch.keys[layer],
            batch.values[layer],
            out,
            indptr,
            indices,
            partials,
            partials_lse,
            each,
            splits,
            shape.scale,
            1.0,
            1.0,
            use_pdl=use_pdl,
        )
        return out

    return attend


def sglang_ways(batch: Batch, sglang: Sglang) -> dict[int, Callable[[int], Tensor]]:
    """By the number of splits; none where there is no SGLang."""
    if sglang.decode is None:
        return {}
    return {splits: sglang_way(batch, sglang.decode, splits) for splits in SGLANG_SPLITS}


def sdpa_way(batch: Batch, *, grouped: bool) -> Callable[[int], Tensor]:
    """Attention [R, H, D] over a contiguous cache [R, T, Hkv, D]: the batch's own memory, read in
    the order of its slots. `grouped` gives the query heads of a key head as rows of one query."""
    shape = batch.shape

    def cache(tensor: Tensor) -> Tensor:
        return tensor[SPARE_SLOTS:].view(
            shape.batch, shape.context, shape.key_heads, shape.head_dim
        ).transpose(1, 2)  # fmt: skip

    def attend(layer: int) -> Tensor:
        query = batch.queries[layer]
        heads = shape.key_heads if grouped else shape.heads
        out = torch.nn.functional.scaled_dot_product_attention(
            query.view(shape.batch, heads, -1, shape.head_dim),
            cache(batch.keys[layer]),
            cache(batch.values[layer]),
            scale=shape.scale,
            enable_gqa=not grouped,
        )
        return out.reshape(query.shape)

    return attend


def contiguous_slots(batch: Batch, row: int) -> Tensor:
    """The slots of a row of `sdpa_way`, for `truth_of`."""
    context = batch.shape.context
    return torch.arange(context, device=DEVICE) + SPARE_SLOTS + row * context


def sdpa_ways(batch: Batch) -> dict[str, Callable[[int], Tensor]]:
    return {name: sdpa_way(batch, grouped=grouped) for name, grouped in SDPA.items()}


def check_peers(sglang: Sglang) -> dict[str, Errors]:
    """The peers against the truth on every row of a small batch: ragged, but for SDPA."""
    shape = Shape(batch=5, context=400, heads=8, key_heads=2, head_dim=64, lengths="ragged")
    batch = make_batch(shape, 1, values=True, seed=1)
    eager, seeds = eager_way(batch, CHECKED_TOP_K)(0), seeds_way(batch, CHECKED_TOP_K)(0)
    outputs = {
        f"SGLang, {splits} splits": way(0).clone()
        for splits, way in sglang_ways(batch, sglang).items()
    }
    plain = make_batch(replace(shape, lengths="full"), 1, values=True, seed=1)
    plain_outputs = {name: way(0) for name, way in sdpa_ways(plain).items()}
    found = {name: Errors() for name in (EAGER, SEEDS, *outputs, *plain_outputs)}
    for row in range(shape.batch):
        exact = truth_of(batch, 0, row)
        exact_plain = truth_of(plain, 0, row, contiguous_slots(plain, row))
        errors = {
            EAGER: compare(eager, row, exact),
            SEEDS: compare_seeds(seeds, row, exact),
            **{name: compare_output(out[row], exact) for name, out in outputs.items()},
            **{name: compare_output(out[row], exact_plain) for name, out in plain_outputs.items()},
        }
        found = {name: found[name].worst(error) for name, error in errors.items()}
    return found


class Rates(NamedTuple):
    """Bytes a second of the device's memory: copied (read and written both count), and read."""

    copy: float
    read: float


@triton.jit
def _read_sum(source, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0)
    values = tl.load(source + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + block, tl.sum(values, 0))


def measured_rates(size: int = FLOOR_BYTES) -> tuple[Rates, list[str]]:
    """Rates of a copy and of a sum over `size` bytes, and what was wrong with their answers."""
    count = size // 4
    random = torch.Generator(DEVICE).manual_seed(0)
    source = torch.empty(count, device=DEVICE).uniform_(generator=random)
    target = torch.empty_like(source)
    problems = []

    def read(sums: Tensor, block: int, warps: int) -> None:
        _read_sum[(len(sums),)](source, sums, BLOCK=block, num_warps=warps)

    ways: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    sums = {}
    for block, warps in READ_GEOMETRIES:
        name = f"read, blocks of {block}, {warps} warps"
        sums[name] = torch.empty(count // block, device=DEVICE)
        ways[name] = partial(read, sums[name], block, warps)
    times = timed(ways, 1)
    if not torch.equal(source, target):
        problems.append("the copy is not its source")
    exact = float(source.sum(dtype=torch.float64))
    for name, out in sums.items():
        if abs(float(out.sum(dtype=torch.float64)) / exact - 1.0) > 1e-5:
            problems.append(f"{name}: a wrong sum")
    fastest = min(times[name].us for name in sums)
    return Rates(2 * size / times["copy"].us * 1e6, size / fastest * 1e6), problems


def measured_sum(size: int, layers: int) -> tuple[Timing, list[str]]:
    """torch.sum over so many bytes in each of some layers, and what was wrong with its answers."""
    random = torch.Generator(DEVICE).manual_seed(0)
    source = torch.empty(layers, size // 2, dtype=torch.bfloat16, device=DEVICE)
    source.normal_(generator=random)
    sums = torch.empty(layers, device=DEVICE)

    def work() -> None:
        for layer in range(layers):
            torch.sum(source[layer], dim=0, dtype=torch.float32, out=sums[layer])

    took = timed({"": captured(work).replay}, layers)[""]
    exact = source.sum(1, dtype=torch.float64)
    good = bool(((sums - exact).abs() <= 1e-3 * math.sqrt(source.shape[1])).all())
    return took, [] if good else ["a wrong sum"]
