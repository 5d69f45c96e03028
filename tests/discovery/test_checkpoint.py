"""Parts on disk that are whole or not there, and belong to one key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from shared import REPO

from capture_kernels.errors import RunError, WriteError
from discovery.runs.checkpoint import StageCheckpoint, chained_key, code_hash
from pipeline.durable import file_facts, write_atomically, write_json

# Writes a part of each kind in a process that may write no file above 20,000 bytes: a disk that
# is full in the middle of a file. Says for each kind what came of it.
FULL_DISK = textwrap.dedent(
    """
    import io, json, resource, sys
    from pathlib import Path
    import numpy as np, pyarrow as pa
    from capture_kernels.errors import WriteError
    from discovery.artifacts.write import write_parquet
    from discovery.runs.checkpoint import StageCheckpoint
    from pipeline.durable import write_json

    folder = Path(sys.argv[1])
    parts = StageCheckpoint(folder / "stage", "key")
    parts.write_arrays("kept.npz", values=np.arange(10))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    noise = np.random.default_rng(0).random(50_000)
    writers = {
        "kept.npz": lambda: parts.write_arrays("kept.npz", values=noise),
        "arrays.npz": lambda: parts.write_arrays("arrays.npz", values=noise),
        "batch.arrow": lambda: parts.write_batch(
            "batch.arrow", pa.record_batch({"x": pa.array(noise)})),
        "value.json": lambda: write_json(parts.path("value.json"), noise.tolist()),
        "table.parquet": lambda: write_parquet(
            parts.path("table.parquet"), pa.table({"x": noise})),
    }
    said = {}
    for name, write in writers.items():
        try:
            write()
            said[name] = "written"
        except WriteError as error:
            said[name] = str(error)
    print(json.dumps(said))
    """
)


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for name, message in said.items():
        assert message == (
            f"cannot write {tmp_path}/stage/{name}: File too large; free space or mend the folder, "
            "then run the command again"
        )
    assert sorted(p.name for p in (tmp_path / "stage").iterdir()) == [
        "hashes.jsonl",
        "kept.npz",
        "key",
    ]
    kept = StageCheckpoint(tmp_path / "stage", "key").read_arrays("kept.npz")
    assert kept["values"].tolist() == list(range(10))


def test_a_part_appears_under_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "part"
    path.write_bytes(b"before")

    def write(file):
        file.write(b"after, ")
        assert path.read_bytes() == b"before"
        file.write(b"whole")

    write_atomically(path, write)
    assert path.read_bytes() == b"after, whole"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_a_folder_that_is_gone_says_which_file(tmp_path):
    with pytest.raises(WriteError, match=r"cannot write .*gone/value\.json: No such file"):
        write_json(tmp_path / "gone" / "value.json", {})


def test_json_holds_no_number_that_json_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "value.json", {"x": float("nan")})
    assert not (tmp_path / "value.json").exists()


def test_the_same_key_finds_its_parts_and_another_key_finds_none(tmp_path):
    first = StageCheckpoint(tmp_path / "umap", "one")
    first.write_arrays("map.npz", points=np.eye(3, dtype=np.float32))
    first.finish({"rows": 3}, "3 rows", 0.5)
    again = StageCheckpoint(tmp_path / "umap", "one")
    assert again.has("map.npz")
    assert again.finished() is not None
    other = StageCheckpoint(tmp_path / "umap", "two")
    assert not other.has("map.npz")
    assert other.finished() is None
    assert other.names(".npz") == []
    # And going back does not bring them back.
    assert not StageCheckpoint(tmp_path / "umap", "one").has("map.npz")


def test_a_folder_without_its_key_is_emptied(tmp_path):
    stage = StageCheckpoint(tmp_path / "umap", "one")
    stage.write_arrays("map.npz", points=np.eye(3))
    (tmp_path / "umap" / "key").unlink()
    assert not StageCheckpoint(tmp_path / "umap", "one").has("map.npz")


@pytest.mark.parametrize("rows", [0, 1, 257])
def test_arrays_and_batches_come_back_as_they_were(tmp_path, rows):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    arrays = {
        "floats": np.random.default_rng(0).random((rows, 20), np.float32),
        "ids": np.arange(rows, dtype=np.int64),
        "flag": np.array(True),
        "nothing": np.array(np.nan),
    }
    stage.write_arrays("some.npz", **arrays)
    back = stage.read_arrays("some.npz")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)
    words = pa.array(["b", "a", None] * rows).dictionary_encode()
    batch = pa.record_batch({"word": words, "n": pa.array(range(3 * rows), pa.int32())})
    stage.write_batch("rows.arrow", batch)
    assert stage.read_batch("rows.arrow").equals(batch)


def test_an_object_array_is_refused_since_reading_it_would_run_code(tmp_path):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    with pytest.raises(ValueError, match="Python objects"):
        stage.write_arrays("objects.npz", values=np.array([{"a": 1}], object))
    assert not stage.has("objects.npz")
    np.savez(stage.path("objects.npz"), values=np.array([{"a": 1}], object))
    with pytest.raises(RunError, match=r"objects\.npz is damaged"):
        stage.read_arrays("objects.npz")


def test_the_memory_order_of_an_array_is_kept(tmp_path):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    arrays = {"c": array, "f": np.asfortranarray(array), "cut": array[::2, 1::3]}
    stage.write_arrays("some.npz", **arrays)
    back = stage.read_arrays("some.npz")
    for name in arrays:
        assert np.array_equal(back[name], arrays[name])
    assert back["f"].flags.f_contiguous and not back["f"].flags.c_contiguous
    assert back["c"].flags.c_contiguous


def test_the_same_arrays_are_the_same_bytes(tmp_path, monkeypatch):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    arrays = {"x": np.arange(9), "y": np.ones((3, 2), np.float32)}
    stage.write_arrays("one.npz", **arrays)
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    stage.write_arrays("two.npz", **arrays)
    assert stage.path("one.npz").read_bytes() == stage.path("two.npz").read_bytes()


def test_a_finished_stage_says_what_it_was_told(tmp_path):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    assert stage.finished() is None
    stage.write_arrays("a.npz", x=np.arange(3))
    stage.write_arrays("b.npz", x=np.arange(4))
    (stage.folder / ".a.npz.99.tmp").write_bytes(b"left by a killed process")
    summary = {"rows": 7, "shares": {"x": 0.1}, "none": None, "list": [1, 2]}
    stage.finish(summary, "7 rows", 1.25)
    saved = StageCheckpoint(tmp_path / "stage", "k").finished()
    assert saved["summary"] == summary
    assert (saved["says"], saved["seconds"], saved["key"]) == ("7 rows", 1.25, "k")
    assert saved["parts"] == {name: file_facts(stage.path(name)) for name in ("a.npz", "b.npz")}
    assert stage.names(".npz") == ["a.npz", "b.npz"]


def test_a_stage_that_was_stopped_in_between_holds_the_parts_of_both_times(tmp_path):
    StageCheckpoint(tmp_path / "stage", "k").write_arrays("a.npz", x=np.arange(3))
    stage = StageCheckpoint(tmp_path / "stage", "k")
    stage.write_arrays("b.npz", x=np.arange(4))
    stage.write_arrays("b.npz", x=np.arange(5))
    stage.finish({}, "", 0.0)
    saved = StageCheckpoint(tmp_path / "stage", "k").finished()
    assert saved["parts"] == {name: file_facts(stage.path(name)) for name in ("a.npz", "b.npz")}


@pytest.mark.parametrize("damage", ["one bit", "cut short", "missing", "longer"])
def test_a_damaged_part_of_a_finished_stage_is_named(tmp_path, damage):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    for name in ("a.npz", "b.npz"):
        stage.write_arrays(name, x=np.arange(100))
    stage.finish({}, "", 0.0)
    part = stage.path("b.npz")
    content = part.read_bytes()
    if damage == "one bit":
        part.write_bytes(content[:150] + bytes([content[150] ^ 1]) + content[151:])
    elif damage == "cut short":
        part.write_bytes(content[:-1])
    elif damage == "longer":
        part.write_bytes(content + b"\0")
    else:
        part.unlink()
    with pytest.raises(RunError) as refused:
        StageCheckpoint(tmp_path / "stage", "k").finished()
    assert str(part) in str(refused.value)
    assert f"delete {stage.folder} and resume" in str(refused.value)
    assert "\n" not in str(refused.value)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]


def test_a_damaged_record_of_a_finished_stage_is_named_whatever_the_damage(tmp_path):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    stage.write_arrays("a.npz", x=np.arange(100))
    stage.finish({"rows": 7, "by": {10: 1, 9: (0.5, None)}}, "7 rows", 0.25)
    record = stage.path("stage.json")
    whole = record.read_bytes()
    damages = [b"", b"[]", b"null", b"[" * 100_000, b"\xff", whole[:-20]]
    saved = StageCheckpoint(tmp_path / "stage", "k").finished()
    for content in [*damages, *(flipped(whole, at) for at in range(len(whole)))]:
        record.write_bytes(content)
        try:
            # A changed blank is no damage.
            assert StageCheckpoint(tmp_path / "stage", "k").finished() == saved
        except RunError as error:
            assert f"{record} is damaged: delete {stage.folder} and resume" in str(error)


def test_damaged_arrays_are_named_and_never_read(tmp_path):
    stage = StageCheckpoint(tmp_path / "stage", "k")
    stage.write_arrays("a.npz", x=np.arange(20, dtype=np.float32), y=np.array("exact"))
    whole = stage.path("a.npz").read_bytes()
    for content in [b"", whole[:-1], *(flipped(whole, at) for at in range(len(whole)))]:
        stage.path("a.npz").write_bytes(content)
        for shares_disk in (True, False):
            with pytest.raises(RunError) as refused:
                StageCheckpoint(tmp_path / "stage", "k").arrays_for_worker("a.npz", shares_disk)
            assert f"{stage.path('a.npz')} is damaged: delete {stage.folder}" in str(refused.value)


def half_done(folder: Path) -> StageCheckpoint:
    """A stage that was stopped: two chunks, the result that they come from, and a later one."""
    stage = StageCheckpoint(folder / "stage", "k")
    stage.write_arrays("fit.npz", x=np.arange(3))
    for index in range(3):
        stage.write_arrays(f"rest-{index:05d}.npz", x=np.arange(4 + index))
    stage.write_batch("rows-00000.arrow", pa.record_batch({"x": pa.array(range(100))}))
    stage.write_arrays("last.npz", x=np.arange(9))
    return stage


FILES = ["fit.npz", "last.npz", *(f"rest-{index:05d}.npz" for index in range(3)),
         "rows-00000.arrow"]  # fmt: skip


def files(stage: StageCheckpoint) -> list[str]:
    return [name for name in stage.names("") if name.endswith((".npz", ".arrow"))]


def test_a_stage_that_was_stopped_keeps_all_that_is_as_it_was_written(tmp_path):
    half_done(tmp_path)
    again = StageCheckpoint(tmp_path / "stage", "k")
    assert again.drop_damaged() == []
    assert files(again) == FILES


@pytest.mark.parametrize(
    ("name", "left"),
    [("rest-00001.npz", [name for name in FILES if name != "rest-00001.npz"]),
     ("rows-00000.arrow", [name for name in FILES if name != "rows-00000.arrow"]),
     ("last.npz", [name for name in FILES if name != "last.npz"]),
     ("fit.npz", [])],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["one bit", "the directory of the zip", "cut short", "missing"])
def test_a_damaged_file_of_a_stopped_stage_is_not_used(tmp_path, name, left, damage):
    path = half_done(tmp_path).path(name)
    content = path.read_bytes()
    at = content.rfind(b"PK\x05\x06") + 10 if damage == "the directory of the zip" else 150
    path.write_bytes(content[:-1] if damage == "cut short" else flipped(content, at))
    if damage == "missing":
        path.unlink()
    again = StageCheckpoint(tmp_path / "stage", "k")
    assert again.drop_damaged() == [name]
    assert files(again) == left
    # And what is computed again is as good as the rest.
    again.write_arrays(name, x=np.arange(7))
    last = StageCheckpoint(tmp_path / "stage", "k")
    assert last.drop_damaged() == []
    assert files(last) == sorted({*left, name})


def test_a_chunk_whose_hash_a_kill_left_unwritten_is_computed_again(tmp_path):
    stage = half_done(tmp_path)
    lines = stage.path("hashes.jsonl").read_bytes()
    for cut in (lines[:-1], lines[: lines.rstrip(b"\n").rfind(b"\n") + 1]):
        shutil.rmtree(stage.folder)
        stage = half_done(tmp_path)
        stage.path("hashes.jsonl").write_bytes(cut)
        again = StageCheckpoint(tmp_path / "stage", "k")
        assert again.drop_damaged() == []
        assert files(again) == [name for name in FILES if name != "last.npz"]
        again.write_arrays("last.npz", x=np.arange(9))
        assert StageCheckpoint(tmp_path / "stage", "k").drop_damaged() == []


def test_damaged_hashes_never_let_a_damaged_file_through(tmp_path):
    stage = half_done(tmp_path)
    lines = stage.path("hashes.jsonl").read_bytes()
    whole = {name: stage.path(name).read_bytes() for name in FILES}
    for content in [b"", b"\xff", b"\n", *(flipped(lines, at) for at in range(0, len(lines), 7))]:
        for name in FILES:
            stage.path(name).write_bytes(whole[name])
        stage.path("rest-00001.npz").write_bytes(flipped(whole["rest-00001.npz"], 150))
        stage.path("hashes.jsonl").write_bytes(content)
        again = StageCheckpoint(tmp_path / "stage", "k")
        again.drop_damaged()
        kept = files(again)
        assert "rest-00001.npz" not in kept
        assert all(again.path(name).read_bytes() == whole[name] for name in kept)
    stage.path("hashes.jsonl").unlink()
    assert StageCheckpoint(tmp_path / "stage", "k").drop_damaged() == ["hashes.jsonl"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"ke"])
def test_a_stage_whose_key_is_damaged_is_computed_again(tmp_path, content):
    StageCheckpoint(tmp_path / "stage", "key").write_arrays("a.npz", x=np.arange(3))
    (tmp_path / "stage" / "key").write_bytes(content)
    again = StageCheckpoint(tmp_path / "stage", "key")
    assert not again.has("a.npz") and again.path("key").read_bytes() == b"key"


def test_any_change_of_a_constant_is_another_version_of_the_code(tmp_path):
    shutil.copytree(REPO / "discovery", tmp_path / "discovery")
    before = code_hash(tmp_path)
    code_hash.cache_clear()
    changed = tmp_path / "discovery" / "stages" / "neighbors.py"
    source = changed.read_text()
    changed.write_text(source.replace("CELL_FLOOR = 40", "CELL_FLOOR = 41"))
    assert source != changed.read_text()
    assert code_hash(tmp_path) != before
    code_hash.cache_clear()
    changed.write_text(source)
    (tmp_path / "discovery" / "more.pyc").write_bytes(b"compiled")
    assert code_hash(tmp_path) == before


def test_a_stages_key_depends_on_its_parameters_and_on_all_stages_before_it():
    def keys(first: dict, second: dict) -> tuple[str, str]:
        one = chained_key("", "extract", first)
        return one, chained_key(one, "pca", second)

    base = keys({"seed": 1, "rows": 2}, {"most": 16})
    assert keys({"rows": 2, "seed": 1}, {"most": 16}) == base
    changed_late = keys({"seed": 1, "rows": 2}, {"most": 15})
    assert changed_late[0] == base[0]
    assert changed_late[1] != base[1]
    changed_early = keys({"seed": 2, "rows": 2}, {"most": 16})
    assert changed_early[0] != base[0]
    assert changed_early[1] != base[1]
    assert chained_key("", "extract", {}) != chained_key("", "umap", {})


def test_file_facts_are_the_size_and_the_sha256(tmp_path):
    path: Path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert file_facts(path) == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
