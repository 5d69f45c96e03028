"""A server's steps: which rows, which layers, and what was found.

    begin    the schedule of the step's rows
    layer    a captured layer, in the order in which the model runs them
    end      what is left to finish, and the append to the ring
    results  copies of what was found, which the next step does not overwrite

`begin`, `layer` and `end` neither allocate, copy nor wait on a GPU, after a step of as many rows
that compiles, so that a CUDA graph can hold them; graphs of several batch sizes share one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capture_kernels.decode.host import HostStatisticsPlan
from capture_kernels.decode.ranks import HeadRanks
from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout, Visibility
from capture_kernels.layer_plan import COLUMNS, head_words

from .requests import RequestTable


@dataclass(frozen=True)
class LayerKind:
    """Captured layers that share everything but their weights.

    Args:
        numbers: the model's numbers of the layers.
        window: the model's own sliding window, the query's own key included; 0 for none.
        scale, soft_cap: as `LayerPlan` takes them.
    """

    numbers: tuple[int, ...]
    _: KW_ONLY
    heads: int
    key_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None = None
    window: int = 0
    # Whether its keys are where `StepCapture.slot_map` or a table of pages says.
    mapped: bool = False


class StepResults(NamedTuple):
    """What was found of R rows in L captured layers, shallowest first, on the device.

    Columns are those of `decode.answers`. If a row was not captured, column 28 of `mean` is 0, and
    the other fields mean nothing. With heads on several ranks, means are of all of them, and fields
    with an H of this rank's. Fields without a number are on the host.
    """

    mean: Tensor  # float32[L, R, 32], of the chosen heads
    mean_positions: Tensor  # int32[L, R, mean_k]: `TopK`
    mean_masses: Tensor  # float32[L, R, mean_k]
    per_head: Tensor  # float32[L, R, H, 32]; H = 0 unless heads are asked for
    positions: Tensor  # int32[L, R, H, k]
    logits: Tensor  # float32[L, R, H, k]
    hubs: Tensor  # float32[n]: of the asked slots, one after the other


@dataclass(eq=False)
class StepCapture:
    """Plans, flags of requests and the ring of one server.

    Attributes:
        layers: the captured layers' numbers, shallowest first.
        hubs: float32[hub_slots, max_length], sums over steps and layers of the heads' mean
            probabilities by position, counted from the end of the masked prefix. Who gives a slot
            to a request clears it.
        requests: which requests are captured, and how. With heads on several ranks, means are of
            all of them, whichever a request chose.
        incomplete_steps: see `end`; of a replayed graph the step that was captured is counted.

    Raises:
        OptionError: layers that no kernel supports, or that occur twice.
    """

    kinds: Sequence[LayerKind]
    _: KW_ONLY
    max_rows: int  # the most rows of a step
    max_length: int  # the most keys of a row
    num_requests: int  # the most rows of a table
    device: torch.device | str
    visibility: Visibility | None = None  # which keys a fingerprint describes
    chosen: Sequence[int] | None = None  # query heads; None for all
    mean_top_k: int = 0  # keys of the mean of the heads' probabilities
    top_k: int = 0  # keys of each head
    hub_slots: int = 0  # how many requests may add up their means by position at once
    # As of `StatisticsPlan`; None for its own default.
    scratch_bytes: int | None = None
    layout: Layout = Layout.LOG16  # of the ring's records
    ring: Any = None  # a `ring.ring.Ring` that records are appended to; None for no records
    on_host: bool | None = None  # whether to compute in plain torch; None: unless on a GPU
    ranks: HeadRanks | None = None  # that hold the layers' other heads; None if all are here
    # int32 or int64[KV slots]: of each of the table's KV slots, where layers of mapped kinds have
    # the key; None if there are none, or tables are of pages. Read in `begin`.
    slot_map: Tensor | None = None
    first_request: int = 1  # row of the table: as `RequestTable` has it

    def __post_init__(self) -> None:
        numbers = [number for kind in self.kinds for number in kind.numbers]
        if not numbers or len(set(numbers)) != len(numbers) or min(numbers) < 0:
            raise OptionError(f"captured layers must be different numbers, got {numbers}")
        if self.ranks is not None and self.chosen is not None:
            raise OptionError("heads cannot be chosen where several ranks have as many each")
        self.layers = tuple(sorted(numbers))
        if self.on_host is None:
            self.on_host = torch.device(self.device).type != "cuda"
        most_heads = max(kind.heads for kind in self.kinds)
        self.requests = RequestTable(
            self.num_requests, self.device, heads=most_heads, first=self.first_request
        )
        self.hubs = torch.zeros((self.hub_slots, self.max_length), device=self.device)
        # One buffer for all kinds, so that one launch appends their records.
        self._mean = torch.zeros((len(numbers), self.max_rows, COLUMNS), device=self.device)
        self._plans: list[Any] = []
        self._plan_of: dict[int, tuple[int, int]] = {}  # of a layer: its plan, and which in it
        first = 0
        for index, kind in enumerate(self.kinds):
            count = len(kind.numbers)
            self._plans.append(self._plan(kind, self._mean[first : first + count]))
            self._plan_of |= {n: (index, at) for at, n in enumerate(sorted(kind.numbers))}
            first += count
        stored = [number for kind in self.kinds for number in sorted(kind.numbers)]
        # Where each layer's answers are among those of the plans; None: in the layers' order.
        self._order: Tensor | None = None
        if stored != list(self.layers):
            order = [stored.index(number) for number in self.layers]
            # Kept on the device: an index that is a list would wait for the step that runs.
            self._order = torch.tensor(order, device=self.device)
        self._append = None
        if self.ring is not None:
            if stored != list(self.layers):
                raise OptionError(
                    "layers of several kinds take turns, so their records cannot go to a ring: "
                    "capture layers of one kind, or leave the ring out"
                )
            from capture_kernels.ring.append import AppendPlan

            self._append = AppendPlan(
                self.ring, max_rows=self.max_rows, layers=self.layers, layout=self.layout
            )
        self.incomplete_steps = 0
        # Of this step: its rows, how many layers of each kind have run, and whether in turn.
        self._table: PageTable | None = None
        self._ran, self._in_turn = [0] * len(self.kinds), True

    def _plan(self, kind: LayerKind, mean: Tensor) -> Any:
        own = self._plan_options(kind, mean)
        if self.on_host:
            return HostStatisticsPlan(**own)
        from capture_kernels.decode.plan import StatisticsPlan

        return StatisticsPlan(**own)

    def _plan_options(self, kind: LayerKind, mean: Tensor) -> dict[str, Any]:
        own: dict[str, Any] = {
            "layers": len(kind.numbers), "max_rows": self.max_rows, "max_length": self.max_length,
            "heads": kind.heads, "key_heads": kind.key_heads, "head_dim": kind.head_dim,
            "scale": kind.scale, "soft_cap": kind.soft_cap, "window": kind.window,
            "mapped": kind.mapped, "device": self.device, "chosen": self.chosen,
            "visibility": self.visibility, "top_k": self.top_k, "mean_top_k": self.mean_top_k,
            "mean_out": mean, "ranks": self.ranks, "hubs": self.hub_slots > 0,
        }  # fmt: skip
        if self.scratch_bytes is not None and not self.on_host:
            own["scratch_bytes"] = self.scratch_bytes
        return own

    @property
    def bytes(self) -> int:
        """Device memory that capture holds on a GPU, without the ring."""
        own = self.requests.bytes + self._mean.nbytes + self.hubs.nbytes
        own += 0 if self._order is None else self._order.nbytes
        return own + sum(plan.bytes for plan in self._plans)

    def begin(self, *tables: PageTable) -> None:
        """Begin a step.

        Args:
            tables: the step's rows in a table of the first requests, or of all: one for all kinds
                of layers, or one for each.

        Raises:
            OptionError: other tables, or more rows than planned.
        """
        for table in tables:
            if table.lists or table.kv_slots.dim() != 2 or len(table.kv_slots) > self.num_requests:
                raise OptionError(f"the table must have {self.num_requests} requests at most")
        if len(tables) not in (1, len(self.kinds)):
            raise OptionError(f"{len(tables)} tables for {len(self.kinds)} kinds of layers")
        self._table = tables[0]
        self._ran, self._in_turn = [0] * len(self.kinds), True
        flags = self.requests
        own = tables if len(tables) > 1 else tables * len(self.kinds)
        for plan, kind, table in zip(self._plans, self.kinds, own, strict=True):
            known = slice(len(table.kv_slots))
            words = flags.heads[known, : head_words(kind.heads)]
            plan.schedule(
                table, enabled=flags.enabled[known], masks=flags.mask[known],
                head_masks=words if self.ranks is None else None, by_request=True,
                hubs=self.hubs if self.hub_slots else None,
                hub_slots=flags.hub[known] if self.hub_slots else None,
                slot_map=self.slot_map if kind.mapped and not table.page else None,
            )  # fmt: skip

    def layer(
        self,
        number: int,
        query: Tensor,
        keys: Tensor,
        *,
        descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """A layer of the step, if it is a captured one. Arguments are those of
        `StatisticsPlan.run`; they must keep their contents until `end`.

        A layer that runs twice, or out of turn, makes the step incomplete.

        Raises:
            OptionError: no step has begun, or tensors that do not fit.
        """
        plan = self._plan_in_turn(number)
        if plan is not None:
            plan.run(query, keys, descale=descale, sinks=sinks)

    def _plan_in_turn(self, number: int) -> Any:
        """The plan that is to take a layer now; None if none is."""
        found = self._plan_of.get(number)
        if found is None:
            return None
        if self._table is None:
            raise OptionError(f"layer {number} of no step: call begin first")
        index, at = found
        self._in_turn &= self._ran[index] == at
        if not self._in_turn:
            return None
        self._ran[index] += 1
        return self._plans[index]

    def end(self) -> None:
        """End the step. One in which the captured layers did not run each once, in turn, is
        incomplete: it records nothing."""
        table = self._table
        if table is None:
            raise OptionError("no step has begun")
        rows = table.num_rows
        self._table = None
        for plan in self._plans:
            plan.finish()
        if not self._in_turn or sum(self._ran) < len(self.layers):
            self.incomplete_steps += 1
            # What the last step left there must not be taken for this one's.
            self._mean[:, :rows].zero_()
            return
        if self._append is not None:
            from capture_kernels.ring.append import RequestRows

            flags = self.requests
            self._append.run(
                self._mean[:, :rows],
                RequestRows(table.seq_lens, table.starts, flags.handle, flags.phase, flags.enabled),
            )

    def results(
        self, rows: int, *, keys: bool = True, heads: bool = False,
        hubs: Sequence[tuple[int, int]] = (),
    ) -> StepResults:  # fmt: skip
        """Copies of what the step that ran last found of its first rows. It does not wait for the
        device.

        Args:
            rows: how many there are; a replayed graph does not tell the host.
            keys: whether the keys of the heads' mean are wanted.
            heads: whether each head's numbers are wanted too.
            hubs: slots, and how many of their first positions.
        """
        top = [plan.answers for plan in self._plans]
        return StepResults(
            self._in_order([self._mean], rows),
            self._in_order([each.mean_positions for each in top], rows, wanted=keys),
            self._in_order([each.mean_masses for each in top], rows, wanted=keys),
            self._in_order([plan.per_head for plan in self._plans], rows, wanted=heads),
            self._in_order([each.positions for each in top], rows, wanted=heads),
            self._in_order([each.logits for each in top], rows, wanted=heads),
            torch.cat([self.hubs[slot, :length] for slot, length in hubs])
            if hubs
            else self.hubs.new_empty(0),
        )

    def _in_order(self, of_kinds: list[Tensor], rows: int, *, wanted: bool = True) -> Tensor:
        """A copy of [layers of each kind, max_rows, n, ...]: [L, rows, n, ...], shallowest first;
        with n = 0 if it is not wanted. Of nothing the copy is on the host, as launching it would
        take as long as any."""
        first = of_kinds[0]
        if not wanted or not first[0].numel():
            rest = first.shape[2:] if wanted else (0, *first.shape[3:])
            return torch.empty((len(self.layers), rows, *rest), dtype=first.dtype)
        if len(of_kinds) == 1 and self._order is None:
            return of_kinds[0][:, :rows].clone()
        found = torch.cat([each[:, :rows] for each in of_kinds])
        return found if self._order is None else found.index_select(0, self._order)
