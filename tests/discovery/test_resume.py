"""A run that is stopped anywhere, however roughly, is finished to the same artifacts."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from shared import NOW, REPO

from discovery.artifacts.read import open_artifacts
from discovery.stages.registry import STAGES

OPTIONS = ["--hours", "0", "--batch-size", "256", "--umap-sample-size", "700", "--seed", "7"]
RUN_ID = "2026-01-10T04-02-11"

# Runs `attn discover` and kills its own process, as kill -9 does, when an event says so.
KILLER = textwrap.dedent(
    """
    import os, signal, sys
    import msgspec
    import discovery.commands.discover, discovery.job
    from cli import app

    kind, stage, done = sys.argv[1].split(":")
    original = discovery.commands.discover.listener_for_terminal

    def killer():
        inner = original()
        def listen(event):
            inner(event)
            event = msgspec.to_builtins(event)
            if (event["event"], event.get("stage")) == (kind, stage):
                if kind != "progress" or event["done"] == int(done):
                    os.kill(os.getpid(), signal.SIGKILL)
        return listen

    discovery.commands.discover.listener_for_terminal = killer
    app(sys.argv[2:])
    """
)


def killed_at(point: str, *arguments: str) -> None:
    """Run the command until the event `kind:stage:done`, where it dies by SIGKILL."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, point, *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, (point, done.returncode, done.stderr)


def fingerprint_of(folder: Path) -> dict[str, object]:
    """Everything a run published: file hashes, and the manifest less the time each stage took."""
    open_artifacts(folder).verify().verify()
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.parquet"))
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["stage_seconds"]
    return {"files": files, "manifest": manifest}


@pytest.fixture
def left_alone(attn, planted_store, tmp_path):
    """The store, and what an uninterrupted run of it publishes."""
    db = planted_store(rows=1_501)
    output = tmp_path / "left_alone"
    done = attn(
        "discover", "--db", db, "--output", output, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS
    )
    assert done.returncode == 0, done.stderr
    return db, fingerprint_of(output / RUN_ID)


MIDDLES = ["progress:extract:3", "progress:neighbors:1", "progress:neighbors:4"]
BOUNDARIES = [f"stage_finished:{stage.name}:" for stage in STAGES]


def test_a_run_killed_at_every_stage_and_in_the_middle_ends_in_the_same_artifacts(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    output = tmp_path / "killed"
    first = ["discover", "--db", str(db), "--output", str(output)]
    names = [stage.name for stage in STAGES]
    points = sorted(
        [*MIDDLES, "stage_started:umap:", *BOUNDARIES],
        key=lambda p: (names.index(p.split(":")[1]), p.startswith("stage_finished")),
    )
    killed_at(points[0], *first, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS)
    for point in points[1:]:
        killed_at(point, *first, "--resume", RUN_ID)
        assert not (output / RUN_ID / "manifest.json").exists() or "publish" in point
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected
    assert (output / "latest").resolve() == (output / RUN_ID).resolve()
    assert not (output / RUN_ID / ".checkpoint").exists()


def test_a_long_running_run_killed_with_its_cluster_ends_in_the_same_artifacts(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    output = tmp_path / "killed"
    first = ["discover", "--db", str(db), "--output", str(output), "--long-running"]
    killed_at("progress:extract:2", *first, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS)
    for point in ("progress:neighbors:2", "stage_started:umap:", "stage_finished:cluster:"):
        killed_at(point, *first, "--resume", RUN_ID)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


def test_a_second_interrupt_stops_at_once_and_still_says_how_to_finish(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "impatient"
    command = [sys.executable, str(REPO / "cli.py"), "discover", "--db", str(db)]
    command += ["--output", str(output), "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = ""
    for line in process.stderr:
        said += line
        if "neighbors" in line:  # the layout comes next, and takes seconds
            break
    for _ in range(2):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.7)
        process.send_signal(signal.SIGINT)
    said += process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 130, said
    assert f"--resume {RUN_ID}" in said and "Traceback" not in said
    assert attn("discover", "--db", db, "--output", output, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_a_run_whose_rows_were_pruned_is_not_finished_with_others(attn, left_alone, tmp_path):
    import datetime as dt

    from shared import START

    from pipeline.store.open import open_store

    db, _ = left_alone
    output = tmp_path / "pruned"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("progress:extract:3", *first, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS)
    with open_store(str(db)) as store:
        assert store.prune(START + dt.timedelta(seconds=400)) == 400
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 2
    assert "start a new run" in done.stderr
    assert not (output / "latest").exists()


def test_a_run_killed_inside_umap_ends_in_the_same_artifacts(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "killed"
    command = [sys.executable, str(REPO / "cli.py"), "discover", "--db", str(db)]
    command += ["--output", str(output), "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = output / RUN_ID / "progress.jsonl"
    for line in process.stderr:
        if "neighbors" in line:
            break
    # The layout takes seconds (it compiles first): one second in, it is at work.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.kill()
    process.wait()
    process.stderr.close()
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["stage"]) == ("stage_started", "umap")
    done = attn("discover", "--db", db, "--output", output, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", [[], ["--long-running"]])
def test_a_signal_stops_at_a_checkpoint_and_prints_the_command_that_finishes(
    attn, left_alone, tmp_path, number, mode
):
    db, expected = left_alone
    output = tmp_path / "stopped"
    command = [sys.executable, str(REPO / "cli.py"), "discover", "--db", str(db)]
    command += ["--output", str(output), "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS, *mode]
    # In a group of its own, and the signal to all of it, as a terminal sends Ctrl+C.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    said = ""
    for line in process.stderr:
        said += line
        if "pca" in line:  # neighbors comes next, which is on the workers
            os.killpg(process.pid, number)
            break
    said += process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 128 + number, said
    assert f"--resume {RUN_ID}" in said
    assert "Traceback" not in said
    resume = said.split("finish it with: attn ")[1].split("\n")[0].split()
    done = attn(*resume)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


def test_time_limit_stops_with_a_checkpoint(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "limited"
    arguments = ["discover", "--db", db, "--output", output]
    done = attn(
        *arguments, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS, "--max-hours", "0.0000001"
    )
    assert done.returncode == 4
    assert "--max-hours" in done.stderr and f"--resume {RUN_ID}" in done.stderr
    assert attn(*arguments, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_dask_and_one_process_give_the_same_artifacts(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "dask"
    done = attn(
        "discover", "--db", db, "--output", output, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}",
        *OPTIONS, "--long-running",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Dask" in done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


def test_rows_that_arrive_during_a_run_are_not_in_it(attn, left_alone, tmp_path):
    from planted import planted, planted_batch

    from pipeline.store.open import open_store

    db, expected = left_alone
    output = tmp_path / "late"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("progress:extract:2", *first, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS)
    with open_store(str(db)) as store:
        start = NOW.replace(hour=0)
        store.append(planted_batch(planted(500, 3)[0], start, prefix="late"))
    assert attn(*first, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_resume_refuses_another_option_and_a_finished_run(attn, left_alone, tmp_path):
    db, _ = left_alone
    output = tmp_path / "left_alone"
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
    killed_at("stage_finished:pca:", *first, "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", *OPTIONS)
    part = output / RUN_ID / ".checkpoint" / "standardize" / "moments.npz"
    content = bytearray(part.read_bytes())
    content[200] ^= 1
    part.write_bytes(content)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 2
    assert "moments.npz is damaged" in done.stderr
