"""The /discovery routes, over real runs: status, events and commands of a job, runs and maps."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI
from http_server import EventReader, serving
from hypothesis import given
from hypothesis import strategies as st
from planted import planted, planted_batch
from processes import AttnProcess
from shared import NOW, REPO, START

from capture_kernels.errors import ArtifactError, WriteError
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.runs.folder import move_latest
from discovery.runs.lock import output_lock
from pipeline.durable import facts_of
from pipeline.store.open import open_store
from sidecar.http.discovery import jobs, maps, routes, runs
from sidecar.http.discovery.jobs import CommandRefused, Follower, read_client_file
from sidecar.http.discovery.maps import Map, Maps, byte_range
from sidecar.http.errors import add_error_handlers
from sidecar.http.live import Broadcast

RUN_ID = f"{NOW:%Y-%m-%dT%H-%M-%S}"
DISCOVER = ["--hours", "0", "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", "--min-cluster-size", "30"]


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("http") / "fingerprints.db"
    with open_store(path, create=True) as opened:
        opened.append(planted_batch(planted(1_500, 0)[0], START))
    return path


@pytest.fixture(scope="session")
def made(store, attn) -> Path:
    """An output folder with one run; nobody changes it."""
    output = store.parent / "made"
    done = attn("discover", "--db", store, "--output", output, *DISCOVER)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture
def output(made, tmp_path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(made, tmp_path / "output", symlinks=True))


def service_of(output: Path) -> Any:
    """What the routes need of the service, with the latest run served."""
    current = None
    if (output / "latest").exists():
        artifacts = open_artifacts(output)
        current = SimpleNamespace(
            classifier=Classifier(artifacts), run_id=artifacts.run_id, folder=artifacts.folder,
            manifest=artifacts.manifest, loaded_at=datetime(2026, 1, 10, 5, tzinfo=UTC),
        )  # fmt: skip
    serving = SimpleNamespace(current=current, refused=None, problem=None)
    options = SimpleNamespace(discovery_dir=output)
    return SimpleNamespace(options=options, serving=serving, broadcast=Broadcast())


def app_of(service: Any) -> FastAPI:
    app = FastAPI()
    add_error_handlers(app)
    app.include_router(routes.router)
    app.include_router(runs.router)
    app.state.service, app.state.broadcast = service, service.broadcast
    return app


@contextmanager
def client_of(output: Path) -> Iterator[httpx.Client]:
    with (
        serving(app_of(service_of(output))) as server,
        httpx.Client(base_url=server.url + "/discovery", timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def still(made) -> Iterator[httpx.Client]:
    """A client of a service whose folder of runs does not change."""
    with client_of(made) as client:
        yield client


def error_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    (message,) = answer.json().values()
    assert message and "\n" not in message
    return message


# status and runs


def test_the_status_says_what_is_served_and_that_nothing_is_at_work(still, made):
    found = still.get("/status").json()
    assert found["latest"] == found["serving"]["run_id"] == RUN_ID
    manifest = open_artifacts(made).manifest
    assert found["serving"]["rows"] == manifest["counts"]["rows"] == 1_500
    assert found["running"] is found["refused"] is found["problem"] is None
    (one,) = found["runs"]
    assert (one["run_id"], one["state"], one["served"]) == (RUN_ID, "latest", True)
    assert one["clusters"] == manifest["counts"]["clusters"]


def test_the_status_gives_the_reason_for_which_a_run_was_refused(made):
    service = service_of(made)
    at = datetime(2026, 1, 11, tzinfo=UTC)
    refused = SimpleNamespace(run_id="2026-01-11T04-02-11", reason="its hash differs", at=at)
    service.serving.refused, service.serving.problem = refused, refused.reason
    with serving(app_of(service)) as server:
        found = httpx.get(server.url + "/discovery/status").json()
    assert found["refused"] == {
        "run_id": "2026-01-11T04-02-11", "reason": "its hash differs", "at": "2026-01-11T00:00:00Z",
    }  # fmt: skip
    assert found["problem"] == "its hash differs"


def test_a_service_without_a_folder_of_runs_says_so(tmp_path):
    with client_of(tmp_path / "nothing here yet") as client:
        found = client.get("/status").json()
        assert found["serving"] is found["latest"] is found["running"] is None
        assert found["runs"] == [] == client.get("/runs").json()["runs"]
        assert "no run is served" in error_of(client.get("/runs/latest"), 404)
        assert "no discovery job" in error_of(
            client.post("/control", json={"command": "stop"}), 409
        )


def copied(output: Path, run_id: str, **changes: Any) -> Path:
    """The run of the folder once more, under another id."""
    folder = Path(shutil.copytree(output / RUN_ID, output / run_id))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "run_id": run_id, **changes}))
    return folder


def test_runs_are_listed_page_by_page_newest_first(output):
    ids = [f"2026-01-{day:02}T04-02-11" for day in range(11, 18)] + ["2026-01-17T04-02-11-2"]
    for run_id in ids:
        copied(output, run_id)
    (output / ids[0] / "manifest.json").write_text("{")
    (output / ids[1] / "manifest.json").unlink()
    (output / ids[1] / ".checkpoint").mkdir()
    for path in (output / ids[1]).glob("*.*"):
        if path.is_file():
            path.unlink()
    move_latest(output, ids[-1])
    with client_of(output) as client:
        seen, before = [], None
        while True:
            page = client.get("/runs", params={"limit": 3} | ({"before": before} if before else {}))
            seen += page.json()["runs"]
            if (before := page.json()["next"]) is None:
                break
        assert [one["run_id"] for one in seen] == [*reversed(ids), RUN_ID]
        states = [one["state"] for one in seen]
        assert states == ["latest", *["published"] * 5, "unfinished", "unreadable", "published"]
        assert "damaged" in seen[-2]["reason"] and seen[0]["served"]
        assert "not finished" in error_of(client.get(f"/runs/{ids[1]}"), 409)
        assert "damaged" in error_of(client.get(f"/runs/{ids[0]}"), 410)
        (output / ids[0] / "manifest.json").write_text(
            (output / RUN_ID / "manifest.json").read_text().replace(RUN_ID, ids[0])
        )
        again = client.get("/runs", params={"limit": 100}).json()["runs"]
        assert again[-2]["state"] == "published"  # mended: nothing old is remembered
        for wrong in ({"limit": 0}, {"limit": 10**9}, {"limit": "x"}):
            assert error_of(client.get("/runs", params=wrong), 422)
        assert error_of(client.get("/runs", params={"before": "../x"}), 400)


@pytest.mark.parametrize(
    "name", ["nothing", "..", "%2e%2e", "..%2f..%2fetc", "2026-01-10", "2030-01-01T00-00-00",
             ".lock", "next_cluster_id", "%00", "2026-01-10T04-02-11%0a", "x" * 500],
)  # fmt: skip
@pytest.mark.parametrize("route", ["", "/clusters", "/lineage", "/map", "/map/meta"])
def test_only_runs_are_found(still, name, route):
    error_of(still.get(f"/runs/{name}{route}"), 404)


def test_a_run_shows_its_manifest_clusters_and_lineage(still, made):
    artifacts = open_artifacts(made)
    for run_id in ("latest", RUN_ID):
        assert still.get(f"/runs/{run_id}").json() == artifacts.manifest
        found = still.get(f"/runs/{run_id}/clusters").json()
        assert found["run_id"] == RUN_ID
        clusters = artifacts.table("clusters").to_pylist()
        assert [one["cluster_id"] for one in found["clusters"]] == [
            one["cluster_id"] for one in clusters
        ]
        for one, known in zip(found["clusters"], clusters, strict=True):
            assert (one["traits"], one["says"]) == (known["traits"], known["says"])
            assert one["exemplars"] == known["exemplars"] and len(one["centroid"]) == 20
        lineage = still.get(f"/runs/{run_id}/lineage").json()
        assert (lineage["runs"], lineage["gone"], lineage["parent_run"]) == ([RUN_ID], [], None)
        assert lineage["events"] == artifacts.manifest["lineage"]["history"]


def test_a_lineage_goes_back_through_the_parents(output):
    ids = [RUN_ID, "2026-01-11T04-02-11", "2026-01-12T04-02-11"]
    for parent, run_id in itertools.pairwise(ids):
        copied(output, run_id, parent_run=parent)
    with client_of(output) as client:
        assert client.get(f"/runs/{ids[2]}/lineage").json()["runs"] == ids
        shutil.rmtree(output / ids[1])
        found = client.get(f"/runs/{ids[2]}/lineage").json()
        assert found["runs"][-2:] == ids[1:] and found["gone"] == [ids[1]]


@pytest.mark.parametrize("name", ["clusters", "embedding"])
@pytest.mark.parametrize("damage", ["short", "changed", "missing", "link"])
def test_a_damaged_file_is_one_line_and_the_rest_is_served(output, name, damage):
    path = output / RUN_ID / f"{name}.parquet"
    service = service_of(output)
    content = path.read_bytes()
    path.unlink()
    if damage == "short":
        path.write_bytes(content[:-1])
    elif damage == "changed":
        path.write_bytes(content[:-9] + b"!" + content[-8:])
    elif damage == "link":
        path.symlink_to("/dev/zero")
    with serving(app_of(service)) as server:
        base = f"{server.url}/discovery/runs/{RUN_ID}"
        assert name in error_of(httpx.get(base + "/map"), 410)
        assert (httpx.get(base + "/clusters").status_code == 410) == (name == "clusters")
        assert httpx.get(base).status_code == 200


def test_a_served_run_that_was_deleted_is_gone(output):
    with client_of(output) as client:
        shutil.rmtree(output / RUN_ID)
        assert error_of(client.get("/runs/latest"), 410)
        assert error_of(client.get(f"/runs/{RUN_ID}/map"), 404)
        assert client.get("/status").json()["serving"]["run_id"] == RUN_ID


# maps


def columns_of(content: bytes, about: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(content, column["type"], about["rows"], column["offset"])
        for name, column in about["columns"].items()
    }


def test_the_map_has_every_row_with_its_cluster_and_zone(still, made):
    table = open_artifacts(made).table("embedding")
    about = still.get("/runs/latest/map/meta").json()
    answer = still.get("/runs/latest/map")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (answer.headers["x-run-id"], answer.headers["etag"]) == (RUN_ID, about["etag"])
    assert len(answer.content) == about["bytes"] == 11 * about["rows"] == 11 * table.num_rows
    found = columns_of(answer.content, about)
    for axis in ("x", "y"):
        assert (found[axis] == table.column(axis).to_numpy()).all()
        assert about[f"{axis}_range"] == [found[axis].min(), found[axis].max()]
    ids = [*about["cluster_ids"], *[None] * (about["noise"] - len(about["cluster_ids"])), -1]
    assert [ids[index] for index in found["cluster"]] == table.column("cluster_id").to_pylist()
    assert [about["zones"][index] for index in found["zone"]] == table.column("zone").to_pylist()
    assert about["noise"] == 65_535 and about["zones"] == list(ZONES)


def test_columns_are_chosen_by_name(still):
    whole = still.get("/runs/latest/map")
    rows = len(whole.content) // 11
    parts = {"x": slice(0, 4), "y": slice(4, 8), "cluster": slice(8, 10), "zone": slice(10, 11)}
    tags = {whole.headers["etag"]}
    for asked in ("x", "zone", "y,x", "zone,cluster", " x , y ,cluster,zone"):
        answer = still.get("/runs/latest/map", params={"columns": asked})
        names = [name for name in parts if name in asked.replace(" ", "").split(",")]
        expected = [whole.content[rows * parts[n].start : rows * parts[n].stop] for n in names]
        assert answer.content == b"".join(expected)
        tags.add(answer.headers["etag"])
    assert len(tags) == 5  # one for each choice, and the whole map twice
    for wrong in ("z", "", "x,", "x" * 100):
        message = error_of(still.get("/runs/latest/map", params={"columns": wrong}), 400)
        assert "use some of x, y, cluster, zone" in message


def test_a_map_that_the_client_has_is_not_sent_again(still):
    first = still.get(f"/runs/{RUN_ID}/map")
    tag = first.headers["etag"]
    assert "immutable" in first.headers["cache-control"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = still.get(f"/runs/{RUN_ID}/map", headers={"If-None-Match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == tag
    for other in ('"other"', "", tag[:-2]):
        answer = still.get(f"/runs/{RUN_ID}/map", headers={"If-None-Match": other})
        assert answer.status_code == 200
    assert still.get("/runs/latest/map").headers["cache-control"] == "no-cache"


def test_ranges_of_a_map_are_its_bytes(still):
    whole = still.get("/runs/latest/map")
    size, tag = len(whole.content), whole.headers["etag"]
    for asked, expected in {
        "bytes=0-0": (0, 1), "bytes=100-199": (100, 200), "bytes=-7": (size - 7, size),
        f"bytes={size - 1}-": (size - 1, size), f"bytes=5-{10 * size}": (5, size),
        f"bytes=-{10 * size}": (0, size),
    }.items():  # fmt: skip
        for more in ({}, {"If-Range": tag}):
            answer = still.get("/runs/latest/map", headers={"Range": asked, **more})
            start, end = expected
            assert answer.status_code == 206
            assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
            assert answer.content == whole.content[start:end]
    for asked in ("bytes=a-b", "rows=0-1", "bytes=5-4", "bytes=-", "bytes=0-1,4-5", "x"):
        answer = still.get("/runs/latest/map", headers={"Range": asked})
        assert (answer.status_code, answer.content) == (200, whole.content)
    answer = still.get("/runs/latest/map", headers={"Range": "bytes=0-1", "If-Range": '"old"'})
    assert (answer.status_code, answer.content) == (200, whole.content)
    for asked in (f"bytes={size}-", "bytes=-0"):
        answer = still.get("/runs/latest/map", headers={"Range": asked})
        assert error_of(answer, 416) and answer.headers["content-range"] == f"bytes */{size}"


@given(st.integers(0, 3_000), st.data())
def test_parts_of_a_map_are_slices_of_its_columns(rows, data):
    names = data.draw(st.lists(st.sampled_from([*maps.TYPES]), unique=True, min_size=1))
    content = np.random.default_rng(rows).bytes(11 * rows)
    offsets = {"x": 0, "y": 4 * rows, "cluster": 8 * rows, "zone": 10 * rows}
    found = Map(rows, content, {"columns": {n: {"offset": at} for n, at in offsets.items()}})
    whole = b"".join(
        content[offsets[n] : offsets[n] + rows * np.dtype(maps.TYPES[n]).itemsize] for n in names
    )
    assert found.size(names) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    assert b"".join(found.part(names, start, end)) == whole[start:end]


@given(st.text("bytes=-0123456789, ", max_size=30), st.integers(0, 10_000))
def test_any_range_header_is_a_range_or_everything_or_refused(header, size):
    try:
        found = byte_range(header, size)
    except ValueError:
        return
    assert found is None or 0 <= found[0] < found[1] <= size


def many_rows(output: Path, run_id: str, rows: int) -> None:
    """A run whose map has so many rows."""

    def repeated(table: pa.Table) -> pa.Table:
        return pa.concat_tables([table] * (rows // table.num_rows + 1)).slice(0, rows)

    published_with(copied(output, run_id), "embedding", repeated)


def test_a_large_map_is_streamed_and_kept_for_the_next_one(output):
    many_rows(output, "2026-01-12T00-00-00", 1_000_000)
    with client_of(output) as client:
        path = "/runs/2026-01-12T00-00-00/map"
        with client.stream("GET", path) as answer:
            sizes = [len(chunk) for chunk in answer.iter_raw()]
        assert sum(sizes) == 11_000_000 and max(sizes) <= 1 << 20
        (output / "2026-01-12T00-00-00" / "embedding.parquet").unlink()
        assert len(client.get(path).content) == 11_000_000  # not made again
        assert client.get(path, headers={"Range": "bytes=10999999-"}).content in b"\0\1\2\3\4"


def test_maps_that_were_not_asked_for_lately_are_given_up(output):
    ids = ["2026-01-12T00-00-00", "2026-01-13T00-00-00", "2026-01-14T00-00-00"]
    for run_id in ids:
        copied(output, run_id)
    kept = Maps(most_bytes=2 * 11 * 1_500)
    opened = [open_artifacts(output / run_id) for run_id in ids]
    first, second, _ = map(kept.get, opened)
    assert kept.kept_bytes == 2 * 11 * 1_500
    assert kept.get(opened[1]) is second
    assert kept.get(opened[0]) is not first and len(first.content) == 11 * 1_500


def published_with(folder: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change a table of a run, as if it had been published so."""
    path = folder / f"{name}.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (manifest["files"][path.name],) = facts_of([path])
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clusters", lambda table: table.slice(0, 1)),
        ("clusters", lambda table: table.slice(0, 0)),
        ("clusters", lambda table: table.drop_columns(["cluster_id"])),
        ("embedding", lambda table: table.drop_columns(["x"])),
        ("embedding", lambda table: table.set_column(0, "zone", pa.array(["x"] * len(table)))),
        ("embedding", lambda table: table.set_column(5, "x", pa.array(["x"] * len(table)))),
    ],
)
def test_a_run_whose_tables_do_not_fit_together_has_no_map(output, name, change):
    published_with(output / RUN_ID, name, change)
    with pytest.raises(ArtifactError, match="run attn discover again"):
        maps.make_map(open_artifacts(output))


