"""The ring of fingerprint records in device memory: written by a kernel, read by a side stream.

Record number n lies in ring slot n mod capacity: one cache line of the GPU, 128 bytes, which is
written in one full write. The host reads slots as `RECORD_DTYPE`.

Tensors:
    slots       int32[capacity, 32]  the slots as words: 0-1 seq, 2-3 handle, 4 position, 5 layer,
                                     layout and phase, 6 sink_mass, 8-27 vector; the rest are 0
    state       int64[3]             committed: records written; claimed: records written or being
                                     written; done: programs of this launch that have ended

A launch of `append_records` writes in this order: seq = 0 in the slots it takes; `claimed`; the
records; their seq, n + 1; `committed`. A reader reads `committed`, copies slots, and then reads
`claimed`. The copies that are whole are those of the records claimed - capacity <= n < committed,
if their seq is n + 1. Reading seq twice would not do: a copy engine reads words in any order.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from capture_kernels.errors import MissingExtraError, OptionError
from capture_kernels.fingerprint.vector import DIMENSIONS

SLOT_BYTES = 128
SLOT_WORDS = SLOT_BYTES // 4
RECORD_DTYPE = np.dtype(
    {
        "names": ["seq", "handle", "position", "layer", "layout", "phase", "sink_mass", "vector"],
        "formats": ["<u8", "<i8", "<i4", "<i2", "u1", "u1", "<f4", ("<f4", DIMENSIONS)],
        "offsets": [0, 8, 16, 20, 22, 23, 24, 32],
        "itemsize": SLOT_BYTES,
    }
)
# Indices in the ring's state.
COMMITTED, CLAIMED, DONE = range(3)


class RecordViews(NamedTuple):
    """A ring's memory, field by field, in slot order; nothing is copied.

    CuPy arrays on a GPU, else NumPy's. Copies made while steps run may be torn: see this module.
    """

    seq: Any  # uint64[capacity]: record number + 1; 0 in a slot that is empty or being written
    handle: Any  # int64[capacity]
    position: Any  # int32[capacity]
    layer: Any  # int16[capacity]
    layout: Any  # uint8[capacity]
    phase: Any  # uint8[capacity]
    sink_mass: Any  # float32[capacity]
    vector: Any  # float32[capacity, 20], rows 128 bytes apart
    committed: Any  # int64[1]: records written since the ring was made
    claimed: Any  # int64[1]: those and the ones being written


class Ring:
    """Records in device memory, allocated once and written by an `AppendPlan` alone.

    Args:
        capacity: ring slots, a power of two; each takes 128 bytes. When all are taken, the oldest
            record is overwritten.
        device: where kernels run; "cpu" if they are interpreted.

    Raises:
        OptionError: the capacity is not a power of two.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cuda") -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise OptionError(f"the ring's capacity must be a power of two, got {capacity}")
        self.capacity = capacity
        self.slots = torch.zeros((capacity, SLOT_WORDS), dtype=torch.int32, device=device)
        self.state = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.slots.device

    def views(self) -> RecordViews:
        """The ring's memory as arrays; made once, they show what later steps write.

        On a GPU, CuPy takes it by DLPack under torch's current stream: what CuPy does under that
        stream (`cupy.cuda.ExternalStream`) comes after the steps that torch has launched on it.
        cuDF takes a field with a copy on the device (`cudf.Series(views.position)`).

        Raises:
            MissingExtraError: the ring is on a GPU and CuPy is not installed.
        """
        if not self.slots.is_cuda:
            return _record_views(self.slots.numpy(), self.state.numpy())
        cupy = _import_cupy()
        stream, index = torch.cuda.current_stream(self.device).cuda_stream, self.device.index
        with cupy.cuda.Device(index), cupy.cuda.ExternalStream(stream, index):
            return _record_views(cupy.from_dlpack(self.slots), cupy.from_dlpack(self.state))


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise MissingExtraError(
            "views of the ring need CuPy, which is not installed: pip install 'attn[gpu]'"
        ) from None
    return cupy


