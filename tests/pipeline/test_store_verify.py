"""Stores with rows that are not records and with damaged files: listed, scanned, verified, repaired
and pruned. The rows are written as an older attn wrote them, which checked less."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_store_commands import db
from test_store_sqlite import sql

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import Selection
from pipeline.store.open import open_store

NOT_UTF8 = pa.array([b"caf\xe9"]).cast(pa.string(), safe=False)
TIMES = {
    "Go's zero time": -62_135_596_800_000_000,
    "nanoseconds read as microseconds": 1_767_225_600_000_000_000,
    "the first of int64": -(2**63),
    "the last of int64": 2**63 - 1,
}
BAD = {
    "a vector of NaN": {"vector": np.full((1, 20), np.nan, np.float32)},
    **{name: {name: NOT_UTF8} for name in ("request_id", "session_id", "model", "capture_id")},
    **{
        name: {"captured_at": pa.array([micros], pa.timestamp("us", tz="UTC"))}
        for name, micros in TIMES.items()
    },
}


def spoil(path: Path, batch: pa.RecordBatch) -> None:
    """Store rows without a look at them."""
    with open_store(path, create=True) as store:
        store._append(batch, {})


def rejected(path: Path) -> dict[str, int]:
    """What `record.conform` says of all rows of a store."""
    with open_store(path, read_only=True) as store:
        return dict(
            sum(
                (Counter(record.conform(b).rejected) for b in store.scan(as_stored=True)), Counter()
            )
        )


def verified(path: Path, *options: str) -> tuple[int, dict]:
    done = db("verify", "--db", path, "--json", *options)
    assert done.exit_code in (0, 3), done.output
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("name", BAD)
def test_a_store_with_a_bad_row_is_listed_scanned_and_pruned(store_path, records, name):
    spoil(store_path, records(90))
    spoil(store_path, records(1, first=90, **BAD[name]))
    listed = db("info", "--db", store_path, "--json")
    assert listed.exit_code == 0, listed.output
    info = json.loads(listed.stdout)
    assert info["rows"] == sum(group["rows"] for group in info["groups"]) == 91
    with open_store(store_path, read_only=True) as store:
        batches = list(store.scan())
        assert sum(batch.num_rows for batch in batches) == 91
        for batch in batches:
            batch.drop_columns(["captured_at"]).to_pylist()  # all text can be decoded
        found = 0
        for group in info["groups"]:
            chosen = Selection(
                model=group["model"], layout=group["layout"], capture_id=group["capture_id"]
            )
            found += sum(batch.num_rows for batch in store.scan(chosen))
        assert found == 91
    done = db("prune", "--db", store_path, "--before", "9999-12-31", "--yes")
    assert "deleted 91 fingerprints" in done.stdout
    assert verified(store_path)[1]["rows"] == 0


@pytest.mark.parametrize("name", BAD)
def test_verify_counts_bad_rows_and_repair_keeps_them_beside_the_store(store_path, records, name):
    spoil(store_path, records(90))
    spoil(store_path, records(1, first=90, **BAD[name]))
    bad = rejected(store_path)
    assert "NaN" not in name or bad == {"NaN or infinity": 1}
    code, found = verified(store_path)
    assert (code, found["bad"], found["rows"]) == (3 if bad else 0, bad, 91)
    code, repaired = verified(store_path, "--repair")
    assert (code, repaired["bad"], repaired["left"]["rows"]) == (0, bad, 91 - sum(bad.values()))
    assert verified(store_path) == (0, {**found, "bad": {}, "rows": 91 - sum(bad.values()),
                                        "left": repaired["left"]})  # fmt: skip
    with open_store(store_path) as store:
        assert (
            store.counts().rows == sum(b.num_rows for b in store.scan()) == 91 - sum(bad.values())
        )
    if bad:
        saved = store_path.with_name(f"{store_path.name}.rejected-1.parquet")
        assert str(saved) in repaired["done"][0]
        (kept,) = pq.read_table(saved).to_batches()
        assert record.conform(kept).rejected == bad


def test_a_store_without_faults_is_verified_and_repair_changes_nothing(store_path, records):
    spoil(store_path, records(500))
    code, found = verified(store_path, "--repair")
    assert (code, found["rows"], found["bad"], found["problems"]) == (0, 500, {}, [])
    assert found["done"] == [] and not list(store_path.parent.glob("*.rejected*"))
    plain = db("verify", "--db", store_path)
    assert plain.stdout == f"{store_path}: 500 rows read, 0 are not records\n"


# -- SQLite

EDITS = {
    "a vector of another length": ("UPDATE fingerprints SET vector = x'0011' WHERE seq = 77",),
    "a vector of text": ("UPDATE fingerprints SET vector = 'none' WHERE seq = 77",),
    "an unknown phase": ("UPDATE fingerprints SET phase = 9 WHERE seq = 77",),
    "an unknown layout": ("UPDATE captures SET layout = 300 WHERE capture_ref = 1",),
    "a request that is gone": ("DELETE FROM requests WHERE request_id = 'request-000001'",),
    "a capture that is gone": ("DELETE FROM captures WHERE capture_ref = 1",),
    "a response that is not UTF-8": (
        "UPDATE traces SET response_id = CAST(x'ff' AS TEXT) WHERE trace_ref = 1",
    ),
    "a traceparent that is none": ("UPDATE traces SET traceparent = 'mine' WHERE trace_ref = 1",),
    "a time that is text": ("UPDATE fingerprints SET captured_at = 'today' WHERE seq = 77",),
    **{
        f"a {name} that is null": (
            "PRAGMA writable_schema = ON",
            f"UPDATE sqlite_master SET sql = replace(sql, '{name} INTEGER NOT NULL',"
            f" '{name} INTEGER') WHERE name = 'fingerprints'",
            "COMMIT",
            "PRAGMA writable_schema = RESET",
            f"UPDATE fingerprints SET {name} = NULL WHERE seq = 77",
        )
        for name in ("key", "capture", "phase")
    },
    "a row that no block counts": (
        "INSERT INTO fingerprints SELECT 900000, key + 512 * 90, vector, capture, captured_at,"
        " session, phase, prompt_len, token_id, sink_mass, router_entropy, top_experts, trace FROM"
        " fingerprints WHERE seq = 77",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_sqlite_file_that_was_edited_can_be_used_verified_and_repaired(tmp_path, records, edit):
    path = tmp_path / "edited.db"
    spoil(path, records(200))
    sql(path, *EDITS[edit])
    assert db("info", "--db", path).exit_code == 0
    with open_store(path, read_only=True) as store:
        for batch in store.scan():
            batch.to_pylist()
    code, found = verified(path)
    assert code == 3 and (found["bad"] or found["problems"])
    code, repaired = verified(path, "--repair")
    assert (code, repaired["left"]["problems"]) == (0, [])
    assert verified(path)[0] == 0
    with open_store(path) as store:
        rows = sum(batch.num_rows for batch in store.scan())
        assert rows == store.counts().rows == repaired["left"]["rows"] > 100
        assert store.append(records(10, first=9_000)).inserted == 10


def test_a_vector_of_another_length_is_kept_as_it_was(tmp_path, records):
    path = tmp_path / "edited.db"
    spoil(path, records(200))
    sql(path, "UPDATE fingerprints SET vector = x'0011' WHERE seq = 77")
    assert verified(path, "--repair")[0] == 0
    saved = pq.read_table(tmp_path / "edited.db.rejected-1.parquet").to_pylist()
    assert [row["stored_vector"] for row in saved] == [b"\x00\x11"]
    assert saved[0]["request_id"] == "request-000001"


def test_damaged_pages_are_named_and_no_row_is_deleted_for_them(tmp_path, records):
    path = tmp_path / "torn.db"
    spoil(path, records(20_000))
    content = bytearray(path.read_bytes())
    half = len(content) // 2 // 8_192 * 8_192
    content[half : half + 8_192] = b"\xff" * 8_192
    path.write_bytes(content)
    code, found = verified(path, "--repair")
    assert code == 3 and any("is damaged: restore it" in line for line in found["problems"])
    assert found["left"] == {name: found[name] for name in ("rows", "bad", "problems")}
    assert any("cannot be repaired" in line for line in found["done"])


# -- Parquet


@pytest.fixture
def root(tmp_path: Path, records) -> Path:
    """A folder of four files."""
    root = tmp_path / "fingerprints"
    for first in range(0, 400, 100):
        spoil(root, records(100, first=first))
    return root


def data_files(root: Path) -> list[Path]:
    return sorted(root.glob("day=*/part-*.parquet"))


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]


@pytest.mark.parametrize("keep", [0, 100, 0.95])
def test_a_file_that_cannot_be_read_is_moved_aside(root, keep):
    damaged = data_files(root)[1]
    content = damaged.read_bytes()
    damaged.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    said = db("info", "--db", root)
    assert said.exit_code == 2 and "attn db verify --repair" in said.stderr
    code, found = verified(root)
    assert (code, found["rows"], len(found["problems"])) == (3, 300, 1)
    code, repaired = verified(root, "--repair")
    assert (code, repaired["left"]) == (0, {"rows": 300, "bad": {}, "problems": []})
    (aside,) = root.glob("**/*.damaged")
    assert str(aside) in repaired["done"][0] and aside.stat().st_size < len(content)
    assert verified(root)[0] == 0
    with open_store(root) as store:
        assert sum(batch.num_rows for batch in store.scan()) == store.counts().rows == 300


def test_rows_that_can_be_read_stay_when_a_part_of_their_file_cannot(tmp_path, records):
    root = tmp_path / "fingerprints"
    spoil(root, records(70_000, every_s=0))
    (file,) = data_files(root)
    content = bytearray(file.read_bytes())
    second = pq.read_metadata(file).row_group(1).column(0).dictionary_page_offset
    content[second : second + 2_000] = b"\xff" * 2_000
    file.write_bytes(content)
    code, repaired = verified(root, "--repair")
    assert (code, repaired["left"]["rows"]) == (0, 65_536)
    assert next(root.glob("**/*.damaged")).read_bytes() == content
    with open_store(root) as store:
        assert store.counts().rows == 65_536
        assert store.append(records(70_000, every_s=0)).inserted == 70_000
        assert sum(batch.num_rows for batch in store.scan()) == 70_000


def test_no_flipped_byte_of_a_footer_loses_rows_silently(tmp_path, records):
    root = tmp_path / "fingerprints"
    spoil(root, records(40))
    (file,) = data_files(root)
    content = file.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    random = np.random.default_rng(18)
    wrong = 0
    for at in len(content) - 1 - random.choice(footer, 150, replace=False):
        file.write_bytes(flip(content, at))
        os.utime(file, ns=(int(at), int(at)))
        try:
            with open_store(root) as store:
                found = sum(batch.num_rows for batch in store.scan(columns=["position"]))
                assert found == store.counts().rows == 40
        except StoreError:
            wrong += 1
    assert wrong > 10


def test_what_a_writer_that_died_left_is_named_and_deleted(root):
    new, old = root / ".part-1.tmp", root / ".part-2.tmp"
    for path in (new, old):
        path.touch()
    os.utime(old, (0, 0))
    code, found = verified(root)
    assert (code, found["problems"]) == (3, [f"{old} was left by a writer that died"])
    assert verified(root, "--repair")[0] == 0
    assert new.exists() and not old.exists()


def test_a_recorded_run_that_cannot_be_read_is_moved_aside(root):
    with open_store(root) as store:
        store.record_run({"run_id": "r1", "created_at": datetime(2026, 1, 10, tzinfo=UTC)}, [])
    (root / "_runs" / "r1.json").write_text("[]")
    assert db("info", "--db", root).exit_code == 2
    assert verified(root, "--repair")[0] == 0
    assert db("info", "--db", root).exit_code == 0
    assert (root / "_runs" / "r1.json.damaged").read_text() == "[]"


@pytest.mark.parametrize("rows", ["seq = 7", "TRUE"])
@pytest.mark.parametrize("name", ["key", "vector", "capture", "captured_at", "session", "phase"])
def test_null_from_a_damaged_page_is_a_row_that_is_rejected(tmp_path, records, name, rows):
    path = tmp_path / "fingerprints.db"
    with open_store(path, create=True) as store:
        store.append(records(40))
    nullable = "UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')"
    sql(path, "PRAGMA writable_schema = ON", f"{nullable} WHERE name = 'fingerprints'")
    sql(path, f"UPDATE fingerprints SET {name} = NULL WHERE {rows}")
    bad = 40 if rows == "TRUE" else 1
    # A row is of no session all the same.
    assert sum(rejected(path).values()) == (0 if name == "session" else bad)
    code, found = verified(path, "--repair")
    assert code == 0 and sum(found["bad"].values()) == (0 if name == "session" else bad)
    with open_store(path) as store:
        assert store.prune(datetime(2100, 1, 1, tzinfo=UTC)) == 40 - sum(found["bad"].values())
