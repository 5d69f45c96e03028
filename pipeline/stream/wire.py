"""One message of the stream: an Arrow IPC stream of its own (DESIGN.md 7, docs/formats.md).

What comes from the network is not trusted. Arrow's reader believes lengths, offsets and indices, so
`decode` refuses what could make it allocate beyond the message (compression, casts of nested types,
dictionaries that grow) and validates every buffer before anyone reads one.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.errors import RecordError
from pipeline.record import SCHEMA, TEXT_BYTES

# Columns of a message, and messages (schema, dictionaries, batches) in a stream.
MAX_COLUMNS = 256
MAX_PARTS = 4_096
# What a sender says of itself in the schema's metadata, beside its sender_id: decimal text. Version
# 1 of the wire format had no `started` and no `rows_before`.
_NUMBERS = ("started", "seq", "rows_before", "dropped_total")
_SINCE_VERSION_2 = ("started", "rows_before")
_NUMBER = re.compile(rb"\d{1,19}")
# Slots of the tables in Arrow's Message.fbs and Schema.fbs.
_HEADER_TYPE, _HEADER = 1, 2
_ENDIANNESS = 0
_DICTIONARY_BATCH, _DICTIONARY_IS_DELTA = 1, 2
_COMPRESSION = 3


class TooManyRowsError(RecordError):
    """A stream with more rows than are accepted at once."""


class Message(NamedTuple):
    """One message of a sender.

    Args:
        batch: n rows with columns of `record.SCHEMA`, validated but not conformed: give it to
            `record.conform`, which casts what can be cast and rejects rows one by one.
        sender_id: who sent it; not empty.
        started: when the sender started, in microseconds since 1970: with `sender_id` it names one
            life of one sender. -1 where a sender of wire version 1 does not say.
        seq: number of this message among all that the sender handed over, from 0.
        rows_before: rows in all messages that it handed over before this one; -1 as `started`.
        dropped_total: rows that it had dropped, and never handed over, before this message.
    """

    batch: pa.RecordBatch
    sender_id: str
    started: int
    seq: int
    rows_before: int
    dropped_total: int


def encode(
    batch: pa.RecordBatch,
    *,
    sender_id: str,
    started: int,
    seq: int,
    rows_before: int,
    dropped_total: int,
) -> bytes:
    """A batch in `record.SCHEMA` as one message: schema with metadata, dictionaries, one batch.

    Args: see `Message`.
    """
    said = {
        "sender_id": sender_id,
        "started": str(started),
        "seq": str(seq),
        "rows_before": str(rows_before),
        "dropped_total": str(dropped_total),
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(said)) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode(message: bytes | memoryview, *, max_rows: int, max_bytes: int) -> Message:
    """The message in these bytes, which may be anything.

    Args:
        message: the batch views it without a copy, so it must not change afterwards.
        max_rows, max_bytes: the most that is accepted.

    Raises:
        RecordError: it is not one whole message of records; says why.
    """
    schema, (batch, *others) = _read(message, max_rows, max_bytes)
    if others:
        raise RecordError(f"the message has {1 + len(others)} batches: send one in each message")
    return Message(batch, *_sender(schema.metadata or {}))


def read_batches(
    data: bytes | memoryview, *, max_rows: int, max_bytes: int
) -> list[pa.RecordBatch]:
    """The batches of an Arrow IPC stream that need not say who sent it, such as a request's body.

    Args and errors: as of `decode`; `max_rows` is of all batches together.
    """
    return _read(data, max_rows, max_bytes)[1]


def _read(
    data: bytes | memoryview, max_rows: int, max_bytes: int
) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Schema and batches (at least one) of a stream, checked in full."""
    size = memoryview(data).nbytes
    if size > max_bytes:
        raise RecordError(f"the message has {size:,} bytes: send at most {max_bytes:,}")
    with _arrow_errors():
        buffer = pa.py_buffer(data)
        if buffer.address % 8:  # Arrow's arrays want their buffers aligned
            buffer = pa.py_buffer(bytes(data))
        _check_parts(buffer)
        with pa.ipc.open_stream(buffer) as reader:
            schema = reader.schema
        known = _known_columns(schema)
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=known)
        batches: list[pa.RecordBatch] = []
        rows = 0
        with pa.ipc.open_stream(buffer, options=options) as reader:
            for batch in reader:
                rows += batch.num_rows
                if rows > max_rows:
                    raise TooManyRowsError(
                        f"the message has {rows:,} rows: send at most {max_rows:,}"
                    )
                for field, column in zip(batch.schema, batch.columns, strict=True):
                    _validate(field.name, column, max_bytes)
                batches.append(batch.replace_schema_metadata(None))
    if not batches:
        raise RecordError("the message has no batch of records")
    return schema, batches


