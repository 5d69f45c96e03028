"""Full attention probabilities of a layer for the queries of a prompt, from a paged key cache.

Mathematics and tensors: `scores_pass`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.launch import LOG2_E, interpreted, processors
from capture_kernels.layer_plan import LARGEST_HEAD_DIM
from capture_kernels.transfers import to_device

from .kernel import scores_pass
from .layer import ScoresLayerPlan

# Lanes and keys of a tile of latent keys (MLA): larger ones have no room in the shared memory.
LATENT_LANES, LATENT_KEYS = 64, 32
# Columns of `ScoresPlan.output` are padded to whole lines of memory: 128 bytes.
LINE = 64
# Keys of a tile: 128 would fill registers and shared memory with one block a processor.
BLOCK_KEYS = 64
PROGRAMS_A_PROCESSOR = 2
# With few queries: tiles of keys that are worth another program.
TILES_A_SPLIT = 4


class ScoresTuning(NamedTuple):
    """How the kernels are cut into programs."""

    block_m: int  # lanes of a program: a power of two, 16 or more
    block_n: int  # keys of a tile: a power of two, 16 or more
    warps: int
    stages: int
    splits: int = 1  # programs that share a block's keys: a power of two


WIDE_TUNING = ScoresTuning(block_m=16, block_n=32, warps=8, stages=2)
# What suits a long prompt in half precision.
PROMPT_TUNING = ScoresTuning(block_m=128, block_n=BLOCK_KEYS, warps=8, stages=3)
LATENT_PROMPT_TUNING = ScoresTuning(LATENT_LANES, LATENT_KEYS, warps=4, stages=3)


def prompt_tuning(head_dim: int) -> ScoresTuning:
    """For prompts of all lengths."""
    return LATENT_PROMPT_TUNING if head_dim > LARGEST_HEAD_DIM else PROMPT_TUNING


@dataclass(kw_only=True, eq=False)
class ScoresPlan(ScoresLayerPlan):
    """Geometry and scratch memory of the scores of one kind of layer; `run` once a layer and chunk.

    A run neither allocates, copies nor waits, so that a CUDA graph can hold it (after a first run,
    which compiles); the graph keeps the number of queries and `start`. `scratch_bytes` is 8 bytes a
    query and head, or a few times that if several programs share a row.

    Raises:
        OptionError: options that do not fit together.

    Source: DESIGN.md sections 2 and 7 (`attn_capture_data`).
    """

    tuning: ScoresTuning | None = None  # how kernels are cut; None for what suits the shape

    def __post_init__(self) -> None:
        super().__post_init__()
        order = self.order
        # Every key head's chosen heads must be a whole number of packs.
        per_key = self.heads // self.key_heads
        self.group = math.gcd(*Counter(head // per_key for head in order).values())
        self.packs = len(order) // self.group
        suited = self._suited_tuning()
        # float32 does not use tensor cores, and larger tiles would not fit the registers.
        self._wide_tuning = self.tuning or WIDE_TUNING._replace(splits=suited.splits)
        self.tuning = self._narrow_tuning = self.tuning or suited
        self._heads = to_device(order, torch.device(self.device), torch.int32)
        shape = (self.tuning.splits, 2, self.packs, self.max_rows * self.group)
        self._partial = torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _suited_tuning(self) -> ScoresTuning:
        lanes = self.max_rows * self.group
        latent = self.head_dim > LARGEST_HEAD_DIM
        most, block_n = (LATENT_LANES, LATENT_KEYS) if latent else (128, BLOCK_KEYS)
        block_m = min(most, max(16, triton.next_power_of_2(lanes)))
        programs = triton.cdiv(lanes, block_m) * self.packs
        wanted = triton.cdiv(PROGRAMS_A_PROCESSOR * processors(self.device), programs)
        useful = triton.cdiv(self.max_length, TILES_A_SPLIT * block_n)
        splits = max(1, triton.next_power_of_2(min(wanted, useful) + 1) // 2)
        # Few queries only wait for keys: more stages load more of them ahead.
        warps, stages = (8, 3) if block_m == 128 else (4, 4 - latent)
        return ScoresTuning(block_m, block_n, warps, stages, splits)

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
        """Write the probabilities of some queries of one request to the whole of `out`.

        Args:
            query, keys, descale, sinks: as `StatisticsPlan.run` takes them; the queries are at
                positions start..start + R - 1, such as one chunk of a prompt, and the cache holds
                the keys 0..start + R - 1.
            table: int32/int64[start + R or more], the slot of each position. Slots of keys that no
                query sees are not read.
            start: the position of the first query.
            out: float16[R, H, columns] of any strides, columns >= start + R; 0 is written where a
                key is not seen. A query that sees no key is 0 throughout.
            last: write only the last `last` queries: `out` is float16[min(last, R), H, columns].

        Raises:
            OptionError: shapes, types or devices that do not fit the plan.
        """
        rows = query.shape[0]
        if last is not None and last < rows:
            if last < 0:
                raise OptionError(f"last must be 0 or more, got {last}")
            query, start, rows = query[rows - last :], start + rows - last, last
        self.check_run(query, keys, table, start, out, sinks)
        descales = self.descales(descale)
        if rows == 0:
            return
        tuning = self._wide_tuning if query.dtype == torch.float32 else self._narrow_tuning
        depth, capped = self.head_dim, self.soft_cap is not None
        block_d = max(16, 1 << (depth.bit_length() - 1))
        rest = 0 if depth <= block_d else max(16, triton.next_power_of_2(depth - block_d))
        cap = self.soft_cap or 1.0
        grid = (triton.cdiv(rows * self.group, tuning.block_m), self.packs, tuning.splits)
        with torch.cuda.device_of(query):
            for write in (False, True):
                scores_pass[grid](
                    *(query, keys, table, self._heads),
                    self._partial if descale is None else descale,
                    self._partial if sinks is None else sinks,
                    *(self._partial, out, rows, start, out.shape[2], self.max_rows * self.group),
                    *(self.mask_prefix, self.window),
                    2.0 * LOG2_E.value * self.scale / cap,
                    LOG2_E.value * (cap if capped else self.scale),
                    *(*query.stride()[:2], *keys.stride()[:2], table.stride(0)),
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
                    DESCALE=descales,
                    SINKS=sinks is not None,
                    UPCAST=interpreted(),
                    BLOCK_M=tuning.block_m,
                    BLOCK_N=tuning.block_n,
                    num_warps=tuning.warps,
                    num_stages=tuning.stages,
                )
