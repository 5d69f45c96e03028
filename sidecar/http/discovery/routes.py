"""What is served, and the discovery job that is at work: its events, and commands to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from capture_kernels.errors import RunError
from discovery.artifacts.schema import SCHEMA_VERSION
from discovery.runs import folder as runs

from ..errors import Json, documented, error_response
from ..reads import FILES
from ..streams import Events
from .jobs import CommandRefused, follow, progress_of, running_job, steer
from .runs import RunSummary, summaries

# Runs that /discovery/status lists.
RECENT = 10
router = APIRouter(prefix="/discovery", tags=["discovery"])


def output_of(request: Request) -> Path:
    return Path(request.app.state.service.options.discovery_dir)


# what is served, and what is at work


class Served(BaseModel):
    run_id: str
    loaded_at: str
    model: str
    layout: str
    capture_id: str
    rows: int
    clusters: int


class RefusedRun(BaseModel):
    run_id: str | None
    reason: str
    at: str


class Running(BaseModel):
    run_id: str
    pid: int | None
    started_at: str | None
    model: str | None
    rows: int | None
    stage: str | None
    number: int | None = Field(description="of the stage, from 1")
    of: int
    done: int | None = Field(description="chunks of the stage")
    total: int | None
    paused: bool
    last_event_at: str | None
    commands: list[str] = Field(description="that /discovery/control takes for it")


class Status(BaseModel):
    schema_version: int
    serving: Served | None
    problem: str | None = Field(description="why nothing, or not what latest names, is served")
    latest: str | None
    refused: RefusedRun | None
    running: Running | None
    runs: list[RunSummary] = Field(description=f"the {RECENT} newest, newest first")


@router.get(
    "/status",
    summary="What is served, what is at work, and the newest runs",
    response_model=Status,
    responses=documented((503, "the folder of runs cannot be read")),
)
async def status(request: Request) -> Response:
    return Json(await FILES(_status, request.app.state.service))


def _status(service: Any) -> dict[str, Any]:
    output = Path(service.options.discovery_dir)
    run, refused = service.serving.current, service.serving.refused
    try:
        holder = running_job(output)
        latest, found = runs.latest_id(output), runs.run_ids(output)
    except (RunError, OSError) as error:
        raise HTTPException(503, f"cannot read {output}: {error}") from None
    return {
        "schema_version": SCHEMA_VERSION,
        "serving": None if run is None else {
            "run_id": run.run_id, "loaded_at": run.loaded_at,
            **{name: run.manifest[name] for name in ("model", "layout", "capture_id")},
            **{name: run.manifest["counts"][name] for name in ("rows", "clusters")},
        },
        "problem": service.serving.problem,
        "latest": latest,
        "refused": None if refused is None else {
            "run_id": refused.run_id, "reason": refused.reason, "at": refused.at,
        },
        "running": progress_of(output, holder) if holder else None,
        "runs": summaries(output, found[::-1][:RECENT], latest, run and run.run_id),
    }  # fmt: skip


EXAMPLE = """retry: 2000

id: 2026-01-10T04-02-11:212
event: progress
data: {"event":"progress","run_id":"2026-01-10T04-02-11","at":"2026-01-10T04:02:13.000+00:00",\
"stage":"neighbors","done":3,"total":9}
"""


@router.get(
    "/live",
    summary="Events of the running job",
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: the lines of the running job's progress.jsonl from "
            "its first one, then as they are written, and those of the next job. After a "
            "reconnection with `Last-Event-ID` only what came since.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": EXAMPLE}},
        },
        **documented((503, "too many clients, or the service is ending")),
    },
)
async def live(
    request: Request, last_event_id: Annotated[str | None, Header(max_length=100)] = None
) -> Response:
    output = output_of(request)

    def events() -> Events:
        return follow(output, last_event_id)

    streams = request.app.state.broadcast.streams
    found: Response = streams.response(events)
    return found


class Command(BaseModel):
    command: Literal["pause", "resume", "stop"]


class Steered(BaseModel):
    run_id: str
    command: str
    via: Literal["websocket", "signal"]


@router.post(
    "/control",
    summary="Pause, resume or stop the running job",
    response_model=Steered,
    responses=documented((409, "no job is running, or it cannot do this")),
)
async def control(request: Request, body: Command) -> Response:
    """The job takes all commands if it was started with --websocket-port. Any other can be stopped,
    if this service may send it a signal: it then stops at its next checkpoint."""
    try:
        return Json(await steer(output_of(request), body.command))
    except (CommandRefused, RunError) as error:
        return error_response(409, str(error))
