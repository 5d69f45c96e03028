"""The client against a real sidecar: every method, as a user would call it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest
from processed_batches import classifier, golden, sample, with_column
from running import Sidecar, running, until
from served_runs import publish, run_id_of

from pipeline.record import vectors
from sidecar import client as api
from sidecar.client.answers import NO_CLUSTER

RUN = run_id_of(0)
QUICK = api.Retries(deadline_s=20.0)
KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    runs = tmp_path_factory.mktemp("client-runs")
    publish(runs)
    with running(tmp_path_factory.mktemp("client"), runs=runs) as found:
        yield found


@pytest.fixture
def client(service: Sidecar) -> Iterator[api.SidecarClient]:
    with api.SidecarClient(service.url, retries=QUICK) as found:
        yield found


def records(count: int, prefix: str) -> list[dict]:
    batch = sample().slice(0, count)
    rows = with_column(batch, "request_id", [f"{prefix}{i // 10}" for i in range(count)])
    rows = with_column(rows, "position", pa.array(range(count), pa.int32()))
    rows = with_column(rows, "session_id", [f"{prefix} session"] * count)
    found = rows.to_pylist()
    return [{**row, "captured_at": row["captured_at"].isoformat()} for row in found]


def test_the_service_is_described(client: api.SidecarClient) -> None:
    assert client.health().status == "ok"
    ready = client.ready()
    assert ready.ready and ready.run_id == RUN and ready.drift == "too few rows"
    assert client.version()["attn"]
    assert client.stats()["run_id"] == RUN
    assert client.drift()["state"] == "too few rows"
    status = client.discovery_status()
    assert status["serving"]["run_id"] == RUN


def test_answers_are_those_of_the_run(client: api.SidecarClient) -> None:
    batch = sample().slice(0, 50)
    rows = vectors(batch)
    wanted = classifier().classify(rows)
    one = client.classify_one(rows[0].tolist())
    assert one.run_id == RUN and one.manifold.cluster_id == wanted.cluster_id[0]
    for form in (rows.tolist(), [{"vector": row} for row in rows.tolist()],
                 pa.Table.from_batches([batch])):  # fmt: skip
        found = client.classify(form)
        assert [one.manifold.cluster_id for one in found.results] == wanted.cluster_id.tolist()
    mixed = client.classify([rows[0].tolist(), [0.0] * 20])
    assert mixed.results[0].manifold and mixed.results[1].error
    with pytest.raises(api.RefusedError) as refused:
        client.classify_one([1.0])
    assert refused.value.status == 400


def test_rows_are_stored_once_however_often_they_are_sent(
    client: api.SidecarClient, service: Sidecar
) -> None:
    rows = records(40, "stored")
    assert client.add(rows[0], wait=True).committed == 1
    for _ in range(2):
        assert client.add_many(rows, wait=True).committed == 40
    assert client.add_many(sample().slice(100, 60), wait=True).committed == 60
    assert client.add_many(rows).queued == 40
    client.flush()
    counts = client.stats()["fingerprints"]
    assert (counts["stored"], counts["duplicate"]) == (100, 81)
    request = client.request("stored0", limit=5)
    assert request["rows"] == 10 and len(request["records"]) == 5
    assert client.request("stored0", vectors=True)["records"][0]["vector"]
    assert client.sessions(limit=1)["sessions"]
    assert client.session("stored session")
    for call in (lambda: client.request("no such"), lambda: client.session("no/such")):
        with pytest.raises(api.NotFoundError):
            call()


def test_runs_and_their_maps_can_be_read(client: api.SidecarClient) -> None:
    assert [run["run_id"] for run in client.runs()["runs"]] == [RUN]
    assert client.run(RUN)["run_id"] == RUN
    clusters = client.run_clusters(RUN)["clusters"]
    assert client.run_lineage(RUN)["run_id"] == RUN
    found, about = client.map(RUN), client.map_about(RUN)
    table = golden().table("embedding")
    assert np.array_equal(found.x, table.column("x").to_numpy())
    ids = np.array([*about["cluster_ids"], -1])
    index = np.where(found.cluster == NO_CLUSTER, len(ids) - 1, found.cluster)
    assert np.array_equal(ids[index], table.column("cluster_id").to_numpy())
    zones = [about["zones"][zone] for zone in found.zone]
    assert zones == table.column("zone").to_pylist()
    assert len(clusters) == len(about["cluster_ids"])
    with pytest.raises(api.NotFoundError, match="no run"):
        client.run("2020-01-01T00-00-00")


def test_commands_are_answered_or_refused_in_a_line(client: api.SidecarClient) -> None:
    assert client.reload()["run_id"] == RUN
    assert client.centroids()["run_id"] == RUN
    for call in (lambda: client.control("pause"), client.recluster):
        try:
            call()
        except api.RefusedError as refused:
            assert refused.status == 409 and "\n" not in str(refused)


def test_live_events_come_while_rows_do(client: api.SidecarClient) -> None:
    stop = threading.Event()

    def feed() -> None:
        with api.SidecarClient(client.url) as feeder:
            number = 0
            while not stop.is_set():
                feeder.add_many(records(200, f"live{number} "))
                number += 1
                time.sleep(0.1)

    feeder = threading.Thread(target=feed)
    feeder.start()
    kinds = set()
    try:
        ends = time.monotonic() + 30
        for event in client.live():
            kinds.add(event.event)
            if len(kinds) > 1 or time.monotonic() > ends:
                break
    finally:
        stop.set()
        feeder.join()
    assert len(kinds) > 1, kinds


def test_the_metrics_say_what_the_client_did(service: Sidecar, client: api.SidecarClient) -> None:
    client.classify_one(vectors(sample().slice(0, 1))[0].tolist())
    text = httpx.get(f"{service.url}/metrics").text
    assert 'attn_sidecar_http_requests_total{method="POST",route="/classify",status="200"}' in text
    assert f'run_id="{RUN}"' in text
    assert "attn_sidecar_nightly_last_success_timestamp_seconds" in text


def test_asyncio_asks_for_several_things_at_once(service: Sidecar) -> None:
    async def ask() -> list:
        async with api.AsyncSidecarClient(service.url, retries=QUICK) as client:
            rows = vectors(sample().slice(0, 20)).tolist()
            return await asyncio.gather(*(client.classify_one(row) for row in rows))

    found = asyncio.run(ask())
    wanted = classifier().classify(vectors(sample().slice(0, 20))).cluster_id.tolist()
    assert [one.manifold.cluster_id for one in found] == wanted


def test_a_key_is_needed_and_sent(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    with running(tmp_path, "--api-key-file", tmp_path / "keys") as service:
        with api.SidecarClient(service.url, retries=QUICK) as client:
            assert client.health().status == "ok"
            with pytest.raises(api.UnauthorizedError):
                client.stats()
        with api.SidecarClient(service.url, key=KEY, retries=QUICK) as client:
            assert not client.ready().ready
            assert "run attn discover" in client.ready().problems[0]


def test_keys_rotate_without_a_restart(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    with running(tmp_path, "--api-key-file", keys) as service:

        def status(key: str) -> int:
            return service.client.get("/version", headers={"X-API-Key": key}).status_code

        another = KEY[::-1] + "-another"
        assert (status(KEY), status(another)) == (200, 401)
        keys.write_text(another)
        until(lambda: status(another) == 200, "the new key is not taken")
        assert status(KEY) == 401
        keys.write_text("")
        until(lambda: "the keys are those of before" in service.said, "nothing was said")
        assert status(another) == 200


def test_a_sidecar_that_has_ended_is_said_to_be_away(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        url = service.url
    short = api.Retries(deadline_s=0.3, first_s=0.05)
    away = pytest.raises(api.UnreachableError, match="is the sidecar running there")
    with api.SidecarClient(url, retries=short) as client, away:
        client.health()