@contextmanager
def _arrow_errors() -> Iterator[None]:
    """Turn all that damaged bytes make Arrow raise into a RecordError."""
    try:
        yield
    # ArrowException is the base of Arrow's own; the others are those that it raises as Python's:
    # OSError a stream that ends early, LookupError an unknown dictionary, ValueError text.
    except (pa.ArrowException, OSError, LookupError, MemoryError, OverflowError, struct.error,
            ValueError) as error:  # fmt: skip
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RecordError(
            f"not a message of records ({reason}): send one whole Arrow IPC stream"
        ) from None


# Before Arrow reads it ----------------------------------------------------------------------------


def _check_parts(stream: pa.Buffer) -> None:
    """Refuse a stream whose parts would be decompressed, swapped or joined as they are read."""
    source = pa.BufferReader(stream)
    parts = 0
    for part in _parts(source):
        parts += 1
        if parts > MAX_PARTS:
            raise RecordError(f"the message has more than {MAX_PARTS:,} parts")
        root = _Table.root(memoryview(part.metadata))
        header = root.table(_HEADER)
        if header is None or (part.type == "schema") != (parts == 1):
            raise RecordError("the message does not begin with its one schema")
        if part.type == "schema":
            if header.number(_ENDIANNESS, "<h") != (sys.byteorder == "big"):
                raise RecordError("the message is of the other byte order: send little-endian")
            continue
        if part.type == "dictionary":
            if header.number(_DICTIONARY_IS_DELTA, "<B"):
                raise RecordError("the message has a dictionary delta: send whole dictionaries")
            header = header.table(_DICTIONARY_BATCH)
        elif part.type != "record batch":
            raise RecordError(f"the message has a {part.type}: send a batch of records")
        if header is None or header.table(_COMPRESSION) is not None:
            raise RecordError("the message is compressed: send it without compression")
    if source.tell() != stream.size:
        raise RecordError("the message goes on after its end: send one stream in each message")


def _parts(source: pa.NativeFile) -> Iterator[pa.ipc.Message]:
    """The parts of a stream; Arrow has verified the FlatBuffers in them."""
    reader = pa.ipc.MessageReader.open_stream(source)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


class _Table(NamedTuple):
    """A table in a FlatBuffer, of which pyarrow shows too little."""

    data: memoryview
    at: int

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def _field(self, slot: int) -> int | None:
        """Where the value of a slot stands; None for a default."""
        vtable = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        if 4 + 2 * slot >= struct.unpack_from("<H", self.data, vtable)[0]:
            return None
        offset: int = struct.unpack_from("<H", self.data, vtable + 4 + 2 * slot)[0]
        return self.at + offset if offset else None

    def number(self, slot: int, kind: str) -> int:
        at = self._field(slot)
        return 0 if at is None else int(struct.unpack_from(kind, self.data, at)[0])

    def table(self, slot: int) -> _Table | None:
        at = self._field(slot)
        if at is None:
            return None
        return _Table(self.data, at + struct.unpack_from("<I", self.data, at)[0])


# Its columns --------------------------------------------------------------------------------------


