"""Full scores (`attn_capture`) of a step's rows, layer by layer, whichever engine runs it.

Rows of a prompt are computed as their layer runs, outside any graph. A decode step may be a CUDA
graph's, in which no Python runs: there the layers only keep their queries (in a buffer that the
graph writes, with the length of each row), and scores are computed after the step, from these and
from the keys in the pool. Lengths that are not those of the step's rows say that the buffer was not
written, and nothing is taken of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capture_kernels.fingerprint.vector import chosen_heads
from capture_kernels.scores.plain import PlainScoresPlan
from capture_kernels.serving.step import LayerKind
from capture_kernels.transfers import to_device
from pipeline.engines.serving.request import CaptureRequest

# With fewer queries a kernel would be compiled, and launched, for little.
FEWEST_FOR_KERNEL = 32


class LayerScores:
    """The layers of full scores.

    Args:
        kinds: of the layers; none if no request may ask.
        max_rows: the most rows of a decode step.
        dtype: of queries.
        on_host: whether to compute in plain torch; None: unless on a GPU.

    Attributes:
        kinds: by layer.
    """

    def __init__(
        self, kinds: Sequence[LayerKind], *, max_rows: int, dtype: torch.dtype,
        device: torch.device | str, on_host: bool | None = None,
    ) -> None:  # fmt: skip
        self.kinds = {number: kind for kind in kinds for number in kind.numbers}
        self._device = torch.device(device)
        self._on_host = self._device.type != "cuda" if on_host is None else on_host
        self._queries = {
            number: torch.zeros((max_rows, kind.heads, kind.head_dim), dtype=dtype, device=device)
            for number, kind in sorted(self.kinds.items())
        }
        # Of each layer, in their order: how many keys its rows had when their queries were kept.
        self._written = torch.zeros((len(self.kinds), max_rows), dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        """Device memory that it holds."""
        return self._written.nbytes + sum(each.nbytes for each in self._queries.values())

    @property
    def layers(self) -> list[int]:
        """Their numbers, ascending: the order of `take_written`."""
        return list(self._queries)

    def heads_of(self, request: CaptureRequest) -> int:
        """How many query heads are taken of a request, of all layers together."""
        kinds = [self.kinds[number] for number in request.scores or ()]
        return sum(len(chosen_heads(k.heads, k.key_heads, request.heads)) for k in kinds)

    def keep(self, number: int, queries: Tensor, lengths: Tensor) -> None:
        """Keep the queries [R, H, D] of a decode step, and the keys of its rows, int[R]. A CUDA
        graph can hold it."""
        at, rows = self.layers.index(number), len(queries)
        self._queries[number][:rows].copy_(queries)
        self._written[at, :rows].copy_(lengths)

    def kept(self, number: int) -> Tensor:
        """The queries [max_rows, H, D] that were kept last of a layer."""
        return self._queries[number]

    def take_written(self, rows: list[int]) -> Tensor:
        """int64[L, rows]: how many keys rows of a decode step had when their queries were kept.
        What a later step does not write does not look like its own."""
        found = self._written[:, to_device(rows, self._device)]
        self._written.zero_()
        return found

    def of_rows(
        self, number: int, request: CaptureRequest, queries: Tensor, keys: Tensor, slots: Tensor,
        begin: int, **run_with: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """float16[R, H, begin + R]: the scores of rows at positions `begin` and after.

        Args:
            queries: [R, H, D] of all heads; keys: [KV slots, key heads, D].
            slots: int[T], where the keys of each position are.
            run_with: as the plans' `run` takes it, scales of 8-bit keys and learned sinks.
        """
        rows, end = len(queries), begin + len(queries)
        plan = self._plan(self.kinds[number], request, rows, end)
        found: Tensor = plan.output(rows, end)
        plan.run(queries, keys, slots, begin, found, **run_with)
        return found

    def _plan(self, kind: LayerKind, request: CaptureRequest, rows: int, length: int) -> Any:
        own: dict[str, Any] = {
            "max_rows": rows, "max_length": length, "heads": kind.heads,
            "key_heads": kind.key_heads, "head_dim": kind.head_dim, "scale": kind.scale,
            "soft_cap": kind.soft_cap, "window": kind.window, "chosen": request.heads,
            "mask_prefix": request.mask_prefix, "device": self._device,
        }  # fmt: skip
        if self._on_host or rows < FEWEST_FOR_KERNEL:
            return PlainScoresPlan(**own)
        from capture_kernels.scores.plan import ScoresPlan, prompt_tuning

        # The same for prompts of all lengths, as a kernel that is compiled holds up the server.
        return ScoresPlan(tuning=prompt_tuning(kind.head_dim), **own)
