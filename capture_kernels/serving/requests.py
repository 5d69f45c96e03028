"""What a server knows of its requests, by their row of `req_to_token`, on the device.

Kernels of a CUDA graph read these tables by the index that a step's rows have anyway, so a request
is switched on or off between two replays, without a kernel or a tensor for each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capture_kernels.arrays import Int32s
from capture_kernels.errors import OptionError
from capture_kernels.layer_plan import head_words

# As in records: indices in prompt, think, output.
PROMPT, THINK, OUTPUT = range(3)
ALL_HEADS = -1  # every bit of a word


class RequestTable:
    """Flags of n requests: set on the host, copied by `copy` if any has changed.

    Attributes:
        handle: int64[n] on the device, what the server calls the request.
        mask: int32[n], tokens at its start that are hidden.
        hub: int32[n], the slot of `StepCapture.hubs` that it is added to; -1 for none.
        heads: int32[n, ceil(H / 32)], the heads that its means are of: `Schedule.run`'s head masks.
        enabled: uint8[n], whether its rows are captured.
        phase: uint8[n], of its next row.

    Args:
        size: rows of `req_to_token`.
        heads: H, query heads of the model.
        first: row of a request: those before it pad the batches of CUDA graphs and are never
            enabled.
    """

    def __init__(
        self, size: int, device: torch.device | str, *, heads: int = 0, first: int = 1
    ) -> None:
        if size <= first:
            raise OptionError(f"a table of {size} requests: {first + 1} or more")
        self.size, self.num_heads, self._first, self._changed = size, heads, first, False
        # Widest first, so that each field is aligned.
        fields = (
            ("handle", np.int64, torch.int64, (size,)),
            ("mask", np.int32, torch.int32, (size,)),
            ("hub", np.int32, torch.int32, (size,)),
            ("heads", np.int32, torch.int32, (size, head_words(heads))),
            ("enabled", np.uint8, torch.uint8, (size,)),
            ("phase", np.uint8, torch.uint8, (size,)),
        )
        sizes = [math.prod(shape) * np.dtype(kind).itemsize for _, kind, _, shape in fields]
        self._host = np.zeros(sum(sizes), np.uint8)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        self._of: dict[str, np.ndarray[Any, Any]] = {}
        # What each enabled row was given last: most steps change nothing.
        self._given: dict[int, tuple[Any, ...]] = {}
        found: list[Tensor] = []
        end = 0
        for (name, kind, dtype, shape), length in zip(fields, sizes, strict=True):
            begin, end = end, end + length
            self._of[name] = self._host[begin:end].view(kind).reshape(shape)
            found.append(self._device[begin:end].view(dtype).view(shape))
        self.handle, self.mask, self.hub, self.heads, self.enabled, self.phase = found

    @property
    def bytes(self) -> int:
        """Device memory that the table holds."""
        return self._device.nbytes

    def enable(
        self,
        index: int,
        *,
        handle: int = 0,
        mask: int = 0,
        phase: int = OUTPUT,
        heads: Sequence[int] | None = None,
        hub: int = -1,
    ) -> None:
        """Capture a request's rows from the next step on.

        Args:
            heads: query heads that its means are of; None for all.
            hub: the slot that its means are added up in; -1 for none.

        Raises:
            OptionError: there is no such row, or a number that its field does not hold.
        """
        given = (handle, mask, phase, None if heads is None else tuple(heads), hub)
        if self._given.get(index) == given:
            return
        if not self._first <= index < self.size:
            raise OptionError(f"request row {index} must be in {self._first}..{self.size - 1}")
        if not (0 <= mask < 1 << 31 and 0 <= phase <= OUTPUT and -(1 << 63) <= handle < 1 << 63):
            raise OptionError(f"request row {index}: mask {mask}, phase {phase}, handle {handle}")
        words: int | Int32s = ALL_HEADS
        if heads is not None:
            if not heads or not 0 <= min(heads) <= max(heads) < self.num_heads:
                raise OptionError(f"request row {index}: heads {list(heads)} of {self.num_heads}")
            bits = np.zeros(32 * head_words(self.num_heads), np.uint8)
            bits[list(heads)] = 1
            words = np.packbits(bits, bitorder="little").view("<i4")
        self._put(index, handle=handle, mask=mask, enabled=1, phase=phase, heads=words, hub=hub)
        self._given[index] = given

    def disable(self, index: int) -> None:
        """Capture none of its rows from the next step on."""
        if self._given.pop(index, None) is not None:
            self._put(index, handle=0, mask=0, enabled=0, phase=0, heads=0, hub=-1)

    def disable_all(self) -> None:
        """Capture none of any request's rows from the next step on."""
        for index in list(self._given):
            self.disable(index)

    def _put(self, index: int, **values: int | Int32s) -> None:
        self._changed = True
        for name, value in values.items():
            self._of[name][index] = value

    def copy(self) -> None:
        """Queue a copy of the flags, if any has changed, on the current stream. It does not wait;
        steps that were queued before still see the flags of then."""
        if not self._changed:
            return
        self._changed = False
        source = torch.from_numpy(self._host)
        if self._device.is_cuda:
            # A buffer of its own, which PyTorch uses again only when this copy is over.
            source = torch.empty(len(source), dtype=torch.uint8, pin_memory=True).copy_(source)
        self._device.copy_(source, non_blocking=True)
