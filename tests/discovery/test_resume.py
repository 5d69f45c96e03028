"""A run that is stopped anywhere, however roughly, is finished to the same artifacts."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planted import planted, planted_batch
from processes import AttnProcess
from published import make_store
from shared import NOW, REPO, START
from uninterrupted import AT_NOW, OPTIONS, RUN_ID, fingerprint_of, killed_at
from watching import logged

from capture_kernels.errors import OptionError
from discovery.runs.checkpoint import read_sealed, write_sealed
from discovery.stages.registry import STAGES
from discovery.stages.tables import token_text
from pipeline.store.open import open_store
from pipeline.token_text import tokenizer_facts


@pytest.fixture
def left_alone(uninterrupted, tmp_path) -> tuple[Path, dict[str, object]]:
    """A copy of the store, and what an uninterrupted run of it publishes."""
    db, output = uninterrupted
    shutil.copy(db, tmp_path)
    return tmp_path / db.name, fingerprint_of(output / RUN_ID)


MIDDLES = ["progress:extract:3", "progress:neighbors:1", "progress:neighbors:4", "progress:umap:0"]
BOUNDARIES = [f"stage_finished:{stage.name}:" for stage in STAGES]


def test_a_run_killed_at_every_stage_and_in_the_middle_ends_in_the_same_artifacts(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    output = tmp_path / "killed"
    first = ["discover", "--db", str(db), "--output", str(output)]
    names = [stage.name for stage in STAGES]
    points = sorted(
        [*MIDDLES, *BOUNDARIES],
        key=lambda p: (names.index(p.split(":")[1]), p.startswith("stage_finished")),
    )
    killed_at(points[0], *first, *AT_NOW, *OPTIONS)
    for point in points[1:]:
        killed_at(point, *first, "--resume", RUN_ID)
        assert not (output / RUN_ID / "manifest.json").exists() or "publish" in point
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected
    assert (output / "latest").resolve() == (output / RUN_ID).resolve()
    assert not (output / RUN_ID / ".checkpoint").exists()


@pytest.mark.slow
def test_a_long_running_run_killed_with_its_cluster_ends_in_the_same_artifacts(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    output = tmp_path / "killed"
    first = ["discover", "--db", str(db), "--output", str(output), "--long-running"]
    killed_at("progress:extract:2", *first, *AT_NOW, *OPTIONS)
    for point in ("progress:neighbors:2", "progress:umap:0", "stage_finished:cluster:"):
        killed_at(point, *first, "--resume", RUN_ID)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once_and_still_says_how_to_finish(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "impatient"
    process = AttnProcess(
        "discover", "--db", db, "--output", output, *AT_NOW, *OPTIONS, hold_at="stage_started:umap:"
    )
    assert any("neighbors" in line for line in process.lines())
    for _ in range(2):
        assert process.alive_after(0.7)
        process.signal(signal.SIGINT)
    done = process.finish(timeout=30)
    assert done.returncode == 130, done.stderr
    assert f"--resume {RUN_ID}" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("at once") == 1 and "\nstopped: at once\n" in done.stderr
    assert attn("discover", "--db", db, "--output", output, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_a_run_whose_rows_were_pruned_is_not_finished_with_others(attn, left_alone, tmp_path):
    db, _ = left_alone
    output = tmp_path / "pruned"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("progress:extract:3", *first, *AT_NOW, *OPTIONS)
    with open_store(str(db)) as store:
        assert store.prune(START + dt.timedelta(seconds=400)) == 400
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 2
    assert "start a new run" in done.stderr
    assert not (output / "latest").exists()


@pytest.mark.parametrize(
    ("number", "mode"),
    [(signal.SIGTERM, []),
     pytest.param(signal.SIGINT, [], marks=pytest.mark.slow),
     pytest.param(signal.SIGINT, ["--long-running"], marks=pytest.mark.slow),
     pytest.param(signal.SIGTERM, ["--long-running"], marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_signal_stops_at_a_checkpoint_and_prints_the_command_that_finishes(
    attn, left_alone, tmp_path, number, mode
):
    db, expected = left_alone
    output = tmp_path / "stopped"
    # In a group of its own, and the signal to all of it, as a terminal sends Ctrl+C.
    process = AttnProcess(
        "discover", "--db", db, "--output", output, *AT_NOW, *OPTIONS, *mode, new_session=True
    )
    # neighbors comes next, which is on the workers.
    assert any("pca" in line for line in process.lines())
    os.killpg(process.pid, number)
    done = process.finish(timeout=120)
    said = done.stderr
    assert done.returncode == 128 + number, said
    assert f"--resume {RUN_ID}" in said
    assert "Traceback" not in said
    name = signal.Signals(number).name
    assert said.count(name) == 1 and f"\nstopped: {name}, at a checkpoint\nfinish it with" in said
    resume = said.split("finish it with: attn ")[1].split("\n")[0].split()
    done = attn(*resume)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


def test_time_limit_stops_with_a_checkpoint(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "limited"
    arguments = ["discover", "--db", db, "--output", output]
    done = attn(*arguments, *AT_NOW, *OPTIONS, "--max-hours", "0.0000001")
    assert done.returncode == 4
    assert done.stderr.count("stopped: --max-hours") == 1 and "error:" not in done.stderr
    assert f"--resume {RUN_ID}" in done.stderr
    assert attn(*arguments, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_rows_that_arrive_during_a_run_are_not_in_it(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "late"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("progress:extract:2", *first, *AT_NOW, *OPTIONS)
    with open_store(str(db)) as store:
        start = NOW.replace(hour=0)
        store.append(planted_batch(planted(500, 3)[0], start, prefix="late"))
    assert attn(*first, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_resume_refuses_another_option_and_a_finished_run(attn, uninterrupted):
    db, output = uninterrupted
    arguments = ["discover", "--db", db, "--output", output, "--resume", RUN_ID]
    changed = attn(*arguments, "--seed", "3")
    assert (changed.returncode, changed.stdout) == (2, "")
    assert changed.stderr.startswith("error: --seed cannot change")
    again = attn(*arguments)
    assert again.returncode == 2
    assert "finished already" in again.stderr
    unknown = attn("discover", "--db", db, "--output", output, "--resume", "2020-01-01T00-00-00")
    assert unknown.returncode == 2
    assert RUN_ID in unknown.stderr


def test_a_damaged_checkpoint_part_is_named(attn, left_alone, tmp_path):
    db, _ = left_alone
    output = tmp_path / "damaged"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("stage_finished:pca:", *first, *AT_NOW, *OPTIONS)
    part = output / RUN_ID / ".checkpoint" / "standardize" / "moments.npz"
    content = bytearray(part.read_bytes())
    content[200] ^= 1
    part.write_bytes(content)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 2
    assert "moments.npz is damaged" in done.stderr


@pytest.mark.parametrize(
    ("point", "name"),
    [("progress:extract:3", "extract/rows-00001.arrow"),
     ("progress:extract:3", "extract/found.npz"),
     ("progress:neighbors:3", "neighbors/rest-00000.npz")],
)  # fmt: skip
def test_a_damaged_chunk_of_an_unfinished_stage_is_computed_again(
    attn, left_alone, tmp_path, point, name
):
    db, expected = left_alone
    first = ["discover", "--db", str(db), "--output", str(tmp_path / "out")]
    killed_at(point, *first, *AT_NOW, *OPTIONS)
    chunk = tmp_path / "out" / RUN_ID / ".checkpoint" / name
    content = bytearray(chunk.read_bytes())
    # Among the numbers of a table, or in the directory of the zip, where it loses an array.
    content[len(content) // 2 if name.endswith(".arrow") else -12] ^= 1
    chunk.write_bytes(content)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    stage, file = name.split("/")
    assert f"{stage}: {file} of the checkpoint was damaged: computed again\n" in done.stderr
    begun = [line for line in logged(tmp_path / "out" / RUN_ID) if "damaged" in line]
    assert [line["damaged"] for line in begun] == [[file]]
    assert fingerprint_of(tmp_path / "out" / RUN_ID) == expected


@pytest.fixture
def killed_after_latest_moved(left_alone, tmp_path) -> tuple[list[str], Path]:
    """A run that was killed when `latest` named it and its last stage was not recorded yet: the
    command, and the run's folder."""
    db, _ = left_alone
    output = tmp_path / "served"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("stage_finished:publish:", *first, *AT_NOW, *OPTIONS)
    (output / RUN_ID / ".checkpoint" / "publish" / "stage.json").unlink()
    assert (output / "latest").readlink() == Path(RUN_ID)
    return first, output / RUN_ID


