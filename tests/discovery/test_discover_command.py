"""`attn discover` and `attn runs`, as a user runs them: real stores, real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from planted import planted, planted_batch
from published import (
    ALL_NOW,
    GROUPS,
    ROWS,
    RUN_ID,
    Mixed,
    Published,
    labels_by_row,
    layered,
    make_store,
    mixed,
    published,
    published_again,
)
from shared import NOW, REPO, START
from sklearn.metrics import adjusted_rand_score

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.job import discover
from discovery.options import DiscoverOptions
from discovery.stages.registry import STAGES
from pipeline.store.open import open_store

STAGE_NAMES = [stage.name for stage in STAGES]


@pytest.fixture(scope="session")
def run(attn, tmp_path_factory) -> Published:
    return published(attn, tmp_path_factory)


@pytest.fixture(scope="session")
def again(attn, tmp_path_factory) -> Published:
    return published_again(attn, tmp_path_factory)


@pytest.fixture(scope="session")
def mixed_run(attn, tmp_path_factory) -> Mixed:
    return mixed(attn, tmp_path_factory)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A store of 150 rows, for all that ends before a map is made."""
    return make_store(tmp_path_factory.mktemp("small") / "small.db", planted(150, 0)[0])


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why a command was refused."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


# What an ordinary run finds and says.


def test_a_run_finds_the_behaviours_that_were_planted(run):
    labels = labels_by_row(run.folder, len(run.vectors))
    real = run.truth >= 0
    assert adjusted_rand_score(run.truth[real], labels[real]) >= 0.9


@pytest.mark.slow
def test_two_seeds_find_the_same_behaviours(run, again):
    first, second = (labels_by_row(r.folder, len(r.vectors)) for r in (run, again))
    assert adjusted_rand_score(first, second) >= 0.9
    one, other = (open_artifacts(r.folder).table("embedding")["x"] for r in (run, again))
    assert one != other  # the seed was used
    assert adjusted_rand_score(run.truth[run.truth >= 0], second[run.truth >= 0]) >= 0.9


def test_a_run_prints_its_clusters_and_its_stages(run):
    lines = run.stdout.splitlines()
    clusters = open_artifacts(run.folder).table("clusters").to_pylist()
    assert lines[0].split() == ["id", "cluster", "traits", "rows", "share", "stability"]
    for line, cluster in zip(lines[1:], clusters, strict=False):
        assert line.split()[0] == str(cluster["cluster_id"])
        assert cluster["label"] in line
        assert f"{cluster['size']:,}" in line
        assert f"{cluster['share']:.1%}" in line
    assert lines[-1] == str(run.folder)
    assert f"rows: {ROWS:,}" in run.stdout
    assert "classifier agreement" in run.stdout
    reported = run.stderr.splitlines()
    assert reported[0] == f"run {RUN_ID}: cpu engine, in one process"
    assert [line.split("] ")[1].split()[0] for line in reported[1:]] == STAGE_NAMES
    assert f"{ROWS:,} rows of planted-model" in reported[1]


