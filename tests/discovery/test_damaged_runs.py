"""Damaged and hostile run folders: named in one line, and the other runs work as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nightly import Lineage, run_id_of, unfinished
from shared import REPO

from capture_kernels.errors import ArtifactError
from discovery.artifacts.read import open_artifacts
from discovery.runs.history import HISTORY_EVENTS, ancestry, history_to_keep
from discovery.runs.retention import collect
from discovery.runs.state import manifests, survey


@pytest.fixture
def output(tmp_path) -> Path:
    """Three nights."""
    lineage = Lineage(tmp_path)
    for _ in range(3):
        lineage.night({0: 0.5, 1: 0.5})
    return tmp_path


def edit(output: Path, day: int, change: Callable[[dict[str, Any]], Any]) -> str:
    path = output / run_id_of(day) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return str(path)


FACTS = {"bytes": 1, "sha256": "0"}
CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda m: m.update(counts=None),
    lambda m: m["counts"].update(rows="7"),
    lambda m: m.update(quality=[]),
    lambda m: m["quality"].update(gate=None),
    lambda m: m.update(stages={}),
    lambda m: m.update(model=None),
    lambda m: m.update(layout="another"),
    lambda m: m.update(zone_rules={"entropy": 7}),
    lambda m: m.update(zone_rules={"unknown": 0.5}),
    lambda m: m.update(parent_run=run_id_of(2)),
    lambda m: m.update(parent_run=run_id_of(3)),
    lambda m: m.update(parent_run="yesterday"),
    lambda m: m["lineage"].update(history=[{"run_id": "now"}]),
    lambda m: m["files"].update({"../x": FACTS}),
    lambda m: m["files"].update({"/dev/zero": FACTS}),
    lambda m: m["files"].update({"x": [1]}),
]


@pytest.mark.parametrize(
    "change",
    [pytest.param(one, marks=pytest.mark.slow) if n % 4 else one for n, one in enumerate(CHANGES)],
)
def test_a_manifest_of_other_types_is_listed_as_damaged_and_the_rest_works(attn, output, change):
    path = edit(output, 2, change)
    done = attn("runs", "list", "--output", output)
    assert done.returncode == 0, done.stderr
    assert f"{run_id_of(2)}: {path} is damaged (" in done.stdout
    assert run_id_of(3) in done.stdout
    for command in (["diff", run_id_of(2), "latest"], ["lineage", "1", "--run", run_id_of(2)]):
        done = attn("runs", *command, "--output", output)
        assert done.returncode == 2 and f"{path} is damaged" in done.stderr
        assert done.stderr.count("\n") == 1
    for command in (["diff", run_id_of(1), "latest"], ["lineage", "1"]):
        done = attn("runs", *command, "--output", output)
        assert done.returncode == 0, done.stderr
        assert f"{run_id_of(2)} ({path} is damaged" in done.stdout
    kept = {run["run_id"]: run["because"] for run in collect(output, keep_last=1)["kept"]}
    assert "cannot be read" in kept[run_id_of(2)]


def linked_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["clusters.parquet", "embedding.parquet", "manifest.json"])
@pytest.mark.parametrize("put", [linked_to_a_device, linked, a_pipe])
def test_only_regular_files_of_the_run_are_read(output, name, put):
    put(output / run_id_of(3) / name)
    with pytest.raises(ArtifactError, match=f"{name} is damaged .it is not a regular file"):
        open_artifacts(output / run_id_of(3)).verify()


def test_lineage_goes_on_past_a_run_whose_clusters_are_damaged(attn, output):
    path = output / run_id_of(2) / "clusters.parquet"
    path.write_bytes(b"PAR1" + path.read_bytes()[4:-1] + b"x")
    done = attn("runs", "lineage", "1", "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["deleted_runs"] == [run_id_of(2)]
    assert f"{path} is damaged" in found["says"][-1]
    # Its child recorded the shares.
    assert [run["share"] for run in found["runs"]] == [0.5, 0.5, 0.5]


def test_a_run_is_shown_without_reading_its_embedding(attn, output):
    run = output / run_id_of(3)
    (run / "embedding.parquet").write_bytes(b"not what was published")
    done = attn("runs", "show", "--output", output, "--json")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"run_id": 7}', '{"run_id": "2026-01-09T06-00-00", "follows": {"parent": []}}',
     '{"run_id": "2026-01-09T06-00-00", "follows": null}', "[" * 100_000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_damaged_run_json_is_listed_and_stops_nothing(attn, output, text):
    path = unfinished(output, run_id_of(9)) / ".checkpoint" / "run.json"
    path.write_text(text)
    done = attn("runs", "list", "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)[-1]
    assert (row["state"], row["reason"]) == ("unreadable", f"{path} is damaged")
    done = attn("runs", "gc", "--output", output, "--keep-last", "1")
    assert done.returncode == 0 and path.exists(), done.stderr


@pytest.mark.parametrize("command", [["list"], ["show"], ["lineage", "1"], ["gc", "--dry-run"]])
def test_a_reader_that_goes_away_leaves_no_traceback(output, command):
    if command == ["show"]:  # which wants all columns of the clusters
        golden(output)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(REPO / "cli.py"), "runs", *command, "--output", str(output)],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert done.returncode != 1


def golden(output: Path) -> None:
    run_id = "2026-11-23T00-00-00"
    (output / run_id).symlink_to(REPO / "tests" / "golden" / "run_v1")
    (output / "latest").unlink()
    (output / "latest").symlink_to(run_id)


def test_a_manifest_keeps_a_bounded_history_and_older_events_are_read_from_older_runs(tmp_path):
    def born(day: int) -> dict[str, Any]:
        return {"run_id": run_id_of(day), "event": "born", "cluster_id": day, "parents": [],
                "children": [], "label": "", "says": ""}  # fmt: skip

    earlier = [born(1)] * 100 + [born(2)] * 100 + [born(3)] * 100
    kept = history_to_keep(earlier, [born(4)] * 300)
    assert kept == [born(2)] * 100 + [born(3)] * 100 + [born(4)] * 300
    assert len(kept) - 300 <= HISTORY_EVENTS
    assert history_to_keep([], [born(1)]) == [born(1)]
    lineage = Lineage(tmp_path)
    lineage.night({1: 1.0})
    lineage.night({1: 0.5, 2: 0.5}, ("born", 2, [], []))
    whole = lineage.history
    lineage.history = whole[1:]  # as if the bound had been reached
    last = lineage.night({1: 0.5, 2: 0.4, 3: 0.1}, ("born", 3, [], []))
    known = ancestry(last, manifests(survey(tmp_path)))
    assert [event["cluster_id"] for event in known.events] == [1, 2, 3]
