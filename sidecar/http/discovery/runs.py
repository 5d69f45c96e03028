"""The runs on disk: their manifests, clusters, lineage and maps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi import Path as InPath
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from capture_kernels.errors import ArtifactError, WriteError
from discovery.artifacts.read import Artifacts, open_artifacts, read_manifest
from discovery.artifacts.schema import MANIFEST, SCHEMA_VERSION, Manifest
from discovery.runs import folder as runs
from discovery.runs import history
from discovery.runs.state import CHECKPOINT, RunState, state_of

from ..errors import Json, documented, error_response
from ..reads import FILES
from .maps import Map, Maps, byte_range, chosen_columns, etag_of, is_unchanged

RUN_ERRORS = documented(
    (404, "there is no such run"),
    (409, "the run is not finished"),
    (410, "the run is damaged: its files are not those that were published"),
)
RunId = Annotated[
    str, InPath(description="Run id, or `latest`: the run that is served.", examples=["latest"])
]
router = APIRouter(prefix="/discovery/runs", tags=["discovery"])


class RunSummary(BaseModel):
    run_id: str
    state: str = Field(description="latest, published, failed its check, unfinished or unreadable")
    served: bool = Field(description="whether this service answers with it")
    reason: str | None = Field(None, description="why it is unreadable")
    parent_run: str | None = None
    model: str | None = None
    layout: str | None = None
    capture_id: str | None = None
    created_at: str | None = None
    rows: int | None = None
    clusters: int | None = None
    noise_share: float | None = None
    gate_passed: bool | None = None


class RunPage(BaseModel):
    runs: list[RunSummary]
    next: str | None = Field(description="`before` of the next page")


@router.get("", summary="All runs, newest first", response_model=RunPage)
async def list_runs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    before: Annotated[str | None, Query(description="Only runs before this one.")] = None,
) -> Response:
    if before is not None and not runs.RUN_ID.fullmatch(before):
        raise HTTPException(400, "before must be a run id, as `next` of the page before gives it")
    run = request.app.state.service.serving.current
    return Json(
        await FILES(
            _page,
            Path(request.app.state.service.options.discovery_dir),
            limit,
            before,
            run and run.run_id,
        )
    )


def _page(output: Path, limit: int, before: str | None, served: str | None) -> dict[str, Any]:
    found = runs.run_ids(output)[::-1]
    if before is not None:
        found = [one for one in found if runs.run_order(one) < runs.run_order(before)]
    page = found[:limit]
    more = len(found) > limit
    return {
        "runs": summaries(output, page, runs.latest_id(output), served),
        "next": page[-1] if more else None,
    }


def summaries(
    output: Path, run_ids: Sequence[str], latest: str | None, served: str | None
) -> list[dict[str, Any]]:
    found = []
    for run_id in run_ids:
        if (one := _summary(output / run_id)) is not None:
            state = "latest" if run_id == latest and one["state"] == "published" else one["state"]
            found.append({**one, "state": state, "served": run_id == served})
    return found


def _summary(folder: Path) -> dict[str, Any] | None:
    """What is known of a run; None if the folder is not one."""
    try:
        facts = (folder / MANIFEST).stat()
    except OSError:
        return _described(state_of(folder)) if folder.is_dir() else None
    if (folder / CHECKPOINT).exists():
        return _described(state_of(folder))
    return _finished_summary(folder, (facts.st_ino, facts.st_size, facts.st_mtime_ns))


@lru_cache(maxsize=1_024)
def _finished_summary(folder: Path, _facts: tuple[int, ...]) -> dict[str, Any] | None:
    """As `_summary`, read once for each manifest."""
    return _described(state_of(folder))


def _described(run: RunState | None) -> dict[str, Any] | None:
    if run is None:
        return None
    one: dict[str, Any] = {
        "run_id": run.run_id, "state": run.state, "reason": run.reason, "parent_run": run.parent,
    }  # fmt: skip
    if run.finished and (manifest := run.manifest):
        one |= {name: manifest.get(name) for name in ("model", "layout", "capture_id")}
        one["created_at"] = manifest.get("created_at")
        one |= {name: manifest["counts"][name] for name in ("rows", "clusters")}
        one["noise_share"] = manifest["quality"]["noise_share"]
        one["gate_passed"] = manifest["quality"]["gate"]["passed"]
    return one


def open_run(service: Any, run_id: str) -> Artifacts:
    """A finished run by its id; `latest` is the one that is served.

    Raises:
        HTTPException: there is none, it is not finished, or it is damaged.
    """
    output = Path(service.options.discovery_dir)
    folder = output / run_id
    if run_id == "latest":
        if (served := service.serving.current) is None:
            raise HTTPException(404, "no run is served: see /discovery/status")
        folder = served.folder
    elif not runs.RUN_ID.fullmatch(run_id) or not folder.is_dir():
        newest = ", ".join(runs.run_ids(output)[-3:]) or "none"
        raise HTTPException(404, f"there is no run {run_id[:40]!r}; the newest: {newest}")
    try:
        if run_id == "latest":
            return open_artifacts(folder)
        state = state_of(folder)
    except (ArtifactError, OSError) as error:
        raise HTTPException(410, str(error)) from None
    if state is None:
        raise HTTPException(404, f"{run_id} is not a run")
    if state.state == "unfinished":
        raise HTTPException(409, f"run {run_id} is not finished: see /discovery/status")
    if state.manifest is None:
        raise HTTPException(410, str(state.reason))
    return Artifacts(folder, state.manifest)


@router.get(
    "/{run_id}",
    summary="The manifest of a run",
    response_class=Json,
    responses={200: {"description": "docs/formats.md describes its fields."}, **RUN_ERRORS},
)
async def manifest(request: Request, run_id: RunId) -> Response:
    artifacts = await FILES(open_run, request.app.state.service, run_id)
    return Json(artifacts.manifest)


class Clusters(BaseModel):
    run_id: str
    schema_version: int
    clusters: list[dict[str, Any]] = Field(
        description="The rows of clusters.parquet (docs/formats.md), with traits, says, exemplars.",
        examples=[[{"cluster_id": 3, "label": "induction", "zone": "semantic_bridge",
                    "share": 0.12, "traits": ["retrieval_heavy"], "exemplars": []}]],
    )  # fmt: skip


@router.get(
    "/{run_id}/clusters",
    summary="The clusters of a run, with traits, words and exemplars",
    response_model=Clusters,
    responses=RUN_ERRORS,
)
async def clusters(request: Request, run_id: RunId) -> Response:
    return Json(await FILES(_clusters, request.app.state.service, run_id))


def _clusters(service: Any, run_id: str) -> dict[str, Any]:
    artifacts = open_run(service, run_id)
    try:
        rows = artifacts.table("clusters").to_pylist()
    except ArtifactError as error:
        raise HTTPException(410, str(error)) from None
    return {"run_id": artifacts.run_id, "schema_version": SCHEMA_VERSION, "clusters": rows}


class Lineage(BaseModel):
    run_id: str
    schema_version: int
    parent_run: str | None
    runs: list[str] = Field(description="it descends from, oldest first, with itself last")
    gone: list[str] = Field(description="those of them that were deleted or are damaged")
    events: list[dict[str, Any]] = Field(description="what became of clusters, oldest first")
    parent_clusters: list[dict[str, Any]]
    links: list[dict[str, Any]]
    says: str = Field(description="all of this in words")


@router.get(
    "/{run_id}/lineage",
    summary="Where a run's clusters come from",
    response_model=Lineage,
    responses=RUN_ERRORS,
)
async def lineage(request: Request, run_id: RunId) -> Response:
    return Json(await FILES(_lineage, request.app.state.service, run_id))


def _lineage(service: Any, run_id: str) -> dict[str, Any]:
    artifacts = open_run(service, run_id)
    output = Path(service.options.discovery_dir)
    known = {artifacts.run_id: artifacts.manifest}
    for other in runs.run_ids(output):
        if other not in known and (found := _manifest(output / other)) is not None:
            known[other] = found
    ancestry = history.ancestry(artifacts.run_id, known)
    own = artifacts.manifest.get("lineage") or {}
    return {
        "run_id": artifacts.run_id, "schema_version": SCHEMA_VERSION,
        "parent_run": artifacts.manifest["parent_run"], "runs": ancestry.runs,
        "gone": ancestry.gone, "events": ancestry.events,
        **{name: own.get(name, []) for name in ("parent_clusters", "links")},
        "says": own.get("says", ""),
    }  # fmt: skip


def _manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished run that can be read."""
    try:
        facts = (folder / MANIFEST).stat()
        return _read_manifest(folder, (facts.st_ino, facts.st_size, facts.st_mtime_ns))
    except (OSError, ArtifactError):
        return None