def test_json_is_one_object_on_stdout_and_the_manifest(attn, planted_store, tmp_path):
    done = attn("discover", "--db", planted_store(601), "--output", tmp_path / "out", *ALL_NOW,
                "--seed", "7", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert printed == json.loads((tmp_path / "out" / RUN_ID / "manifest.json").read_text())
    assert printed["parameters"]["seed"] == 7
    assert printed["run_id"] == RUN_ID
    assert datetime.fromisoformat(printed["created_at"]) == NOW


def test_a_run_leaves_the_fingerprints_in_the_store_as_they_were(run):
    with open_store(run.db, read_only=True) as store:
        assert store.counts().rows == len(run.vectors)


# progress.jsonl


@pytest.mark.parametrize("which", ["run", "mixed_run"])
def test_the_progress_file_tells_every_stage_in_order(which, request):
    folder = request.getfixturevalue(which).folder
    lines = (folder / "progress.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        assert event["run_id"] == RUN_ID
        assert datetime.fromisoformat(event["at"]).utcoffset() == timedelta(0)
    assert [e["at"] for e in events] == sorted(e["at"] for e in events)
    kinds = [e["event"] for e in events]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")
    assert kinds.count("run_started") == kinds.count("run_finished") == 1
    found = {"embedding_sample", "zone_stats", "cluster_update"}
    assert set(kinds[1:-1]) == {"stage_started", "progress", "stage_finished", *found}
    # started, its parts, finished, and then the next stage
    stages = [e for e in events if "stage" in e]
    place = 0
    for number, name in enumerate(STAGE_NAMES, start=1):
        begun = stages[place]
        assert (begun["event"], begun["stage"], begun["number"]) == ("stage_started", name, number)
        place += 1
        done = -1  # the map tells of its epochs before the first
        while stages[place]["event"] == "progress":
            part = stages[place]
            assert part["stage"] == name
            assert done < part["done"] <= part["total"]
            done, place = part["done"], place + 1
        ended = stages[place]
        assert (ended["event"], ended["stage"]) == ("stage_finished", name)
        assert (ended["of"], ended["kept"]) == (len(STAGE_NAMES), False)
        assert ended["seconds"] >= 0
        assert ended["says"]
        place += 1
    assert place == len(stages)


# attn runs


def test_runs_list_names_every_run_and_which_is_latest(attn, run, tmp_path):
    empty = attn("runs", "list", "--output", tmp_path)
    assert (empty.returncode, empty.stdout) == (0, f"no runs in {tmp_path}\n")
    assert json.loads(attn("runs", "list", "--output", tmp_path, "--json").stdout) == []
    output = tmp_path / "several"
    output.mkdir()
    (output / "2026-01-09T04-02-11" / ".checkpoint").mkdir(parents=True)
    shutil.copytree(run.folder, output / RUN_ID)
    (output / "latest").symlink_to(RUN_ID)
    listed = json.loads(attn("runs", "list", "--output", output, "--json").stdout)
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert listed == [
        {"run_id": "2026-01-09T04-02-11", "state": "unfinished"},
        {
            "run_id": RUN_ID,
            "state": "latest",
            "rows": ROWS,
            "clusters": manifest["counts"]["clusters"],
            "noise_share": manifest["quality"]["noise_share"],
            "model": "planted-model",
        },
    ]
    table = attn("runs", "list", "--output-dir", output)
    assert table.returncode == 0
    assert [line.split()[:2] for line in table.stdout.splitlines()] == [
        ["run", "state"], ["2026-01-09T04-02-11", "unfinished"], [RUN_ID, "latest"]
    ]  # fmt: skip


def test_runs_show_repeats_what_the_run_printed(attn, run):
    assert (
        attn("runs", "show", "--output", run.output).stdout.splitlines()[:-1]
        == (run.stdout.splitlines()[:-1])
    )
    shown = json.loads(attn("runs", "show", RUN_ID, "--output", run.output, "--json").stdout)
    artifacts = open_artifacts(run.folder)
    assert shown == {
        "manifest": artifacts.manifest,
        "clusters": artifacts.table("clusters").to_pylist(),
    }


def test_runs_show_of_a_run_that_is_not_there_names_those_that_are(attn, run, tmp_path):
    unknown = attn("runs", "show", "2020-01-01T00-00-00", "--output", run.output)
    assert RUN_ID in refused(unknown)
    assert "run attn discover, or choose --output" in refused(
        attn("runs", "show", "--output", tmp_path)
    )


# The window, and what is in it.


def test_an_empty_store_and_a_missing_one_say_what_to_do(attn, tmp_path):
    open_store(tmp_path / "empty.db", create=True).close()
    empty = refused(attn("discover", "--db", tmp_path / "empty.db", "--output", tmp_path / "out"))
    assert "holds no fingerprints yet" in empty
    for missing in (tmp_path / "missing.db", tmp_path / "missing folder"):
        said = refused(attn("discover", "--db", missing, "--output", tmp_path / "out"))
        assert str(missing) in said
        assert "attn db init" in said
        assert not missing.exists()
    assert not list((tmp_path / "out").glob("2*"))


@pytest.mark.parametrize("hours", ["1", "3.5"])
def test_an_empty_window_says_which_hours_reach_the_rows(attn, small, tmp_path, hours):
    window = ["discover", "--db", small, "--output", tmp_path / "out", "--now",
              f"{NOW:%Y-%m-%dT%H:%M:%S}"]  # fmt: skip
    said = refused(attn(*window, "--hours", hours))
    assert f"no fingerprints in the last {hours} hours" in said
    assert "holds 150, the newest of 2026-01-09 06:02 UTC" in said
    reach = said.split("--hours ")[1].split()[0]
    # The newest rows are found with it: it is only refused for the many that it is asked to have.
    found = refused(attn(*window, "--hours", reach, "--min-rows", "1000"))
    assert "fingerprints of planted-model (log16, capture planted00000) in the window" in found


def test_the_hours_that_an_empty_window_names_are_enough_for_a_run(attn, small, tmp_path):
    window = ["discover", "--db", small, "--output", tmp_path / "out", "--now",
              f"{NOW:%Y-%m-%dT%H:%M:%S}"]  # fmt: skip
    said = refused(attn(*window, "--hours", "1"))
    reach = said.split("--hours ")[1].split()[0]
    # Stopped by a limit that is looked at once the window is known to hold --min-rows.
    done = attn(*window, "--hours", reach, "--max-per-request", "1")
    assert "--max-per-request 1 leaves" in done.stderr


def test_rows_of_the_future_are_not_in_the_window(attn, small, tmp_path):
    window = ["discover", "--db", small, "--output", tmp_path / "out"]
    before = refused(attn(*window, "--now", f"{START - timedelta(hours=2):%Y-%m-%dT%H:%M:%S}"))
    assert "use --hours 0" in before
    # The window ends before `now`: of the rows at :00 to :49, 50 are in it.
    amid = START + timedelta(seconds=50)
    said = refused(attn(*window, "--now", f"{amid:%Y-%m-%dT%H:%M:%S}", "--hours", "24"))
    assert "only 50 fingerprints" in said
    first = refused(attn(*window, "--now", f"{START:%Y-%m-%dT%H:%M:%S}", "--hours", "24"))
    assert "use --hours 0" in first


def test_a_run_takes_the_commonest_and_says_what_it_left_out(mixed_run):
    manifest = json.loads((mixed_run.folder / "manifest.json").read_text())
    assert (manifest["model"], manifest["layout"]) == ("common", "log16")
    assert (manifest["capture_id"], manifest["counts"]["rows"]) == ("a", 501)
    left_out = [
        {"model": model, "layout": layout, "capture_id": capture_id, "rows": rows}
        for (model, layout, capture_id), rows in list(GROUPS.items())[1:]
    ]
    assert manifest["counts"]["left_out"] == left_out
    said = "501 rows of common; 624 of other models, layouts or captures left out"
    assert said in mixed_run.stderr
    requests = open_artifacts(mixed_run.folder).table("embedding")["request_id"].to_pylist()
    assert {request.rsplit("-", 1)[0] for request in requests} == {"common1a"}


@pytest.mark.parametrize(
    ("filters", "chosen"),
    [
        (["--model", "other"], "121 fingerprints of other (log16, capture a)"),
        (["--layout", "layered"], "300 fingerprints of common (layered, capture c)"),
        (["--capture-id", "b"], "203 fingerprints of common (log16, capture b)"),
        (["--model", "common", "--layout", "log16"], "501 fingerprints of common (log16"),
        (["--model", "other", "--capture-id", "a"], "121 fingerprints of other"),
    ],
)
def test_filters_choose_among_models_layouts_and_captures(
    attn, mixed_run, tmp_path, filters, chosen
):
    # Refused for too few rows, and so it says which ones it would have taken.
    done = attn("discover", "--db", mixed_run.db, "--output", tmp_path, "--hours", "0",
                "--min-rows", "10000", *filters)  # fmt: skip
    assert f"only {chosen}" in refused(done)


@pytest.mark.parametrize(
    "filters", [["--model", "nobody's"], ["--layout", "layered", "--model", "other"]]
)
def test_a_filter_that_nothing_matches_says_what_there_is(attn, mixed_run, tmp_path, filters):
    done = attn("discover", "--db", mixed_run.db, "--output", tmp_path, "--hours", "0", *filters)
    said = refused(done)
    assert "none of the 1,125 fingerprints matches" in said
    assert f"--model {filters[filters.index('--model') + 1]}" in said
    assert "common (log16, capture a)" in said


# Options.

BAD_OPTIONS = [
    ("--hours", "-1"), ("--hours", "nan"), ("--hours", "inf"), ("--hours", "1e9"),
    ("--min-rows", "3"), ("--min-rows", "many"), ("--min-samples", "0"),
    ("--min-cluster-size", "1"), ("--max-per-request", "-1"), ("--umap-neighbors", "1"),
    ("--umap-min-dist", "-0.1"), ("--umap-min-dist", "1.5"), ("--umap-min-dist", "nan"),
    ("--umap-sample-size", "99"), ("--batch-size", "255"), ("--seed", "-1"),
    ("--seed", "4294967296"), ("--layout", "log32"), ("--max-memory-gb", "0"),
    ("--max-memory-gb", "nan"), ("--max-hours", "0"), ("--max-hours", "inf"),
    ("--scheduler", "tcp://127.0.0.1:1"), ("--now", "yesterday"), ("--now", "0001-01-01"),
    ("--now", "1999-12-31"), ("--now", "2100-01-01"), ("--no-such-option", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=lambda text: text)
def test_a_value_that_cannot_be_used_is_refused_by_the_name_of_its_option(
    option, value, small, tmp_path
):
    from typer.testing import CliRunner

    from cli import app

    # In this process, for 25 of them; the next test is one in a process of its own.
    arguments = ["discover", "--db", str(small), "--output", str(tmp_path / "out"), option, value]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert option.lstrip("-") in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.glob("out/2*"))


@pytest.mark.parametrize(
    ("option", "value"), [("--hours", "nan"), ("--seed", "4294967296"), ("--layout", "log32")]
)
def test_a_bad_value_ends_the_command_with_one_line(attn, option, value, small, tmp_path):
    done = attn("discover", "--db", small, "--output", tmp_path / "out", option, value)
    said = refused(done)
    assert option.lstrip("-") in said
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_to_is_refused(attn, small, tmp_path):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc/attn")):
        done = attn("discover", "--db", small, "--output", output, "--hours", "0")
        assert f"cannot write to {output}" in refused(done)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("now", "in_utc"),
    [
        ("2025-01-10T04:02:11+02:00", "2025-01-10 02:02"),
        ("2025-01-10T04:02:11", "2025-01-10 04:02"),
    ],
)
def test_the_end_of_the_window_may_have_an_offset_from_utc(now, in_utc, small, tmp_path):
    from typer.testing import CliRunner

    from cli import app

    # Before all rows, so that the message names the window's end.
    arguments = ["discover", "--db", str(small), "--output", str(tmp_path / "out"), "--now", now]
    said = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "TERM": "dumb"}).stderr
    assert f"in the 24 hours before {in_utc} UTC" in said


