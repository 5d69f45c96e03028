"""The nightly job's state is read from its manifests, and a manifest is read once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from processed_batches import golden, golden_copy

from sidecar.watch import nightly

FIRST, SECOND, THIRD = (f"2026-11-2{day}T00-00-00" for day in (3, 4, 5))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The run folders that were read."""
    found: list[str] = []
    own = nightly.state_of
    monkeypatch.setattr(nightly, "state_of", lambda f: found.append(f.name) or own(f))
    return found


def run(output: Path, run_id: str, finished_at: float, passed: bool = True, **more: Any) -> Path:
    """A copy of the golden run under another id."""
    folder = golden_copy(output, run_id)
    quality = {**golden().manifest["quality"], "gate": {"passed": passed, "served": passed}}
    changed = {"run_id": run_id, "parent_run": None, "quality": quality, **more}
    path = folder / "manifest.json"
    path.write_text(json.dumps({**golden().manifest, **changed}))
    os.utime(path, (finished_at, finished_at))
    return folder


def test_a_folder_that_is_not_there_has_no_runs(output: Path) -> None:
    state = nightly.Nightly(output).refresh()
    assert state.runs == dict.fromkeys(nightly.STATES, 0)
    assert state[1:] == (None, None, None, None)


def test_the_last_success_is_not_the_last_run(output: Path) -> None:
    run(output, FIRST, 1_000.0, stage_seconds={"extract": 1.5, "umap": 2.0})
    watched = nightly.Nightly(output)
    assert watched.refresh() == watched.state()
    assert watched.state()[1:4] == (1_000.0, 3.5, True)

    run(output, SECOND, 2_000.0, passed=False, stage_seconds={"umap": 7.0})
    (output / THIRD / ".checkpoint").mkdir(parents=True)
    (output / "latest").symlink_to(FIRST)
    state = watched.refresh()
    assert state[1:] == (1_000.0, 7.0, False, FIRST)
    assert state.runs == {"published": 1, "failed its check": 1, "unfinished": 1, "unreadable": 0}


def test_a_manifest_is_read_once_and_again_when_it_changes(output: Path, reads: list[str]) -> None:
    run(output, FIRST, 1_000.0)
    folder = run(output, SECOND, 2_000.0)
    watched = nightly.Nightly(output)
    watched.refresh()
    assert reads == [FIRST, SECOND]
    for _ in range(3):
        watched.refresh()
    assert len(reads) == 2
    (folder / "manifest.json").write_text("{")
    assert watched.refresh().runs["unreadable"] == 1
    assert reads[2:] == [SECOND]
    shutil.rmtree(folder)
    assert watched.refresh().runs == {**dict.fromkeys(nightly.STATES, 0), "published": 1}
    # What finishes a run may leave its manifest as it is: the checkpoint goes away.
    checkpoint = output / FIRST / ".checkpoint"
    checkpoint.mkdir()
    (checkpoint / "run.json").write_text(json.dumps({"run_id": FIRST}))
    assert watched.refresh().runs["unfinished"] == 1
    shutil.rmtree(checkpoint)
    assert watched.refresh().runs["published"] == 1


def test_the_age_of_a_run() -> None:
    now = lambda: 1_700_000_060.0  # noqa: E731
    assert nightly.age_seconds("2023-11-14T22:13:20+00:00", now) == 60
    assert nightly.age_seconds("yesterday", now) is None