def as_on_disk(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every artifact: another write changes both."""
    found = ((path.name, path.stat()) for path in folder.iterdir() if path.is_file())
    return {name: (s.st_ino, s.st_mtime_ns) for name, s in found if name != "progress.jsonl"}


def test_a_run_that_is_served_already_is_finished_without_writing_it_again(
    attn, left_alone, killed_after_latest_moved
):
    first, folder = killed_after_latest_moved
    before = as_on_disk(folder)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert as_on_disk(folder) == before
    assert fingerprint_of(folder) == left_alone[1]
    assert not (folder / ".checkpoint").exists()


def test_a_run_that_is_served_and_damaged_is_not_written_again(attn, killed_after_latest_moved):
    first, folder = killed_after_latest_moved
    (folder / "shares.parquet").write_bytes(b"damaged")
    before = as_on_disk(folder)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 2
    assert "shares.parquet is damaged" in done.stderr and "--resume" not in done.stderr
    assert as_on_disk(folder) == before


@pytest.mark.slow
def test_whether_the_gate_counts_is_decided_when_a_run_begins(attn, tmp_path):
    db = make_store(tmp_path / "alike.db", np.repeat(planted(1, 1)[0], 120, axis=0))
    first = ["discover", "--db", str(db), "--output", str(tmp_path / "out")]
    for number, options in ((1, ["--no-gate"]), (2, [])):
        run_id = f"2026-01-1{number}T00-00-00"
        killed_at("stage_finished:quality:", *first, "--hours", "0", *options,
                  "--now", f"2026-01-1{number}T00:00:00")  # fmt: skip
        refused = attn(*first, "--resume", run_id, "--no-gate")
        assert refused.returncode == 2
        assert refused.stderr == (
            "error: --no-gate cannot change when a run is resumed: leave it out\n"
        )
        # The first is served although it fails its gate, the second is not.
        assert attn(*first, "--resume", run_id).returncode == (0 if options else 3)
        assert (tmp_path / "out" / "latest").readlink() == Path("2026-01-11T00-00-00")


def test_a_run_is_finished_with_the_tokenizer_that_it_was_begun_with(attn, tmp_path):
    db = make_store(tmp_path / "alike.db", np.repeat(planted(1, 1)[0], 120, axis=0))
    own, other = tmp_path / "tokenizer.json", tmp_path / "other.json"
    content = (REPO / "examples" / "demo_model" / "tokenizer.json").read_text()
    own.write_text(content)
    other.write_text(content + "\n")
    first = ["discover", "--db", db, "--output", tmp_path / "out"]
    killed_at("stage_finished:extract:", *first, *AT_NOW, "--hours", "0", "--tokenizer", own)
    elsewhere = own.rename(tmp_path / "moved.json")
    for options in (["--tokenizer", other], []):
        refused = attn(*first, "--resume", RUN_ID, *options)
        assert refused.returncode == 2
        assert "is not the tokenizer that run" in refused.stderr
    done = attn(*first, "--resume", RUN_ID, "--tokenizer", elsewhere)
    assert done.returncode == 3 and "no clusters" in done.stderr


def test_a_tokenizer_of_the_models_own_folder_is_the_one_that_the_run_was_begun_with(
    attn, tmp_path
):
    own, kept = tmp_path / "model" / "tokenizer.json", tmp_path / "kept.json"
    shutil.copytree(REPO / "examples" / "demo_model", own.parent)
    db = make_store(tmp_path / "own.db", planted(600, 1)[0], model=str(own.parent))
    first = ["discover", "--db", db, "--output", tmp_path / "out"]
    killed_at("stage_finished:extract:", *first, *AT_NOW, "--hours", "0")
    shutil.copy(own, kept)
    own.write_text(own.read_text() + "\n")
    refused = attn(*first, "--resume", RUN_ID)
    assert (refused.returncode, refused.stderr) == (
        2, f"error: {own} is not the tokenizer that run {RUN_ID} was begun with: give that file "
        "with --tokenizer\n",
    )  # fmt: skip
    done = attn(*first, "--resume", RUN_ID, "--tokenizer", kept)
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_that_changes_while_the_run_is_at_work_names_no_clusters(tmp_path):
    own = tmp_path / "tokenizer.json"
    shutil.copy(REPO / "examples" / "demo_model" / "tokenizer.json", own)
    context: Any = SimpleNamespace(
        run_id=RUN_ID,
        options=SimpleNamespace(tokenizer=str(own)),
        started={"tokenizer": tokenizer_facts(str(own))},
    )
    assert token_text(context)(0) == "<|bos|>"
    own.write_text(own.read_text() + "\n")
    with pytest.raises(OptionError, match=f"{own} was changed since run {RUN_ID} began: give "):
        token_text(context)


@pytest.mark.slow
def test_a_tokenizer_that_appears_later_is_not_used(attn, tmp_path):
    model = tmp_path / "model"
    db = make_store(tmp_path / "late.db", planted(600, 1)[0], model=str(model))
    first = ["discover", "--db", db, "--output", tmp_path / "out"]
    assert attn(*first, *AT_NOW, "--hours", "0").returncode == 0
    expected = fingerprint_of(tmp_path / "out" / RUN_ID)
    shutil.rmtree(tmp_path / "out")
    killed_at("stage_finished:extract:", *first, *AT_NOW, "--hours", "0")
    shutil.copytree(REPO / "examples" / "demo_model", model)
    refused = attn(*first, "--resume", RUN_ID, "--tokenizer", model)
    assert refused.stderr == (
        f"error: run {RUN_ID} was begun without a tokenizer: leave --tokenizer out\n"
    )
    assert attn(*first, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(tmp_path / "out" / RUN_ID) == expected


@pytest.mark.slow
def test_parts_of_another_version_are_computed_again_and_the_run_says_so(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    output = tmp_path / "upgraded"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("progress:neighbors:2", *first, *AT_NOW, *OPTIONS)
    begun = output / RUN_ID / ".checkpoint" / "run.json"
    saved = read_sealed(begun)
    write_sealed(begun, saved | {"made_by": {**saved["made_by"], "attn": "0", "numpy": "1.0"}})
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()[0]
    now = saved["made_by"]
    assert "all is computed again, since " in said
    assert f"attn 0 is now {now['attn']}" in said and f"numpy 1.0 is now {now['numpy']}" in said
    assert "(kept)" not in done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


@pytest.mark.parametrize("damage", ["empty", "one bit", "not an object"])
def test_a_run_whose_options_are_damaged_is_not_finished_with_others(
    attn, left_alone, tmp_path, damage
):
    db, _ = left_alone
    first = ["discover", "--db", str(db), "--output", str(tmp_path / "out")]
    killed_at("stage_started:extract:", *first, *AT_NOW, *OPTIONS)
    begun = tmp_path / "out" / RUN_ID / ".checkpoint" / "run.json"
    whole = begun.read_bytes()
    seven = whole.index(b'"seed": 7') + len('"seed": ')
    damaged = {
        "empty": b"",
        "one bit": whole[:seven] + b"6" + whole[seven + 1 :],
        "not an object": b"[]",
    }
    begun.write_bytes(damaged[damage])
    done = attn(*first, "--resume", RUN_ID)
    assert (done.returncode, done.stderr) == (
        2, f"error: {begun} is damaged, or of another version of attn: start a new run\n"
    )  # fmt: skip
