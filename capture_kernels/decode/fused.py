"""Decode attention over a paged cache that emits its statistics as it goes.

Mathematics: `key_pass` with values. With o_i, m_i and L_i of a row's splits, a head's output is

    sum_i o_i exp(m_i - m) / (sum_i L_i exp(m_i - m) + exp(sink - m))

where L_i counts every key that is read, sink tokens and masked keys too: the output is the model's
own, whatever a fingerprint leaves out. The statistics are finished later, as in `StatisticsPlan`.

Tensors (P programs, R rows, H query heads):
    partial_values  float32[P + R, H, value_dim]  sums of e v of each split
    output          float16/bfloat16/float32[R, H, value_dim], of the queries' type
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.launch import LOG2_E, LOWEST, after_last_kernel, launch
from capture_kernels.layer_plan import LARGEST_HEAD_DIM, check

from .key_pass import PARTIAL
from .plan import StatisticsPlan
from .step.schedule import is_split, row_splits
from .tuning import Tuning

# Values take registers and shared memory from other programs; with a top k, two warps would need
# more registers than a thread can have.
TUNING = Tuning(programs_a_processor=2)
TUNING_TOP = TUNING._replace(warps=4)


@triton.jit(do_not_specialize=["num_rows"])
def merge_values(
    partial, partial_values, row_table, block_ptr, program_ptr, sinks, value_descale, output,
    stride_or, stride_oh, num_rows, HEADS: tl.constexpr, QUERIES_A_KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, STATISTICS: tl.constexpr,
    HAS_SINKS: tl.constexpr, VALUE_DESCALE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The output of one row and head; 0 for a row without keys, such as those that pad a batch:
    NaN there would reach routing, or an all-reduce."""
    AT_ONCE: tl.constexpr = 16
    after_last_kernel(EARLY)
    row, number = tl.program_id(0), tl.program_id(1)
    begin, end, first, last = row_splits(block_ptr, row_table, row, num_rows)
    dims = tl.arange(0, BLOCK_V)
    is_dim = dims < VALUE_DIM
    output += row.to(tl.int64) * stride_or + number * stride_oh
    if begin == end:
        tl.store(output + dims, tl.zeros([BLOCK_V], output.dtype.element_ty), mask=is_dim)
        return
    m = tl.full([1], LOWEST, tl.float32)
    if HAS_SINKS:
        m = tl.zeros([1], tl.float32) + tl.load(sinks + number).to(tl.float32) * LOG2_E
    weight = tl.where(m > LOWEST, 1.0, 0.0)
    o = tl.zeros([BLOCK_V], tl.float32)
    for p in range(first, last + 1, AT_ONCE):
        program = p + tl.arange(0, AT_ONCE)
        there = is_split(program_ptr, program, begin, end, last)
        split = (program + row).to(tl.int64) * HEADS + number
        m_i = tl.load(partial + split * PARTIAL + 32, mask=there, other=LOWEST)
        l_i = tl.load(partial + split * PARTIAL + 33, mask=there, other=0.0)
        if STATISTICS:
            # 33 counts the visible keys; sink tokens and other keys that were read stand apart.
            l_i += tl.load(partial + split * PARTIAL + 26, mask=there, other=0.0)
            l_i += tl.load(partial + split * PARTIAL + 27, mask=there, other=0.0)
        o_i = tl.load(
            partial_values + split[:, None] * VALUE_DIM + dims[None, :],
            mask=there[:, None] & is_dim[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(m_i, 0))
        old = tl.exp2(m - m_new)
        new = tl.exp2(m_i - m_new)
        weight = weight * old + tl.sum(l_i * new, 0)
        o = o * old + tl.sum(o_i * new[:, None], 0)
        m = m_new
    o = o / weight
    if VALUE_DESCALE:
        o *= tl.load(value_descale + number // QUERIES_A_KEY * (VALUE_DESCALE - 1))
    tl.store(output + dims, o.to(output.dtype.element_ty), mask=is_dim)


@dataclass(kw_only=True, eq=False)
class FusedDecodePlan(StatisticsPlan):
    """Decode attention for engines whose own can be replaced; a step is `schedule`, then `decode`
    for each layer in turn.

    All heads have an output, so `chosen` is left out.
    """

    all_keys = True

    value_dim: int  # the size of a value, 1..256
    statistics: bool = True  # whether statistics are emitted as well

    def __post_init__(self) -> None:
        if not 1 <= self.value_dim <= 256:
            raise OptionError(f"value_dim {self.value_dim} is not supported: 1 to 256, and no MLA")
        if self.head_dim > LARGEST_HEAD_DIM:
            raise OptionError(
                f"head_dim {self.head_dim} is not supported: fused decode takes {LARGEST_HEAD_DIM} "
                "at most, and no MLA"
            )
        if self.chosen is not None:
            raise OptionError("fused decode takes all query heads: leave `chosen` out")
        with_top = self.top_k or self.mean_top_k or self.hubs
        if with_top and not self.statistics:
            raise OptionError("a top k or hubs need statistics: leave them out, or emit statistics")
        self.tuning = self.tuning or (TUNING_TOP if with_top else TUNING)
        super().__post_init__()
        self.partial_values = self._zeros(self.partial.shape[1], self.heads, self.value_dim)

    def decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        *,
        descale: Tensor | None = None,
        value_descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attention of the scheduled rows in the step's next layer, with its statistics.

        Values and output are not used after this call; the other tensors must keep their contents
        until the layer is finished, as for `StatisticsPlan.run`.

        Args:
            query, keys, descale, sinks: as `StatisticsPlan.run` takes them.
            values: of the keys' type, [KV slots, key_heads, value_dim], the last axis contiguous.
            output: of the queries' type, [R, heads, value_dim], the last axis contiguous; written.
                Padding rows and rows without keys are 0.
            value_descale: what values are multiplied by, in either form of `descale`.

        Raises:
            OptionError: shapes, types or devices that do not fit the plan, or more layers than it
                has.
        """
        rows, heads = self.scheduled.num_rows, self.heads
        key_heads, depth, device = self.key_heads, self.value_dim, self.device
        check(values, "values", [None, key_heads, depth], {keys.dtype}, device)
        check(output, "output", [rows, heads, depth], {query.dtype}, device)
        value_descales = self.descales(value_descale, "value_descale")
        step = self._next_layer(
            query, keys, descale, sinks, values, self.partial_values, self.statistics
        )
        self._launch_pass(step)
        if rows:
            launch(
                merge_values,
                (rows, heads),
                step,
                value_descale=self.partial if value_descale is None else value_descale,
                output=output,
                stride_or=output.stride(0),
                stride_oh=output.stride(1),
                VALUE_DESCALE=value_descales,
                num_warps=1,
            )
        self._finish_if_full()
