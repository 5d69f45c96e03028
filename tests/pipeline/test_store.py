"""What both stores promise, on real files: every test runs on SQLite and on a Parquet folder."""

from __future__ import annotations

import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_kernels.errors import RecordError, StoreError
from pipeline import record
from pipeline.store.base import Selection
from pipeline.store.open import open_store
from pipeline.store.times import from_micros, to_micros

KEYS = list(record.KEY)
# When the first of `records` was captured.
START = datetime(2026, 1, 9, 22, 0, tzinfo=UTC)


def scanned(store, **options) -> pa.Table:
    names = options.get("columns") or record.SCHEMA.names
    schema = pa.schema([record.SCHEMA.field(name) for name in names])
    return pa.Table.from_batches(list(store.scan(**options)), schema)


@pytest.mark.parametrize("count", [0, 1, 7, 1_009])
def test_records_come_back_as_they_were(store, records, count):
    batch = records(count)
    assert store.append(batch).inserted == count
    assert scanned(store).to_pylist() == batch.to_pylist()
    assert all(b.schema == record.SCHEMA for b in store.scan())


def test_many_rows_over_several_batches_and_days_come_back(store, records):
    whole = records(70_003)
    for start in range(0, whole.num_rows, 40_009):
        store.append(whole.slice(start, 40_009))
    table = scanned(store)
    assert table.num_rows == whole.num_rows
    for name in record.SCHEMA.names:
        if not pa.types.is_dictionary(record.SCHEMA.field(name).type):
            assert table.column(name).combine_chunks().equals(whole.column(name)), name
    assert table.column("model").cast(pa.string()).combine_chunks() == whole.column("model").cast(
        pa.string()
    )


def test_a_store_keeps_its_records_when_it_is_opened_again(store_path, records):
    with open_store(store_path, create=True) as store:
        store.append(records(100))
    with open_store(store_path) as store:
        store.append(records(100, first=100))
    with open_store(store_path, read_only=True) as store:
        expected = records(100).to_pylist() + records(100, first=100).to_pylist()
        assert scanned(store).to_pylist() == expected


def test_the_ends_of_what_a_column_holds_come_back(store, records):
    batch = records(
        3,
        request_id=["", "ü" * 512, "a|b\n"],
        session_id=["", None, "'; --"],
        sink_mass=pa.array([1.0, -0.0, 1e-40], pa.float32()),
        top_experts=pa.array([[], None, [32_767, -32_768]], pa.list_(pa.int16())),
    )
    store.append(batch)
    assert scanned(store).to_pylist() == batch.to_pylist()


def test_a_null_among_experts_is_rejected_by_every_store(store, records):
    experts = pa.array([[1, None], [2], None], pa.list_(pa.int16()))
    added = store.append(records(3, top_experts=experts))
    assert (added.inserted, added.rejected) == (2, {"null in top_experts": 1})
    assert [row["top_experts"] for row in scanned(store).to_pylist()] == [[2], None]


@pytest.mark.parametrize("position", [2**24 - 1, 2**24, 2**31 - 1])
@pytest.mark.parametrize("layer", [-1, 510, 511, 32_767])
def test_any_position_and_layer_that_a_record_can_hold(store, records, position, layer):
    batch = records(1, position=pa.array([position], pa.int32()), layer=layer)
    others = records(4, request_id="request-000000", layer=pa.array([-1, 510, 511, 0], pa.int16()))
    store.append(others)
    assert store.append(batch).inserted == 1
    store.append(batch)
    assert scanned(store).num_rows == 5
    assert batch.to_pylist()[0] in scanned(store).to_pylist()


def test_a_key_is_stored_once_and_its_first_record_stays(store, records):
    first = records(50)
    later = records(50, seed=1)
    assert store.append(first).inserted == 50
    store.append(later)
    assert scanned(store).to_pylist() == first.to_pylist()
    assert store.counts().rows == 50
    assert sum(group.rows for group in store.groups()) == 50


def test_repeats_within_a_batch_count_as_duplicates(store, records):
    batch = records(10)
    twice = pa.Table.from_batches([batch, records(10, seed=1), records(5, first=10)])
    appended = store.append(twice)
    assert (appended.inserted, appended.duplicates) == (15, 10)
    assert scanned(store).to_pylist() == [*batch.to_pylist(), *records(5, first=10).to_pylist()]
    assert store.counts().duplicates == 10