def test_a_run_without_rows_has_an_empty_map(output):
    published_with(output / RUN_ID, "embedding", lambda table: table.slice(0, 0))
    with client_of(output) as client:
        assert client.get("/runs/latest/map").content == b""
        assert client.get("/runs/latest/map/meta").json()["x_range"] is None
        assert error_of(client.get("/runs/latest/map", headers={"Range": "bytes=0-"}), 416)


def test_a_full_disk_is_one_line(output, monkeypatch):
    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(maps.tempfile, "TemporaryFile", full)
    with pytest.raises(WriteError, match="No space left"):
        maps.make_map(open_artifacts(output))
    monkeypatch.setattr(runs, "MAPS", Maps())
    with client_of(output) as client:
        assert "No space left" in error_of(client.get(f"/runs/{RUN_ID}/map"), 507)


# the running job


class Job:
    """A job that holds the lock of a folder and writes to its log, as `attn discover` does."""

    def __init__(self, output: Path, run_id: str) -> None:
        self.folder = output / run_id
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run_id = run_id
        self._lock = output_lock(output)
        self._log = (self.folder / "progress.jsonl").open("ab", buffering=0)

    def __enter__(self) -> Job:
        self._lock.__enter__()(self.run_id, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__(None, None, None)
        self._log.close()

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        line = {"event": kind, "run_id": self.run_id, "at": "2026-01-10T04:02:11.000+00:00"}
        line |= fields
        self.write_raw(json.dumps(line).encode() + b"\n")
        return line

    def write_raw(self, content: bytes) -> None:
        self._log.write(content)


def next_events(events: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    found = []
    while len(found) < count:
        if "event" in (one := next(events)):
            found.append(one)
    return found


def test_events_are_followed_from_the_start_through_torn_lines_to_the_next_run(tmp_path):
    app = app_of(service_of(tmp_path))
    with serving(app) as server, EventReader(server, "/discovery/live") as reader:
        events = reader.events()
        with Job(tmp_path, RUN_ID) as job:
            sent = [
                job.write("run_started", resumed=False),
                job.write("stage_started", stage="pca"),
            ]
            found = next_events(events, 2)
            assert [one["data"] for one in found] == sent
            assert [one["event"] for one in found] == ["run_started", "stage_started"]
            whole = json.dumps({"event": "progress", "done": 1}).encode()
            job.write_raw(whole[:9])
            time.sleep(0.6)
            job.write_raw(whole[9:] + b"\n" + b"\xff not an event\n")
            assert next_events(events, 1)[0]["data"] == {"event": "progress", "done": 1}
            job.write("run_finished", clusters=3)
        assert next_events(events, 1)[0]["event"] == "run_finished"
        with Job(tmp_path, "2026-01-11T04-02-11") as job:
            job.write("run_started", resumed=False)
            (one,) = next_events(events, 1)
            assert one["data"]["run_id"] == one["id"].rpartition(":")[0] == "2026-01-11T04-02-11"


def test_a_client_that_comes_again_gets_only_what_it_missed(tmp_path):
    app = app_of(service_of(tmp_path))
    with serving(app) as server, Job(tmp_path, RUN_ID) as job:
        for number in range(5):
            job.write("progress", done=number)
        with EventReader(server, "/discovery/live") as reader:
            found = next_events(reader.events(), 5)
        assert [one["data"]["done"] for one in found] == [0, 1, 2, 3, 4]
        for index, one in enumerate(found[:-1]):
            with EventReader(
                server, "/discovery/live", f"Last-Event-ID: {one['id']}\r\n"
            ) as reader:
                assert next_events(reader.events(), 1) == [found[index + 1]]
        for wrong in (
            "x",
            f"{RUN_ID}:3",
            f"{RUN_ID}:99999",
            "2020-01-01T00-00-00:5",
            f"../{RUN_ID}:0",
        ):
            with EventReader(server, "/discovery/live", f"Last-Event-ID: {wrong}\r\n") as reader:
                assert next_events(reader.events(), 1) == [found[0]]


def test_a_client_of_an_ended_run_gets_its_end_and_then_the_next_run(tmp_path):
    with Job(tmp_path, RUN_ID) as job:
        job.write("run_started", resumed=False)
        follower = Follower(tmp_path)
        (first,) = follower.read()
        last_id = first.split(b"\n")[0].removeprefix(b"id: ").decode()
        job.write("run_finished", clusters=1)
    with Job(tmp_path, "2026-01-11T04-02-11") as job:
        job.write("run_started", resumed=False)
        again = Follower(tmp_path, last_id)
        assert [b"run_finished" in one for one in again.read()] == [True]
        assert [b"2026-01-11" in one for one in again.read()] == [True]
        assert again.read() == []


def test_a_log_that_is_no_log_is_passed_over(tmp_path):
    with Job(tmp_path, RUN_ID) as job:
        job.write_raw(b"x" * (jobs.READ_BYTES + jobs.MOST_LINE_BYTES + 5) + b"\n")
        wanted = job.write("progress", done=1)
        follower = Follower(tmp_path)
        found: list[bytes] = []
        for _ in range(10):
            found += follower.read()
        assert len(found) == 1 and json.dumps(wanted).encode() in found[0]


def test_the_end_of_the_service_ends_the_events_of_a_job(tmp_path):
    service = service_of(tmp_path)
    with serving(app_of(service)) as server, EventReader(server, "/discovery/live") as reader:
        threading.Timer(0.3, service.broadcast.close).start()
        began = time.monotonic()
        assert not [one for one in reader.events() if "event" in one]
        assert time.monotonic() - began < 5


def test_the_status_shows_where_a_job_is(tmp_path):
    with client_of(tmp_path) as client, Job(tmp_path, RUN_ID) as job:
        found = client.get("/status").json()["running"]
        assert (found["run_id"], found["pid"], found["stage"]) == (RUN_ID, os.getpid(), None)
        job.write("run_started", resumed=False, model="m", rows=7)
        job.write("stage_started", stage="pca", number=3, of=10)
        job.write("progress", stage="pca", done=2, total=9)
        job.write_raw(b'{"event": "progr')
        found = client.get("/status").json()["running"]
        assert found.items() >= {"stage": "pca", "number": 3, "of": 10, "done": 2, "total": 9,
                                 "model": "m", "rows": 7, "paused": False,
                                 "commands": ["stop"]}.items()  # fmt: skip
        job.write_raw(b"\n")
        job.write("run_paused")
        assert client.get("/status").json()["running"]["paused"]
        job.write("run_resumed")
        assert not client.get("/status").json()["running"]["paused"]


def test_deleting_old_runs_is_not_a_run(tmp_path):
    with client_of(tmp_path) as client, output_lock(tmp_path):
        assert client.get("/status").json()["running"] is None


# commands


def wait_for(what: Callable[[], Any], seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def test_a_job_with_a_websocket_is_paused_resumed_and_stopped(store, tmp_path):
    output = tmp_path / "runs"
    job = AttnProcess("discover", "--db", store, "--output", output, *DISCOVER,
                      "--websocket-port", "0")  # fmt: skip
    try:
        with client_of(output) as client:

            def running() -> dict[str, Any]:
                return client.get("/status").json()["running"] or {}

            def ask(command: str) -> httpx.Response:
                return client.post("/control", json={"command": command})

            wait_for(running)
            assert running()["commands"] == ["pause", "resume", "stop"]
            assert "not paused" in error_of(ask("resume"), 409)
            sent = {"run_id": RUN_ID, "command": "pause", "via": "websocket"}
            assert ask("pause").json() == sent
            wait_for(lambda: running()["paused"])
            assert ask("resume").json() == {**sent, "command": "resume"}
            wait_for(lambda: not running()["paused"])
            assert ask("stop").json() == {**sent, "command": "stop"}
            wait_for(lambda: not running())
            assert "no discovery job" in error_of(ask("stop"), 409)
    except BaseException:
        job.end()
        raise
    done = job.finish(120)
    assert done.returncode == 4, done.stderr
    assert f"--resume {RUN_ID}" in done.stderr


def test_a_job_without_a_websocket_is_stopped_at_a_checkpoint_by_a_signal(store, tmp_path):
    output = tmp_path / "runs"
    job = AttnProcess("discover", "--db", store, "--output", output, *DISCOVER)
    try:
        with client_of(output) as client:
            wait_for(lambda: client.get("/status").json()["running"])
            for command in ("pause", "resume"):
                answer = client.post("/control", json={"command": command})
                assert "--websocket-port" in error_of(answer, 409)
            answer = client.post("/control", json={"command": "stop"})
            assert answer.json() == {"run_id": RUN_ID, "command": "stop", "via": "signal"}
    except BaseException:
        job.end()
        raise
    done = job.finish(120)
    assert done.returncode == 143 and f"--resume {RUN_ID}" in done.stderr


def test_a_process_that_only_has_the_number_of_a_job_is_not_signalled(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with output_lock(tmp_path) as describe, client_of(tmp_path) as client:
            describe(RUN_ID, None)
            (tmp_path / ".lock").write_text(json.dumps({"pid": stranger.pid, "run_id": RUN_ID}))
            message = error_of(client.post("/control", json={"command": "stop"}), 409)
            assert "not computed by a process" in message
        for pid in (0, 1, -1, 2**31, None):
            with pytest.raises(CommandRefused):
                jobs.terminate(tmp_path, jobs.Holder(pid, RUN_ID))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"command": "ping"}', b'{"command": "kill"}', b'{"command": 1}']
)
def test_a_command_that_is_none_is_refused(still, body):
    answer = still.post("/control", content=body, headers={"Content-Type": "application/json"})
    error_of(answer, 422)


def test_a_job_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "ANSWER_S", 0.5)
    path = tmp_path / "client.json"
    with socket.create_server(("127.0.0.1", 0)) as silent, Job(tmp_path, RUN_ID) as job:
        for url in (f"ws://127.0.0.1:{silent.getsockname()[1]}", "ws://127.0.0.1:1"):
            path.write_text(json.dumps({"url": url, "token": "t"}))
            (tmp_path / ".lock").write_text(
                json.dumps({"pid": os.getpid(), "run_id": job.run_id, "client_file": str(path)})
            )
            with client_of(tmp_path) as client:
                message = error_of(client.post("/control", json={"command": "pause"}), 409)
                assert "did not answer" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"url": "ws://127.0.0.1:1"}', b'{"url": 1, "token": "t"}',
     b'{"url": "ws://evil.example:1", "token": "t"}', b'{"url": "http://127.0.0.1", "token": "t"}',
     b'{"url": "ws://[::1", "token": "t"}', b"\xff"],
)  # fmt: skip
def test_a_client_file_that_is_not_of_a_job_here_is_refused(tmp_path, content):
    path = tmp_path / "client.json"
    path.write_bytes(content)
    with pytest.raises(CommandRefused, match=r"client\.json"):
        read_client_file(path)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "link", tmp_path / "pipe", tmp_path / "missing", tmp_path):
        with pytest.raises(CommandRefused):
            read_client_file(other)


