"""Stores under several processes, sudden death, full disks and missing permissions: all real."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.open import open_store

REPO = Path(__file__).parents[2]
# What every child starts with: `batch(first)` makes 500 records numbered from `first`. The share of
# the nearest keys holds the last three digits of the number.
PRELUDE = """
import os, resource, sys
import numpy as np, pyarrow as pa
import pipeline.store.parquet.store, pipeline.store.sqlite.store
from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.open import open_store

def batch(first, rows=500):
    number = np.arange(first, first + rows)
    near = (number % 1000 / 1000).astype(np.float32)
    vector = np.zeros((rows, 20), np.float32)
    vector[:, [0, 3, 4]] = near[:, None]
    vector[:, [2, 19]] = 1 - near[:, None]
    return record.make_batch({
        "request_id": [f"request-{n // 100}" for n in number.tolist()],
        "position": (number % 100).astype(np.int32), "layer": -1,
        "captured_at": pa.array(number * 30_000_000 + 1_767_225_600_000_000,
                                pa.timestamp("us", tz="UTC")),
        "model": "m", "capture_id": "c", "layout": 1, "phase": "output",
        "vector": vector,
    }, rows)

path = sys.argv[1]
"""
WRITER = """
store = open_store(path, create=True)
first = int(sys.argv[2])
for step in range(int(sys.argv[3])):
    assert store.append(batch(first + 500 * step)).inserted == 500
    print(first + 500 * step, flush=True)
"""


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip


def numbers(path: Path) -> list[int]:
    """The numbers of the records in a store; each must be whole."""
    found = []
    with open_store(path) as store:
        for batch in store.scan():
            requests = [int(r.removeprefix("request-")) for r in batch["request_id"].to_pylist()]
            of_batch = [100 * r + p for r, p in zip(requests, batch["position"].to_pylist(),
                                                    strict=True)]  # fmt: skip
            vectors = record.vectors(batch)
            near = np.array([n % 1000 / 1000 for n in of_batch], np.float32)[:, None]
            assert (vectors[:, [0, 3, 4]] == near).all()
            assert (vectors[:, [2, 19]] == 1 - near).all()
            found += of_batch
        assert store.counts().rows == len(found)
    return found


def test_a_killed_writer_leaves_every_acknowledged_batch(store_path):
    acknowledged: list[int] = []
    for patience in (1, 7):
        first = 100_000 * patience
        with child(WRITER, store_path, first, 100_000) as writer:
            try:
                for _ in range(patience):
                    acknowledged.append(int(writer.stdout.readline()))
            finally:
                writer.send_signal(signal.SIGKILL)
            # communicate() would leave out the lines that readline() has read ahead.
            rest, errors = writer.stdout.read(), writer.stderr.read()
        assert writer.returncode == -signal.SIGKILL, errors
        # Only whole lines are acknowledgements.
        acknowledged += [int(line) for line in rest.splitlines(keepends=True) if line[-1] == "\n"]
    stored = set(numbers(store_path))
    for start in acknowledged:
        assert stored.issuperset(range(start, start + 500))
    if store_path.suffix == ".db":
        # A batch is stored whole or not at all; at most one per writer was not acknowledged.
        assert len(stored) % 500 == 0
        assert len(stored) <= 500 * (len(acknowledged) + 2)


def test_two_writers_and_a_reader_work_together(store_path):
    open_store(store_path, create=True).close()
    # The batches from 5,000 to 7,500 come from both.
    writers = [child(WRITER.replace("assert ", ""), store_path, 0, 15),
               child(WRITER.replace("assert ", ""), store_path, 5_000, 15)]  # fmt: skip
    with open_store(store_path) as store:
        seen = 0
        while any(writer.poll() is None for writer in writers):
            mark = store.snapshot()
            now = sum(batch.num_rows for batch in store.scan(snapshot=mark, columns=["vector"]))
            again = sum(batch.num_rows for batch in store.scan(snapshot=mark, columns=["layer"]))
            assert seen <= now == again
            seen = now
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    stored = numbers(store_path)
    assert len(stored) == len(set(stored))
    assert set(stored) == set(range(12_500))


def test_two_processes_may_make_the_same_store(store_path):
    writers = [child(WRITER, store_path, first, 3) for first in (0, 50_000)]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    assert len(numbers(store_path)) == 3_000


FILL = """
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
store = open_store(path, create=True)
try:
    for step in range(10_000):
        store.append(batch(2_500 * step, 2_500))
        print(2_500 * step, flush=True)
except StoreError as error:
    print("error:", error)
