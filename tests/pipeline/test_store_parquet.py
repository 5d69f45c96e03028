"""The Parquet store: its files, compaction, snapshots across it, and what goes wrong."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import Selection
from pipeline.store.open import open_store
from pipeline.store.parquet import compaction
from pipeline.store.parquet.folder import FILES_LOCK, MARKER, STATE
from pipeline.store.parquet.summary import _b85decode

START = datetime(2026, 1, 9, 22, 0, tzinfo=UTC)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fingerprints"


@pytest.fixture
def store(root: Path):
    with open_store(root, create=True) as opened:
        yield opened


def rows(store, **options) -> list[dict]:
    return [row for batch in store.scan(**options) for row in batch.to_pylist()]


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("day=*/*"))


def test_files_are_partitioned_by_day_for_any_reader(store, root, records):
    batch = records(1_000, every_s=10)
    store.append(batch)
    assert files(root) == [
        "day=2026-01-09/part-000000000001.parquet",
        "day=2026-01-10/part-000000000001.parquet",
    ]
    table = pa.dataset.dataset(root, partitioning="hive").to_table()
    assert table.num_rows == 1_000
    assert pq.read_schema(root / files(root)[0]).equals(record.SCHEMA)
    assert set(table.column("day").to_pylist()) == {"2026-01-09", "2026-01-10"}


def test_compaction_makes_one_file_per_day_and_changes_no_scan(store, root, records):
    whole = records(1_200, every_s=10)
    for start in range(0, 1_100, 100):
        store.append(whole.slice(start, 150))  # a third of each comes again
    before, counts, groups = rows(store), store.counts(), store.groups()
    assert len(before) == 1_150
    made = len(files(root))
    assert store.compact() == made - 2
    assert len(files(root)) == 2
    assert rows(store) == before
    assert (store.counts(), store.groups()) == (counts, groups)
    assert pa.dataset.dataset(root, partitioning="hive").to_table().num_rows == 1_150
    assert store.compact() == 0
    store.append(whole)
    store.compact()
    assert sorted(rows(store), key=str) == sorted(whole.to_pylist(), key=str)


def test_a_snapshot_holds_across_compaction(store, records):
    for start in range(0, 3_000, 500):
        store.append(records(500, first=start))
    mark = store.snapshot()
    expected = rows(store)
    store.append(records(500, first=2_800))
    store.append(records(700, first=5_000))
    store.compact()
    assert rows(store, snapshot=mark) == expected
    store.append(records(10, first=9_000))
    store.compact()
    assert rows(store, snapshot=json.loads(json.dumps(mark))) == expected
    assert len(rows(store)) == 3_000 + 300 + 700 + 10


def test_a_key_again_on_another_day_stays_with_its_first_record(store, records):
    late, early = records(50, first=90_000), records(50, first=90_000, captured_at=START)
    store.append(late)
    store.append(early)
    assert rows(store) == late.to_pylist()
    assert store.groups(Selection(end=START + timedelta(hours=1))) == []
    assert rows(store, selection=Selection(end=START + timedelta(hours=1))) == []
    store.prune(START + timedelta(hours=1))
    assert rows(store) == late.to_pylist()


def test_pruning_the_first_record_of_a_key_does_not_bring_out_a_repeat(store, records):
    store.append(records(50, captured_at=START))
    store.append(records(50, captured_at=START + timedelta(days=3)))
    assert store.prune(START + timedelta(days=1)) == 50
    assert rows(store) == []
    assert store.counts().rows == 0


def test_what_a_crash_leaves_behind_is_ignored(store, root, records):
    store.append(records(100))
    whole = (root / files(root)[0]).read_bytes()
    (root / ".part-99-0.tmp").write_bytes(whole[:1_000])
    (root / "day=2026-01-09" / "notes.txt").write_text("not a data file")
    old = root / ".part-98-0.tmp"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    assert len(rows(store)) == 100
    store.compact()
    assert not old.exists() and (root / ".part-99-0.tmp").exists()


def test_a_compaction_that_died_before_removing_its_sources_counts_once(store, root, records):
    store.append(records(100))
    store.append(records(100, first=100))
    saved = {name: (root / name).read_bytes() for name in files(root)}
    store.compact()
    (compacted,) = files(root)
    for name, content in saved.items():
        (root / name).write_bytes(content)
    with open_store(root) as again:
        assert len(rows(again)) == again.counts().rows == 200
        again.compact()
    assert files(root) == [compacted]


def test_sequence_numbers_go_on_when_the_state_is_lost(store, root, records):
    store.append(records(10))
    store.append(records(10, first=10))
    for content in (None, "{"):
        (root / STATE).unlink(missing_ok=True)
        if content:
            (root / STATE).write_text(content)
        with open_store(root) as again:
            mark = again.snapshot()
            again.append(records(10, first=100 if content else 50))
            assert again.snapshot()["sequence"] == mark["sequence"] + 1
            assert len(rows(again, snapshot=mark)) == again.counts().rows - 10


def test_two_stores_of_one_folder_see_each_other(store, root, records):
    with open_store(root) as other:
        store.append(records(10))
        other.append(records(10, first=10))
        store.append(records(10, first=20))
        assert len(rows(other)) == len(rows(store)) == 30
        other.compact()
        assert len(rows(store)) == 30


def in_steps(store, records, days: int = 3, appends: int = 4) -> list[dict]:
    """Append 100 rows several times a day, each with a third of the one before; the rows."""
    for start in range(0, 100 * days * appends, 100):
        at = START + timedelta(days=start // (100 * appends))
        store.append(records(150, first=start, captured_at=at))
    return rows(store)


def test_a_paused_scan_blocks_nobody_and_gives_its_rows_across_compactions(root, records):
    with open_store(root, create=True, busy_timeout_s=0.5) as store, open_store(root) as other:
        expected = in_steps(store, records)
        scan = store.scan(batch_rows=30)
        seen = next(scan).to_pylist()
        other.append(records(100, first=9_000))
        assert other.compact() > 0
        seen += [row for _ in range(14) for row in next(scan).to_pylist()]
        other.append(records(100, first=9_100))
        assert other.compact() > 0
        # What was captured before its first row is none of its rows.
        other.prune(START - timedelta(days=1))
        seen += [row for batch in scan for row in batch.to_pylist()]
        assert seen == expected


def test_a_scan_whose_rows_are_deleted_says_so_and_blocks_nobody(root, records):
    with open_store(root, create=True, busy_timeout_s=0.5) as store, open_store(root) as other:
        in_steps(store, records, days=40, appends=1)
        scan = store.scan(batch_rows=30)
        next(scan)
        assert other.prune(START + timedelta(days=39)) == 3_950
        with pytest.raises(StoreError, match=r"rows were deleted from .* while they were read"):
            list(scan)
        assert store.counts().rows == len(rows(store)) == 100


def test_a_scan_outlives_a_prune_of_days_outside_its_window(root, records):
    with open_store(root, create=True) as store:
        in_steps(store, records, days=40, appends=1)
        later = Selection(start=START + timedelta(days=10))
        expected = rows(store, selection=later)
        scan = store.scan(later, batch_rows=30)
        seen = next(scan).to_pylist()
        store.prune(START + timedelta(days=5))
        store.compact()
        assert seen + [row for batch in scan for row in batch.to_pylist()] == expected


def test_a_scan_right_after_a_prune_that_rewrote_its_files_gives_the_rows_that_are_left(
    store, records
):
    store.append(records(100, every_s=60))
    store.append(records(100, first=50, every_s=60))
    assert len(rows(store)) == 150  # knows now which rows are duplicates
    store.prune(START + timedelta(minutes=30))
    assert [row["token_id"] for row in rows(store)] == [
        row["token_id"] for row in records(120, first=30, every_s=60).to_pylist()
    ]


def test_a_long_prune_and_a_long_compaction_let_others_get_their_turn(root, records, monkeypatch):
    monkeypatch.setattr(compaction, "TURN_S", 0)  # after every file
    turns, running = [], threading.Event()

    def read() -> None:
        with open_store(root, busy_timeout_s=60) as reader:
            while running.is_set():
                turns.append(reader.counts().rows)
                time.sleep(0.01)

    with open_store(root, create=True) as store:
        in_steps(store, records, days=10, appends=2)
        for work in (store.compact, lambda: store.prune(START + timedelta(days=60))):
            turns.clear()
            running.set()
            thread = threading.Thread(target=read)
            thread.start()
            while not turns:
                time.sleep(0.01)
            before = len(turns)
            work()
            during = len(turns) - before
            running.clear()
            thread.join()
            assert during >= 3
        assert len(set(turns)) > 3  # it saw the rows become fewer
        assert store.counts().rows == 0


def test_what_is_known_of_files_that_are_gone_is_forgotten(store, records):
    in_steps(store, records)
    assert len(store._folder._known) == 12
    store.compact()
    assert store.counts().rows == 1_250
    assert len(store._folder._known) == 3


def test_names_that_a_killed_writer_left_stop_no_append(store, root, records):
    # Of a writer with this process id, which comes again after the restart of a container.
    for number in range(1_000):
        (root / f".part-{os.getpid()}-{number}.tmp").touch()
    assert store.append(records(10)).inserted == 10


def test_a_folder_of_another_kind_is_refused_and_kept(root):
    root.mkdir()
    (root / "holiday.jpg").write_bytes(b"photo")
    for options in ({}, {"create": True}, {"read_only": True}):
        with pytest.raises(StoreError, match="folder of another kind"):
            open_store(root, **options)
    assert [path.name for path in root.iterdir()] == ["holiday.jpg"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"kind": "songs"}', "damaged"),
        ('{"schema_version": 1}', "damaged"),
        ('{"kind": "attn fingerprint store", "schema versio', "damaged"),
        ('{"kind": "attn fingerprint store", "schema_versiom": 1}', "damaged"),
        ('{"kind": "attn fingerprint store", "schema_version": 2}', "upgrade attn"),
    ],
)
def test_a_marker_that_cannot_be_used_is_named(store, root, marker, message):
    (root / MARKER).write_text(marker)
    with pytest.raises(StoreError, match=message):
        open_store(root)


def test_a_store_with_a_damaged_marker_works_again_once_what_is_said_was_done(store, root, records):
    store.append(records(500))
    (root / MARKER).write_bytes(b"\xff" * 100)
    with pytest.raises(StoreError) as refused:
        open_store(root)
    told = re.search("or write ({.*}) into it$", str(refused.value))
    (root / MARKER).write_text(told[1])
    with open_store(root) as mended:
        assert mended.verify().is_good and mended.counts().rows == 500


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.95])
def test_a_damaged_file_is_named(store, root, records, keep):
    store.append(records(500))
    file = root / files(root)[0]
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(StoreError, match=r"part-000000000001.parquet is damaged.*or delete it"):
        rows(store)


def test_a_file_with_a_damaged_page_is_named(store, root, records):
    store.append(records(5_000))
    file = root / files(root)[0]
    content = bytearray(file.read_bytes())
    content[1_000:200_000] = b"\xff" * 199_000
    file.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged"):
        rows(store)


def test_a_parquet_file_of_another_program_is_named(store, root, records):
    (root / "day=2026-01-09").mkdir()
    pq.write_table(pa.table({"x": [1]}), root / "day=2026-01-09" / "part-000000000009.parquet")
    with pytest.raises(StoreError, match="not written by this store"):
        rows(store)


def test_a_copy_without_its_locks_can_be_read(store, root, records):
    store.append(records(20))
    (root / FILES_LOCK).unlink()
    (root / "_lock").unlink()
    with open_store(root, read_only=True) as copy:
        assert len(rows(copy)) == copy.counts().rows == 20


def test_a_run_id_that_cannot_be_a_file_name_is_refused(store):
    with pytest.raises(StoreError, match="cannot be a file name"):
        store.record_run({"run_id": "../../x", "created_at": "now"}, [])


@given(content=st.binary(max_size=200))
def test_base85_is_decoded_as_the_standard_library_encodes_it(content):
    assert _b85decode(base64.b85encode(content).decode()) == content
