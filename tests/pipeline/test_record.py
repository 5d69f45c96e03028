"""The record: its schema as written down in a golden file, and what `conform` makes of others."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from shared import NOW

from capture_kernels.errors import RecordError
from capture_kernels.fingerprint.vector import Layout
from pipeline import record
from pipeline.store.open import open_store
from pipeline.stream.wire import decode

GOLDEN = Path(__file__).parents[1] / "golden"
# What the golden file holds, spelt out: never to be made from code that is being tested.
VECTORS = [
    [0.1875, 0.3125, 0.5, 0.25] + [0.0625] * 16,
    [1.0, 0.0, 0.0, 0.0, 1.0] + [0.0] * 15,
    [0.0, 0.25, 0.75, 0.984375] + [0.25, 0.0] * 4 + [0.125, 0.0] * 4,
]
EXPECTED = [
    {
        "request_id": "chat-1", "session_id": "anna", "position": 12, "prompt_len": 12,
        "layer": -1, "captured_at": datetime(2026, 1, 10, 4, 2, 11, 123456, UTC),
        "model": "demo", "capture_id": "0123456789ab", "layout": 1, "phase": "output",
        "token_id": 42, "sink_mass": 0.25, "top_experts": [3, 0, 127], "router_entropy": 0.5,
        "vector": VECTORS[0],
    },
    {
        "request_id": "chat-1", "session_id": "anna", "position": 13, "prompt_len": 12,
        "layer": 5, "captured_at": datetime(2026, 1, 10, 4, 2, 11, 123457, UTC),
        "model": "demo", "capture_id": "0123456789ab", "layout": 1, "phase": "think",
        "token_id": 0, "sink_mass": 0.0, "top_experts": [], "router_entropy": 0.0,
        "vector": VECTORS[1],
    },
    {
        "request_id": "ü", "session_id": None, "position": 2147483647, "prompt_len": None,
        "layer": 32767, "captured_at": datetime(2099, 12, 31, 23, 59, 59, 999999, UTC),
        "model": "other", "capture_id": "ba9876543210", "layout": 2, "phase": "prompt",
        "token_id": None, "sink_mass": None, "top_experts": None, "router_entropy": None,
        "vector": VECTORS[2],
    },
]  # fmt: skip


# Version 2 added two columns. A record of version 1 has nulls in them.
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ADDED = [("chatcmpl-7", TRACEPARENT), ("chatcmpl-7", None), (None, None)]
EXPECTED_2 = [
    row | {"response_id": response, "traceparent": trace}
    for row, (response, trace) in zip(EXPECTED, ADDED, strict=True)
]
EXPECTED_1 = [row | {"response_id": None, "traceparent": None} for row in EXPECTED]


def golden(version: int) -> pa.RecordBatch:
    with pa.ipc.open_stream((GOLDEN / f"record_v{version}.arrow").read_bytes()) as reader:
        return reader.read_next_batch()


def test_records_of_version_1_still_read_the_same():
    batch = golden(1)
    assert batch.to_pylist() == EXPECTED
    assert record.conform(batch).batch.to_pylist() == EXPECTED_1
    assert record.vectors(batch).tolist() == VECTORS


def test_records_of_version_2_still_read_the_same():
    batch = golden(2)
    assert batch.to_pylist() == EXPECTED_2
    assert batch.schema.equals(record.SCHEMA, check_metadata=True)
    assert record.conform(batch).batch.equals(batch)
    assert record.vectors(batch).tolist() == VECTORS


def test_a_message_of_version_1_is_a_stream_of_records_that_says_who_sent_it():
    # One message: an Arrow stream of its own, whose schema says who sent it (DESIGN.md section 7).
    with pa.ipc.open_stream((GOLDEN / "wire_v1.arrow").read_bytes()) as reader:
        batch = reader.read_next_batch()
        with pytest.raises(StopIteration):
            reader.read_next_batch()
    sent = {b"sender_id": b"host-1:4242", b"seq": b"7", b"dropped_total": b"3"}
    assert batch.schema.metadata == sent
    conformed = record.conform(batch)
    assert conformed.rejected == {}
    assert conformed.batch.to_pylist() == EXPECTED_1
    assert conformed.batch.schema.equals(record.SCHEMA, check_metadata=True)


def test_a_message_of_version_2_says_when_its_sender_started_and_what_came_before():
    data = (GOLDEN / "wire_v2.arrow").read_bytes()
    found = decode(data, max_rows=3, max_bytes=len(data))
    assert found.batch.to_pylist() == EXPECTED_2
    assert found[1:] == ("host-1:4242", 1_768_017_731_123_456, 7, 1_792, 3)


@pytest.mark.parametrize(("version", "expected"), [(1, EXPECTED_1), (2, EXPECTED_2)])
def test_records_of_every_version_can_be_stored(store, version, expected):
    assert store.append(golden(version)).inserted == 3
    found = [row for batch in store.scan() for row in batch.to_pylist()]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("name", ["store_v1.db", "store_v1"])
@pytest.mark.parametrize("read_only", [True, False])
def test_stores_of_version_1_are_read_and_written(tmp_path, name, read_only):
    golden_store, path = GOLDEN / name, tmp_path / name
    copy = shutil.copytree if golden_store.is_dir() else shutil.copy
    copy(golden_store, path)
    with open_store(path, read_only=read_only) as store:
        for _ in range(2):
            found = [row for batch in store.scan() for row in batch.to_pylist()]
            assert sorted(found, key=str) == sorted(EXPECTED_1, key=str)
            for names in (["response_id"], ["traceparent", "position"]):
                rows = [row for batch in store.scan(columns=names) for row in batch.to_pylist()]
                expected = [{name: row[name] for name in names} for row in EXPECTED_1]
                assert sorted(rows, key=str) == sorted(expected, key=str)
            assert store.verify().is_good
    if read_only:
        return
    later = record.conform(golden(2)).batch
    index = later.schema.get_field_index("request_id")
    later = later.set_column(index, later.schema.field(index), pa.array(["a", "b", "c"]))
    with open_store(path) as store:
        assert store.append(golden(2)).inserted + store.append(later).inserted in (3, 6)
        store.compact()
        found = [row for batch in store.scan() for row in batch.to_pylist()]
        assert sorted(found, key=str) == sorted([*EXPECTED_1, *later.to_pylist()], key=str)
        assert store.verify().is_good


@pytest.mark.parametrize("count", [0, 1, 997])
def test_a_batch_in_the_schema_conforms_as_it_is(records, count):
    conformed = record.conform(records(count))
    assert conformed.batch.to_pylist() == records(count).to_pylist()
    assert conformed.rejected == {}


def test_other_types_are_cast(records):
    batch = records(90)
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns |= {
        "position": batch.column("position").cast(pa.int64()),
        "model": batch.column("model").cast(pa.string()),
        "captured_at": batch.column("captured_at").cast(pa.timestamp("ns", tz="UTC")),
        "vector": batch.column("vector").cast(pa.list_(pa.float32())),
        "layout": batch.column("layout").cast(pa.int32()),
    }
    assert record.conform(pa.table(columns)).batch.to_pylist() == batch.to_pylist()


def test_vectors_of_lists_of_any_length_are_sorted_out(records):
    batch = records(6)
    lists = record.vectors(batch).tolist()
    lists[1], lists[2], lists[4] = [0.5], None, lists[4] + [0.5]
    index = batch.schema.get_field_index("vector")
    other = batch.set_column(index, "vector", pa.array(lists, pa.list_(pa.float64())))
    conformed = record.conform(other)
    assert conformed.rejected == {"wrong length": 3}
    assert conformed.batch.to_pylist() == [batch.to_pylist()[n] for n in (0, 3, 5)]


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("phase", pa.array(["prompt", "dream", None]), {"unknown phase": 1, "missing value": 1}),
        ("layout", pa.array([1, 3, None], pa.uint8()), {"unknown layout": 1, "missing value": 1}),
        ("layer", pa.array([-1, -2, None], pa.int16()), {"layer below -1": 1, "missing value": 1}),
        ("position", pa.array([0, -1, None], pa.int32()),
         {"negative position": 1, "missing value": 1}),
        ("model", pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int32()),
                                                 pa.array(["m", None])), {"missing value": 1}),
        ("request_id", pa.array(["a", None, "b"]), {"missing value": 1}),
    ],
)  # fmt: skip
def test_rows_that_are_no_records_are_counted_by_reason(records, name, values, reason):
    batch = records(3)
    columns = {n: batch.column(n) for n in batch.schema.names} | {name: values}
    conformed = record.conform(pa.table(columns))
    assert conformed.rejected == reason
    assert conformed.batch.num_rows == 3 - sum(reason.values())
    assert conformed.batch.schema == record.SCHEMA


LOG16, LAYERED = VECTORS[0], VECTORS[2]


@pytest.mark.parametrize("size", [1e-3, 1e3, 1e20, 3.4e38])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("at", range(20))
@pytest.mark.parametrize("layout", [1, 2])
def test_a_number_that_no_attention_has_is_rejected(records, layout, at, sign, size):
    whole = np.array([VECTORS[0], VECTORS[2]][layout - 1], np.float32)
    vectors = np.stack([whole] * 3)
    vectors[1, at] += sign * size
    found = record.conform(records(3, vector=vectors, layout=layout))
    possible = size < 1 and 0 <= vectors[1, at] <= 1 and (at == 3 or (layout == 2 and at > 11))
    assert sum(found.rejected.values()) == (not possible)
    assert found.batch.num_rows == 2 + possible


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", range(20))
def test_nan_and_infinity_are_rejected_wherever_they_stand(records, at, bad):
    vectors = np.array([LOG16] * 3, np.float32)
    vectors[1, at] = bad
    assert record.conform(records(3, vector=vectors, layout=1)).rejected == {"NaN or infinity": 1}


def times(*text: str) -> pa.Array:
    return pa.array(np.array(text, "datetime64[us]")).cast(pa.timestamp("us", tz="UTC"))


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("captured_at", times("0001-01-01", "1999-12-31T23:59:59.999999", "2000-01-01"),
         "captured_at outside the years 2000 to 2099"),
        ("captured_at", times("2100-01-01", "2099-12-31T23:59:59.999999", "9999-12-31"),
         "captured_at outside the years 2000 to 2099"),
        ("captured_at", pa.array([-(2**63), 2**63 - 1, 1_767_225_600_000_000]).view(
            pa.timestamp("us", tz="UTC")), "captured_at outside the years 2000 to 2099"),
        ("sink_mass", pa.array([-0.01, None, 1.01], pa.float32()), "sink_mass outside 0 to 1"),
        ("sink_mass", pa.array([np.nan, 0.5, np.inf], pa.float32()), "sink_mass outside 0 to 1"),
        ("router_entropy", pa.array([np.nan, 7, -1], pa.float32()),
         "router_entropy negative or not finite"),
        ("token_id", pa.array([-1, None, -(2**31)], pa.int32()), "negative token_id"),
        ("prompt_len", pa.array([-1, 0, -7], pa.int32()), "negative prompt_len"),
        ("top_experts", pa.array([[3, None], None, [None]], pa.list_(pa.int16())),
         "null in top_experts"),
        ("top_experts", pa.array([[7], [None], [1], [None, 2], []], pa.list_(pa.int16()))[1:4],
         "null in top_experts"),
        *((name, pa.array(["x" * 1_025, "x" * 1_024, "ü" * 600]),
           f"{name}: longer than 1,024 bytes")
          for name in ("request_id", "session_id", "model", "capture_id", "response_id")),
        *((name, pa.array([b"\xff", b"ok", b"half \xc3"]).view(pa.string()), f"{name}: not UTF-8")
          for name in ("request_id", "session_id", "model", "capture_id", "response_id")),
    ],
)  # fmt: skip
def test_values_that_no_capture_records_are_rejected(records, name, values, reason):
    found = record.conform(records(3, **{name: values}))
    assert found.rejected == {reason: 2}
    assert found.batch.num_rows == 1
    assert found.batch.column(name).null_count == values.null_count


BAD_TRACES = [
    "", "00", TRACEPARENT.upper(), TRACEPARENT + "-00", " " + TRACEPARENT, TRACEPARENT + "\n",
    "01" + TRACEPARENT[2:], "ff" + TRACEPARENT[2:], TRACEPARENT.replace("4bf9", "xbf9"),
    "00-" + "0" * 32 + TRACEPARENT[35:], TRACEPARENT[:36] + "0" * 16 + "-01",
    TRACEPARENT.replace("-", "_"), TRACEPARENT[:-1], "ü" * 55,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_TRACES)
def test_a_traceparent_that_w3c_does_not_know_rejects_its_row(records, bad):
    traces = pa.array([TRACEPARENT, bad, None, bad, TRACEPARENT.replace("-01", "-ff")])
    found = record.conform(records(5, traceparent=traces))
    assert found.rejected == {"traceparent: not 00-<32 hex>-<16 hex>-<2 hex>": 2}
    kept = found.batch.column("traceparent").to_pylist()
    assert kept == [TRACEPARENT, None, TRACEPARENT[:-2] + "ff"]


def test_one_bad_row_of_many_of_both_layouts_is_found(records):
    count = 10_007
    batch = records(count)
    vectors = record.vectors(batch).copy()
    vectors[5_003, 7] = 1e10
    found = record.conform(records(count, vector=vectors))
    assert found.rejected == {"share outside 0 to 1": 1}
    keep = np.arange(count) != 5_003
    assert np.array_equal(record.vectors(found.batch), vectors[keep])


def test_a_dictionary_that_is_too_short_is_one_error(records):
    short = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 8], pa.int32()), pa.array(["a", "b"]), safe=False
    )
    batch = records(3)
    columns = {name: batch.column(name) for name in batch.schema.names}
    with pytest.raises(RecordError, match="'model' is damaged"):
        record.conform(pa.table(columns | {"model": short}))


def test_a_row_with_several_faults_is_counted_once(records):
    vectors = np.full((2, 20), np.nan, np.float32)
    batch = records(2, vector=vectors, position=pa.array([-1, -1], pa.int32()))
    assert record.conform(batch).rejected == {"NaN or infinity": 2}


def test_a_column_that_cannot_be_read_is_said(records):
    batch = records(2)
    columns = {n: batch.column(n) for n in batch.schema.names}
    with pytest.raises(RecordError, match="'position' cannot be cast to int32"):
        record.conform(pa.table(columns | {"position": pa.array(["one", "two"])}))
    with pytest.raises(RecordError, match="'vector' must hold lists"):
        record.conform(pa.table(columns | {"vector": pa.array([1.0, 2.0])}))
    with pytest.raises(RecordError, match="'layer' cannot be cast to int16") as refused:
        record.conform(pa.table(columns | {"layer": pa.array(["1", "line\n" * 999])}))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    for lists in ([["a\nb"] * 20, ["1"] * 20], [[{"a": 1}] * 20] * 2, [[NOW] * 20] * 2):
        with pytest.raises(RecordError, match="'vector' must hold lists of numbers: ") as refused:
            record.conform(pa.table(columns | {"vector": pa.array(lists)}))
        assert "\n" not in str(refused.value)
    with pytest.raises(RecordError, match="unknown column 'colour'"):
        record.make_batch({"colour": "red"}, 1)
    with pytest.raises(RecordError, match="'request_id' is missing"):
        record.make_batch({}, 1)


def test_vectors_are_seen_without_a_copy(records):
    rows = np.random.default_rng(0).random((50, 20), np.float32)
    batch = records(50, vector=rows)
    assert np.shares_memory(record.vectors(batch), rows)
    assert np.array_equal(record.vectors(batch.slice(10, 5)), rows[10:15])


def test_a_capture_id_depends_on_values_not_on_order():
    settings = {
        "revision": "r", "layers": [1, 2], "heads": [3, 0], "mask": 0, "window": 0, "sinks": 1,
        "layout": Layout.LOG16, "windowed": False,
    }  # fmt: skip
    found = record.capture_id(**settings)
    assert found == record.capture_id(**settings | {"layers": (2, 1), "heads": [0, 3]})
    others = {"revision": "s", "layers": [1], "heads": None, "mask": 1, "window": 8, "sinks": 0,
              "layout": Layout.LAYERED, "windowed": True, "per_layer": True}  # fmt: skip
    ids = {found, *(record.capture_id(**settings | {name: other})
                    for name, other in others.items())}  # fmt: skip
    assert len(ids) == 1 + len(others) and all(len(each) == 12 for each in ids)