"""


def check_filled(writer: subprocess.Popen[str], path: Path) -> None:
    out, errors = writer.communicate(timeout=120)
    assert writer.returncode == 0, errors
    *acknowledged, error = out.splitlines()
    assert error.startswith("error: ") and "nothing of this batch was stored" in error
    assert acknowledged
    stored = numbers(path)
    assert set(stored) >= {
        n for first in acknowledged for n in range(int(first), int(first) + 2_500)
    }
    assert len(stored) == 2_500 * len(acknowledged)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, which root may mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_nothing_that_was_acknowledged(small_disk, store_path, tmp_path):
    path = small_disk / store_path.name
    writer = child(FILL, path)
    out, errors = writer.communicate(timeout=120)
    assert writer.returncode == 0, errors
    *acknowledged, error = out.splitlines()
    assert error.startswith("error: ")
    assert "is full" in error or "No space left" in error
    # Reading needs a little room (SQLite's lock file), so look at it on a larger disk.
    copy = tmp_path / "copy" / path.name
    shutil.copytree(small_disk, copy.parent)
    stored = numbers(copy)
    assert acknowledged and len(stored) == 2_500 * len(acknowledged)


def test_a_file_size_limit_loses_nothing_that_was_acknowledged(tmp_path):
    path = tmp_path / "fingerprints.db"
    check_filled(child(FILL, path, 2_000_000), path)


READ_ONLY = """
root = sys.argv[2]
# Loads the driver and the modules that a scan needs while we still may read them.
with open_store(root + "/warm.db", create=True) as warm:
    warm.append(batch(10))
    list(warm.scan())
os.chmod(root, int(sys.argv[3], 8))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
with open_store(path, read_only=True) as store:
    print("read", sum(batch.num_rows for batch in store.scan()), store.counts().rows)
try:
    with open_store(path) as store:
        store.append(batch(10_000))
    print("written")
except StoreError as error:
    print("error:", error)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)
        Path(made).chmod(0o755)


@pytest.mark.parametrize("folder_mode", ["555", "777"])
def test_a_read_only_store_can_be_read_and_says_why_not_written(
    store_path, open_folder, folder_mode, records
):
    path = open_folder / store_path.name
    with open_store(path, create=True) as store:
        store.append(records(120))
    path.chmod(0o444 if path.is_file() else 0o555)
    reader = child(READ_ONLY, path, open_folder, folder_mode)
    out, errors = reader.communicate(timeout=60)
    assert reader.returncode == 0, errors
    read, said = out.splitlines()
    assert read == "read 120 120"
    assert said.startswith("error: ") and ("read-only" in said or "Permission denied" in said)


EXPORT = """
from pathlib import Path
from capture_kernels.errors import AttnError
from pipeline.store.transfer import export_file
with open_store(path, read_only=True) as store:
    try:
        print(export_file(store, Path(sys.argv[2])))
    except AttnError as error:
        print("error:", error)
"""


@pytest.mark.slow
def test_two_exports_to_one_name_leave_a_whole_file(tmp_path):
    path, out = tmp_path / "fingerprints.db", tmp_path / "out.parquet"
    writer = child(WRITER, path, 0, 40)
    assert not writer.communicate(timeout=60)[1]
    for _ in range(3):
        exports = [child(EXPORT, path, out) for _ in range(2)]
        for export in exports:
            said, errors = export.communicate(timeout=60)
            assert (said, errors) == ("20000\n", "")
        assert pq.read_table(out).num_rows == 20_000
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    "name", ["out.parquet", "out.jsonl", pytest.param("out.jsonl.gz", marks=pytest.mark.slow)]
)
def test_an_export_to_a_full_disk_is_one_line_and_leaves_nothing(small_disk, tmp_path, name):
    path = tmp_path / "fingerprints"
    assert not child(WRITER, path, 0, 40).communicate(timeout=60)[1]
    (small_disk / "other").write_bytes(bytes(2_000_000))
    said, errors = child(EXPORT, path, small_disk / name).communicate(timeout=60)
    assert errors == "" and len(said.splitlines()) == 1
    assert said.startswith("error: cannot write") and "No space left" in said
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_a_store_without_room_can_be_read_verified_and_says_what_it_cannot_write(
    small_disk, store_path
):
    path = small_disk / store_path.name
    with open_store(path, create=True) as store:
        assert not child(WRITER, path, 0, 2).communicate(timeout=60)[1]
        (small_disk / "rest").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        assert store.verify().is_good
        assert sum(batch.num_rows for batch in store.scan()) == store.counts().rows == 1_000
        for run in range(100):
            try:
                store.record_run({"run_id": f"r{run}", "created_at": "now", "x": "y" * 9_999}, [])
            except StoreError as error:
                assert "batch" not in str(error) and len(str(error).splitlines()) == 1
                break
        else:
            pytest.fail("the disk is not full")
        assert store.prune(datetime(2020, 1, 1, tzinfo=UTC)) == 0
