"""Nights that follow one another into one output folder, good ones and poisoned ones."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from planted import SHARES, planted, planted_batch
from published import layered, make_store
from rich.table import Table
from shared import NOW, REPO
from uninterrupted import fingerprint_of, killed_at

from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.consistency import entropy_bound, inconsistent
from discovery.artifacts.read import open_artifacts
from discovery.commands.runs import console
from discovery.runs.checkpoint import read_sealed, write_sealed
from pipeline.store.open import open_store

ROWS = 3_000
DAY = dt.timedelta(days=1)


class FirstNight(NamedTuple):
    """A good night in an output folder, to be copied before anything follows it."""

    output: Path
    run_id: str
    ids: list[int]


def at(night: int) -> str:
    return f"{NOW + night * DAY:%Y-%m-%dT%H:%M:%S}"


def store_of(path: Path, vectors: NDArray[np.float32], night: int, **about: str) -> Path:
    with open_store(path, create=True) as store:
        start = NOW + night * DAY - dt.timedelta(hours=20)
        store.append(planted_batch(vectors, start, prefix=f"night{night}", **about))
    return path


def identities(output: Path, run_id: str) -> list[int]:
    return open_artifacts(output / run_id).table("clusters")["cluster_id"].to_pylist()


@pytest.fixture(scope="module")
def first_night(attn, tmp_path_factory) -> FirstNight:
    folder = tmp_path_factory.mktemp("nights")
    db = store_of(folder / "first.db", planted(ROWS, 0)[0], 0)
    done = attn("discover", "--db", db, "--output", folder / "runs", "--now", at(0))
    assert done.returncode == 0, done.stderr
    run_id = at(0).replace(":", "-")
    return FirstNight(folder / "runs", run_id, identities(folder / "runs", run_id))


@pytest.fixture
def runs(first_night, tmp_path) -> Path:
    output = tmp_path / "runs"
    shutil.copytree(first_night.output, output, symlinks=True)
    return output


def test_another_night_of_the_same_keeps_the_ids_the_names_and_the_map(
    attn, first_night, runs, tmp_path
):
    db = store_of(tmp_path / "second.db", planted(ROWS, 1)[0], 1)
    done = attn("discover", "--db", db, "--output", runs, "--now", at(1), "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert manifest["parent_run"] == first_night.run_id
    assert identities(runs, manifest["run_id"]) != []
    assert set(identities(runs, manifest["run_id"])) == set(first_night.ids)
    assert {event["event"] for event in manifest["lineage"]["events"]} == {"kept"}
    assert (runs / "latest").readlink().name == manifest["run_id"]
    tables = [open_artifacts(runs / run).table("clusters").to_pylist()
              for run in (first_night.run_id, manifest["run_id"])]  # fmt: skip
    before, after = ({row["cluster_id"]: row for row in table} for table in tables)
    same = sum(before[i]["label"] == after[i]["label"] for i in before)
    assert same >= len(before) - 1
    assert all(row["born_in"] == first_night.run_id for row in after.values())
    places = np.array([[(r["x"], r["y"]) for r in (before[i], after[i])] for i in before])
    moved = np.linalg.norm(places[:, 0] - places[:, 1], axis=1)
    apart = np.linalg.norm(places[:, 0][:, None] - places[:, 0][None], axis=2)
    assert np.median(moved) < 0.2 * np.median(apart[apart > 0])
    assert manifest["quality"]["drift"]["clusters"]["low"] < 0.05


def dirichlet_noise(rows: int) -> NDArray[np.float32]:
    """Rows of nothing, each of which could be real: float32[rows, 20]."""
    rng = np.random.default_rng(0)
    hist = rng.dirichlet(np.full(16, 0.35), rows)
    entropy = rng.random(rows) * entropy_bound(hist)
    bands = [hist[:, :3].sum(axis=1), hist[:, 3:8].sum(axis=1), hist[:, 8:].sum(axis=1)]
    vectors = np.column_stack([*bands, entropy, hist]).astype(np.float32)
    assert not inconsistent(vectors, Layout.LOG16).any()
    return vectors


def another_model(rows: int) -> NDArray[np.float32]:
    """The same kinds of behaviour, in quite other shares and places: float32[rows, 20]."""
    few = np.zeros(len(SHARES))
    few[[4, 7, 10, 11]] = [4, 3, 2, 1]
    return planted(rows, 7, shares=few)[0]


def too_even(rows: int) -> NDArray[np.float32]:
    """Planted rows whose entropy says that they attend evenly: float32[rows, 20]."""
    vectors = planted(rows, 1)[0]
    vectors[:, 3] = 1.0
    return vectors


POISON = {
    "noise that could be real": (dirichlet_noise(ROWS), "recognise"),
    "more entropy than their histograms allow": (too_even(ROWS), "contradict one another"),
    "another model's vectors": (another_model(ROWS), "earlier run"),
    "half of the rows missing": (planted(ROWS, 1)[0][: ROWS // 2], "smallest of the last"),
}  # fmt: skip


# Rows that contradict one another, and too few of them.
FAST_POISON = ("half of the rows missing",)


@pytest.mark.parametrize(
    "poison",
    [
        name if name in FAST_POISON else pytest.param(name, marks=pytest.mark.slow)
        for name in POISON
    ],
)
def test_a_poisoned_night_never_becomes_latest_and_says_why(
    attn, first_night, runs, tmp_path, poison
):
    vectors, reason = POISON[poison]
    db = store_of(tmp_path / "poisoned.db", vectors, 1)
    done = attn("discover", "--db", db, "--output", runs, "--now", at(1))
    assert done.returncode == 3, (done.returncode, done.stderr)
    assert (runs / "latest").readlink().name == first_night.run_id
    run_id = at(1).replace(":", "-")
    gate = open_artifacts(runs / run_id).manifest["quality"]["gate"]
    assert not gate["passed"] and reason in " ".join(gate["reasons"])
    assert f"FAILED: {gate['reasons'][0]}" in done.stderr
    # Nor does it become a parent: the night after follows the good one.
    if poison == "random numbers":
        db = store_of(tmp_path / "third.db", planted(ROWS, 2)[0], 2)
        done = attn("discover", "--db", db, "--output", runs, "--now", at(2), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["parent_run"] == first_night.run_id


@pytest.mark.slow
def test_latest_does_not_change_to_another_model_unless_that_was_asked_for(
    attn, first_night, runs, tmp_path
):
    db = make_store(tmp_path / "other.db", planted(1_500, 3)[0], model="newcomer")
    arguments = ["discover", "--db", db, "--output", runs, "--hours", "0"]
    done = attn(*arguments, "--now", at(1))
    assert done.returncode == 3
    assert "latest is of planted-model" in done.stderr and "--model" in done.stderr
    assert (runs / "latest").readlink().name == first_night.run_id
    done = attn(*arguments, "--now", at(2), "--model", "newcomer", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parent_run"] is None
    assert not set(identities(runs, at(2).replace(":", "-"))) & set(first_night.ids)


@pytest.mark.slow
def test_a_night_let_through_is_what_the_next_one_follows(attn, first_night, runs, tmp_path):
    db = store_of(tmp_path / "half.db", planted(ROWS, 1)[0][: ROWS // 2], 1)
    done = attn("discover", "--db", db, "--output", runs, "--now", at(1), "--no-gate")
    assert done.returncode == 0, done.stderr
    assert (runs / "latest").readlink().name == at(1).replace(":", "-")
    # As few as then is not few any more.
    store_of(db, planted(ROWS, 2)[0][: ROWS // 2], 2)
    done = attn("discover", "--db", db, "--output", runs, "--now", at(2), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parent_run"] == at(1).replace(":", "-")


@pytest.mark.slow
def test_a_second_night_killed_at_any_stage_ends_in_the_same_artifacts(attn, runs, tmp_path):
    db = store_of(tmp_path / "second.db", planted(1_501, 1)[0], 1)
    alone = tmp_path / "alone"
    shutil.copytree(runs, alone, symlinks=True)
    options = ["--now", at(1), "--batch-size", "256", "--umap-sample-size", "700", "--no-gate"]
    done = attn("discover", "--db", db, "--output", alone, *options)
    assert done.returncode == 0, done.stderr
    run_id = at(1).replace(":", "-")
    first = ["discover", "--db", str(db), "--output", str(runs)]
    killed_at("progress:lineage:2", *first, *options)
    for point in ("stage_finished:lineage:", "stage_finished:quality:"):
        killed_at(point, *first, "--resume", run_id)
    done = attn(*first, "--resume", run_id)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(runs / run_id) == fingerprint_of(alone / run_id)
    assert (runs / run_id / "report.html").read_bytes() == (
        alone / run_id / "report.html"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("landmarks.parquet", ()), ("manifest.json", ()), ("landmarks.parquet", ("--new-lineage",))],
)
def test_a_damaged_parent_fails_the_gate_unless_a_new_lineage_was_asked_for(
    attn, first_night, runs, tmp_path, name, options
):
    path = runs / first_night.run_id / name
    path.write_bytes(path.read_bytes()[:-9])
    db = store_of(tmp_path / "second.db", planted(ROWS, 1)[0], 1)
    done = attn("discover", "--db", db, "--output", runs, "--now", at(1), "--json", *options)
    manifest = json.loads(done.stdout)
    assert (done.returncode, manifest["parent_run"]) == (0 if options else 3, None), done.stderr
    assert f"{path} is damaged" in done.stderr
    assert [one["run_id"] for one in manifest["lineage"]["damaged"]] == [first_night.run_id]
    reasons = manifest["quality"]["gate"]["reasons"]
    assert bool(options) != any(f"{path} is damaged" in reason for reason in reasons)
    checks = {check["name"]: check["says"] for check in manifest["quality"]["gate"]["checks"]}
    unknown = f"that run, {first_night.run_id}, cannot be read"
    assert (unknown in checks["identity"]) == (name == "manifest.json")
    assert ("as latest is" in checks["identity"]) == (name != "manifest.json")
    said = "a new lineage, as was asked for" if options else "no earlier run is left"
    assert said in done.stderr and "first run of its lineage" not in done.stderr
    latest = manifest["run_id"] if options else first_night.run_id
    assert (runs / "latest").readlink().name == latest
    assert min(identities(runs, manifest["run_id"])) > max(first_night.ids)


def test_a_resumed_night_whose_parent_is_gone_says_so(attn, first_night, runs, tmp_path):
    db = store_of(tmp_path / "second.db", planted(1_501, 1)[0], 1)
    first = ["discover", "--db", str(db), "--output", str(runs)]
    killed_at("stage_finished:neighbors:", *first, "--now", at(1))
    shutil.rmtree(runs / first_night.run_id)
    done = attn(*first, "--resume", at(1).replace(":", "-"))
    assert done.returncode == 2
    assert f"parent run {first_night.run_id} cannot be read" in done.stderr


def test_the_layered_layout_has_nights_as_well(attn, tmp_path):
    ids = []
    for night in range(2):
        db = tmp_path / f"layered{night}.db"
        batch = planted_batch(
            layered(600, night), NOW + night * DAY - dt.timedelta(hours=2), f"night{night}"
        )
        layouts = pa.array([2] * 600, pa.uint8())
        batch = batch.set_column(batch.schema.get_field_index("layout"), "layout", layouts)
        with open_store(db, create=True) as store:
            store.append(batch)
        done = attn("discover", "--db", db, "--output", tmp_path / "runs", "--now", at(night),
                    "--json", timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        ids.append(set(identities(tmp_path / "runs", json.loads(done.stdout)["run_id"])))
    assert ids[0] == ids[1] and len(ids[0]) == 3
    assert (tmp_path / "runs" / "latest").is_symlink()


@pytest.mark.slow
def test_a_night_from_the_past_does_not_become_latest(attn, first_night, runs, tmp_path):
    db = store_of(tmp_path / "past.db", planted(1_500, 1)[0], -1)
    done = attn("discover", "--db", db, "--output", runs, "--now", at(-1), "--no-gate")
    assert done.returncode == 0, done.stderr
    assert f"latest is {first_night.run_id}, a newer run" in done.stderr
    assert (runs / "latest").readlink().name == first_night.run_id


@pytest.mark.slow
def test_parts_that_are_all_or_none_of_the_sample_are_placed_as_well(attn, runs, tmp_path):
    db = store_of(tmp_path / "second.db", planted(1_281, 1)[0], 1)
    done = attn("discover", "--db", db, "--output", runs, "--now", at(1), "--no-gate",
                "--batch-size", "256", "--umap-sample-size", "100", "--seed", "5")  # fmt: skip
    assert done.returncode == 0, done.stderr
    run_id = at(1).replace(":", "-")
    assert open_artifacts(runs / run_id).table("embedding").num_rows == 1_281


def test_a_tokenizer_that_cannot_be_read_is_refused_before_anything_is_written(attn, tmp_path):
    db = store_of(tmp_path / "first.db", planted(300, 0)[0], 0)
    done = attn("discover", "--db", db, "--output", tmp_path / "runs", "--now", at(0),
                "--tokenizer", tmp_path / "tokenizer.json")  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "tokenizer.json" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_begun_by_another_version_is_not_resumed(attn, runs, tmp_path):
    db = store_of(tmp_path / "second.db", planted(1_501, 1)[0], 1)
    first = ["discover", "--db", str(db), "--output", str(runs)]
    killed_at("stage_finished:extract:", *first, "--now", at(1))
    run_id = at(1).replace(":", "-")
    saved = runs / run_id / ".checkpoint" / "run.json"
    begun = read_sealed(saved)
    del begun["follows"]
    write_sealed(saved, begun)
    done = attn(*first, "--resume", run_id)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "or of another version of attn" in done.stderr
    assert "--resume" not in done.stderr


def test_a_label_with_square_brackets_is_printed_as_it_is(capsys):
    table = Table("cluster")
    table.add_row('on "[/INST]" and "[b]"')
    console().print(table)
    assert 'on "[/INST]" and "[b]"' in capsys.readouterr().out


@pytest.mark.slow
def test_token_texts_name_clusters(attn, tmp_path):
    sample = REPO / "examples" / "sample" / "fingerprints.parquet"
    tokens = REPO / "examples" / "demo_model" / "tokenizer.json"
    db = tmp_path / "sample.db"
    with open_store(db, create=True) as store:
        table = pq.read_table(sample)
        tasks = (pc.starts_with(table["request_id"], task) for task in ("brackets", "counting"))
        wanted = pc.or_(*tasks)
        store.append(table.filter(wanted).combine_chunks().to_batches()[0])
    done = attn("discover", "--db", db, "--output", tmp_path / "runs", "--hours", "0",
                "--tokenizer", tokens, "--no-gate")  # fmt: skip
    assert done.returncode == 0, done.stderr
    clusters = open_artifacts(tmp_path / "runs").table("clusters").to_pylist()
    texts = {token["text"] for cluster in clusters for token in cluster["tokens"]}
    assert texts & {"␣[", "␣("}
    named = " ".join(cluster["label"] for cluster in clusters)
    assert "on closing brackets" in named and "on digits" in named
    page = (tmp_path / "runs" / "latest" / "report.html").read_text()
    assert clusters[0]["says"].split(";")[0] in page