def _known_columns(schema: pa.Schema) -> list[int]:
    """The numbers of the columns of a record.

    A column that is none is left out, so that a newer sender's may be; one that may not be null is
    refused, as its sender says that a record is nothing without it.
    """
    if schema.equals(SCHEMA):
        return list(range(len(SCHEMA)))
    if len(schema) > MAX_COLUMNS:
        raise RecordError(f"the message has {len(schema):,} columns: send at most {MAX_COLUMNS}")
    known = {}
    for number, field in enumerate(schema):
        if field.name not in SCHEMA.names:
            if not field.nullable:
                raise RecordError(
                    f"column {_shown(field.name)} is required and unknown: upgrade the receiver"
                )
            continue
        if field.name in known:
            raise RecordError(f"column {field.name!r} occurs twice")
        if not _castable(field.type, SCHEMA.field(field.name).type):
            raise RecordError(
                f"column {field.name!r} holds {_shown(field.type)}, not "
                f"{SCHEMA.field(field.name).type}"
            )
        known[field.name] = number
    for field in SCHEMA:
        if field.name not in known and not field.nullable:
            raise RecordError(f"column {field.name!r} is missing")
    return list(known.values())


def _shown(what: object) -> str:
    text = str(what)
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _castable(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a type may become those of a record's field, in bounded memory."""
    if pa.types.is_null(kind):
        return True
    if pa.types.is_string(wanted) or pa.types.is_dictionary(wanted):
        return _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)
    if pa.types.is_list(wanted) or pa.types.is_fixed_size_list(wanted):
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return (lists or pa.types.is_fixed_size_list(kind)) and _is_number(kind.value_type)
    return _is_number(kind) or pa.types.is_timestamp(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _validate(name: str, column: pa.Array, max_bytes: int) -> None:
    """Refuse a column whose lengths, offsets, indices or nulls contradict its buffers.

    Text is not checked to be UTF-8: `record.conform` rejects such rows one by one.

    Raises:
        RecordError, ArrowInvalid: it is damaged.
    """
    if pa.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        texts = column.dictionary
        _validate(name, texts, max_bytes)
        bounds = pc.min_max(column.indices)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        if low is not None and not 0 <= low <= high < len(texts):
            raise RecordError(f"column {name!r} is damaged: an index is outside its dictionary")
        # A cast writes the text of every row. Nearly always all texts together are short.
        if texts.nbytes <= TEXT_BYTES:
            return
        longest = pc.max(pc.binary_length(texts)).as_py() or 0
        if longest > TEXT_BYTES and longest * len(column) > max_bytes:
            raise RecordError(f"column {name!r} has {len(column):,} texts of {longest:,} bytes")
    elif _is_text(column.type):
        column.validate()
        large = pa.types.is_large_string(column.type)
        column.view(pa.large_binary() if large else pa.binary()).validate(full=True)
    else:
        column.validate(full=True)


# Its sender ---------------------------------------------------------------------------------------


def _sender(metadata: dict[bytes, bytes]) -> tuple[str, int, int, int, int]:
    """sender_id, started, seq, rows_before and dropped_total of a message."""
    try:
        sender_id = metadata[b"sender_id"].decode()
    except KeyError:
        raise RecordError("the message does not say its sender_id") from None
    except UnicodeDecodeError:
        raise RecordError("the message's sender_id is not UTF-8") from None
    if not 0 < len(metadata[b"sender_id"]) <= TEXT_BYTES:
        raise RecordError(f"the message's sender_id is empty or longer than {TEXT_BYTES:,} bytes")
    version_1 = not any(name.encode() in metadata for name in _SINCE_VERSION_2)
    found = []
    for name in _NUMBERS:
        if version_1 and name in _SINCE_VERSION_2:
            found.append(-1)
            continue
        text = metadata.get(name.encode(), b"")
        if not _NUMBER.fullmatch(text) or int(text) >= 1 << 63:
            raise RecordError(f"the message does not say its {name}, a number from 0 to 2^63 - 1")
        found.append(int(text))
    started, seq, rows_before, dropped_total = found
    return sender_id, started, seq, rows_before, dropped_total