BAD_TOML = {
    "local_mass = [": "is not a TOML file",
    "no_such_zone = 0.5": "no_such_zone",
    "ripple = 'high'": "ripple must be a number",
    "entropy = 1.0": "entropy must lie between 0 and 1",
    "entropy = nan": "entropy must lie between 0 and 1",
}


@pytest.mark.parametrize("content", BAD_TOML)
def test_thresholds_that_cannot_be_used_are_refused(attn, small, tmp_path, content):
    path = tmp_path / "zones.toml"
    path.write_text(content)
    done = attn("discover", "--db", small, "--output", tmp_path / "out", "--zone-thresholds", path)
    assert BAD_TOML[content] in refused(done)
    assert not (tmp_path / "out").exists()


def test_a_thresholds_file_that_is_missing_is_named(attn, small, tmp_path):
    done = attn("discover", "--db", small, "--output", tmp_path, "--zone-thresholds", "none.toml")
    assert "cannot read none.toml" in refused(done)


# Two jobs at once.


def test_a_second_job_is_refused_while_one_is_at_work_and_not_once_it_is_killed(
    attn, small, tmp_path
):
    output = tmp_path / "out"
    command = ["discover", "--db", str(small), "--output", str(output), *ALL_NOW]
    with subprocess.Popen(
        [sys.executable, str(REPO / "cli.py"), *command], stderr=subprocess.PIPE, text=True
    ) as first:
        assert RUN_ID in first.stderr.readline()
        second = attn(*command)
        first.kill()
    # Not that of a mistake: a scheduler may try again.
    assert (second.returncode, second.stdout) == (5, "")
    said = second.stderr
    assert f"another discovery job (process {first.pid}) is writing to {output}" in said
    # The lock is free again: the next job gets as far as counting its rows.
    assert "only 150 fingerprints" in refused(attn(*command, "--min-rows", "1000"))


