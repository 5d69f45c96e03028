"""Sessions: what the store has of them, and what happens in them now."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.zones import ZONES
from pipeline import record
from pipeline.store.base import Selection

from .errors import Json, documented
from .reads import STORE

# Rows that are looked at to find the requests of a session, and requests that are listed.
MOST_SCANNED = 1 << 21
MOST_REQUESTS = 1_000
TEXT = Path(max_length=record.TEXT_BYTES, description="As it was recorded; encode / as %2F.")

router = APIRouter(tags=["sessions"])
STORE_ERRORS = documented((503, "the store cannot be read, or too many wait for it"))


def unreadable(error: StoreError) -> HTTPException:
    return HTTPException(503, str(error), {"Retry-After": "1"})


# sessions


class SessionPage(BaseModel):
    sessions: list[dict[str, Any]] = Field(
        description="The most recent first; a session with several models or captures once for "
        "each. Counts and zones (by the standard thresholds) are those of the store; `live` has "
        "those since the service started, null if there were none.",
        examples=[[{"session_id": "s-1", "model": "m", "capture_id": "0123456789ab", "layout": 1,
                    "requests": 2, "fingerprints": 512, "first_at": "2026-01-10T04:02:11Z",
                    "last_at": "2026-01-10T04:09:00Z", "zones": dict.fromkeys(ZONES, 1),
                    "cursor": "1768017740000000:7", "live": None}]],
    )  # fmt: skip
    next: str | None = Field(description="`after` of the next page")


@router.get(
    "/sessions",
    summary="Sessions",
    response_model=SessionPage,
    responses={**documented((400, "a cursor that is none")), **STORE_ERRORS},
)
async def sessions(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    after: Annotated[str | None, Query(max_length=41, pattern=r"^-?\d+:-?\d+$")] = None,
) -> Response:
    """What the store has and what has arrived since, page by page."""
    return Json(await STORE(_sessions, request.app.state.service, limit, after))


def _sessions(service: Any, limit: int, after: str | None) -> dict[str, Any]:
    store = service.store
    if after and any(abs(int(one)) >= 1 << 63 for one in after.split(":")):
        raise HTTPException(400, "after must be `next` of the page before")
    try:
        found = store.sessions(limit + 1, after)
        page = [{**one, "live": service.sessions.live(one["session_id"])} for one in found[:limit]]
        if after is None:
            # Rows that are not stored yet may be of a session that the store does not know.
            known = {None, *(one["session_id"] for one in page)}
            arrived = [
                {"session_id": live["session_id"], "live": live}
                for live in service.sessions.newest(limit)
                if live["session_id"] not in known and not store.session(live["session_id"])
            ]
            page = arrived + page
    except StoreError as error:
        raise unreadable(error) from None
    return {"sessions": page, "next": found[limit - 1]["cursor"] if len(found) > limit else None}


class RequestOfSession(BaseModel):
    request_id: str
    rows: int
    first_at: str
    last_at: str


class Session(BaseModel):
    session_id: str
    fingerprints: int = Field(description="that the store has had")
    first_at: str | None
    last_at: str | None
    zones: dict[str, int] = Field(description="rows in each zone, by the standard thresholds")
    groups: list[dict[str, Any]] = Field(description="the same for each model and capture")
    requests: list[RequestOfSession] = Field(
        description=f"that the store holds, in the order in which they began; {MOST_REQUESTS:,} at "
        "most"
    )
    is_whole: bool = Field(description="whether these are all")
    live: dict[str, Any] | None = Field(description="since the service started")


@router.get(
    "/sessions/{session_id:path}",
    summary="One session",
    response_model=Session,
    responses={**documented((404, "there is no such session")), **STORE_ERRORS},
)
async def session(request: Request, session_id: Annotated[str, TEXT]) -> Response:
    """Its counts, its zones and its requests, also if it ended long ago: each request is read with
    /requests/{request_id}."""
    return Json(await STORE(_session, request.app.state.service, session_id))


def _session(service: Any, session_id: str) -> dict[str, Any]:
    live = service.sessions.live(session_id)
    try:
        groups = service.store.session(session_id)
        requests, is_whole = requests_of(service.store, session_id, groups)
    except StoreError as error:
        raise unreadable(error) from None
    if not groups and live is None:
        raise HTTPException(404, f"there is no session {session_id[:80]!r}")
    return {
        "session_id": session_id,
        "fingerprints": sum(one["fingerprints"] for one in groups),
        "first_at": min((one["first_at"] for one in groups), default=None),
        "last_at": max((one["last_at"] for one in groups), default=None),
        "zones": {zone: sum(one["zones"][zone] for one in groups) for zone in ZONES},
        "groups": groups, "requests": requests, "is_whole": is_whole, "live": live,
    }  # fmt: skip


def requests_of(
    store: Any, session_id: str, groups: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """The requests of a session, and whether these are all.

    No store has an index of them: the rows of the session's time are read, `MOST_SCANNED` at most.
    """
    left, found = MOST_SCANNED, []
    for one in groups:
        window = Selection(
            one["first_at"], one["last_at"] + timedelta(microseconds=1), one["model"],
            one["layout"], one["capture_id"],
        )  # fmt: skip
        for batch in store.scan(window, columns=["session_id", "request_id", "captured_at"]):
            rows = batch.filter(pc.equal(batch.column("session_id"), session_id))
            if rows.num_rows:
                found.append(rows)
            left -= batch.num_rows
            if left <= 0:
                break
    if not found:
        return [], left > 0
    times = [("captured_at", "min"), ("captured_at", "max"), ("captured_at", "count")]
    table = pa.Table.from_batches(found).group_by("request_id").aggregate(times)
    table = table.sort_by([("captured_at_min", "ascending"), ("request_id", "ascending")])
    requests = [
        {"request_id": one["request_id"], "rows": one["captured_at_count"],
         "first_at": one["captured_at_min"], "last_at": one["captured_at_max"]}
        for one in table.slice(0, MOST_REQUESTS).to_pylist()
    ]  # fmt: skip
    return requests, left > 0 and table.num_rows <= MOST_REQUESTS
