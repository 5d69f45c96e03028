"""The SQLite store: its file as other programs see it, its schema versions, and what goes wrong.

A file is looked at with Python's `sqlite3` in a process of its own: two SQLite libraries must not
have one file open in one process (pipeline/store/sqlite/file.py).
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shared import REPO

import pipeline.store
from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from pipeline import record
from pipeline.store.open import open_store
from pipeline.store.sqlite import store as sqlite_store
from pipeline.store.sqlite.file import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    open_database,
    statements,
)
from pipeline.store.sqlite.migrations import MIGRATIONS, OLDEST_READABLE

START = datetime(2026, 1, 9, 22, 0, tzinfo=UTC)
GOLDEN = REPO / "tests" / "golden"
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
        scripts = MIGRATIONS + STEPS[:upto]
        open_database(filled, create=False, read_only=False, migrations=scripts).close()
    scripts = MIGRATIONS + STEPS[:steps]
    open_database(filled, create=False, read_only=False, migrations=scripts).close()
    assert sql(filled, "PRAGMA user_version") == [[SCHEMA_VERSION + steps]]
    expected = [[], [["a;b"]], [["a;b", "me"]]][steps]
    if steps:
        assert sql(filled, "SELECT * FROM notes") == expected
    assert sql(filled, "SELECT count(*) FROM fingerprints") == [[5_000]]


def test_a_migration_that_fails_leaves_the_old_file(filled):
    broken = (*MIGRATIONS, STEPS[0], "ALTER TABLE songs ADD COLUMN x;\n")
    with pytest.raises(StoreError, match="no such table"):
        open_database(filled, create=False, read_only=False, migrations=broken)
    assert sql(filled, "PRAGMA user_version") == [[SCHEMA_VERSION]]
    assert sql(filled, "SELECT count(*) FROM sqlite_master WHERE name = 'notes'") == [[0]]
    with open_store(filled) as store:
        assert store.counts().rows == 5_000


def test_an_old_file_is_not_changed_by_a_reader(filled):
    before = sql(filled, "SELECT name, sql FROM sqlite_master ORDER BY name")
    scripts = MIGRATIONS + STEPS
    open_database(filled, create=False, read_only=True, migrations=scripts).close()
    assert sql(filled, "SELECT name, sql FROM sqlite_master ORDER BY name") == before
    assert sql(filled, "PRAGMA user_version") == [[SCHEMA_VERSION]]
    sql(filled, f"PRAGMA user_version = {OLDEST_READABLE - 1}")
    with pytest.raises(StoreError, match="old schema version 0: open it once for writing"):
        open_store(filled, read_only=True)


def old_store(folder: Path) -> Path:
    return Path(shutil.copy(GOLDEN / "store_v1.db", folder / "old.db"))


def test_a_file_of_version_1_becomes_what_a_new_one_is(tmp_path, path, records):
    old = old_store(tmp_path)
    open_store(path, create=True).close()
    open_store(old).close()
    columns = "SELECT m.type, m.name, p.name, p.type, p.pk FROM sqlite_master AS m LEFT JOIN"
    columns += " pragma_table_info(m.name) AS p ORDER BY m.type, m.name, p.cid"
    assert sql(old, columns) == sql(path, columns)
    views = "SELECT sql FROM sqlite_master WHERE type IN ('view', 'index') ORDER BY name"
    assert sql(old, views) == sql(path, views)
    with open_store(old) as store:
        assert store.append(records(500)).inserted == 500
        assert store.counts().rows == 503


WRITES = len(list(statements(MIGRATIONS[0]))) + 2


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, marks=() if at in (0, WRITES // 2, WRITES - 1) else pytest.mark.slow)
        for at in range(WRITES)
    ],
)
def test_a_migration_that_is_killed_leaves_the_old_file_and_the_next_one_ends_it(
    tmp_path, records, at
):
    old = old_store(tmp_path)
    code = (
        "import os, signal, sys\n"
        "from pipeline.store.open import open_store\n"
        "from pipeline.store.sqlite import file\n"
        "run, left = file.Database.run, int(sys.argv[2])\n"
        "def killed(self, sql, *more):\n"
        "    global left\n"
        "    writes = 'CREATE', 'ALTER', 'DROP', 'PRAGMA user_version =', 'COMMIT'\n"
        "    if sql.strip().startswith(writes):\n"
        "        left -= 1\n"
        "    if left < 0:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return run(self, sql, *more)\n"
        "file.Database.run = killed\n"
        "open_store(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(old), str(at)], timeout=60, cwd=REPO)
    assert done.returncode == -signal.SIGKILL
    assert sql(old, "PRAGMA user_version") == [[1]]
    assert sql(old, "SELECT count(*) FROM fingerprints") == [[3]]
    with open_store(old) as store:
        assert store.append(records(100)).inserted == 100
        assert store.verify().is_good
        assert store.counts().rows == 103
    assert sql(old, "PRAGMA user_version") == [[2]]


def test_rows_of_one_trace_share_it_and_rows_without_cost_none(path, records):
    nothing = {"response_id": None, "traceparent": None}
    with open_store(path, create=True) as store:
        store.append(records(200, **nothing))
        assert not store._db.has_traces()
        store.append(records(800, first=200))
        store.append(records(800, first=600))
        names = ["token_id", *record.SINCE_VERSION_2]
        (found,) = store.scan(columns=names)
        made = [records(200, **nothing).select(names), records(1_200, first=200).select(names)]
        assert found.to_pylist() == pa.Table.from_batches(made).to_pylist()
    # Four requests of five name a response or a trace; of each there is one row.
    named = records(1_400).slice(200)
    pairs = zip(*(named.column(n).to_pylist() for n in record.SINCE_VERSION_2), strict=True)
    found = sql(path, "SELECT response_id, traceparent FROM traces")
    assert sorted(map(tuple, found), key=str) == sorted(set(pairs) - {(None, None)}, key=str)
    assert sql(path, "SELECT count(*) FROM fingerprints WHERE trace IS NULL") == [[200]]
    newest = "SELECT trace_ref FROM traces EXCEPT SELECT trace FROM fingerprints GROUP BY trace"
    newest += " HAVING max(captured_at) = (SELECT last_at FROM traces WHERE trace_ref = trace)"
    assert sql(path, newest) == []
    with open_store(path) as store:
        store.prune(START + timedelta(seconds=700))
        assert store.verify().is_good
    unused = "SELECT count(*) FROM traces WHERE trace_ref NOT IN (SELECT trace FROM fingerprints)"
    assert sql(path, unused) == [[0]]
    assert sql(path, "SELECT count(*) FROM traces") != [[0]]


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