# Runs of other shapes.


def test_a_sampled_run_with_its_own_zones_and_request_limit(attn, run, tmp_path):
    thresholds = tmp_path / "zones.toml"
    thresholds.write_text("local_mass = 0.9\nentropy = 0.25\n")
    output = tmp_path / "out"
    done = attn(
        "discover", "--db", run.db, "--output", output, *ALL_NOW, "--max-per-request", "37",
        "--umap-sample-size", "701", "--batch-size", "300", "--zone-thresholds", thresholds,
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    counts = manifest["counts"]
    assert (counts["rows_in_window"], counts["rows"]) == (ROWS, 40 * 37)
    assert counts["over_request_limit"] == ROWS - 40 * 37
    assert (counts["fit_rows"], counts["sampled"]) == (701, True)
    assert "2,520 over 37 a request left out" in done.stderr

    embedding = open_artifacts(output).table("embedding")
    requests, rows = np.unique(embedding["request_id"].to_pylist(), return_counts=True)
    assert (len(requests), set(rows.tolist())) == (40, {37})
    # Every row, of the sample or not, has a place, and nearly all have their behaviour's label.
    assert np.isfinite(np.column_stack([embedding["x"], embedding["y"]])).all()
    request = [int(name.rsplit("-", 1)[1]) for name in embedding["request_id"].to_pylist()]
    row = np.array(request) * 100 + embedding["position"].to_numpy()
    labels, truth = embedding["cluster_id"].to_numpy(), run.truth[row]
    assert (labels[truth >= 0] >= 0).mean() > 0.9
    assert adjusted_rand_score(truth[truth >= 0], labels[truth >= 0]) >= 0.75

    rules = ZoneRules(local_mass=0.9, entropy=0.25)
    assert manifest["zone_rules"] == asdict(rules)
    expected = rules.classify(run.vectors[row], Layout.LOG16)
    assert embedding["zone"].to_pylist() == expected.names
    shares = np.bincount(expected.zone, minlength=len(ZONES)) / len(row)
    told = manifest["stages"]["zones"]["shares"]
    assert told == pytest.approx(dict(zip(ZONES, shares.tolist(), strict=True)))
    classified = Classifier.load(output).classify(run.vectors[row])
    assert np.array_equal(classified.zone, expected.zone)


def test_rows_that_are_all_alike_end_in_a_run_that_is_kept_but_not_served(attn, tmp_path):
    db = make_store(tmp_path / "alike.db", np.repeat(planted(1, 1)[0], 301, axis=0))
    output = tmp_path / "out"
    done = attn("discover", "--db", db, "--output", output, *ALL_NOW)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "no clusters" in done.stderr
    assert f"{output / RUN_ID} is kept, and no run is served yet" in done.stderr
    assert not (output / "latest").exists()
    embedding = open_artifacts(output / RUN_ID).table("embedding")
    assert set(embedding["cluster_id"].to_pylist()) == {-1}
    assert np.isfinite(np.column_stack([embedding["x"], embedding["y"]])).all()


def quietly(db: Path, output: Path, **options) -> Path:
    """A run in this process, where UMAP is compiled once for all of them; gives its folder."""
    wanted = DiscoverOptions(db=str(db), output=str(output), hours=0, **options)
    return output / discover(wanted, now=NOW)["run_id"]


def test_a_parquet_folder_gives_the_same_run_as_a_file(tmp_path):
    vectors = planted(701, 4)[0]
    for name in ("store.db", "store"):
        make_store(tmp_path / name, vectors)
    in_file = quietly(tmp_path / "store.db", tmp_path / "from file")
    in_folder = quietly(tmp_path / "store", tmp_path / "from folder")
    for name in ("embedding", "clusters", "landmarks", "projection"):
        # Their dictionaries may be others, the values may not.
        from_file, from_folder = (open_artifacts(f).table(name) for f in (in_file, in_folder))
        assert from_file.to_pylist() == from_folder.to_pylist()


def test_the_order_of_arrival_does_not_change_a_run_of_the_same_rows(tmp_path):
    vectors = planted(400, 6)[0]
    batch = planted_batch(vectors, START)
    for name, parts in (("whole", [batch]), ("parts", [batch.slice(0, 123), batch.slice(123)])):
        with open_store(tmp_path / f"{name}.db", create=True) as store:
            for part in parts:
                store.append(part)
                store.append(part)  # a sender that sends twice
    whole, parts = (quietly(tmp_path / f"{n}.db", tmp_path / n) for n in ("whole", "parts"))
    assert open_artifacts(whole).table("embedding").equals(open_artifacts(parts).table("embedding"))


@pytest.mark.parametrize("rows", [4, 5, 17, 100])
def test_the_fewest_rows_make_a_whole_run(tmp_path, rows):
    db = make_store(tmp_path / "few.db", planted(rows, rows)[0])
    folder = quietly(db, tmp_path / "out", min_rows=rows)
    artifacts = open_artifacts(folder)
    assert artifacts.table("embedding").num_rows == rows
    assert artifacts.manifest["counts"]["fit_rows"] == rows
    classified = Classifier(artifacts).classify(planted(50, 1)[0])
    known = {-1, *artifacts.table("clusters")["cluster_id"].to_pylist()}
    assert set(classified.cluster_id.tolist()) <= known


def test_two_kinds_of_exact_duplicates_end_in_a_whole_run(tmp_path):
    vectors = np.repeat(planted(2, 3)[0], 75, axis=0)
    folder = quietly(make_store(tmp_path / "odd.db", vectors), tmp_path / "out")
    embedding = open_artifacts(folder).table("embedding")
    assert np.isfinite(np.column_stack([embedding["x"], embedding["y"]])).all()


@pytest.mark.parametrize("options", [{}, {"clustering": "hdbscan", "min_samples": 1_000}])
def test_options_larger_than_the_window_make_a_whole_run(tmp_path, options):
    db = make_store(tmp_path / "small.db", planted(150, 2)[0])
    folder = quietly(db, tmp_path / "out", umap_neighbors=1_000, min_cluster_size=1_000, **options)
    assert open_artifacts(folder).manifest["counts"]["clusters"] == 0


def test_a_request_limit_that_leaves_too_few_rows_is_refused(attn, tmp_path):
    with open_store(tmp_path / "one.db", create=True) as store:
        store.append(planted_batch(planted(300, 0)[0], START, rows_per_request=300))
    done = attn("discover", "--db", tmp_path / "one.db", "--output", tmp_path / "out",
                "--hours", "0", "--max-per-request", "3")  # fmt: skip
    assert done.returncode == 2
    said, hint = done.stderr.splitlines()[-2:]
    assert said.startswith("error: --max-per-request 3 leaves 3 of 300 rows")
    assert hint.startswith("finish it with: attn discover")
    assert "Traceback" not in done.stderr


def test_runs_in_one_output_folder_never_share_an_id_and_latest_is_the_last(tmp_path):
    db = make_store(tmp_path / "layered.db", planted(600, 9)[0])
    output = tmp_path / "out"
    folders = [quietly(db, output, seed=seed) for seed in (1, 2)]
    assert [folder.name for folder in folders] == [RUN_ID, f"{RUN_ID}-2"]
    assert (output / "latest").readlink() == Path(f"{RUN_ID}-2")
    born = [
        cluster["cluster_id"]
        for folder in folders
        for cluster in open_artifacts(folder).table("clusters").to_pylist()
        if cluster["born_in"] == folder.name
    ]
    assert len(born) == len(set(born)) > 0
    state = json.loads((output / "next_cluster_id").read_text())
    assert state["next"] > max(born)
    assert state["reserved"] == {}


@pytest.mark.parametrize("rows", [700, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_small_run_has_a_classifier_that_agrees_with_it(tmp_path, rows):
    folder = quietly(make_store(tmp_path / "small.db", planted(rows, 0)[0]), tmp_path / "out")
    assert open_artifacts(folder).manifest["quality"]["classifier_agreement"] >= 0.9


def test_a_layered_store_is_discovered_without_being_told(tmp_path):
    batch = planted_batch(layered(300, 1), START)
    with open_store(tmp_path / "layered.db", create=True) as store:
        column = batch.schema.get_field_index("layout")
        store.append(batch.set_column(column, "layout", pa.array([2] * 300, pa.uint8())))
    artifacts = open_artifacts(quietly(tmp_path / "layered.db", tmp_path / "out"))
    assert artifacts.manifest["layout"] == "layered"
    assert artifacts.manifest["counts"]["clusters"] >= 3