def test_rejected_rows_are_counted_and_never_stored(store, records):
    vectors = record.vectors(records(6)).copy()
    vectors[1, 3], vectors[2, 0] = np.nan, np.inf
    batch = records(6, vector=vectors, layout=pa.array([1, 1, 1, 1, 9, 1], pa.uint8()),
                    position=pa.array([0, 1, 2, -1, 4, 5], pa.int32()), layer=-1)  # fmt: skip
    appended = store.append(batch)
    expected = {"NaN or infinity": 2, "unknown layout": 1, "negative position": 1}
    assert (appended.inserted, appended.rejected) == (2, expected)
    assert scanned(store).column("position").to_pylist() == [0, 5]
    only_bad = store.append(batch.slice(1, 1))
    assert (only_bad.inserted, only_bad.rejected) == (0, {"NaN or infinity": 1})
    assert store.counts().rejected == expected | {"NaN or infinity": 3}


def test_a_batch_without_a_required_column_is_refused_whole(store, records):
    with pytest.raises(RecordError, match="'phase' is missing"):
        store.append(records(3).drop_columns(["phase"]))
    assert store.counts().rows == 0


def test_vectors_of_a_scan_are_views_of_the_column(store, records):
    store.append(records(1_000))
    for batch in store.scan(columns=["vector"], batch_rows=300):
        values = batch.column("vector").flatten()
        data = values.buffers()[1]
        begin = record.vectors(batch).__array_interface__["data"][0]
        assert data.address <= begin < data.address + data.size
        assert record.vectors(batch).dtype == np.float32


@pytest.mark.parametrize(
    "columns",
    [
        ["vector"],
        ["layer"],
        ["position", "request_id"],
        ["capture_id", "session_id", "layout"],
        ["top_experts"],
    ],
)
def test_a_scan_gives_the_columns_asked_for_in_their_order(store, records, columns):
    store.append(records(500))
    table = scanned(store, columns=columns)
    assert table.column_names == columns
    assert table.to_pylist() == records(500).select(columns).to_pylist()


def test_a_column_that_no_record_has_is_refused(store):
    with pytest.raises(StoreError, match="no column 'colour'"):
        list(store.scan(columns=["colour"]))


def test_batches_have_at_most_the_rows_asked_for(store, records):
    store.append(records(1_000))
    sizes = [batch.num_rows for batch in store.scan(batch_rows=64)]
    assert max(sizes) <= 64 and min(sizes) > 0 and sum(sizes) == 1_000


