"""What a run publishes can be read for good, verified, and never runs code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from published import RUN_ID, Mixed, Published, mixed, published
from shared import REPO

from capture_kernels.errors import ArtifactError
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.read import open_artifacts, read_manifest
from discovery.artifacts.schema import CLUSTER_COLUMNS, EMBEDDING_COLUMNS
from pipeline.store.open import open_store

GOLDEN = REPO / "tests" / "golden" / "manifest_v1.json"


@pytest.fixture(scope="session")
def run(attn, tmp_path_factory) -> Published:
    return published(attn, tmp_path_factory)


@pytest.fixture(scope="session")
def mixed_run(attn, tmp_path_factory) -> Mixed:
    return mixed(attn, tmp_path_factory)


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """A copy of a published output folder, to be damaged."""
    shutil.copytree(run.output, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def refusal(folder: Path) -> str:
    with pytest.raises(ArtifactError) as refused:
        open_artifacts(folder).verify()
    message = str(refused.value)
    assert "\n" not in message
    return message


def kinds(value: Any, path: str = "") -> dict[str, str]:
    """Each key of a JSON value by its path, with the kind of its value; lists by their first."""
    if isinstance(value, dict):
        found = {path: "object"}
        for key, inner in value.items():
            found |= kinds(inner, f"{path}.{key}")
        return found
    if isinstance(value, list):
        return {path: "list"} | (kinds(value[0], f"{path}[]") if value else {})
    # JSON does not tell 1 from 1.0.
    names = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return {path: names[type(value)]}


# Null where no held-out row is noise, which the processor's rounding decides here; and what only
# runs of --clustering hdbscan measure.
NULLABLE = (".quality.classifier_noise_recognised", ".quality.mean_persistence")


def test_a_manifest_of_today_has_all_that_version_1_promised(mixed_run):
    promised = kinds(json.loads(GOLDEN.read_text()))
    today = kinds(json.loads((mixed_run.folder / "manifest.json").read_text()))
    assert len(promised) > 60
    missing = sorted(set(promised) - set(today))
    assert not missing
    # What was null may get a value; what had one must not change its kind or become null.
    changed = {k: (v, today[k]) for k, v in promised.items() if v not in ("null", today[k])}
    assert {name: kind for name, kind in changed.items() if name not in NULLABLE} == {}
    assert {today[name] for name in NULLABLE} <= {"number", "null"}


def test_a_manifest_of_version_1_can_be_read(tmp_path):
    shutil.copy(GOLDEN, tmp_path / "manifest.json")
    assert read_manifest(tmp_path)["run_id"] == RUN_ID


def test_a_run_folder_holds_json_and_parquet_and_nothing_else(run, mixed_run):
    for folder in (run.folder, mixed_run.folder):
        names = sorted(path.name for path in folder.rglob("*"))
        assert names == [
            "clusters.parquet", "embedding.parquet", "landmarks.parquet", "manifest.json",
            "progress.jsonl", "projection.parquet", "references.parquet", "report.html",
            "shares.parquet",
        ]  # fmt: skip
        for path in folder.iterdir():
            head = path.read_bytes()[:4]
            begins = {".parquet": b"PAR1", ".html": b"<"}.get(path.suffix, b"{")
            assert head.startswith(begins)


def test_the_output_folder_holds_no_leftovers(run):
    names = sorted(path.name for path in run.output.iterdir())
    assert names == [".lock", RUN_ID, "latest", "next_cluster_id"]


def test_the_manifest_lists_every_parquet_file_with_its_hash(run):
    listed = json.loads((run.folder / "manifest.json").read_text())["files"]
    written = {path.name for path in run.folder.iterdir()}
    assert set(listed) == written - {"manifest.json", "progress.jsonl"}


def test_the_output_folder_opens_at_its_latest_run(run):
    assert (run.output / "latest").readlink() == Path(RUN_ID)
    assert open_artifacts(run.output).folder == open_artifacts(run.folder).folder
    assert open_artifacts(run.output).run_id == RUN_ID


@pytest.mark.parametrize("name", ["clusters", "embedding", "landmarks", "projection"])
@pytest.mark.parametrize("damage", ["one bit", "cut short", "swapped"])
def test_a_file_that_is_not_what_was_published_is_refused(copy, name, damage):
    path = copy / RUN_ID / f"{name}.parquet"
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "one bit":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    elif damage == "cut short":
        path.write_bytes(content[:middle])
    else:
        other = "clusters" if name != "clusters" else "landmarks"
        shutil.copy(copy / RUN_ID / f"{other}.parquet", path)
    message = refusal(copy)
    assert f"{path} is damaged" in message
    assert "run attn discover again" in message


@pytest.mark.parametrize("name", ["clusters", "embedding", "landmarks", "projection"])
def test_a_file_that_is_missing_is_named(copy, name):
    path = copy / RUN_ID / f"{name}.parquet"
    path.unlink()
    assert f"{path} is missing" in refusal(copy / RUN_ID)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        manifest = json.loads(text)
        change(manifest)
        return json.dumps(manifest)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (edited(lambda m: m.update(schema_version=2)), "schema version 2, this version reads 1"),
        (edited(lambda m: m.update(schema_version="1")), "schema version 1"),
        (edited(lambda m: m.pop("schema_version")), "schema version None"),
        (edited(lambda m: m.pop("files")), "is damaged"),
        (edited(lambda m: m.update(files=[])), "is damaged"),
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: "\0" * 100, "is damaged"),
        (lambda text: "[]", "schema version None"),
        (lambda text: "7", "schema version None"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(copy, edit, says):
    path = copy / RUN_ID / "manifest.json"
    path.write_text(edit(path.read_text()))
    message = refusal(copy)
    assert says in message
    assert str(path) in message


def test_a_manifest_that_is_no_text_is_refused(copy):
    (copy / RUN_ID / "manifest.json").write_bytes(b'{"schema_version": 1, "model": "\xff\xfe"}')
    assert "manifest.json is damaged" in refusal(copy)


def test_a_folder_without_a_finished_run_says_what_to_do(copy, tmp_path):
    assert "run attn discover first" in refusal(tmp_path)
    assert "run attn discover first" in refusal(tmp_path / "nowhere")
    (copy / RUN_ID / "manifest.json").unlink()
    assert "holds no finished run" in refusal(copy)


def test_the_tables_hold_what_the_design_promises(run):
    artifacts = open_artifacts(run.folder)
    manifest, embedding = artifacts.manifest, artifacts.table("embedding")
    clusters, landmarks = artifacts.table("clusters"), artifacts.table("landmarks")
    assert embedding.schema.equals(EMBEDDING_COLUMNS)
    assert clusters.schema.equals(CLUSTER_COLUMNS)
    assert embedding.num_rows == manifest["counts"]["rows"] == len(run.vectors)
    assert np.isfinite(np.column_stack([embedding["x"], embedding["y"]])).all()
    assert set(embedding["zone"].to_pylist()) <= set(ZONES)

    cluster_id = embedding["cluster_id"].to_numpy()
    probability = embedding["probability"].to_numpy()
    assert np.all((probability >= 0) & (probability <= 1))
    assert np.all(probability[cluster_id == -1] == 0)
    sizes = dict(zip(clusters["cluster_id"].to_pylist(), clusters["size"].to_pylist(), strict=True))
    ids, counts = np.unique(cluster_id[cluster_id >= 0], return_counts=True)
    assert sizes == dict(zip(ids.tolist(), counts.tolist(), strict=True))
    assert clusters.num_rows == manifest["counts"]["clusters"] == len(sizes)
    assert manifest["quality"]["noise_share"] == pytest.approx((cluster_id == -1).mean())
    assert clusters["share"].to_pylist() == [size / len(cluster_id) for size in sizes.values()]

    assert 0 < landmarks.num_rows <= 1_024
    assert landmarks.num_rows == manifest["counts"]["landmarks"]
    assert set(landmarks["cluster_id"].to_pylist()) - {-1} == set(sizes)


def test_a_clusters_centroid_and_exemplars_are_its_own_members(run):
    artifacts = open_artifacts(run.folder)
    embedding = artifacts.table("embedding").to_pylist()
    cluster_of = {(row["request_id"], row["position"]): row["cluster_id"] for row in embedding}
    row_of = {key: i for i, key in enumerate(sorted(cluster_of))}  # as they were planted
    for cluster in artifacts.table("clusters").to_pylist():
        members = [row_of[key] for key, own in cluster_of.items() if own == cluster["cluster_id"]]
        np.testing.assert_allclose(
            cluster["centroid"], run.vectors[members].astype(float).mean(axis=0), atol=1e-6
        )
        shown = [(e["request_id"], e["position"]) for e in cluster["exemplars"]]
        assert len(shown) == 5
        assert len({request for request, _ in shown}) == 5
        assert {cluster_of[key] for key in shown} == {cluster["cluster_id"]}
        # The rows that show a cluster are nearer to its centroid than most of it.
        apart = np.linalg.norm(run.vectors[members] - cluster["centroid"], axis=1)
        near = np.linalg.norm(run.vectors[[row_of[k] for k in shown]] - cluster["centroid"], axis=1)
        assert near.mean() < np.median(apart)


def test_a_parquet_artifact_can_be_read_by_any_reader(run):
    for path in run.folder.glob("*.parquet"):
        assert pq.read_table(path, memory_map=False).num_rows > 0


def test_the_store_has_a_note_of_the_run(mixed_run):
    with open_store(mixed_run.db, read_only=True) as store:
        noted = {entry["run_id"]: entry for entry in store.runs()}
    assert noted[RUN_ID]["status"] == "published"
    assert (noted[RUN_ID]["model"], noted[RUN_ID]["rows"]) == ("common", 501)
