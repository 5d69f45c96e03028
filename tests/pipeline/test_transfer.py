"""Import and export: Parquet and JSON lines, whole and broken."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared import possible_vectors

from capture_kernels.errors import OptionError, RecordError, StoreError, WriteError
from pipeline import record
from pipeline.store import sources
from pipeline.store.base import Selection
from pipeline.store.open import open_store
from pipeline.store.transfer import export_file, import_file

START = datetime(2026, 1, 9, 22, 0, tzinfo=UTC)
FORMATS = ["f.parquet", "f.jsonl", "f.jsonl.gz"]
BATCH_LINES = 300


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(sources, "BATCH_LINES", BATCH_LINES)


def rows(store) -> list[dict]:
    return [row for batch in store.scan() for row in batch.to_pylist()]


def key(row: dict) -> tuple:
    return tuple(row[name] for name in record.KEY)


def line(**changes) -> str:
    made = {
        "request_id": "r", "position": 0, "layer": -1, "captured_at": "2026-01-10T00:00:00Z",
        "model": "m", "capture_id": "c", "layout": 1, "phase": "output",
        "vector": [1.0, 0.0, 0.0, 0.5, 1.0] + [0.0] * 15,
    }  # fmt: skip
    kept = {name: value for name, value in (made | changes).items() if value is not ...}
    return json.dumps(kept)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 1_009])
def test_what_is_exported_comes_back_the_same(store, records, tmp_path, name, count):
    store.append(records(count))
    path = tmp_path / name
    assert export_file(store, path) == count
    with open_store(tmp_path / "again.db", create=True) as again:
        imported = import_file(again.append, path)
        assert (imported.rows, imported.inserted, imported.duplicates) == (count, count, 0)
        assert rows(again) == rows(store) == records(count).to_pylist()
        once_more = import_file(again.append, path)
        assert (once_more.inserted, once_more.duplicates) == (0, count)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_an_export_is_the_same_bytes_each_time(store, records, tmp_path):
    store.append(records(500))
    for name in FORMATS:
        export_file(store, tmp_path / name)
        first = (tmp_path / name).read_bytes()
        export_file(store, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first


def test_a_selection_is_exported_with_progress(store, records, tmp_path):
    store.append(records(300))
    shown: list[int] = []
    selection = Selection(start=START + timedelta(seconds=100), model="small")
    count = export_file(store, tmp_path / "f.jsonl", selection, shown.append)
    lines = [json.loads(text) for text in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert len(lines) == count == shown[-1] == sum(g.rows for g in store.groups(selection))
    assert {made["model"] for made in lines} == {"small"}
    assert lines[0]["captured_at"].endswith("+00:00") and len(lines[0]["vector"]) == 20


def test_bad_lines_are_counted_with_their_reason_and_first_line(store, tmp_path):
    path = tmp_path / "f.jsonl"
    lines = [
        (None, line(position=0)),
        (None, ""),
        ("not JSON", "{half a li"),
        ("wrong length", line(position=1, vector=[0.5] * 19)),
        ("position: Expected `int`, got `str`", line(position="2")),
        ("Object missing required field `phase`", line(position=3, phase=...)),
        ("negative position", line(position=-4)),
        ("position: Expected `int` <= 2147483647", line(position=2**40)),
        ("captured_at: not an ISO 8601 time", line(position=5, captured_at="yesterday")),
        ("vector: Expected `float`, got `str`", line(position=6, vector=[0.5] * 19 + ["x"])),
        ("NaN or infinity", line(position=7, vector=[0.5] * 19 + [1e999])),
        ("unknown phase", line(position=8, phase="dream")),
        ("Expected `object`, got `array`", "[1]"),
        ("not JSON", "more {"),
        ("not Unicode text", line(position=9, **{"\ud800": 1})),
        ("request_id: not Unicode text", line(position=9, request_id="\ud800")),
        ("layer: Expected `int`, got `bool`", line(position=10, layer=True)),
        ("vector: Expected `array`, got `str`", line(position=11, vector="abc")),
        (None, line(position=12, captured_at="2026-01-10T02:00:00+02:00", unknown="field")),
        ("model: Expected `str`, got `null`", line(position=13, model=None)),
        ("sink_mass outside 0 to 1", line(position=14, sink_mass=float("nan"))),
        ("not JSON", "[" * 100_000),
    ]
    path.write_text("\n".join(text for _, text in lines))
    imported = import_file(store.append, path)
    reasons = [reason for reason, _ in lines if reason]
    assert imported.rejected == Counter(reasons)
    numbers = [reason for reason, _ in lines]
    assert imported.first_lines == {reason: numbers.index(reason) + 1 for reason in reasons}
    assert (imported.rows, imported.inserted) == (21, 2)
    assert [row["captured_at"] for row in rows(store)] == [datetime(2026, 1, 10, tzinfo=UTC)] * 2


def test_first_lines_are_right_past_the_first_batch(store, tmp_path):
    path = tmp_path / "f.jsonl"
    lines = [line(position=n) for n in range(BATCH_LINES + 50)]
    lines[BATCH_LINES + 20] = line(position=1, vector=[])
    path.write_text("\n".join(lines) + "\n")
    imported = import_file(store.append, path)
    assert imported.first_lines == {"wrong length": BATCH_LINES + 21}
    assert imported.inserted == BATCH_LINES + 49


def test_vectors_of_plain_lists_and_other_floats_are_imported(store, records, tmp_path):
    batch = records(50)
    lists = pa.array(record.vectors(batch).astype(np.float64).tolist(), pa.list_(pa.float64()))
    columns = {name: batch.column(name) for name in record.SCHEMA.names} | {"vector": lists}
    pq.write_table(pa.table(columns | {"extra": pa.nulls(50)}), tmp_path / "f.parquet")
    assert import_file(store.append, tmp_path / "f.parquet").inserted == 50
    assert rows(store) == batch.to_pylist()


def test_a_parquet_file_without_a_column_is_refused(store, records, tmp_path):
    table = pa.Table.from_batches([records(5)]).drop_columns(["model"])
    pq.write_table(table, tmp_path / "f.parquet")
    with pytest.raises(RecordError, match="'model' is missing"):
        import_file(store.append, tmp_path / "f.parquet")


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_off_file_is_named_and_what_was_read_is_kept(store, records, tmp_path, name):
    store.append(records(BATCH_LINES + 100))
    path = tmp_path / name
    export_file(store, path)
    path.write_bytes(path.read_bytes()[:-200])
    with open_store(tmp_path / "again.db", create=True) as again:
        if name == "f.jsonl":  # the last line only
            assert import_file(again.append, path).rejected == {"not JSON": 1}
        else:
            with pytest.raises(StoreError, match=f"{name} is damaged"):
                import_file(again.append, path)
        assert again.counts().rows in (0, BATCH_LINES, BATCH_LINES + 99)


def test_a_damaged_gzip_and_a_wrong_kind_of_file_are_named(store, tmp_path):
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(line().encode())[:-9] + b"123456789")
    with pytest.raises(StoreError, match="damaged"):
        import_file(store.append, tmp_path / "f.jsonl.gz")
    (tmp_path / "f.parquet").write_text("not Parquet")
    with pytest.raises(StoreError, match="damaged"):
        import_file(store.append, tmp_path / "f.parquet")
    with pytest.raises(OptionError, match=r"ends in .parquet, .jsonl"):
        import_file(store.append, tmp_path / "f.csv")
    with pytest.raises(StoreError, match="does not exist"):
        import_file(store.append, tmp_path / "none.jsonl")
    with pytest.raises(StoreError, match="does not exist: make it"):
        export_file(store, tmp_path / "no" / "f.jsonl")


def test_a_failed_export_keeps_the_old_file(store, records, tmp_path, monkeypatch):
    store.append(records(10))
    path = tmp_path / "f.jsonl"
    path.write_text("precious")

    def failing(rows: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="No space left"):
        export_file(store, path, progress=failing)
    assert path.read_text() == "precious"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".f")] == []


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
shares = st.floats(0, 1, width=32)
lines = st.fixed_dictionaries(
    {
        "request_id": texts,
        "session_id": st.none() | texts,
        "position": st.integers(0, 2**31 - 1),
        "prompt_len": st.none() | st.integers(0, 2**31 - 1),
        "layer": st.integers(-1, 2**15 - 1),
        "captured_at": st.datetimes(datetime(2000, 1, 1), datetime(2099, 12, 31)),
        "model": texts,
        "capture_id": texts,
        "layout": st.sampled_from([1, 2]),
        "phase": st.sampled_from(record.PHASES),
        "token_id": st.none() | st.integers(0, 2**31 - 1),
        "sink_mass": st.none() | shares,
        "router_entropy": st.none() | st.floats(0, width=32, allow_infinity=False),
        "top_experts": st.none() | st.lists(st.integers(-(2**15), 2**15 - 1), max_size=3),
        "response_id": st.none() | texts,
        "traceparent": st.none()
        | st.builds(
            "00-{:032x}-{:016x}-{:02x}".format,
            st.integers(1, 2**128 - 1),
            st.integers(1, 2**64 - 1),
            st.integers(0, 255),
        ),
        "vector": st.integers(0, 2**32 - 1),  # the seed of one that its layout may have
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(lines, max_size=5, unique_by=key))
def test_any_records_survive_store_export_and_import(store_path, tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("round")
    columns = {field.name: [row[field.name] for row in made] for field in record.SCHEMA}
    drawn = zip(columns["layout"], columns["vector"], strict=True)
    vectors = np.array(
        [
            possible_vectors(np.array([layout]), np.random.default_rng(seed))[0]
            for layout, seed in drawn
        ]
    ).reshape(-1, 20)
    kinds = {f.name: f.type for f in record.SCHEMA} | dict.fromkeys(
        ["model", "capture_id", "phase"], pa.string()
    )
    batch = record.make_batch(
        {n: pa.array(v, kinds[n]) for n, v in columns.items() if n != "vector"}
        | {"vector": vectors}, len(made),
    )  # fmt: skip
    with open_store(folder / store_path.name, create=True) as store:
        assert store.append(batch).inserted == len(made)
        expected = sorted(batch.to_pylist(), key=key)
        assert sorted(rows(store), key=key) == expected
        for name in ("f.parquet", "f.jsonl"):
            assert export_file(store, folder / name) == len(made)
            with open_store(folder / f"again-{name}{store_path.suffix}", create=True) as again:
                assert import_file(again.append, folder / name).inserted == len(made)
                assert sorted(rows(again), key=key) == expected