@lru_cache(maxsize=128)
def _read_manifest(folder: Path, _facts: tuple[int, ...]) -> Manifest | None:
    found = read_manifest(folder)
    # A copy of a run under another id is not a run.
    return found if found["run_id"] == folder.name else None


# the map


class Column(BaseModel):
    type: Literal["float32", "uint16", "uint8"]
    offset: int = Field(description="of its first byte")


class AboutMap(BaseModel):
    run_id: str
    version: int
    rows: int
    bytes: int
    etag: str
    columns: dict[str, Column]
    noise: int = Field(description="the value of `cluster` for rows that are in no cluster")
    cluster_ids: list[int] = Field(description="cluster id by the value of `cluster`")
    zones: list[str] = Field(description="zone by the value of `zone`")
    x_range: list[float] | None
    y_range: list[float] | None


MAPS = Maps()


def _map(artifacts: Artifacts) -> Map:
    try:
        return MAPS.get(artifacts)
    except ArtifactError as error:
        raise HTTPException(410, str(error)) from None
    except WriteError as error:
        raise HTTPException(507, str(error)) from None


@router.get(
    "/{run_id}/map/meta",
    summary="Columns of the map of a run",
    response_model=AboutMap,
    responses=RUN_ERRORS,
)
async def about_map(request: Request, run_id: RunId) -> Response:
    artifacts = await FILES(open_run, request.app.state.service, run_id)
    return Json((await FILES(_map, artifacts)).about)


