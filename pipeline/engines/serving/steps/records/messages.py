"""What the model's process and the one that makes its records say to each other, over two pipes.

A message to the worker is a header of two lengths, MessagePack, and float32 numbers; one from it is
a header of one length, and MessagePack.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from pipeline.engines.serving.sinks import Counts

# Bytes of MessagePack, and of the numbers that follow.
TO_WORKER = struct.Struct("<QQ")
FROM_WORKER = struct.Struct("<Q")


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message: where records go, as `open_sink` takes it, and their layout."""

    sidecar_url: str | None
    store: str | None
    curve_keys: str | None
    layout: int


class RowGroup(msgspec.Struct, array_like=True):
    """R rows of a step, each with L layers; their columns float32[L, R, 32] are the next numbers of
    the message. Each other list is of R. request: numbers of collectors; the rest as in
    `collect.RecordedRows`."""

    layers: int
    at: datetime
    request: Sequence[int]
    position: Sequence[int]
    token: Sequence[int | None]
    phase: Sequence[str]
    experts: Sequence[list[int] | None]
    entropy: Sequence[float | None]


class Rows(msgspec.Struct, tag=True, array_like=True):
    """Rows of some steps. over: numbers of requests that no row from here on is of; begun: of
    those that a row is of for the first time, encoded `RequestCollector.common` by number."""

    over: list[int]
    begun: dict[int, msgspec.Raw]
    groups: list[RowGroup]


class Close(msgspec.Struct, tag=True, array_like=True):
    """The last message. seconds: that the worker has to deliver what waits."""

    seconds: float


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The sink can be used."""


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The sink cannot be used, and why in a line. kind: of the error, a name of
    `capture_kernels.errors`."""

    kind: str
    reason: str


class Line(msgspec.Struct, tag=True, array_like=True):
    """A line of a log, as `logging` has its fields."""

    logger: str
    level: int
    text: str


class Progress(msgspec.Struct, tag=True, array_like=True):
    """What became of rows so far. taken: those that were made to records, or have no key to
    describe."""

    taken: int
    counts: Counts


ToWorker = Start | Rows | Close
FromWorker = Ready | Refused | Line | Progress


def _plain(value: Any) -> Any:
    """Numbers of NumPy as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
encode = _ENCODER.encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


class Packed(NamedTuple):
    """A message to the worker as it is written. rows: in it; unsendable: rows that were left out,
    as their requests cannot be encoded."""

    buffers: list[memoryview]
    rows: int = 0
    unsendable: int = 0


def packed(message: ToWorker, columns: Sequence[Any] = ()) -> list[memoryview]:
    """The bytes of a message. columns: its numbers, C-contiguous float32 arrays."""
    head = encode(message)
    # Without rows or layers an array has no bytes, and memoryview cannot cast it.
    numbers = [memoryview(each).cast("B") for each in columns if each.size]
    sizes = TO_WORKER.pack(len(head), sum(each.nbytes for each in numbers))
    return [memoryview(sizes + head), *numbers]
