"""The SQLite store: its file as other programs see it, its schema versions, and what goes wrong.

A file is looked at with Python's `sqlite3` in a process of its own: two SQLite libraries must not
have one file open in one process (pipeline/store/sqlite/file.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipeline.store
from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from pipeline import record
from pipeline.store.open import open_store
from pipeline.store.sqlite import store as sqlite_store
from pipeline.store.sqlite.file import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION, open_database

START = datetime(2026, 1, 9, 22, 0, tzinfo=UTC)
SCHEMA = Path(pipeline.store.__file__).parent / "sqlite" / "schema.sql"


def sql(path: Path, *statements: str) -> list[Any]:
    """Run statements with Python's own sqlite3, in another process; the rows of the last one."""
    script = (
        "import json, sqlite3, sys\n"
        "path, *statements = json.load(sys.stdin)\n"
        "connection = sqlite3.connect(path)\n"
        "for statement in statements:\n"
        "    rows = connection.execute(statement).fetchall()\n"
        "connection.commit()\n"
        "print(json.dumps(rows))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps([str(path), *statements]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fingerprints.db"


@pytest.fixture
def filled(path: Path, records) -> Path:
    with open_store(path, create=True) as store:
        store.append(records(5_000))
    return path


def test_the_schema_fed_to_sqlite_makes_a_store(path, records):
    script = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.stdin.read())"
    subprocess.run(
        [sys.executable, "-c", script, str(path)], input=SCHEMA.read_text(), text=True, check=True
    )
    with open_store(path) as store:
        assert store.append(records(100)).inserted == 100
        assert store.counts().rows == 100
    made = path.with_name("made.db")
    open_store(made, create=True).close()
    shape = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
    assert sql(path, shape) == sql(made, shape)
    for pragma in ("page_size", "journal_mode", "user_version", "application_id"):
        assert sql(path, f"PRAGMA {pragma}") == sql(made, f"PRAGMA {pragma}")
    assert sql(made, "PRAGMA application_id") == [[APPLICATION_ID]]
    assert sql(made, "PRAGMA user_version") == [[SCHEMA_VERSION]] == [[len(MIGRATIONS) + 1]]


def test_the_tables_say_what_schema_sql_says(filled, records):
    batch = records(5_000)
    (row,) = sql(
        filled,
        "SELECT request_id, position, layer, f.captured_at, model, session_id, r.phase,"
        " r.token_id, hex(r.vector), hex(top_experts), r.captured_at"
        " FROM records AS r JOIN fingerprints AS f USING (seq) WHERE seq = 1235",
    )
    expected = batch.slice(1_234, 1).to_pylist()[0]
    assert row[:3] == [expected[name] for name in record.KEY]
    assert row[3] == int(expected["captured_at"].timestamp() * 1_000_000)
    assert row[4:6] == [expected["model"], expected["session_id"]]
    assert row[6:8] == [expected["phase"], expected["token_id"]]
    assert bytes.fromhex(row[8]) == np.array(expected["vector"], "<f4").tobytes()
    assert bytes.fromhex(row[9]) == np.array(expected["top_experts"], "<i2").tobytes()
    assert row[10] == expected["captured_at"].strftime("%Y-%m-%dT%H:%M:%SZ")


def test_sessions_add_up_over_appends(path, records):
    whole = records(3_000)
    with open_store(path, create=True) as store:
        for start in range(0, 3_000, 170):
            store.append(whole.slice(start, 200))  # 30 rows of each come twice
    found = sql(
        path,
        "SELECT session_id, model, requests, fingerprints, first_at, last_at,"
        f" {', '.join(ZONES)} FROM sessions JOIN captures ON capture_ref = capture",
    )
    layouts = whole.column("layout").to_numpy()
    zones = np.empty(3_000, int)
    for layout in Layout:
        chosen = layouts == layout
        zones[chosen] = ZoneRules().classify(record.vectors(whole)[chosen], layout).zone
    expected: dict[tuple, list] = {}
    for number, row in enumerate(whole.to_pylist()):
        kind = row["session_id"], row["model"], row["capture_id"], row["layout"]
        session = expected.setdefault(kind, [set(), 0, [], [0] * 5])
        session[0].add(row["request_id"])
        session[1] += 1
        session[2].append(int(row["captured_at"].timestamp() * 1_000_000))
        session[3][zones[number]] += 1
    made = [
        [kind[0], kind[1], len(requests), rows, min(times), max(times), *shares]
        for kind, (requests, rows, times, shares) in expected.items()
    ]
    assert sorted(found, key=str) == sorted(made, key=str)
    assert any(kind[0] is None for kind in expected)