def test_the_routes_are_described_with_their_answers(made):
    described = app_of(service_of(made)).openapi()
    paths = described["paths"]
    assert len(paths) >= 9
    for path, methods in paths.items():
        for method, route in methods.items():
            assert route["summary"], path
            answer = route["responses"]["200"]
            if (
                "application/json" in answer.get("content", {})
                and path != "/discovery/runs/{run_id}"
            ):
                assert answer["content"]["application/json"]["schema"], (path, method)
    served = paths["/discovery/runs/{run_id}/map"]["get"]["responses"]
    assert {"200", "206", "304", "404", "410", "416"} <= set(served)


def test_answers_are_as_they_are_described(still, made, tmp_path):
    described = {
        "/status": routes.Status, "/runs": runs.RunPage, "/runs/latest/clusters": runs.Clusters,
        "/runs/latest/lineage": runs.Lineage, "/runs/latest/map/meta": runs.AboutMap,
    }  # fmt: skip
    for path, model in described.items():
        answer = still.get(path).json()
        model.model_validate(answer, strict=True)
        assert set(answer) == set(model.model_fields)
    with client_of(tmp_path) as client, Job(tmp_path, RUN_ID) as job:
        for found in (client.get("/status").json()["running"] for _ in range(2)):
            routes.Running.model_validate(found, strict=True)
            assert set(found) == set(routes.Running.model_fields)
            job.write("run_started", resumed=False, model="m", rows=7)


def test_the_routes_load_no_library_of_the_job(made):
    code = (
        "import sys; import sidecar.http.discovery.routes, sidecar.http.discovery.runs; "
        "import sidecar.http.live, sidecar.http.limits; "
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('sklearn', 'umap', 'hdbscan', 'dask', 'scipy', 'numba', 'rich', 'torch', 'psutil')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
