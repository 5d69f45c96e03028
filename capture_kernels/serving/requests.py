"""What a server knows of its requests, by their row of `req_to_token`, on the device.

Kernels of a CUDA graph read these tables by the index that a step's rows have anyway, so a request
is switched on or off between two replays, without a kernel or a tensor for each row.
"""

from __future__ import annotations

import numpy as np
import torch

from capture_kernels.errors import OptionError

# As in records: indices in prompt, think, output.
PROMPT, THINK, OUTPUT = range(3)
_FIELDS = (("handle", "<i8"), ("mask", "<i4"), ("enabled", "u1"), ("phase", "u1"))


class RequestTable:
    """Flags of n requests: set on the host, copied by `copy` if any has changed.

    Attributes:
        handle: int64[n] on the device, what the server calls the request.
        mask: int32[n], tokens at its start that are hidden.
        enabled: uint8[n], whether its rows are captured.
        phase: uint8[n], of its next row.

    Args:
        size: rows of `req_to_token`; row 0 pads the batches of CUDA graphs and is never enabled.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        if size < 2:
            raise OptionError(f"a table of {size} requests: 2 or more")
        widths = [np.dtype(kind).itemsize for _, kind in _FIELDS]
        self._host = np.zeros(size * sum(widths), np.uint8)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        types = (torch.int64, torch.int32, torch.uint8, torch.uint8)
        # Widest first, so that each field is aligned.
        ends = np.cumsum([size * width for width in widths]).tolist()
        parts = list(zip([0, *ends[:-1]], ends, types, _FIELDS, strict=True))
        self.handle, self.mask, self.enabled, self.phase = (
            self._device[begin:end].view(dtype) for begin, end, dtype, _ in parts
        )
        self._of = {name: self._host[begin:end].view(kind) for begin, end, _, (name, kind) in parts}
        self.size, self._changed = size, False

    @property
    def bytes(self) -> int:
        """Device memory that the table holds."""
        return self._device.nbytes

    def enable(self, index: int, *, handle: int = 0, mask: int = 0, phase: int = OUTPUT) -> None:
        """Capture a request's rows from the next step on.

        Raises:
            OptionError: there is no such row, or a number that its field does not hold.
        """
        if not 0 < index < self.size:
            raise OptionError(f"request row {index} must be in 1..{self.size - 1}")
        if not (0 <= mask < 1 << 31 and 0 <= phase <= OUTPUT and -(1 << 63) <= handle < 1 << 63):
            raise OptionError(f"request row {index}: mask {mask}, phase {phase}, handle {handle}")
        self._put(index, handle=handle, mask=mask, enabled=1, phase=phase)

    def disable(self, index: int) -> None:
        """Capture none of its rows from the next step on."""
        self._put(index, handle=0, mask=0, enabled=0, phase=0)

    def _put(self, index: int, **values: int) -> None:
        for name, value in values.items():
            of = self._of[name]
            self._changed |= int(of[index]) != value
            of[index] = value

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
