"""Decode attention over a paged cache that emits its statistics as it goes.

Mathematics: `decode_pass` with values, and `finish`.

Tensors (R rows, H query heads):
    partial_values  float32[programs + R, H, value_dim]  sums of e v of each stretch
    output          float16/bfloat16/float32[R, H, value_dim], of the queries' type
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import OptionError
from .launch import FLOAT32, check
from .statistics import Statistics, StatisticsPlan, Tuning

# Values take registers and shared memory that programs would have; with a top k, two warps would
# need more registers than a thread can have.
TUNING = Tuning(programs_a_processor=2)
TUNING_TOP = TUNING._replace(warps=4)


class FusedDecodePlan(StatisticsPlan):
    """A decode attention for engines that let theirs be replaced; `schedule` once a step, `run`
    once a layer.

    Args:
        value_dim: the size of a value, 256 at most.
        statistics: whether statistics are emitted as well.
        options: those of `StatisticsPlan` but `chosen`: all heads have an output.
    """

    all_keys = True

    def __init__(self, *, value_dim: int, statistics: bool = True, **options: Any) -> None:
        if not 1 <= value_dim <= 256:
            raise OptionError(f"value_dim {value_dim} is not supported: 1 to 256, and no MLA")
        if options.get("chosen") is not None:
            raise OptionError("fused decode takes all query heads: leave `chosen` out")
        with_top = options.get("top_k") or options.get("mean_top_k") or options.get("hubs")
        if with_top and not statistics:
            raise OptionError("a top k or hubs need statistics: leave them out, or emit statistics")
        options["tuning"] = options.get("tuning") or (TUNING_TOP if with_top else TUNING)
        super().__init__(**options)
        self.value_dim, self.statistics = value_dim, statistics
        self.partial_values = self._floats(len(self.partial), self.query_heads, value_dim)

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
        mean: Tensor | None = None,
        hubs: Tensor | None = None,
    ) -> Statistics | None:
        """Attention of the scheduled rows in one layer, and its statistics.

        Args:
            query, keys, descale, sinks, mean, hubs: as `StatisticsPlan.run` takes them.
            values: of the keys' type, [slots, key_heads, value_dim], the last axis contiguous.
            output: of the queries' type, [R, heads, value_dim], the last axis contiguous; written.
                Rows that are not live, or have no keys, keep what they hold.
            value_descale: float32[key_heads], what float8 values are multiplied by; None for 1.

        Raises:
            OptionError: shapes or types that do not fit the plan.
        """
        rows, heads = self.steps.rows, self.query_heads
        key_heads, depth = self.groups.key_heads, self.value_dim
        check(values, "values", [len(values), key_heads, depth], {keys.dtype})
        check(output, "output", [rows, heads, depth], {query.dtype})
        if value_descale is not None:
            check(value_descale, "value_descale", [key_heads], FLOAT32)
        means = self.checked_means(sinks, mean, hubs)
        step = self.launch_pass(
            query, keys, descale, sinks, values, self.partial_values, self.statistics
        )
        self.launch_finish(step, means, hubs, output, value_descale)
        return self.found(means) if self.statistics else None
