"""A new run is served between two requests; one that cannot be served is refused, and why."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from running import PATIENCE_S, Sidecar, running, until
from served_runs import (
    classifier_of,
    publish,
    publish_layered,
    publish_without_clusters,
    run_id_of,
    vectors_of,
)

from discovery.runs.folder import move_latest
from sidecar.serving import ServedRun, Serving

RECORDS = [{"vector": vector} for vector in vectors_of(64).tolist()]


def served(sidecar: Sidecar) -> str | None:
    return sidecar.get("/ready")["run_id"]


def test_no_request_fails_while_runs_change_and_each_is_answered_by_the_run_it_names(tmp_path):
    """The runs differ in their labels and zones, so that an answer of two runs would show."""
    rounds = 4
    publish(tmp_path)
    wanted = {}
    with running(tmp_path, runs=tmp_path) as sidecar:
        stop, seen, failures = threading.Event(), [], []

        def hammer(batch: bool) -> None:
            with httpx.Client(base_url=sidecar.url, timeout=PATIENCE_S) as client:
                while not stop.is_set():
                    body = {"records": RECORDS} if batch else RECORDS[0]
                    found = client.post("/classify", json=body)
                    if found.status_code != 200:
                        failures.append(found.text)
                        return
                    answer = found.json()
                    results = answer["results"] if batch else [{"manifold": answer["manifold"]}]
                    seen.append((answer["run_id"], results))

        threads = [threading.Thread(target=hammer, args=(batch,)) for batch in (True, False)]
        for thread in threads:
            thread.start()
        for number in range(1, rounds):
            rules = {"entropy": 0.5 + 0.03 * number, "long_mass": 0.6 - 0.03 * number}
            publish(tmp_path, number, change=lambda m, r=rules: m["zone_rules"].update(r))
            answer = sidecar.client.post("/discovery/reload")
            assert answer.status_code == 200, answer.text
            # The thread that follows `latest` may have been first.
            assert answer.json()["outcome"] in ("loaded", "unchanged")
            assert answer.json()["run_id"] == run_id_of(number)
            least = len(seen) + 4
            until(lambda least=least: len(seen) >= least or failures, "no answers")
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sidecar.get("/stats")["reloads"]["loaded"] == rounds
    assert failures == []
    for number in range(rounds):
        answers = classifier_of(tmp_path, run_id_of(number)).answer(RECORDS)
        wanted[run_id_of(number)] = [{"manifold": answer["manifold"]} for answer in answers]
    assert len({json.dumps(answers) for answers in wanted.values()}) == rounds
    for run_id, results in seen:
        assert results == wanted[run_id][: len(results)]
    assert {run_id for run_id, _ in seen} >= {run_id_of(n) for n in range(1, rounds)}


def truncate(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size // 2)

    return change


def flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return change


def manifest(**values) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def loop(folder: Path) -> None:
    """`latest` that leads to itself."""
    shutil.rmtree(folder)
    folder.symlink_to(folder.name)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest yet": (lambda f: (f / "manifest.json").unlink(), "holds no finished run"),
    "half a manifest": (truncate("manifest.json"), "manifest.json is damaged"),
    "another version": (manifest(schema_version=2), "has schema version 2, this version reads 1"),
    "another layout": (manifest(layout="layered"), "is not of layout layered as its manifest says"),
    "no layout": (manifest(layout="none"), "manifest.json is damaged"),
    "another shape": (manifest(files=[]), "manifest.json is damaged"),
    "a truncated table": (truncate("landmarks.parquet"), "landmarks.parquet is damaged"),
    "a flipped bit": (flip("projection.parquet"), "projection.parquet is damaged"),
    "a flipped bit in a file that no answer needs": (
        flip("embedding.parquet"), "embedding.parquet is damaged (its hash differs)"
    ),
    "a missing table": (lambda f: (f / "clusters.parquet").unlink(), "clusters.parquet is missing"),
    "a folder in place of a file": (
        lambda f: ((f / "shares.parquet").unlink(), (f / "shares.parquet").mkdir()),
        "it is not a regular file",
    ),
    "an empty folder": (lambda f: (shutil.rmtree(f), f.mkdir()), "holds no finished run"),
    "no folder": (shutil.rmtree, "holds no finished run"),
    "a file in place of the folder": (
        lambda f: (shutil.rmtree(f), f.write_text("x")), "holds no finished run"
    ),
    "a link to itself": (loop, ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def following(tmp_path_factory):
    """A sidecar whose runs are changed, and its output folder."""
    folder = tmp_path_factory.mktemp("following")
    publish(folder / "runs")
    with running(folder, runs=folder / "runs") as sidecar:
        yield sidecar, folder / "runs"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_refused_and_the_old_one_serves_on(following, damage):
    sidecar, output = following
    number = 10 + 2 * list(DAMAGES).index(damage)
    change, reason = DAMAGES[damage]
    before = sidecar.client.post("/classify", json=RECORDS[0]).json()
    publish(output, number, latest=False)
    change(output / run_id_of(number))
    move_latest(output, run_id_of(number))
    answer = sidecar.client.post("/discovery/reload")
    assert answer.status_code == 409, answer.text
    assert answer.json()["outcome"] == "refused"
    assert answer.json()["run_id"] == before["run_id"]
    assert reason in answer.json()["error"] and "\n" not in answer.json()["error"]
    ready = sidecar.client.get("/ready")
    assert (ready.status_code, ready.json()["refused"]) == (200, answer.json()["error"])
    assert sidecar.client.post("/classify", json=RECORDS[0]).json() == before
    # The next good one is served as if nothing had been.
    publish(output, number + 1)
    assert sidecar.client.post("/discovery/reload").json()["run_id"] == run_id_of(number + 1)
    assert sidecar.get("/ready")["refused"] is None


def test_a_half_written_run_is_served_once_it_is_whole(following):
    """Copied by hand, file by file, under a `latest` that is there already."""
    sidecar, output = following
    number = 80
    publish(output, number, latest=False)
    folder, aside = output / run_id_of(number), output / "aside"
    folder.rename(aside)
    folder.mkdir()
    move_latest(output, run_id_of(number))
    assert sidecar.client.post("/discovery/reload").status_code == 409
    for name in sorted(path.name for path in aside.iterdir() if path.name != "manifest.json"):
        shutil.copy(aside / name, folder)
        assert sidecar.client.post("/discovery/reload").status_code == 409
    shutil.copy(aside / "manifest.json", folder)
    shutil.rmtree(aside)
    # It is noticed without a request: the manifest, which comes last, has changed.
    until(lambda: served(sidecar) == run_id_of(number), "the whole run is not served")


def test_the_run_that_is_served_may_be_deleted(following):
    sidecar, output = following
    publish(output, 90)
    assert sidecar.client.post("/discovery/reload").json()["run_id"] == run_id_of(90)
    before = sidecar.client.post("/classify", json={"records": RECORDS}).json()
    shutil.rmtree(output / run_id_of(90))
    answer = sidecar.client.post("/discovery/reload")
    assert answer.status_code == 409 and run_id_of(90) in answer.json()["error"]
    assert sidecar.client.post("/classify", json={"records": RECORDS}).json() == before
    (output / "latest").unlink()
    assert sidecar.client.post("/discovery/reload").status_code == 409
    assert sidecar.client.post("/classify", json={"records": RECORDS}).json() == before
    move_latest(output, publish(output, 91))
    until(lambda: served(sidecar) == run_id_of(91), "the new run is not served")


def test_a_run_that_was_published_anew_under_its_id_is_loaded_again(following):
    sidecar, output = following
    publish(output, 95)
    assert sidecar.client.post("/discovery/reload").json()["run_id"] == run_id_of(95)
    shutil.rmtree(output / run_id_of(95))
    publish_without_clusters(output, 95)
    assert sidecar.client.post("/discovery/reload").json()["run_id"] == run_id_of(95)
    answer = sidecar.client.post("/classify", json={"records": RECORDS}).json()
    assert {one["manifold"]["cluster_id"] for one in answer["results"]} == {-1}


def test_a_run_of_another_layout_takes_over(following):
    sidecar, output = following
    publish_layered(output, 97)
    assert sidecar.client.post("/discovery/reload").json()["run_id"] == run_id_of(97)
    answer = sidecar.client.post("/classify", json=RECORDS[0] | {"layout": "log16"})
    assert answer.status_code == 400 and "the run has layered" in answer.json()["error"]
    assert answer.json()["run_id"] == run_id_of(97)
    publish(output, 98)
    assert sidecar.client.post("/discovery/reload").json()["run_id"] == run_id_of(98)


def test_a_latest_that_appears_later_is_served(tmp_path):
    """Neither the output folder nor a run is there when the service starts."""
    with running(tmp_path) as sidecar:
        answer = sidecar.client.post("/discovery/reload")
        assert answer.status_code == 409 and answer.json()["run_id"] is None
        publish(tmp_path / "runs")
        until(lambda: served(sidecar) == run_id_of(0), "the first run is not served")
        assert sidecar.client.get("/ready").status_code == 200
        found = sidecar.client.post("/classify", json=RECORDS[0]).json()
        assert found == classifier_of(tmp_path / "runs", run_id_of(0)).answer([RECORDS[0]])[0]


def test_runs_that_change_without_pause_are_all_valid_answers(tmp_path):
    """`latest` is replaced many times while reloads look at it: none of them may break."""
    numbers = range(4)
    for number in numbers:
        publish(tmp_path, number)
    with running(tmp_path, runs=tmp_path) as sidecar:
        stop = threading.Event()

        def swap() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                if turn % 3:
                    move_latest(tmp_path, run_id_of(turn % 4))
                else:
                    (tmp_path / "latest").unlink()

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            for _ in range(40):
                answer = sidecar.client.post("/discovery/reload")
                assert answer.status_code in (200, 409), answer.text
                assert answer.json()["run_id"] in {run_id_of(n) for n in numbers}
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        publish(tmp_path, 5)
        until(lambda: served(sidecar) == run_id_of(5), "the last run is not served")


def test_a_part_of_the_service_that_fails_on_a_new_run_stops_no_reload(tmp_path, caplog):
    seen = []

    def on_change(run: ServedRun) -> None:
        seen.append(run.run_id)
        raise ValueError("a metric of it")

    serving = Serving(tmp_path, on_change)
    for number in range(2):
        publish(tmp_path, number)
        assert serving.reload() == "loaded"
    assert seen == [run_id_of(0), run_id_of(1)]
    assert serving.current is not None and serving.current.run_id == run_id_of(1)
    assert caplog.text.count("ValueError: a metric of it") == 2
