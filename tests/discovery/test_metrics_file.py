"""`--metrics-file`: what a scheduler's operator watches, however the night ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from planted import planted
from processes import AttnProcess
from prometheus_client.parser import text_string_to_metric_families
from published import make_store
from uninterrupted import AT_NOW, RUN_ID, killed_at

from capture_kernels.errors import OptionError
from discovery.artifacts.read import read_manifest
from discovery.commands.metrics_file import GAUGES, PREFIX, MetricsFile
from discovery.events.schema import RunStarted
from discovery.gate import QUESTIONS
from discovery.stages.registry import STAGES

AUTO = ("--resume", "auto")


@pytest.fixture
def line(tmp_path) -> list[str]:
    db = make_store(tmp_path / "small.db", planted(150, 1)[0])
    return ["discover", "--db", str(db), "--output", str(tmp_path / "out"), "--hours", "0", *AUTO,
            "--metrics-file", str(tmp_path / "attn.prom")]  # fmt: skip


def samples(path: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """The values of each metric by those of its labels, less attn_discover_."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert family.type == "gauge" and family.documentation
        for sample in family.samples:
            of = found.setdefault(sample.name.removeprefix(PREFIX), {})
            of[tuple(sample.labels.values())] = sample.value
    return found


def plain(path: Path) -> dict[str, float]:
    return {name: of[()] for name, of in samples(path).items() if () in of}


def test_a_good_night_has_every_metric_and_they_are_those_of_its_manifest(attn, line, tmp_path):
    file = tmp_path / "attn.prom"
    assert attn(*line, *AT_NOW).returncode == 0
    found, numbers = samples(file), plain(file)
    assert set(found) == set(GAUGES)
    manifest = read_manifest(tmp_path / "out" / RUN_ID)
    counts, quality = manifest["counts"], manifest["quality"]
    assert numbers["run_rows"] == numbers["run_window_rows"] == counts["rows"] == 150
    assert numbers["run_clusters"] == counts["clusters"] > 0
    assert numbers["run_noise_ratio"] == quality["noise_share"]
    assert numbers["run_gate_passed"] == numbers["run_served"] == 1
    assert numbers["last_exit_code"] == numbers["last_resumed"] == 0
    assert numbers["run_peak_memory_bytes"] > 50e6
    seconds = found["run_stage_duration_seconds"]
    assert set(seconds) == {(stage.name,) for stage in STAGES}
    assert {name: seconds[name,] for name in manifest["stage_seconds"]} == manifest["stage_seconds"]
    assert {name for (name,) in found["run_gate_check_passed"]} == {*QUESTIONS, "identity",
                                                                    "parent"}  # fmt: skip
    assert found["run_gate_check_limit"]["noise_share",] == 0.75
    (info,) = found["run_info"]
    assert sorted(info) == sorted((RUN_ID, "planted-model", "log16", manifest["capture_id"], "cpu"))
    start, end = (numbers[f"last_{at}_timestamp_seconds"] for at in ("start", "end"))
    assert start <= numbers["last_success_timestamp_seconds"] <= end
    # The collector runs as another user.
    assert file.stat().st_mode & 0o444 == 0o444 & ~umask()


def umask() -> int:
    os.umask(before := os.umask(0))
    return before


def test_a_failed_night_keeps_when_the_last_good_one_was(attn, line, tmp_path):
    file = tmp_path / "attn.prom"
    assert attn(*line, *AT_NOW).returncode == 0
    good = samples(file)
    failed = attn(*line, "--min-rows", "1000")
    assert failed.returncode == 2
    now = samples(file)
    assert now["last_exit_code"] == {(): 2.0}
    new = {"last_exit_code", "last_end_timestamp_seconds", "last_duration_seconds"}
    assert {name: of for name, of in now.items() if name not in new} == {
        name: of for name, of in good.items() if name not in new
    }


def test_a_night_that_failed_its_gate_is_no_success(attn, tmp_path):
    db = make_store(tmp_path / "alike.db", planted(1, 1)[0].repeat(120, axis=0))
    file = tmp_path / "attn.prom"
    done = attn("discover", "--db", db, "--output", tmp_path / "out", "--hours", "0",
                "--metrics-file", file)  # fmt: skip
    assert done.returncode == 3
    found, numbers = samples(file), plain(file)
    assert "last_success_timestamp_seconds" not in found
    assert (numbers["run_gate_passed"], numbers["run_served"], numbers["last_exit_code"]) == (
        0, 0, 3,
    )  # fmt: skip
    assert found["run_gate_check_passed"]["clusters",] == 0


def test_a_killed_night_leaves_a_start_without_an_end_and_then_says_that_it_was_resumed(
    attn, line, tmp_path
):
    file = tmp_path / "attn.prom"
    left = tmp_path / ".attn.prom.0123456789abcdef.tmp"
    left.touch()
    killed_at("stage_started:umap:", *line, *AT_NOW)
    assert set(plain(file)) == {"last_start_timestamp_seconds", "last_resumed"}
    assert not left.exists()
    assert attn(*line).returncode == 0
    assert plain(file)["last_resumed"] == 1


def test_a_stopped_night_says_by_what(attn, line, tmp_path):
    process = AttnProcess(*line, *AT_NOW, hold_at="stage_started:umap:")
    assert any("neighbors" in said for said in process.lines())
    # While it is at work another invocation changes nothing.
    before = (tmp_path / "attn.prom").read_bytes()
    assert attn(*line).returncode == 5
    assert (tmp_path / "attn.prom").read_bytes() == before
    process.signal(signal.SIGTERM)
    assert process.alive_after(2.5)
    process.signal(signal.SIGTERM)
    assert process.finish(30).returncode == 143
    assert plain(tmp_path / "attn.prom")["last_exit_code"] == 143


def test_a_file_that_nobody_would_read_is_refused_before_anything_begins(attn, line, tmp_path):
    *most, _ = line
    for path, says in (
        ("attn.txt", "must end with .prom"), ("none/attn.prom", "cannot be written"),
        (".prom", "must end with .prom"),
    ):  # fmt: skip
        refused = attn(*most, tmp_path / path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("error: --metrics-file ") and says in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_does_not_change_how_a_night_ended(tmp_path, monkeypatch, capsys):
    figures = MetricsFile(tmp_path / "attn.prom", clock=lambda: 5.0)
    monkeypatch.setattr(figures, "path", tmp_path / "gone" / "attn.prom")
    figures.ended(0)
    assert capsys.readouterr().err.startswith("the metrics were not written: cannot write ")


def test_a_damaged_file_is_written_anew(tmp_path):
    path = tmp_path / "attn.prom"
    for damaged in (
        b"\xff\xfe",
        b"attn_discover_last_exit_code{ 3\n",
        b"attn_discover_run_info 1\n",
    ):
        path.write_bytes(damaged)
        figures = MetricsFile(path, clock=iter((7.0, 8.0, 9.5)).__next__)
        figures.listen(RunStarted(run_id=RUN_ID, at="", resumed=False, engine="cpu", model="m",
                                  layout="log16", rows=1))  # fmt: skip
        figures.ended(4)
        assert plain(path) == {
            "last_start_timestamp_seconds": 8.0, "last_end_timestamp_seconds": 9.5,
            "last_duration_seconds": 2.5, "last_exit_code": 4.0, "last_resumed": 0.0,
        }  # fmt: skip
    with pytest.raises(OptionError, match="cannot be written"):
        MetricsFile(tmp_path / "x.prom" / "y.prom")