def test_a_recorded_run_and_its_clusters_can_be_queried(filled):
    centroid = np.linspace(0, 1, 20, dtype=np.float32)
    with open_store(filled) as store:
        store.record_run(
            {"run_id": "r1", "created_at": "2026-01-10", "quality": {"noise": 0.1}},
            [{"cluster_id": 2, "label": "table", "centroid": centroid, "born_in": "r0"}],
        )
    ((manifest, label, blob, details),) = sql(
        filled,
        "SELECT manifest, label, hex(centroid), details FROM clusters JOIN discovery_runs"
        " USING (run_id)",
    )
    assert json.loads(manifest)["quality"] == {"noise": 0.1}
    assert (label, bytes.fromhex(blob)) == ("table", centroid.tobytes())
    assert json.loads(details) == {"born_in": "r0"}


# -- schema versions

STEPS = (
    "CREATE TABLE notes (text TEXT);\nINSERT INTO notes VALUES ('a;b');\n",
    "ALTER TABLE notes ADD COLUMN author TEXT;\nUPDATE notes SET author = 'me';\n",
)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_old_file_is_brought_up_to_date_step_by_step(filled, steps, records):
    for upto in range(steps + 1):
        open_database(filled, create=False, read_only=False, migrations=STEPS[:upto]).close()
    open_database(filled, create=False, read_only=False, migrations=STEPS[:steps]).close()
    assert sql(filled, "PRAGMA user_version") == [[SCHEMA_VERSION + steps]]
    expected = [[], [["a;b"]], [["a;b", "me"]]][steps]
    if steps:
        assert sql(filled, "SELECT * FROM notes") == expected
    assert sql(filled, "SELECT count(*) FROM fingerprints") == [[5_000]]


def test_a_migration_that_fails_leaves_the_old_file(filled):
    broken = (STEPS[0], "ALTER TABLE songs ADD COLUMN x;\n")
    with pytest.raises(StoreError, match="no such table"):
        open_database(filled, create=False, read_only=False, migrations=broken)
    assert sql(filled, "PRAGMA user_version") == [[SCHEMA_VERSION]]
    assert sql(filled, "SELECT count(*) FROM sqlite_master WHERE name = 'notes'") == [[0]]
    with open_store(filled) as store:
        assert store.counts().rows == 5_000


def test_an_old_file_is_not_changed_by_a_reader(filled):
    with pytest.raises(StoreError, match="old schema version 1: open it once for writing"):
        open_database(filled, create=False, read_only=True, migrations=STEPS)


def test_a_file_of_a_newer_version_is_refused(filled):
    sql(filled, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match="upgrade attn"):
        open_store(filled)


# -- what goes wrong


def test_a_file_that_is_no_sqlite_is_refused_and_kept(path):
    path.write_bytes(b"no database at all" * 1_000)
    for options in ({}, {"create": True}, {"read_only": True}):
        with pytest.raises(StoreError, match="not a SQLite file"):
            open_store(path, **options)
    assert path.read_bytes() == b"no database at all" * 1_000


def test_a_sqlite_file_of_another_program_is_refused_and_kept(path):
    sql(path, "CREATE TABLE songs (title TEXT)")
    before = path.read_bytes()
    for options in ({}, {"create": True}, {"read_only": True}):
        with pytest.raises(StoreError, match="another program"):
            open_store(path, **options)
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_store_only_when_asked(path):
    path.touch()
    with pytest.raises(StoreError, match="empty file: make it a store with `attn db init"):
        open_store(path)
    with open_store(path, create=True) as store:
        assert store.counts().rows == 0