@router.get(
    "/{run_id}/map",
    summary="The map of a run: every row's point, cluster and zone",
    response_class=Response,
    responses={
        200: {
            "description": "Little-endian columns of n rows, one after the other: float32 x, "
            "float32 y, uint16 cluster (an index into `cluster_ids` of /map/meta; 65535: noise), "
            "uint8 zone (an index into `zones`). 11 bytes a row.",
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        },
        206: {"description": "the bytes of the Range header"},
        304: {"description": "the client has it already (If-None-Match)"},
        **RUN_ERRORS,
        **documented((400, "unknown column"), (416, "no such bytes"), (507, "the disk is full")),
    },
)
async def run_map(
    request: Request,
    run_id: RunId,
    columns: Annotated[
        str | None, Query(description="Only these, for example `x,y`.", max_length=100)
    ] = None,
    if_none_match: Annotated[str | None, Header()] = None,
    if_range: Annotated[str | None, Header()] = None,
    range: Annotated[str | None, Header()] = None,
) -> Response:
    try:
        names = chosen_columns(columns)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    artifacts = await FILES(open_run, request.app.state.service, run_id)
    etag = etag_of(artifacts, names)
    kept = "no-cache" if run_id == "latest" else "private, max-age=31536000, immutable"
    headers = {"ETag": etag, "Cache-Control": kept, "X-Run-Id": artifacts.run_id,
               "Accept-Ranges": "bytes"}  # fmt: skip
    if is_unchanged(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    found = await FILES(_map, artifacts)
    size = found.size(names)
    start, end, code = 0, size, 200
    if if_range in (None, etag):
        try:
            if part := byte_range(range, size):
                start, end, code = *part, 206
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        except ValueError as error:
            return error_response(416, str(error), {"Content-Range": f"bytes */{size}"})
    headers["Content-Length"] = str(end - start)
    return StreamingResponse(
        _chunks(found, names, start, end), code, headers, "application/octet-stream"
    )


async def _chunks(found: Map, names: Sequence[str], start: int, end: int) -> AsyncIterator[bytes]:
    """Each of at most 256 KiB: the server waits between them for a slow client."""
    for chunk in found.part(names, start, end):
        yield chunk
