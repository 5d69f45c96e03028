"""Messages of the stream: what `encode` makes, and what `decode` makes of anything else."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fuzzing import mutated
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import RecordError
from pipeline import record
from pipeline.stream import wire

GOLDEN = Path(__file__).parents[1] / "golden"
SENDER = {
    "sender_id": "host-1:4242", "started": 1_767_225_600_000_000, "seq": 7, "rows_before": 1_792,
    "dropped_total": 3,
}  # fmt: skip
LIMITS = {"max_rows": 1_000, "max_bytes": 1 << 20}
PATIENCE_S = 20.0


def message(batch: pa.RecordBatch, metadata: dict[str, str] | None = None, **options) -> bytes:
    """Any batch as a stream with any metadata, as `encode` would not make it."""
    said = {name: str(value) for name, value in SENDER.items()} if metadata is None else metadata
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(said), options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_column(batch: pa.RecordBatch, name: str, values: pa.Array, nullable=True):
    field = pa.field(name, values.type, nullable)
    if name not in batch.schema.names:
        return batch.append_column(field, values)
    return batch.set_column(batch.schema.get_field_index(name), field, values)


@pytest.mark.parametrize("rows", [0, 1, 997])
def test_a_message_comes_back_as_it_was_sent(records, rows):
    sent = records(rows)
    found = wire.decode(wire.encode(sent, **SENDER), **LIMITS)
    assert found.batch.equals(sent)
    assert found._asdict() == {"batch": found.batch, **SENDER}
    assert record.conform(found.batch).rejected == {}


def test_a_slice_of_a_batch_is_sent_alone(records):
    whole = records(900)
    data = wire.encode(whole.slice(300, 5), **SENDER)
    assert len(data) < 8_000
    assert wire.decode(data, **LIMITS).batch.to_pylist() == whole.slice(300, 5).to_pylist()


def test_vectors_are_views_of_the_message_wherever_it_stands(records):
    data = wire.encode(records(50), **SENDER)
    for shift in range(8):  # ZMQ hands over memory at any address
        held = bytearray(shift) + data
        batch = wire.decode(memoryview(held)[shift:], **LIMITS).batch
        vectors = record.vectors(batch)
        assert vectors.flags.aligned
        assert np.array_equal(vectors, record.vectors(records(50)))


def test_a_message_of_version_1_says_less_of_its_sender():
    found = wire.decode((GOLDEN / "wire_v1.arrow").read_bytes(), **LIMITS)
    assert found[1:] == ("host-1:4242", -1, 7, -1, 3)
    assert found.batch.num_rows == 3


def test_columns_that_a_newer_sender_adds_are_left_out(records):
    newer = with_column(records(3), "colour", pa.array([["red"], [], None]))
    found = wire.decode(message(newer), **LIMITS)
    assert found.batch.equals(records(3))
    required = with_column(records(3), "colour", pa.array(["red"] * 3), nullable=False)
    with pytest.raises(RecordError, match="'colour' is required and unknown: upgrade"):
        wire.decode(message(required), **LIMITS)


def test_columns_that_may_be_null_may_be_missing(records):
    names = [field.name for field in record.SCHEMA if not field.nullable]
    batch = records(3).select(names)
    found = record.conform(wire.decode(wire.encode(batch, **SENDER), **LIMITS).batch)
    assert found.rejected == {}
    assert found.batch.select(names).equals(batch)


def test_rows_that_are_no_records_do_not_take_the_others_along(records):
    texts = pa.array([b"\xff", b"chat", b"x" * 1_025]).view(pa.string())
    vectors = record.vectors(records(3)).copy()
    found = wire.decode(message(records(3, session_id=texts)), **LIMITS)
    rejected = record.conform(found.batch).rejected
    assert rejected == {"session_id: not UTF-8": 1, "session_id: longer than 1,024 bytes": 1}
    vectors[2, 0] = np.nan
    found = wire.decode(message(records(3, vector=vectors)), **LIMITS)
    assert record.conform(found.batch).rejected == {"NaN or infinity": 1}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("position", pa.array([0, 1, 2], pa.int64())),
        ("model", pa.array(["a", "b", "a"], pa.large_string())),
        ("request_id", pa.array(["a", "b", "a"]).dictionary_encode()),
        ("phase", pa.array(["think"] * 3).dictionary_encode().cast(
            pa.dictionary(pa.int8(), pa.large_string()))),
        ("session_id", pa.nulls(3)),
        ("captured_at", pa.array([1_767_225_600_000] * 3, pa.timestamp("ms"))),
        ("vector", pa.array([[0.5] * 20] * 3, pa.list_(pa.float64()))),
        ("top_experts", pa.array([[1], [], None], pa.large_list(pa.int64()))),
    ],
)  # fmt: skip
def test_types_that_can_be_cast_are_taken(records, name, values):
    batch = wire.decode(message(with_column(records(3), name, values)), **LIMITS).batch
    assert batch.column(name).to_pylist() == values.to_pylist()
    rejected = sum(record.conform(batch).rejected.values())
    assert rejected == (3 if name == "vector" else 0)  # twenty halves are no shares


def several(batch: pa.RecordBatch, times: int, **options) -> bytes:
    sink = pa.BufferOutputStream()
    schema = batch.schema.with_metadata({k: str(v) for k, v in SENDER.items()})
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for number in range(times):
            models = pa.array([f"model-{n}" for n in range(number + 1)] * batch.num_rows)
            model = models.slice(0, batch.num_rows).dictionary_encode()
            grown = pa.DictionaryArray.from_arrays(
                model.indices, pa.array([f"model-{n}" for n in range(number + 1)])
            )
            writer.write_batch(with_column(batch, "model", grown, nullable=False))
    return sink.getvalue().to_pybytes()


def test_a_body_may_have_several_batches_and_new_dictionaries(records):
    found = wire.read_batches(several(records(3), 4), **LIMITS)
    assert [batch.num_rows for batch in found] == [3] * 4
    assert found[3].column("model").dictionary.to_pylist() == [f"model-{n}" for n in range(4)]
    with pytest.raises(RecordError, match="has 12 rows: send at most 11"):
        wire.read_batches(several(records(3), 4), max_rows=11, max_bytes=1 << 20)
    with pytest.raises(RecordError, match="has 4 batches: send one in each message"):
        wire.decode(several(records(3), 4), **LIMITS)


BOMB = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000, pa.int32()), pa.array(["x" * 100_000]))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda b: b"", "not a message of records|no batch of records"),
        (lambda b: b"hello", "not a message of records"),
        (lambda b: message(b)[:-300], "not a message of records"),
        (lambda b: message(b) * 2, "goes on after its end"),
        (lambda b: message(b) + b"x", "goes on after its end"),
        (lambda b: bytes((1 << 20) + 1), "send at most 1,048,576"),
        (lambda b: message(b, compression="zstd"), "is compressed: send it without compression"),
        (lambda b: message(b, compression="lz4"), "is compressed: send it without compression"),
        (lambda b: several(b, 4, emit_dictionary_deltas=True), "has a dictionary delta"),
        (lambda b: several(b, 0), "no batch of records"),
        (lambda b: message(b.select(["request_id"])), "column 'position' is missing"),
        (lambda b: message(b.append_column("layer", b.column("layer"))), "'layer' occurs twice"),
        (lambda b: message(pa.record_batch({str(n): [n] for n in range(300)})), "300 columns"),
        (lambda b: message(with_column(b, "vector", pa.array([{"x": 1}] * 1_000))), "'vector' hol"),
        (lambda b: message(with_column(b, "phase", pa.array([1] * 1_000))), "'phase' holds 'int64"),
        (lambda b: message(with_column(b, "request_id", BOMB)), "1,000 texts of 100,000 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_one_clear_line(records, make, problem):
    with pytest.raises(RecordError, match=problem) as raised:
        wire.decode(make(records(1_000)), **LIMITS)
    assert "\n" not in str(raised.value)


def test_a_stream_of_many_empty_batches_is_refused(records):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, record.SCHEMA) as writer:
        for _ in range(wire.MAX_PARTS):
            writer.write_batch(records(0))
    with pytest.raises(RecordError, match="more than 4,096 parts"):
        wire.read_batches(sink.getvalue(), max_rows=1, max_bytes=1 << 24)


def test_a_batch_of_too_many_rows_is_refused(records):
    data = wire.encode(records(11), **SENDER)
    with pytest.raises(RecordError, match="has 11 rows: send at most 10"):
        wire.decode(data, max_rows=10, max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("sender_id", None, "does not say its sender_id"),
        ("sender_id", "", "empty or longer"),
        ("sender_id", "x" * 1_025, "empty or longer"),
        ("sender_id", b"\xff", "not UTF-8"),
        *((name, value, f"does not say its {name}, a number")
          for name in ("started", "seq", "rows_before", "dropped_total")
          for value in (None, "", "-1", "1.5", "1_000", " 7", "9" * 19, "9" * 5_000, "٣")),
    ],
)  # fmt: skip
def test_a_sender_that_does_not_say_who_it_is_is_refused(records, name, value, problem):
    said = {key: str(one) for key, one in SENDER.items()} | {name: value}
    said = {key: one for key, one in said.items() if one is not None}
    with pytest.raises(RecordError, match=problem):
        wire.decode(message(records(3), said), **LIMITS)


def test_a_length_that_claims_memory_gets_none(records):
    """Every 4 and 8 bytes of a message replaced by large lengths, in 2 GiB of address space."""
    code = """
