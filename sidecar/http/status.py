"""Routes about the service itself: health, readiness, figures, flush and reload."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from discovery.artifacts.classifier import ANSWER_VERSION
from sidecar.service import Service

from .errors import Json
from .reads import FILES

router = APIRouter()
# How long a flush may take, in seconds.
FLUSH_S = 30.0
# Between two looks at whether it is done.
POLL_S = 0.01


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/health", summary="Whether the process answers")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready", summary="Whether artifacts are loaded and the store takes rows")
async def ready(request: Request) -> JSONResponse:
    """503 with the problems if not."""
    found = await FILES(service_of(request).readiness)
    return JSONResponse(found, 200 if found["ready"] else 503)


@router.get("/version", summary="Versions of the service and of its formats")
async def version(request: Request) -> dict[str, Any]:
    return service_of(request).versions()


@router.get("/stats", summary="What came in, what became of it, and how it compares with the run")
async def stats(request: Request) -> dict[str, Any]:
    return await run_in_threadpool(service_of(request).stats)


@router.post("/storage/flush", summary="Write what is queued now")
async def flush(request: Request) -> JSONResponse:
    """200 once all rows that were queued are in the store, 503 if they are not."""
    intake = service_of(request).intake
    began = time.perf_counter()
    last = intake.queue.hurry()
    # Not in a thread: one that waits could not be stopped, and would hold up the end.
    with suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(FLUSH_S):
            while last and not last.done:
                await asyncio.sleep(POLL_S)
    done = last is None or last.done
    answer = {"flushed": done, "seconds": round(time.perf_counter() - began, 3)}
    if done:
        return JSONResponse(answer)
    why = intake.writer.problem or f"not written after {answer['seconds']:g} s"
    return JSONResponse({**answer, "error": why}, 503, {"Retry-After": "1"})


@router.post("/discovery/reload", summary="Load the latest run now")
async def reload(request: Request) -> JSONResponse:
    """200 if the latest run is served, 409 with the reason if it was refused."""
    serving = service_of(request).serving
    outcome = await FILES(serving.reload)
    run = serving.current
    answer: dict[str, Any] = {"outcome": outcome, "run_id": run.run_id if run else None}
    if serving.refused:
        answer["error"] = serving.refused.reason
    return JSONResponse(answer, 409 if serving.refused else 200)


@router.get("/metrics", summary="Metrics for Prometheus")
async def metrics(request: Request) -> Response:
    content, kind = await run_in_threadpool(
        service_of(request).metrics.render, request.headers.get("accept", "")
    )
    return Response(content, media_type=kind)


@router.get("/centroids", summary="Live clusters, and those of the served run")
async def centroids(request: Request) -> Response:
    """`mode`: "batch" where the recent rows are clustered again at intervals, "online" where each
    batch updates the clusters. `status`, as in /stats, has another `mode`, of the same two ways:
    "recluster" and "online"."""
    service = service_of(request)
    while True:
        run = service.serving.current
        live = await run_in_threadpool(service.live_clusters.clusters)
        if run is service.serving.current:  # else the nearest clusters may be another run's
            break
    published = run and [
        {
            **{name: one[name] for name in ("cluster_id", "label", "zone", "size", "share",
                                            "centroid", "traits")},
            "sampling_hint": run.sampling_hints[one["cluster_id"]],
        }
        for one in run.clusters
    ]  # fmt: skip
    return Json({
        "mode": "online" if service.options.online else "batch",
        "clusters": live,
        "status": service.live_clusters.status(),
        "run_id": run.run_id if run else None,
        "run_clusters": published or [],
        "schema_version": ANSWER_VERSION,
    })  # fmt: skip


@router.post("/recluster", summary="Cluster the recent rows now")
async def recluster(request: Request) -> Response:
    """202 if a round began, 409 with the reason if not."""
    answer = service_of(request).recluster()
    if answer["started"]:
        return JSONResponse(answer, 202)
    return JSONResponse({**answer, "error": answer["reason"]}, 409)
