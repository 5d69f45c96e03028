"""Layers of a step that are finished together: one launch passes over the keys of all of them.

Triton has no arrays of tensors, so the addresses of the layers' inputs are written to a table on
the device, which the kernels read. A pass over a single layer takes its inputs as arguments and
writes the table itself, for the kernels after it.

Tensors (A layers, rounded up to whole launches of `note_layers`):
    addresses    int64[A, 4]  of a layer's keys, their scales, its learned sinks and its queries
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from capture_kernels.launch import after_last_kernel, launch

ADDRESSES = tl.constexpr(4)
# The most layers whose addresses one launch writes.
NOTED = 32


@triton.jit
def tensor_at(address, like):
    """A tensor of another layer by its address: of the type of `like`, and as well aligned."""
    # Derived from a pointer whose alignment is known: a pointer made of a number has none.
    bytes_apart = tl.multiple_of(address - like.to(tl.int64), 16)
    return (like.to(tl.pointer_type(tl.int8)) + bytes_apart).to(like.dtype)


@triton.jit
def layer_inputs(addresses, layer, query, keys):
    """Queries, keys and the keys' scales of a layer; `query` and `keys` are of a layer like it."""
    at = addresses + layer * ADDRESSES
    descale = tl.load(at + 1).to(tl.pointer_type(tl.float32))
    return tensor_at(tl.load(at + 3), query), tensor_at(tl.load(at), keys), descale


@triton.jit
def layer_sinks(addresses, layer, sinks):
    """Learned sinks of a layer; `sinks` are of a layer like it."""
    return tl.load(addresses + layer * ADDRESSES + 2).to(sinks.dtype)


@triton.jit
def note_layer(addresses, keys, descale, sinks, query, rescan_queue, BUCKETS: tl.constexpr):
    """Write the addresses of one layer, and empty the queue of heads to rescan."""
    tl.store(addresses, keys.to(tl.int64))
    tl.store(addresses + 1, descale.to(tl.int64))
    tl.store(addresses + 2, sinks.to(tl.int64))
    tl.store(addresses + 3, query.to(tl.int64))
    if BUCKETS:
        tl.store(rescan_queue, 0)


@triton.jit
def note_layers(
    addresses, rescan_queue, inputs, COUNT: tl.constexpr, BUCKETS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """`note_layer` of several layers: COUNT addresses, of which `inputs` has 2 * address + 1."""
    after_last_kernel(EARLY)
    for number in tl.static_range(COUNT):
        tl.store(addresses + number, inputs[number] >> 1)
    if BUCKETS:
        tl.store(rescan_queue, 0)


class PendingLayers:
    """Layers that have run but are not finished, all of one kind: as one launch can take them.

    Args:
        capacity: for how many layers there is a workspace.
    """

    def __init__(self, capacity: int, device: torch.device | str) -> None:
        self.capacity = capacity
        self._noted = min(NOTED, triton.next_power_of_2(capacity))
        lines = triton.cdiv(capacity, self._noted) * self._noted
        self.addresses = torch.zeros((lines, ADDRESSES.value), dtype=torch.int64, device=device)
        self._layers: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._layers)

    def accepts(self, arguments: dict[str, Any]) -> bool:
        """Whether a layer with these launch arguments is like those that wait."""
        return not self._layers or _kind(self._layers[-1]) == _kind(arguments)

    def add(self, arguments: dict[str, Any]) -> None:
        self._layers.append(arguments)

    def take(self) -> list[dict[str, Any]]:
        """The launch arguments of the layers that wait, which then wait no longer."""
        taken, self._layers = self._layers, []
        return taken

    def note(self, layers: list[dict[str, Any]]) -> None:
        """Launch what writes the addresses of some layers, which one pass is to take together."""
        # Padded, so that every launch has as many arguments and is compiled once.
        layers = layers + layers[-1:] * (-len(layers) % self._noted)
        for first in range(0, len(layers), self._noted):
            # Odd, as Triton would compile anew for numbers that 16 divides.
            inputs = tuple(
                2 * each[name].data_ptr() + 1
                for each in layers[first : first + self._noted]
                for name in ("keys", "descale", "sinks", "query")
            )
            step = {**layers[0], "addresses": self.addresses[first:]}
            launch(note_layers, (1,), step, inputs=inputs, COUNT=len(inputs), num_warps=1)


def _kind(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What all layers of one launch must share."""
    tensors = (arguments["query"], arguments["keys"])
    return (
        *((each.dtype, each.stride(), each.data_ptr() % 16) for each in tensors),
        arguments["DESCALE"],
        arguments["HAS_SINKS"],
        arguments["sinks"].dtype,
    )