import resource, sys
import pyarrow as pa
from capture_kernels.errors import RecordError
from pipeline import record
from pipeline.stream import wire
data = sys.stdin.buffer.read()
size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open("/proc/self/statm") as file:
    virtual = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (virtual + (1 << 28), virtual + (1 << 28)))
for at in range(0, len(data) - 8, 4):
    for value in (b"\\xff\\xff\\xff\\x7f", (1 << 40).to_bytes(8, "little"), b"\\xff" * 8):
        bad = data[:at] + value + data[at + len(value):]
        try:
            message = wire.decode(bad, max_rows=1_000, max_bytes=1 << 20)
            record.conform(message.batch)
        except RecordError as error:
            assert "alloc" not in str(error), (at, value, error)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size
assert grown < 64 * 1024, grown
"""
    data = wire.encode(records(7), **SENDER)
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, timeout=300,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stderr.decode()) == (0, "")


def take(data: bytes) -> None:
    """Decode and read all of it, as a receiver does."""
    try:
        found = wire.decode(data, **LIMITS)
        batch, rejected = record.conform(found.batch)
    except RecordError as error:
        assert "\n" not in str(error)
        return
    assert batch.num_rows + sum(rejected.values()) == found.batch.num_rows
    assert np.isfinite(record.vectors(batch)).all()
    assert len(batch.to_pylist()) == batch.num_rows


def other_types(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same records in other types than the schema's, beside a column that is no record's."""
    batch = with_column(batch, "model", batch.column("model").cast(pa.large_string()))
    ids = batch.column("request_id").dictionary_encode()
    lists = batch.column("vector").cast(pa.large_list(pa.float64()))
    batch = with_column(with_column(batch, "request_id", ids), "vector", lists)
    return with_column(batch, "colour", pa.array([[{"a": ["red"]}]] * batch.num_rows))


def overwritten(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to three of its aligned numbers replaced."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        size = rng.choice([4, 8])
        at = rng.randrange(len(made) // 4) * 4
        number = rng.choice([-1, 0, 1, rng.randrange(64), 1 << 31, 1 << 40, rng.getrandbits(63)])
        made[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(made)


@pytest.mark.parametrize(
    "seeds", [range(400), pytest.param(range(400, 2_500), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("how", [mutated, overwritten])
def test_damaged_messages_are_refused_or_judged_row_by_row(records, how, seeds):
    messages = [wire.encode(records(40), **SENDER), message(other_types(records(40)))]
    for seed in seeds:
        rng = random.Random(seed)
        began = time.monotonic()
        try:
            take(how(rng.choice(messages), rng))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert time.monotonic() - began < PATIENCE_S, seed


@given(st.binary(max_size=200), st.integers(0, 4_000), st.integers(0, 60))
def test_any_bytes_put_anywhere_are_refused_or_judged_row_by_row(records, put, at, cut):
    data = wire.encode(records(4), **SENDER)
    take(data[:at] + put + data[at + cut :])
    take(put)
