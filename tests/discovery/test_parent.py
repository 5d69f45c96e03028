"""Which run tonight's follows, and what it reads of it: from folders written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import Lineage, run_id_of, unfinished
from numpy.typing import NDArray
from planted import planted

from capture_kernels.errors import RunError
from capture_kernels.fingerprint.vector import DIMENSIONS
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.known_areas import InAreas
from discovery.algorithms.shares import Shares, shares_of
from discovery.artifacts.schema import REFERENCES, SHARES, landmark_columns
from discovery.artifacts.write import write_parquet
from discovery.runs.folder import move_latest
from discovery.runs.parent import (
    VOLUMES_KEPT,
    before_this_run,
    index_of,
    open_parent,
    references_table,
    saved_shares,
    shares_table,
)
from pipeline.durable import file_facts

TONIGHT = run_id_of(28)
WINDOW = {"model": "model", "layout": 1, "capture_id": "a"}
HOURS = 24.0


def night(
    lineage: Lineage,
    *,
    passed: bool = True,
    references: bool = True,
    hours: float = HOURS,
    rows: int = 1_000,
    let_through: bool = False,
    **identity: str,
) -> str:
    """A finished run as `attn discover` leaves it, as far as the next one looks at its manifest."""
    run_id = lineage.night({0: 1.0}, passed=passed)
    path = lineage.output / run_id / "manifest.json"
    manifest = json.loads(path.read_text()) | identity
    manifest["quality"]["gate"]["served"] = passed or let_through
    manifest["parameters"]["hours"] = hours
    manifest["counts"]["rows_in_window"] = rows
    if references:
        manifest["files"] |= {name: written(path.with_name(name)) for name in (REFERENCES, SHARES)}
    path.write_text(json.dumps(manifest))
    return run_id


def written(path: Path) -> dict[str, Any]:
    """A file that nobody reads here, and what a manifest says of it."""
    path.write_bytes(b"not read here" * 100)
    return file_facts(path)


@pytest.fixture
def lineage(tmp_path) -> Lineage:
    (tmp_path / TONIGHT).mkdir()
    return Lineage(tmp_path)


def follows(output: Path, run_id: str = TONIGHT, hours: float = HOURS) -> dict[str, Any]:
    return before_this_run(output, run_id, WINDOW, hours)


def test_the_first_run_follows_nothing(lineage):
    assert follows(lineage.output) == {
        "parent": None, "damaged": [], "volumes": [], "latest": None, "served": None, "same": 0,
        "others": 0,
    }  # fmt: skip


def test_tonight_follows_the_newest_run_before_it(lineage):
    runs = [night(lineage, rows=rows) for rows in (100, 200, 300)]
    unfinished(lineage.output, run_id_of(20))
    identity = {"model": "model", "layout": "log16", "capture_id": "a"}
    assert follows(lineage.output) == {
        "parent": runs[-1], "damaged": [], "volumes": [300, 200, 100], "latest": runs[-1],
        "served": identity, "same": 3, "others": 0,
    }  # fmt: skip
    assert json.loads(json.dumps(follows(lineage.output))) == follows(lineage.output)


def test_runs_that_came_later_do_not_count_and_neither_does_tonights(lineage):
    runs = [night(lineage, rows=rows) for rows in (100, 200, 300)]
    assert follows(lineage.output, runs[1])["parent"] == runs[0]
    assert follows(lineage.output, runs[1])["volumes"] == [100]
    assert follows(lineage.output, runs[0])["parent"] is None


def test_the_tenth_run_of_a_second_comes_after_the_ninth(lineage):
    first = night(lineage)
    for suffix in (9, 10):
        copied(lineage.output, first, f"{first}-{suffix}")
    assert follows(lineage.output)["parent"] == f"{first}-10"


def copied(output: Path, run_id: str, name: str) -> None:
    """The run as if it had been made under another id."""
    shutil.copytree(output / run_id, output / name)
    path = output / name / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": name}))


@pytest.mark.parametrize(
    "identity", [{"model": "another"}, {"layout": "layered"}, {"capture_id": "b"}]
)
def test_what_cannot_be_compared_is_not_followed_though_it_is_served(lineage, identity):
    own = night(lineage, rows=100)
    night(lineage, rows=200, **identity)
    found = follows(lineage.output)
    assert (found["parent"], found["volumes"]) == (own, [100])
    assert found["served"] == {"model": "model", "layout": "log16", "capture_id": "a"} | identity


def test_a_run_that_failed_its_gate_is_followed_only_where_it_was_let_through(lineage):
    good = night(lineage, rows=100)
    night(lineage, rows=5, passed=False)
    assert follows(lineage.output)["parent"] == good
    assert follows(lineage.output)["volumes"] == [100]
    let_through = night(lineage, rows=7, passed=False, let_through=True)
    assert follows(lineage.output)["parent"] == let_through
    assert follows(lineage.output)["volumes"] == [7, 100]


def test_a_manifest_from_before_no_gate_is_served_where_it_passed(lineage):
    run_id = lineage.night({0: 1.0})
    path = lineage.output / run_id / "manifest.json"
    manifest = json.loads(path.read_text())
    assert "served" not in manifest["quality"]["gate"]
    manifest["files"] |= {name: written(path.with_name(name)) for name in (REFERENCES, SHARES)}
    path.write_text(json.dumps(manifest))
    assert follows(lineage.output)["parent"] == run_id


def test_a_run_that_left_nothing_to_compare_with_is_passed_over_but_its_rows_are_known(lineage):
    older = night(lineage, rows=100)
    night(lineage, rows=200, references=False)
    assert follows(lineage.output)["parent"] == older
    assert follows(lineage.output)["volumes"] == [200, 100]


def test_volumes_are_those_of_windows_as_long_as_tonights(lineage):
    for hours, rows in ((24.0, 100), (1.0, 5), (0.0, 900), (24.0, 200)):
        last = night(lineage, hours=hours, rows=rows)
    assert follows(lineage.output)["volumes"] == [200, 100]
    assert follows(lineage.output, hours=1.0)["volumes"] == [5]
    # A run that read more or less is followed all the same.
    assert follows(lineage.output, hours=1.0)["parent"] == last


def test_volumes_are_looked_back_at_for_a_week_and_a_day(lineage):
    for rows in range(1, 13):
        night(lineage, rows=rows)
    assert VOLUMES_KEPT == 8
    assert follows(lineage.output)["volumes"] == [12, 11, 10, 9, 8, 7, 6, 5]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def overwritten(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00" * 300)


def no_object(path: Path) -> None:
    path.write_text("[]")


def without_its_files(path: Path) -> None:
    manifest = json.loads(path.read_text())
    del manifest["files"]
    path.write_text(json.dumps(manifest))


def without_its_gate(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quality": {}}))


def of_a_later_version(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))


def unreadable(path: Path) -> None:
    """Opening it fails for everybody, root as well."""
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


DAMAGES = [
    truncated, emptied, overwritten, no_object, without_its_files, without_its_gate,
    of_a_later_version, unreadable,
    gone,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_whose_manifest_cannot_be_read_is_not_followed_and_is_named(lineage, damage):
    good = night(lineage, rows=100)
    bad = night(lineage, rows=200)
    assert (lineage.output / "latest").readlink().name == bad
    damage(lineage.output / bad / "manifest.json")
    found = follows(lineage.output)
    assert [one["run_id"] for one in found.pop("damaged")] == [bad]
    assert found == {
        "parent": good, "volumes": [100], "latest": bad, "served": None, "same": 1, "others": 0,
    }  # fmt: skip
    move_latest(lineage.output, good)
    assert follows(lineage.output)["served"]["model"] == "model"


@pytest.mark.parametrize("name", [REFERENCES, SHARES, "embedding.parquet"])
@pytest.mark.parametrize("damage", [truncated, emptied, gone])
def test_a_run_with_a_damaged_file_is_named_not_followed_but_its_rows_are_known(
    lineage, name, damage
):
    good = night(lineage, rows=100)
    bad = night(lineage, rows=200)
    damage(lineage.output / bad / name)
    found = follows(lineage.output)
    assert (found["parent"], found["volumes"]) == (good, [200, 100])
    assert [one["run_id"] for one in found["damaged"]] == [bad]
    assert f"{bad}/{name} is" in found["damaged"][0]["reason"]
    damage(lineage.output / good / name)
    found = follows(lineage.output)
    assert found["parent"] is None
    assert [one["run_id"] for one in found["damaged"]] == [bad, good]


def test_a_run_older_than_the_parent_may_be_damaged(lineage):
    gone(lineage.output / night(lineage) / SHARES)
    good = night(lineage)
    assert (follows(lineage.output)["parent"], follows(lineage.output)["damaged"]) == (good, [])


def test_a_new_lineage_follows_nothing(lineage):
    night(lineage, rows=100)
    found = before_this_run(lineage.output, TONIGHT, WINDOW, HOURS, new_lineage=True)
    assert (found["parent"], found["damaged"], found["volumes"]) == (None, [], [100])


def test_runs_of_others_and_runs_that_failed_are_known_to_be_there(lineage):
    night(lineage, model="another")
    night(lineage, capture_id="b")
    assert (follows(lineage.output)["same"], follows(lineage.output)["others"]) == (0, 2)
    night(lineage, passed=False)
    found = follows(lineage.output)
    assert (found["parent"], found["same"], found["others"]) == (None, 1, 2)


def test_a_latest_that_leads_nowhere_serves_nothing_and_is_named(lineage):
    run_id = night(lineage)
    shutil.rmtree(lineage.output / run_id)
    assert (lineage.output / "latest").is_symlink()
    found = follows(lineage.output)
    assert [one["run_id"] for one in found.pop("damaged")] == [run_id]
    assert found == {
        "parent": None, "volumes": [], "latest": run_id, "served": None, "same": 0, "others": 0,
    }  # fmt: skip


def test_a_copy_of_a_run_under_another_name_is_no_run(lineage):
    run_id = night(lineage, rows=100)
    shutil.copytree(lineage.output / run_id, lineage.output / run_id_of(9))
    (lineage.output / run_id_of(10)).symlink_to(run_id)
    assert follows(lineage.output)["parent"] == run_id
    assert follows(lineage.output)["volumes"] == [100]


@given(
    known=st.lists(st.integers(0, 10_000), max_size=20, unique=True),
    picks=st.lists(st.integers(-1, 19), max_size=30),
)
def test_every_id_is_found_where_it_stands_whatever_the_order(known, picks):
    wanted = [pick if pick < len(known) else -1 for pick in picks]
    ids = np.array([known[i] if i >= 0 else -1 for i in wanted], np.int32)
    found = index_of(np.array(known, np.int32), ids)
    assert found.tolist() == wanted
    assert found.dtype == np.int64


def random_shares(categories: int, requests: int, seed: int) -> Shares:
    rng = np.random.default_rng(seed)
    return shares_of(rng.integers(0, 50, (requests, categories)))


def assert_same(one: Shares, other: Shares) -> None:
    assert np.array_equal(one.shares, other.shares)
    assert np.array_equal(one.covariance, other.covariance)
    for name in ("requests", "rows", "effective_rows"):
        assert getattr(one, name) == getattr(other, name)


@given(st.integers(0, 12), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_shares_come_back_to_the_last_bit(tmp_path_factory, clusters, requests, seed):
    zones = random_shares(len(ZONES), requests, seed)
    own = random_shares(clusters + 1, requests, seed + 1)
    ids = np.random.default_rng(seed).permutation(100)[:clusters].astype(np.int32)
    table = shares_table(zones, own, ids)
    assert table["name"].to_pylist() == [*ZONES, *map(str, ids), "-1"]
    path = tmp_path_factory.mktemp("shares") / SHARES
    write_parquet(path, table)
    zones_back, own_back = saved_shares(pq.read_table(path).to_pylist())
    assert_same(zones_back, zones)
    assert_same(own_back, own)


def areas_of(reference_ids: NDArray[np.int32]) -> InAreas:
    """Area 1 for the references of cluster 7, 0 for those of 3, and none for the others."""
    area = np.select([reference_ids == 7, reference_ids == 3], [1, 0], -1)
    return InAreas(area.astype(np.int32), np.linspace(0, 1, len(area), dtype=np.float32))


def whole_run(
    lineage: Lineage, references: NDArray[np.float32], reference_ids: NDArray[np.int32]
) -> str:
    """A run with all that its successor reads: clusters 7, 3 and 12, and four landmarks."""
    run_id = night(lineage)
    folder = lineage.output / run_id
    clusters = pa.table(
        {
            "cluster_id": pa.array([7, 3, 12], pa.int32()),
            "label": ["seven", "three", "twelve"],
            "share": [0.5, 0.25, 0.125],
            "traits": [["far"], [], ["wide", "flat"]],
            "born_in": [run_id, run_id, "2025-12-31T06-00-00"],
        }
    )
    landmarks = pa.table(
        {
            "projected": [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
            "x": [0.0, 2.0, 4.0, 6.0],
            "y": [1.0, 3.0, 5.0, 7.0],
            "cluster_id": [3, 7, 12, -1],
            "probability": [1.0, 1.0, 1.0, 0.0],
            "second_cluster_id": [-1, 3, -1, -1],
            "second_probability": [0.0, 0.25, 0.0, 0.0],
        },
        schema=landmark_columns(2),
    )
    projection = pa.table(
        {
            "mean": [[0.0] * 16 * DIMENSIONS],
            "scale": [[1.0] * DIMENSIONS],
            "components": [np.eye(DIMENSIONS, 2).reshape(-1).tolist()],
            "explained": [[0.6, 0.4]],
            "reach": [1.5],
            "noise_factor": [0.25],
        }
    )
    shares = shares_table(
        random_shares(len(ZONES), 9, 1), random_shares(4, 9, 2), np.array([7, 3, 12], np.int32)
    )
    tables = {
        "clusters": clusters, "landmarks": landmarks, "projection": projection, "shares": shares,
        "references": references_table(references, reference_ids, areas_of(reference_ids)),
    }  # fmt: skip
    for name, table in tables.items():
        write_parquet(folder / f"{name}.parquet", table)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: file_facts(folder / name) for name in manifest["files"]}
    manifest["lineage"]["areas"] = [{"requests": 2.5}, {"requests": 40.0}]
    path.write_text(json.dumps(manifest))
    return run_id


def test_all_that_a_run_left_is_read_back(lineage):
    vectors = planted(50, 0)[0]
    ids = np.random.default_rng(0).choice([3, 7, 12], 50).astype(np.int32)
    run_id = whole_run(lineage, vectors, ids)
    assert follows(lineage.output)["parent"] == run_id
    parent = open_parent(lineage.output, run_id)
    assert (parent.run_id, parent.ids.tolist()) == (run_id, [7, 3, 12])
    assert parent.labels == ["seven", "three", "twelve"]
    assert parent.traits == [["far"], [], ["wide", "flat"]]
    assert parent.born_in == [run_id, run_id, "2025-12-31T06-00-00"]
    assert parent.share.tolist() == [0.5, 0.25, 0.125]
    assert np.array_equal(parent.references, vectors) and parent.references.dtype == np.float32
    # Indices of clusters, not their ids.
    assert parent.ids[parent.reference_cluster].tolist() == ids.tolist()
    assert all(map(np.array_equal, parent.areas.rows, areas_of(ids)))
    assert parent.areas.requests.tolist() == [2.5, 40.0]
    # The references of a cluster stand for its share of the rows together.
    assert [parent.areas.weight[ids == one].sum() for one in (7, 3, 12)] == pytest.approx(
        [0.5, 0.25, 0.125]
    )
    assert parent.codebook.labels.tolist() == [1, 0, 2, -1]
    assert parent.codebook.labels.dtype == np.int32
    assert (parent.codebook.reach, parent.codebook.noise_factor) == (1.5, 0.25)
    assert parent.coordinates.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert_same(parent.zones, random_shares(len(ZONES), 9, 1))
    assert_same(parent.clusters, random_shares(4, 9, 2))
    assert [event["event"] for event in parent.history] == ["born"]


def test_a_run_without_references_rows_is_read_as_well(lineage):
    run_id = whole_run(lineage, np.empty((0, DIMENSIONS), np.float32), np.empty(0, np.int32))
    parent = open_parent(lineage.output, run_id)
    assert parent.references.shape == (0, DIMENSIONS)
    assert parent.references.dtype == np.float32
    assert parent.reference_cluster.shape == parent.areas.rows.area.shape == (0,)


def test_a_run_of_before_there_were_areas_has_none(lineage):
    ids = np.array([3, 3, 7], np.int32)
    run_id = whole_run(lineage, planted(3, 0)[0], ids)
    path = lineage.output / run_id / REFERENCES
    write_parquet(path, pq.read_table(path).drop_columns(["area", "area_share"]))
    manifest_path = path.with_name("manifest.json")
    manifest = json.loads(manifest_path.read_text())
    manifest["files"][REFERENCES] = file_facts(path)
    del manifest["lineage"]["areas"]
    manifest_path.write_text(json.dumps(manifest))
    areas = open_parent(lineage.output, run_id).areas
    assert areas.rows.area.tolist() == [-1, -1, -1]
    assert areas.gone(InAreas.none(2), np.ones(2)).tolist() == []


@pytest.mark.parametrize("name", [REFERENCES, SHARES, "clusters.parquet", "manifest.json"])
@pytest.mark.parametrize("damage", [truncated, emptied, gone])
def test_a_parent_that_was_damaged_since_is_named(lineage, name, damage):
    run_id = whole_run(lineage, planted(50, 0)[0], np.full(50, 3, np.int32))
    damage(lineage.output / run_id / name)
    with pytest.raises(RunError, match=f"parent run {run_id} cannot be read .*: bring it back"):
        open_parent(lineage.output, run_id)


def test_a_parent_that_is_gone_is_named(lineage):
    with pytest.raises(RunError, match=f"parent run {run_id_of(3)} cannot be read"):
        open_parent(lineage.output, run_id_of(3))
