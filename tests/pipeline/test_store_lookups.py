"""Sessions and requests of a store, as a service asks for them."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shared import REPO

from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from pipeline import record
from pipeline.store.open import open_store
from pipeline.store.parquet import lookups as parquet_lookups
from pipeline.store.sqlite import lookups as sqlite_lookups

sys.path.insert(0, str(REPO / "tests" / "pipeline"))
from test_store_sqlite import sql

GROUP = ("session_id", "model", "capture_id", "layout")


def expected_sessions(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """What `sessions` says of rows, in a loop over them."""
    layouts = np.array(rows.column("layout").to_pylist())
    vectors = np.array(rows.column("vector").to_pylist(), np.float32)
    zones = np.empty(len(layouts), int)
    for layout in Layout:
        zones[layouts == layout] = ZoneRules().classify(vectors[layouts == layout], layout).zone
    made: dict[tuple, list[tuple]] = {}
    for zone, row in zip(zones, rows.drop_columns("vector").to_pylist(), strict=True):
        if row["session_id"] is not None:
            made.setdefault(tuple(row[name] for name in GROUP), []).append((row, ZONES[zone]))
    return [
        dict(zip(GROUP, key, strict=True))
        | {
            "requests": len({row["request_id"] for row, _ in found}),
            "fingerprints": len(found),
            "first_at": min(row["captured_at"] for row, _ in found),
            "last_at": max(row["captured_at"] for row, _ in found),
            "zones": dict.fromkeys(ZONES, 0) | Counter(zone for _, zone in found),
        }
        for key, found in made.items()
    ]


def without_cursor(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: v for name, v in one.items() if name != "cursor"} for one in sessions]


def by_key(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(sessions, key=lambda one: str([one[name] for name in GROUP]))


def everything(store) -> pa.Table:
    return pa.Table.from_batches(list(store.scan()))


@pytest.fixture
def filled(store, records):
    """A store with 3,000 rows, over four days, some of them appended twice."""
    for start in (0, 700, 2_000, 1_400):
        store.append(records(1_000, first=start, every_s=100))
    return store


def test_all_sessions_are_told_newest_first_page_by_page(filled):
    expected = expected_sessions(everything(filled))
    found = filled.sessions(10_000)
    assert by_key(without_cursor(found)) == by_key(expected)
    times = [one["last_at"] for one in found]
    assert times == sorted(times, reverse=True)
    assert len({one["cursor"] for one in found}) == len(found) > 20
    for size in (1, 7, len(found)):
        paged, after = [], None
        while page := filled.sessions(size, after):
            paged += page
            after = page[-1]["cursor"]
        assert paged == found
    assert filled.sessions(limit=3) == found[:3]


def test_one_session_has_an_entry_for_each_of_its_groups(filled):
    expected = expected_sessions(everything(filled))
    for name in {one["session_id"] for one in expected}:
        mine = [one for one in expected if one["session_id"] == name]
        found = filled.session(name)
        assert by_key(without_cursor(found)) == by_key(mine)
        assert [one["last_at"] for one in found] == sorted(
            (one["last_at"] for one in mine), reverse=True
        )
    assert max(len(filled.session(one["session_id"])) for one in expected) > 1
    assert filled.session("nobody") == []


def test_sessions_of_one_time_come_once_each(store, records):
    same = pa.array([1_767_225_600_000_000] * 400).cast(pa.timestamp("us", tz="UTC"))
    store.append(records(400, captured_at=same))
    pages, after = [], None
    while page := store.sessions(1, after):
        pages += page
        after = page[0]["cursor"]
    assert by_key(without_cursor(pages)) == by_key(expected_sessions(everything(store)))


def rows_of(store, request_id: str) -> list[dict[str, Any]]:
    rows = [row for row in everything(store).to_pylist() if row["request_id"] == request_id]
    return sorted(rows, key=lambda row: (row["position"], row["layer"]))


def test_the_rows_of_a_request_come_by_position_and_layer(filled):
    for name in ("request-000000", "request-000017", "request-000042"):
        expected = rows_of(filled, name)
        assert len(expected) == 40
        count, rows = filled.request(name)
        assert (count, rows.schema) == (40, record.SCHEMA)
        assert rows.to_pylist() == expected
        for offset, limit in ((0, 1), (7, 5), (39, 10), (40, 10), (10**9, 1)):
            count, rows = filled.request(name, offset, limit)
            assert (count, rows.to_pylist()) == (40, expected[offset : offset + limit])
    assert filled.request("nobody").total == 0
    assert filled.request("nobody").rows.schema == record.SCHEMA


def test_a_request_that_comes_in_disorder_and_twice_is_told_in_order(store, records):
    number = np.random.default_rng(0).permutation(600)
    for part in (number[:250], number[200:400], number[150:]):
        layers, positions = part % 3 * 300 - 1, part // 3 * 200_000
        store.append(
            records(
                len(part), request_id="one", position=positions.astype(np.int32),
                layer=layers.astype(np.int16),
            )
        )  # fmt: skip
    count, rows = store.request("one", 100, 400)
    assert count == 600
    keys = [(n // 3 * 200_000, n % 3 * 300 - 1) for n in range(600)]
    found = list(zip(*(rows.column(n).to_pylist() for n in ("position", "layer")), strict=True))
    assert found == keys[100:500]
    assert rows.to_pylist() == rows_of(store, "one")[100:500]


def test_rows_that_are_pruned_are_not_told(filled):
    name = "request-000000"
    last = filled.request(name, 39, 1).rows.column("captured_at")[0].as_py()
    filled.prune(last)
    assert filled.request(name).total == 1
    filled.prune(max(everything(filled).column("captured_at").to_pylist()))
    assert filled.request(name).total == 0
    assert len(filled.sessions()) <= 1


@pytest.mark.parametrize("after", ["", "x", "1", "1:", "1:x", ":1", "9" * 30 + ":1", "1:2:3"])
def test_what_is_no_cursor_is_said(filled, after):
    with pytest.raises(StoreError, match="is not the cursor of a session"):
        filled.sessions(5, after)


@pytest.mark.parametrize(("offset", "limit"), [(-1, 5), (0, 0), (0, -1), (0, 65_537)])
def test_a_page_has_a_size(filled, offset, limit):
    with pytest.raises(StoreError, match="a page has an offset from 0, and 1 to 65,536"):
        filled.request("request-000000", offset, limit)
    if offset == 0:
        with pytest.raises(StoreError, match="a page has"):
            filled.sessions(limit)


@pytest.mark.parametrize("name", ["store_v1.db", "store_v1"])
def test_a_store_of_version_1_that_is_only_read_answers_too(tmp_path, name):
    golden = REPO / "tests" / "golden" / name
    (shutil.copytree if golden.is_dir() else shutil.copy)(golden, tmp_path / name)
    with open_store(tmp_path / name, read_only=True) as store:
        (anna,) = store.sessions()
        assert (anna["session_id"], anna["requests"], anna["fingerprints"]) == ("anna", 1, 2)
        assert store.session("anna") == [anna]
        assert store.request("chat-1").rows.column("traceparent").to_pylist() == [None, None]


def test_a_sqlite_store_finds_them_by_index(tmp_path, records):
    path = tmp_path / "fingerprints.db"
    with open_store(path, create=True) as store:
        store.append(records(3_000))

    def plan(query: str, *values: object) -> str:
        for value in values:
            query = query.replace("?", repr(value), 1)
        return "\n".join(row[3] for row in sql(path, f"EXPLAIN QUERY PLAN {query}"))

    newest = plan(sqlite_lookups._NEWEST, 2**62, 2**62, 10)
    assert "SEARCH sessions USING INDEX sessions_by_time" in newest
    assert "SCAN sessions" not in newest and "TEMP B-TREE" not in newest
    named = plan(sqlite_lookups._NAMED, "session-3")
    assert "SEARCH sessions USING COVERING INDEX" in named and "SCAN sessions" not in named
    keys = plan("SELECT key, seq FROM fingerprints WHERE key BETWEEN ? AND ?", 1, 2)
    assert keys == "SEARCH fingerprints USING COVERING INDEX fingerprints_by_key (key>? AND key<?)"
    refs = plan("SELECT request_ref, page FROM requests WHERE request_id = ?", "request-000003")
    assert refs.startswith("SEARCH requests USING COVERING INDEX")


def test_a_parquet_store_reads_only_the_files_that_name_them(tmp_path, records, monkeypatch):
    read: list[str] = []
    original = parquet_lookups._find

    def noted(files, *more):
        read.extend(file.name for file in files)
        return original(files, *more)

    monkeypatch.setattr(parquet_lookups, "_find", noted)
    with open_store(tmp_path / "folder", create=True) as store:
        for number in range(8):
            store.append(records(240, first=number * 240, every_s=600))
        files = len(list((tmp_path / "folder").glob("day=*/*.parquet")))
        assert files > 10
        assert store.request("request-000003").total == 40
        assert 0 < len(set(read)) <= 2
        read.clear()
        assert store.session("session-1")
        assert 0 < len(set(read)) <= 3
        read.clear()
        assert len(store.sessions(1)) == 1
        assert 0 < len(set(read)) < files / 2


def test_a_parquet_store_that_is_compacted_meanwhile_answers_all_the_same(
    tmp_path, records, monkeypatch
):
    original, compacted = parquet_lookups._find, []
    with open_store(tmp_path / "folder", create=True) as store:
        for start in range(0, 200, 50):
            store.append(records(50, first=start))

        def compacting(*found):
            if not compacted:
                compacted.append(store.compact())
            return original(*found)

        monkeypatch.setattr(parquet_lookups, "_find", compacting)
        assert store.request("request-000001").total == 40
        assert compacted == [3]