def _record_views(slots: Any, state: Any) -> RecordViews:
    """Fields of int32[capacity, 32] and int64[3], NumPy's or CuPy's."""
    fields = []
    for dtype, offset, *_ in (RECORD_DTYPE.fields or {}).values():
        columns = slots.view(dtype.base)[:, offset // dtype.base.itemsize :]
        fields.append(columns[:, : dtype.shape[0]] if dtype.shape else columns[:, 0])
    return RecordViews(*fields, *(state[i : i + 1] for i in (COMMITTED, CLAIMED)))


class Drain:
    """Reads a ring's records to the host, in order, each once or counted as dropped.

    The thread that runs the steps calls `mark` after a step; `poll`, from that thread or one other,
    returns what has arrived since. On a GPU a side stream waits for the marked step and copies to
    pinned memory. Only `flush` waits for the GPU, and the steps' stream never waits. CUDA forbids
    queries while a graph is captured: do not poll meanwhile.

    Attributes:
        received: records that were returned to the caller.
        dropped: records that were overwritten before they were read.
        torn: how many of the dropped ones were overwritten while they were copied.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.received = self.dropped = self.torn = 0
        self._number = 0  # of the next record to be read
        self._marked = False
        self._reading: Generator[None, None, NDArray[np.void]] | None = None
        self._side: torch.cuda.Stream | None = None
        on_gpu = ring.slots.is_cuda
        self._slots = torch.zeros(ring.slots.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._records = self._slots.numpy().view(RECORD_DTYPE)[:, 0]
        # `committed` before the slots were copied, `claimed` after.
        self._counters = torch.zeros(2, dtype=torch.int64, pin_memory=on_gpu)
        if on_gpu:
            self._side = torch.cuda.Stream(ring.device)
            self._step, self._arrived = torch.cuda.Event(), torch.cuda.Event()

    def mark(self) -> None:
        """Request the records of the steps launched so far on the current stream.

        Raises:
            OptionError: the current stream is being captured in a CUDA graph.
        """
        if self._side is not None:
            with torch.cuda.device_of(self.ring.slots):
                if torch.cuda.is_current_stream_capturing():
                    raise OptionError("mark a step after its CUDA graph is replayed, not inside it")
                self._step.record()
        self._marked = True

    def poll(self) -> NDArray[np.void]:
        """The records that have arrived: `RECORD_DTYPE`[n], a copy, oldest first."""
        parts: list[NDArray[np.void]] = []
        # Until a copy is on its way, or there is nothing to copy.
        while self._side is None or self._reading is None or self._arrived.query():
            if self._reading is None:
                if not self._marked:
                    break
                self._marked, self._reading = False, self._read()
            try:
                next(self._reading)
            except StopIteration as done:
                parts.append(done.value)
                self._reading = None
        # Without a dtype, NumPy would drop the padding between the fields.
        return np.concatenate([np.empty(0, RECORD_DTYPE), *parts], dtype=RECORD_DTYPE)

    def flush(self) -> NDArray[np.void]:
        """All records of the steps launched so far. It waits for them, so it is for the end."""
        self.mark()
        parts = [self.poll()]
        while self._marked or self._reading is not None:
            self._arrived.synchronize()
            parts.append(self.poll())
        return np.concatenate(parts, dtype=RECORD_DTYPE)

    def _read(self) -> Generator[None, None, NDArray[np.void]]:
        """Copy the records of the marked step; pauses while a copy is on its way."""
        capacity = self.ring.capacity
        if self._side is not None:
            self._side.wait_event(self._step)
        self._copy(self._counters[:1], self.ring.state[COMMITTED : COMMITTED + 1])
        yield
        committed = int(self._counters[0])
        overwritten = max(0, committed - capacity - self._number)
        self.dropped += overwritten
        self._number += overwritten
        count = committed - self._number
        if not count:
            return self._records[:0]
        first = self._number & (capacity - 1)
        to_end = min(count, capacity - first)
        self._copy(self._slots[:to_end], self.ring.slots[first : first + to_end])
        self._copy(self._slots[to_end:count], self.ring.slots[: count - to_end])
        self._copy(self._counters[1:], self.ring.state[CLAIMED : CLAIMED + 1])
        yield
        copied, numbers = self._records[:count], np.arange(self._number, committed)
        whole = copied["seq"] == numbers.astype(np.uint64) + 1
        whole &= numbers >= int(self._counters[1]) - capacity
        records = copied[whole]
        self._number = committed
        self.received += len(records)
        self.torn += count - len(records)
        self.dropped += count - len(records)
        return records

    def _copy(self, host: Tensor, device: Tensor) -> None:
        if self._side is None:
            host.copy_(device)
        elif len(host):
            with torch.cuda.stream(self._side):
                host.copy_(device, non_blocking=True)
            self._arrived.record(self._side)
