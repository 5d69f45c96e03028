"""Copies between the host and a GPU that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:  # fmt: skip
    """`dtype` of the shape of `numbers`. Without a wait, as of indices that are a list, for the
    step that runs."""
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def on_its_way(found: Tensor) -> Tensor:
    """The same on the host, with its copy under way. Scores of a prompt are as large as a request
    may have: no step holds several of them on the device."""
    if not found.is_cuda:
        return found
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return host.copy_(found, non_blocking=True)