@pytest.mark.parametrize("keep", [0.3, 0.9, None])
def test_a_truncated_or_overwritten_file_is_called_damaged(filled, keep):
    content = filled.read_bytes()
    quarter = len(content) // 4
    filled.write_bytes(
        content[: int(len(content) * keep)]
        if keep
        else content[:quarter] + b"\xff" * quarter + content[2 * quarter :]
    )
    damaged = pytest.raises(StoreError, match="damaged: restore it from a backup")
    with damaged, open_store(filled) as store:
        list(store.scan())


def test_a_vector_of_the_wrong_length_is_a_row_that_is_rejected(filled):
    sql(filled, "UPDATE fingerprints SET vector = x'00' WHERE seq = 77")
    with open_store(filled) as store:
        (batch,) = store.scan()
    assert record.conform(batch).rejected == {"NaN or infinity": 1}
    assert np.isfinite(record.vectors(batch)).all(axis=1).sum() == 4_999


def test_a_scan_whose_rows_are_deleted_says_so_and_other_rows_come(path, records):
    with open_store(path, create=True) as store, open_store(path) as other:
        for start in range(0, 200_000, 50_000):
            store.append(records(50_000, first=start))
        scans = [store.scan(), store.scan(snapshot=store.snapshot(), columns=["vector"])]
        for scan in scans:
            next(scan)
        other.append(records(100, first=900_000))
        assert other.prune(START + timedelta(seconds=100)) == 100
        # Only the first block lost rows, and it was read before.
        assert 65_535 + sum(batch.num_rows for batch in scans[0]) == 200_000
        assert other.prune(START + timedelta(seconds=150_000)) == 149_900
        with pytest.raises(StoreError, match=r"rows were deleted from .* while they were read"):
            list(scans[1])
        later = store.scan()
        assert sum(batch.num_rows for batch in later) == store.counts().rows == 50_100


def test_a_long_prune_lets_threads_and_processes_write_and_read(path, records, monkeypatch):
    monkeypatch.setattr(sqlite_store, "PRUNE_BLOCKS", 1)
    with open_store(path, create=True) as store:
        for start in range(0, 300_000, 50_000):
            store.append(records(50_000, first=start))
        pruning = threading.Thread(target=store.prune, args=(START + timedelta(days=30),))
        pruning.start()
        seen = []
        while pruning.is_alive():
            seen.append(store.counts().rows)
            late = store.append(records(1, first=90_000_000 + len(seen)))
            assert late.inserted == 1
        pruning.join()
        assert len(set(seen)) > 3
        assert store.counts().rows == len(seen)
        assert all(b.num_rows for b in store.scan())  # no session that is used was deleted


def test_a_file_locked_for_too_long_says_so(filled, records):
    script = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('BEGIN IMMEDIATE')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(filled)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"locked\n"
        with open_store(filled, busy_timeout_s=0.2) as store:
            with pytest.raises(StoreError, match="locked by another process"):
                store.append(records(10, first=9_000))
            assert sum(batch.num_rows for batch in store.scan()) == 5_000
            holder.communicate(timeout=20)
            assert store.append(records(10, first=9_000)).inserted == 10
    finally:
        holder.kill()
        holder.wait()


def test_a_closed_store_says_so(filled):
    store = open_store(filled)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.counts()


def test_a_name_with_odd_characters_is_a_name(tmp_path, records):
    path = tmp_path / "a?mode=ro#50%20 é.db"
    with open_store(path, create=True) as store:
        store.append(records(3))
    assert path.is_file()
    with open_store(path) as store:
        assert store.counts().rows == 3


def test_an_append_that_fails_leaves_nothing_behind(filled, records, monkeypatch):
    with open_store(filled) as store:
        before = store.counts()
        # The last statement of an append: what a full disk would do at the worst moment.
        monkeypatch.setattr(
            "pipeline.store.sqlite.insert._ADD_TO_SESSION", "UPDATE songs SET x = ?"
        )
        with pytest.raises(StoreError, match="no such table"):
            store.append(records(100, first=90_000))
        monkeypatch.undo()
        assert store.counts() == before
        assert store.append(records(100, first=90_000)).inserted == 100
