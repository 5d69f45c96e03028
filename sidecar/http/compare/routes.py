"""The routes of /compare."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from capture_kernels.errors import ArtifactError, StoreError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout, broken_invariants
from pipeline.record import PHASES, TEXT_BYTES
from sidecar.http.discovery.runs import open_run
from sidecar.http.errors import Json, documented
from sidecar.http.reads import Reads
from sidecar.http.sessions import unreadable

from . import figures, words
from .axes import axes, largest
from .means import DIGITS
from .names import KINDS, Name
from .sides import Run, Side, opened_run, side_of_rows, side_of_run, side_of_vectors
from .stored import rows_of_store

# Rows of a side that come in the body.
MOST_GIVEN = 100_000
# A comparison reads up to four million rows: one at a time, so that ingest goes on.
COMPARISONS = Reads(threads=1, most_waiting=8)
Text = Annotated[str, Field(max_length=TEXT_BYTES)]
Asked = Annotated[
    str,
    Query(
        max_length=TEXT_BYTES + 16, description="KIND:ID", examples=["session:s-1", "run:latest"]
    ),
]

router = APIRouter(tags=["compare"])


class Given(BaseModel):
    """Rows of a trace."""

    name: Text
    vectors: list[list[float]] = Field(min_length=1, max_length=MOST_GIVEN)
    layout: Literal["log16", "layered"] = "log16"
    model: Text | None = None
    capture_id: Text | None = None
    phases: list[Literal["prompt", "think", "output"]] | None = None


class Both(BaseModel):
    a: Annotated[str, Field(max_length=TEXT_BYTES + 16)] | Given
    b: Annotated[str, Field(max_length=TEXT_BYTES + 16)] | Given


class Comparison(BaseModel):
    a: dict[str, Any]
    b: dict[str, Any]
    run_id: str | None = Field(description="that clusters and axes are of")
    similarity: dict[str, Any]
    zones: list[dict[str, Any]]
    clusters: list[dict[str, Any]] | None
    histogram: dict[str, list[float]] | None
    bands: list[dict[str, Any]]
    axes: list[dict[str, Any]] | None
    phases: list[dict[str, Any]]
    drift: dict[str, Any]
    words: list[str]
    notes: list[str]


def both_are_given(request: Request) -> None:
    """HTTPException 422 with the form of the request if a side is missing."""
    if missing := [side for side in ("a", "b") if side not in request.query_params]:
        raise HTTPException(
            422, f"without {' and '.join(missing)}: ask /compare?a=KIND:ID&b=KIND:ID with KIND one "
            f"of {', '.join(KINDS)}, such as a=session:s-1&b=run:latest",
        )  # fmt: skip


ERRORS = documented(
    (400, "a side that is none, or two that cannot be compared"),
    (404, "there is no such session, request, run or row"),
    (503, "the store cannot be read, or too many comparisons wait"),
)


@router.get(
    "/compare",
    summary="How two sessions, requests, runs, models or windows differ",
    response_model=Comparison,
    responses=ERRORS,
    dependencies=[Depends(both_are_given)],
)
async def compare(request: Request, a: Asked, b: Asked) -> Response:
    """docs/http.md says what similarity is made of, and where intervals come from."""
    return Json(await COMPARISONS(_compared, request.app.state.service, a, b))


@router.post(
    "/compare",
    summary="The same, with rows of a trace on a side or on both",
    response_model=Comparison,
    responses=ERRORS,
)
async def compare_given(request: Request, body: Both) -> Response:
    return Json(await COMPARISONS(_compared, request.app.state.service, body.a, body.b))


def _compared(service: Any, a: str | Given, b: str | Given) -> dict[str, Any]:
    names = [Name.parse(one) if isinstance(one, str) else one for one in (a, b)]
    try:
        runs = [
            opened_run(open_run(service, one.id))
            if isinstance(one, Name) and one.kind == "run" else None
            for one in names
        ]  # fmt: skip
        # Rows are classified by the run that they are compared with, or else by the served one.
        known = next(filter(None, runs), None) or _served(service)
        sides = [_side(service, one, run, known) for one, run in zip(names, runs, strict=True)]
    except StoreError as error:
        raise unreadable(error) from None
    except ArtifactError as error:
        raise HTTPException(410, str(error)) from None
    one, other = sides
    if one.layout is not other.layout:
        raise HTTPException(
            400, f"A has layout {one.layout.label}, B {other.layout.label}: their numbers mean "
            "different things and cannot be compared",
        )  # fmt: skip
    return _answer(one, other, known)


def _served(service: Any) -> Run | None:
    run = service.serving.current
    if run is None:
        return None
    try:
        return opened_run(run.artifacts)
    except ArtifactError:  # a run of the first versions has no shares: as without one
        return None


def _side(service: Any, one: Name | Given, run: Run | None, known: Run | None) -> Side:
    if isinstance(one, Given):
        return _given(one, known)
    if run is not None:
        side = side_of_run(run, one)
        if known is not None and run.identity != known.identity:
            # Another lineage: the same cluster ids mean something else.
            side.clusters, side.about["comparable"] = None, False
        return side
    return side_of_rows(rows_of_store(service.store, one, known and known.identity), known)


def _given(one: Given, known: Run | None) -> Side:
    layout = Layout.parse(one.layout)
    if any(len(row) != DIMENSIONS for row in one.vectors):
        raise HTTPException(400, f"a vector has {DIMENSIONS} numbers")
    with np.errstate(over="ignore"):
        vectors = np.array(one.vectors, np.float32)
    if not (np.isfinite(vectors).all() and (vectors >= 0).all()):
        raise HTTPException(400, "a vector's numbers must be finite and not negative")
    for reason, hit in broken_invariants(vectors, np.full(len(vectors), int(layout))).items():
        if hit.any():
            at = int(hit.argmax())
            raise HTTPException(400, f"no attention row has vector {at}: {reason}")
    phases = one.phases if one.phases is not None else ["output"] * len(vectors)
    if len(phases) != len(vectors):
        raise HTTPException(400, f"{len(vectors)} vectors have {len(phases)} phases")
    numbers = np.array([PHASES.index(phase) for phase in phases])
    return side_of_vectors(
        f"trace {one.name[:80]}", one.model, layout, one.capture_id, vectors, numbers, known
    )


def _answer(a: Side, b: Side, run: Run | None) -> dict[str, Any]:
    zones, clusters = figures.zones(a, b), figures.clusters(a, b)
    found_axes = axes(a, b, run)
    for side in (a, b):
        side.about["entropy"] = round(float(side.entropy.shares[0]), DIGITS)
    return {
        "a": a.about, "b": b.about, "run_id": run.classifier.run_id if run else None,
        "similarity": figures.similarity(a, b), "zones": zones, "clusters": clusters,
        "histogram": figures.histogram(a, b), "bands": figures.bands(a, b),
        "axes": found_axes, "phases": figures.phases(a, b), "drift": figures.drifts(a, b),
        "words": words.differences(a, b, zones, clusters, largest(found_axes, words.MOST_OF_KIND)),
        "notes": words.notes(a, b),
    }  # fmt: skip