SELECTIONS = [
    Selection(start=START + timedelta(seconds=90)),
    Selection(end=START + timedelta(seconds=90)),
    Selection(START + timedelta(seconds=70), START + timedelta(seconds=7_300)),
    Selection(START + timedelta(seconds=70), START + timedelta(seconds=7_300), model="small"),
    Selection(model="big", layout=1, capture_id="capture-0"),
    Selection(layout=2),
    Selection(capture_id="capture-1"),
    Selection(model="nobody"),
    Selection(start=START + timedelta(days=9)),
    Selection(end=START.replace(tzinfo=None)),
]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_selection_narrows_scan_and_groups_alike(store, records, selection):
    whole = records(2_500, every_s=4)
    for start in range(0, 2_500, 399):
        store.append(whole.slice(start, 399))
    low = selection.start or datetime.min
    high = selection.end or datetime.max
    expected = [
        row
        for row in whole.to_pylist()
        if low.replace(tzinfo=UTC) <= row["captured_at"] < high.replace(tzinfo=UTC)
        and selection.model in (None, row["model"])
        and selection.layout in (None, row["layout"])
        and selection.capture_id in (None, row["capture_id"])
    ]
    assert scanned(store, selection=selection).to_pylist() == expected
    kinds: dict[tuple, list[datetime]] = {}
    for row in expected:
        kind = row["model"], row["layout"], row["capture_id"]
        kinds.setdefault(kind, []).append(row["captured_at"])
    found = {(g.model, g.layout, g.capture_id): (g.rows, g.first, g.last)
             for g in store.groups(selection)}  # fmt: skip
    assert found == {kind: (len(t), min(t), max(t)) for kind, t in kinds.items()}
    sizes = [group.rows for group in store.groups(selection)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_snapshot_sees_no_later_row_whatever_its_time(store, records):
    store.append(records(300, first=200_000))
    mark = store.snapshot()
    before = scanned(store)
    store.append(records(300))
    store.append(records(300, first=200_150))
    assert scanned(store, snapshot=mark).equals(before)
    assert scanned(store).num_rows == 750
    assert isinstance(mark, dict)


def test_a_scan_after_an_earlier_snapshot_gives_the_rows_that_came_since(store, records):
    for start in range(0, 70_000, 35_000):
        store.append(records(35_000, first=start))
    earlier = store.snapshot()
    store.append(records(150, first=69_950))  # 100 of them new
    store.append(records(100, first=90_000, captured_at=START))
    later = store.snapshot()
    store.append(records(100, first=95_000))
    for _ in range(2):
        found = scanned(store, after=earlier, snapshot=later).column("token_id").to_pylist()
        new = (records(100, first=first)["token_id"] for first in (70_000, 90_000))
        expected = [number for column in new for number in column.to_pylist()]
        assert sorted(map(str, found)) == sorted(map(str, expected))
        store.compact()
    assert scanned(store, after=store.snapshot()).num_rows == 0


def test_a_snapshot_of_a_pruned_store_still_sees_no_later_row(store, records):
    store.append(records(100))
    mark = store.snapshot()
    store.prune(START + timedelta(days=1))
    store.append(records(50, first=500))
    assert scanned(store, snapshot=mark).num_rows == 0


def test_a_snapshot_of_another_kind_of_store_is_refused(store):
    with pytest.raises(StoreError, match="was not taken of a"):
        list(store.scan(snapshot={"kind": "tape"}))


def test_a_scan_that_has_begun_does_not_see_what_is_appended_meanwhile(store, records):
    store.append(records(500))
    scan = store.scan(batch_rows=100)
    seen = next(scan).num_rows
    store.append(records(500, first=500))
    assert seen + sum(batch.num_rows for batch in scan) == 500


def test_counts_say_what_is_there(store, records):
    empty = store.counts()
    assert (empty.rows, empty.requests, empty.sessions, empty.first) == (0, 0, 0, None)
    store.append(records(400))
    counts = store.counts()
    sessions = set(records(400).column("session_id").drop_null().to_pylist())
    assert (counts.rows, counts.requests, counts.sessions) == (400, 10, len(sessions))
    assert (counts.first, counts.last) == (START, START + timedelta(seconds=399))


@pytest.mark.parametrize("seconds", [0, 1, 399, 8_000, 200_000])
def test_prune_deletes_what_was_captured_before(store, records, seconds):
    whole = records(2_503, every_s=4)
    for start in range(0, 2_503, 503):
        store.append(whole.slice(start, 503))
    limit = START + timedelta(seconds=seconds)
    gone = min(-(-seconds // 4), 2_503)
    assert store.prune(limit) == gone
    assert scanned(store).to_pylist() == whole.slice(gone).to_pylist()
    assert store.counts().rows == 2_503 - gone
    assert sum(group.rows for group in store.groups()) == 2_503 - gone
    assert store.append(whole).inserted >= gone
    assert scanned(store).num_rows == 2_503


def test_a_run_is_recorded_and_replaced(store):
    run = {"run_id": "2026-01-10T04-02-11", "created_at": START, "status": "published",
           "model": "m", "layout": 1, "rows": 10, "noise_share": 0.25,
           "manifest": {"seed": 42}}  # fmt: skip
    cluster = {"cluster_id": 3, "label": "counting", "zone": "diffuse", "size": 7, "share": 0.7,
               "centroid": np.arange(20, dtype=np.float32), "traits": ["low entropy"]}  # fmt: skip
    store.record_run(run, [cluster])
    store.record_run(run | {"rows": 11}, [cluster, cluster | {"cluster_id": 4}])
    store.record_run(run | {"run_id": "2026-01-11T04-02-11"}, [])
    later, run = store.runs()
    assert later["run_id"] == "2026-01-11T04-02-11"
    assert (run["rows"], run["noise_share"]) == (11, 0.25)
    assert run["created_at"] == START.isoformat()


@pytest.mark.parametrize(
    ("run", "clusters", "said"),
    [
        ({"created_at": "now"}, [], "without its run_id"),
        ({"run_id": "r", "created_at": "now"}, [{"label": "x"}], "no cluster_id"),
        (
            {"run_id": "r", "created_at": "now"},
            [{"cluster_id": 1, "centroid": [1.0]}],
            "20 numbers",
        ),
    ],
)
def test_a_run_that_cannot_be_recorded_is_refused(store, run, clusters, said):
    with pytest.raises(StoreError, match=said):
        store.record_run(run, clusters)
    assert store.runs() == []


def test_threads_may_append_and_scan_one_store(store, records):
    failures = []

    def write(worker: int) -> None:
        try:
            for step in range(5):
                store.append(records(200, first=(worker * 5 + step) * 200))
                sum(batch.num_rows for batch in store.scan(columns=KEYS))
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert scanned(store).num_rows == 3_000


def test_a_read_only_store_reads_and_refuses_to_write(store_path, records):
    with open_store(store_path, create=True) as store:
        store.append(records(10))
    with open_store(store_path, read_only=True) as store:
        assert scanned(store).num_rows == 10
        for write in (
            lambda: store.append(records(1)),
            lambda: store.prune(START),
            lambda: store.record_run({"run_id": "r", "created_at": "now"}, []),
        ):
            with pytest.raises(StoreError, match="read-only"):
                write()


def test_a_store_that_is_not_there_is_made_only_when_asked(store_path):
    for options in ({}, {"read_only": True}, {"read_only": True, "create": True}):
        with pytest.raises(StoreError, match="attn db init"):
            open_store(store_path, **options)
        assert not store_path.exists()
    open_store(store_path, create=True).close()
    open_store(store_path).close()


def destroy(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()


@pytest.mark.parametrize("then", ["nothing", "another store"])
def test_an_append_to_a_store_that_was_deleted_or_replaced_is_no_success(store_path, records, then):
    with open_store(store_path, create=True) as store:
        store.append(records(10))
        destroy(store_path)
        if then == "another store":
            open_store(store_path, create=True).close()
        for write in (
            lambda: store.append(records(10, first=10)),
            lambda: store.prune(START + timedelta(days=9)),
            lambda: store.record_run({"run_id": "r", "created_at": "now"}, []),
        ):
            with pytest.raises(StoreError, match="was deleted or replaced while it was open"):
                write()
        with pytest.raises(StoreError, match="nothing of this batch was stored: send it again"):
            store.append(records(10, first=20))
        with pytest.raises(StoreError, match="deleted or replaced"):
            list(store.scan())
    if then == "nothing":
        assert not store_path.exists()
    else:
        with open_store(store_path) as other:
            assert other.counts().rows == len(other.runs()) == 0
        assert not list(store_path.glob("**/*.tmp"))


def test_what_the_operating_system_refuses_is_a_store_error(store_path):
    with pytest.raises(StoreError, match=r"cannot .*name too long"):
        open_store(store_path.with_name("n" * 300 + store_path.suffix), create=True)


@pytest.mark.parametrize("url", ["s3://bucket/store", "gs://bucket/f.db", Path("S3://bucket/f.db")])
def test_object_storage_is_refused_in_one_line(url):
    with pytest.raises(StoreError, match=r"^object storage \(\w+://\) is not supported"):
        open_store(url, create=True)


def test_a_store_in_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    for name in ("no/where.db", "no/where"):
        with pytest.raises(StoreError, match="does not exist: make it"):
            open_store(tmp_path / name, create=True)


@pytest.mark.parametrize("micros", [0, -1, 1, 1_767_225_600_123_456, -(2**63), 2**63 - 1])
def test_times_keep_their_microseconds(micros):
    time = from_micros(micros)
    if datetime.min.replace(tzinfo=UTC) < time < datetime.max.replace(tzinfo=UTC):
        assert to_micros(time) == micros


rows = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 5), st.integers(-1, 1), st.integers(0, 2), st.booleans()
    ),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(rows, max_size=5), data=st.data())
def test_any_batches_with_repeats_make_the_set_of_their_keys(
    store_path, records, tmp_path_factory, batches, data
):
    path = tmp_path_factory.mktemp("property") / store_path.name
    expected: dict[tuple, float] = {}
    with open_store(path, create=True) as store:
        for number, batch in enumerate(batches):
            values = [(number * 100 + row) / 1_024 for row in range(len(batch))]
            for (request, position, layer, _, _), value in zip(batch, values, strict=True):
                expected.setdefault((f"r{request}", position, layer), value)
            made = records(
                len(batch),
                request_id=pa.array([f"r{row[0]}" for row in batch], pa.string()),
                position=pa.array([row[1] for row in batch], pa.int32()),
                layer=pa.array([row[2] for row in batch], pa.int16()),
                model=pa.array([f"m{row[3]}" for row in batch], pa.string()),
                session_id=pa.array([None if row[4] else "s" for row in batch], pa.string()),
                captured_at=pa.array([(20_000 + row[3]) * 86_400_000_000 for row in batch],
                                     pa.timestamp("us", tz="UTC")),
                layout=2,
                vector=np.array([[1, 0, 0, value] + [0.125] * 8 + [value] * 8 for value in values],
                                np.float32).reshape(-1, 20),
            )  # fmt: skip
            store.append(made)
            if hasattr(store, "compact") and data.draw(st.booleans()):
                store.compact()
        found = {
            tuple(row[name] for name in KEYS): row["vector"][3]
            for batch in store.scan()
            for row in batch.to_pylist()
        }
        assert found == expected
        assert store.counts().rows == len(expected) == scanned(store).num_rows
