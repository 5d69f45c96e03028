"""What is read from Parquet files and streams: damaged footers, other types, odd kinds of files."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shared import REPO

from capture_kernels.errors import AttnError, RecordError, StoreError
from pipeline import record
from pipeline.store import sources
from pipeline.store.sources import read_chunks
from pipeline.store.transfer import export_file, import_file

SAMPLE = REPO / "examples" / "sample" / "fingerprints.parquet"


def written(path, batch, **columns):
    """A Parquet file of a batch, some of whose columns are replaced."""
    made = {name: batch.column(name) for name in record.SCHEMA.names} | columns
    pq.write_table(pa.table(made), path)
    return path


def read(path) -> tuple[list[dict], dict[str, list[int]]]:
    """The records of a file, and the rows that cannot be made one."""
    rows, rejected = [], {}
    for chunk in read_chunks(path, "parquet"):
        rows += record.conform(chunk.batch).batch.to_pylist()
        rejected |= chunk.rejected
    return rows, rejected


def test_a_footer_that_hides_the_rows_is_an_error(store, tmp_path):
    damaged = bytearray(SAMPLE.read_bytes())
    damaged[-3060] ^= 0x40  # in its footer, which lists no row group then
    (tmp_path / "f.parquet").write_bytes(damaged)
    with pytest.raises(StoreError, match="0 rows, its footer says 20,590"):
        import_file(store.append, tmp_path / "f.parquet")
    assert store.counts().rows == 0


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_any_flipped_byte_of_a_footer_gives_the_same_rows_or_an_error(records, tmp_path, step):
    path = written(tmp_path / "f.parquet", records(20))
    whole, (expected, _) = path.read_bytes(), read(path)
    length = int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for at in range(len(whole) - 8 - length, len(whole), step):
        for flip in (0x01, 0x40):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            path.write_bytes(damaged)
            try:
                assert read(path) == (expected, {}), (at, flip)
            except AttnError:
                refused += 1
    assert refused > 100 / step


def cells(kind: pa.DataType, **changed):
    """Ten values of a type, of which `changed` names some as `at_N`."""
    values = list(range(10))
    for name, value in changed.items():
        values[int(name.removeprefix("at_"))] = value
    return pa.array(values, kind)


@pytest.mark.parametrize(
    ("name", "column", "bad"),
    [
        ("position", cells(pa.int64(), at_7=2**40), [8]),
        ("position", cells(pa.uint64(), at_0=2**63, at_9=2**32), [1, 10]),
        ("position", cells(pa.float64(), at_3=1.5, at_4=float("nan")), [4, 5]),
        ("position", pa.array([*"0123456", "x", "", "9"]), [8, 9]),
        ("token_id", cells(pa.int64(), at_2=-(2**40), at_3=None), [3]),
        ("layout", pa.array([1] * 5 + [300] * 5, pa.int64()), [6, 7, 8, 9, 10]),
        ("captured_at", pa.array([2**45] + [1_768_000_000] * 9, pa.timestamp("s", "UTC")), [1]),
        ("model", pa.array([b"m"] * 9 + [b"\xff"]), [10]),
        ("top_experts", pa.array([[1], [2**20], None, []] + [[1]] * 6), [2]),
        ("vector", pa.array([[1, 0, 0, 0.5, 1] + [0] * 15] * 10).cast(pa.large_list(pa.float64())),
         []),
    ],
)  # fmt: skip
def test_only_the_rows_with_a_cell_that_cannot_be_cast_are_rejected(
    store, records, tmp_path, name, column, bad
):
    layout = pa.array([1] * 10, pa.uint8())
    vector = pa.array([[1, 0, 0, 0.5, 1] + [0] * 15] * 10, pa.list_(pa.float32()))
    batch = records(10, request_id=pa.array([f"r{n}" for n in range(10)]), layout=layout)
    path = written(tmp_path / "f.parquet", batch, **({"vector": vector} | {name: column}))
    imported = import_file(store.append, path)
    assert (imported.rows, imported.inserted) == (10, 10 - len(bad))
    assert sum(imported.rejected.values()) == len(bad)
    for reason, number in imported.first_lines.items():
        assert reason.startswith(f"{name}: cannot be cast to") and number == bad[0]
    kept = [n for n in range(10) if n + 1 not in bad]
    stored = {row["request_id"]: row[name] for batch in store.scan() for row in batch.to_pylist()}
    assert sorted(stored) == [f"r{n}" for n in kept]


def test_one_huge_number_in_a_large_file_costs_one_row(store, records, tmp_path):
    position = np.arange(70_000)
    position[69_000] = 2**40
    batch = records(70_000, request_id="r")
    path = written(tmp_path / "f.parquet", batch, position=pa.array(position))
    imported = import_file(store.append, path)
    assert (imported.rows, imported.inserted) == (70_000, 69_999)
    assert imported.first_lines == {"position: cannot be cast to int32": 69_001}


def test_rows_that_are_no_records_are_named_by_their_row(store, records, tmp_path):
    batch = records(70_000, request_id="r", position=np.arange(70_000, dtype=np.int32))
    token = np.where(np.arange(70_000) < 69_500, 1, -1).astype(np.int32)
    imported = import_file(store.append, written(tmp_path / "f.parquet", batch, token_id=token))
    assert imported.first_lines == {"negative token_id": 69_501}


def test_nanoseconds_are_cut_off_to_microseconds(store, records, tmp_path):
    time = pa.array([1_768_000_000_123_456_789] * 10, pa.timestamp("ns", "UTC"))
    import_file(store.append, written(tmp_path / "f.parquet", records(10), captured_at=time))
    expected = datetime.fromtimestamp(1_768_000_000, UTC).replace(microsecond=123_456)
    assert {row["captured_at"] for b in store.scan() for row in b.to_pylist()} == {expected}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"position": pa.array([{"a": 1}] * 10)}, "column 'position' holds struct<a: int64>"),
        ({"vector": pa.array([[{"a": 1}]] * 10)}, "column 'vector' holds list<"),
        ({"vector": pa.array([["a", "b"]] * 10)}, "none of the 10 rows is a record"),
        ({"captured_at": pa.array([1.5] * 10)}, "column 'captured_at' holds double"),
        ({"vector": pa.nulls(10)}, "column 'vector' must hold lists|none of the 10 rows"),
    ],
)
def test_a_column_of_which_nothing_can_be_cast_is_named(store, records, tmp_path, columns, message):
    path = written(tmp_path / "f.parquet", records(10), **columns)
    with pytest.raises(RecordError, match=f"f.parquet: {message}"):
        import_file(store.append, path)
    assert store.counts().rows == 0


def test_a_column_that_occurs_twice_is_named(store, records, tmp_path):
    batch = records(10)
    columns = [*batch.columns, batch.column("position")]
    table = pa.Table.from_arrays(columns, names=[*batch.schema.names, "position"])
    pq.write_table(table, tmp_path / "f.parquet")
    with pytest.raises(RecordError, match=r"f.parquet: column 'position' occurs twice"):
        import_file(store.append, tmp_path / "f.parquet")


@pytest.mark.parametrize("kind", sources.FORMATS)
def test_a_named_pipe_is_read_and_written_like_a_file(store, records, tmp_path, pipe, kind):
    store.append(records(200))
    writer = threading.Thread(target=export_file, args=(store, pipe), kwargs={"kind": kind})
    writer.start()
    chunks = list(read_chunks(pipe, kind))
    writer.join()
    assert sum(chunk.batch.num_rows for chunk in chunks) == 200
    assert pipe.is_fifo()


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_folder_and_a_damaged_archive_are_named_as_what_they_are(store, tmp_path):
    (tmp_path / "f.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"f.jsonl is a folder: give the files in it"):
        import_file(store.append, tmp_path / "f.jsonl")
    (tmp_path / "f.jsonl.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\0" + b"\xff" * 50)
    with pytest.raises(StoreError, match=r"f.jsonl.gz is damaged"):
        import_file(store.append, tmp_path / "f.jsonl.gz")
