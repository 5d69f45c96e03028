"""Requests: the path of each through the zones, its phases, its clusters and its rows."""

from __future__ import annotations

from collections import OrderedDict
from datetime import datetime
from functools import partial
from threading import Lock
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Query, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from capture_kernels.arrays import Floats, Mask
from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.classifier import ANSWER_VERSION
from discovery.artifacts.schema import NOISE
from pipeline import record
from pipeline.record import PHASES
from pipeline.store.base import from_micros
from pipeline.store.columns import matching_rows

from .errors import Json, documented
from .live import standard_zones, step_of
from .reads import STORE
from .sessions import STORE_ERRORS, TEXT, unreadable

# Rows of a request that a summary reads: some 50 MB. A context of 262,144 tokens has as many.
MOST_ROWS = 1 << 18
PAGE_ROWS = 1 << 16
MOST_PATH = 10_000
# Summaries that are kept; one with the longest path takes some 4 MB.
MOST_SUMMARIES = 16

router = APIRouter(tags=["sessions"])


class Span(BaseModel):
    zone: str
    first_step: int
    last_step: int
    rows: int


class PhaseSummary(BaseModel):
    rows: int
    zones: dict[str, float] = Field(description="share of the phase's rows in each zone")
    mean_entropy: float


class ClusterCount(BaseModel):
    cluster_id: int
    label: str | None
    rows: int
    share: float


class RequestClusters(BaseModel):
    run_id: str
    comparable_rows: int = Field(description="of the run's model, layout and capture_id")
    noise_rows: int
    clusters: list[ClusterCount] = Field(description="the largest first")


class RequestSummary(BaseModel):
    request_id: str
    session_id: str | None
    model: str
    capture_id: str
    layout: str
    prompt_len: int | None
    rows: int
    summarised_rows: int = Field(description=f"the first {MOST_ROWS:,} at most")
    layers: list[int] = Field(description="-1 is the mean over the captured layers")
    path_layer: int = Field(description="the layer that `zone_path` and `transitions` are of")
    first_at: str
    last_at: str
    zones: dict[str, float]
    zone_path: list[Span] = Field(description=f"spans of one zone; the first {MOST_PATH:,}")
    zone_spans: int = Field(description="how many there are")
    transitions: list[list[int]] = Field(
        description="how often row i's zone was followed by column j's, both in the order of zones"
    )
    phases: dict[str, PhaseSummary] = Field(description="think against output, and the prompt")
    clusters: RequestClusters | None = Field(description="null if no run is served")
    offset: int
    records: list[dict[str, Any]] = Field(description="rows `offset` to `offset` + `limit`")
    next_offset: int | None
    run_id: str | None
    schema_version: int


@router.get(
    "/requests/{request_id:path}",
    summary="One request: its zones over the steps, its phases, its rows",
    response_model=RequestSummary,
    responses={**documented((404, "there is no such request")), **STORE_ERRORS},
)
async def request_summary(
    request: Request,
    request_id: Annotated[str, TEXT],
    offset: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
    limit: Annotated[int, Query(ge=0, le=1_000)] = 100,
    vectors: Annotated[bool, Query(description="Give each row's vector.")] = False,
    summary: Annotated[bool, Query(description="Without it: the rows alone, at once.")] = True,
) -> Response:
    """Zones are decided from the stored vectors by the rules of the served run, or else by the
    standard ones. Rows are in the order of position and layer."""
    service, summaries = request.app.state.service, request.app.state.summaries
    asked = partial(_request, summaries) if summary else _rows_alone
    return Json(await STORE(asked, service, request_id, offset, limit, vectors))


class Summary(NamedTuple):
    """What all rows of a request say, as long as there are so many and this run is served."""

    rows: int
    run_id: str | None
    fields: dict[str, Any]


class Summaries:
    """The last summaries of requests, by request: who reads a request page by page does not have
    all of its rows read again for each page. Threads may share it."""

    def __init__(self, most: int = MOST_SUMMARIES) -> None:
        self._most = most
        self._kept: OrderedDict[str, Summary] = OrderedDict()
        self._lock = Lock()

    def get(self, request_id: str) -> Summary | None:
        with self._lock:
            return self._kept.get(request_id)

    def put(self, request_id: str, summary: Summary) -> None:
        with self._lock:
            self._kept[request_id] = summary
            self._kept.move_to_end(request_id)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)


def _request(
    summaries: Summaries, service: Any, request_id: str, offset: int, limit: int, vectors: bool
) -> dict[str, Any]:
    store, run = service.store, service.serving.current
    run_id = run.run_id if run else None
    try:
        summary = summaries.get(request_id)
        if summary is not None:
            count, rows = store.request(request_id, offset, max(limit, 1))
            rows = rows.slice(0, limit)
        if summary is None or (count, run_id) != summary[:2]:
            table, count = _first_rows(store, request_id)
            if not count:
                raise _missing(request_id)
            summary = Summary(count, run_id, Read(table, run).summary())
            summaries.put(request_id, summary)
            rows = table.slice(offset, limit)
            if limit and rows.num_rows < min(limit, count - offset):
                rows = store.request(request_id, offset, limit).rows
    except StoreError as error:
        raise unreadable(error) from None
    return {
        "request_id": request_id, "rows": count, **summary.fields,
        **_page(rows, count, run, offset, limit, vectors),
    }  # fmt: skip


def _rows_alone(
    service: Any, request_id: str, offset: int, limit: int, vectors: bool
) -> dict[str, Any]:
    """A page of rows without the summary, which takes all rows of the request to make."""
    try:
        count, rows = service.store.request(request_id, offset, max(limit, 1))
    except StoreError as error:
        raise unreadable(error) from None
    if not count:
        raise _missing(request_id)
    page = _page(rows.slice(0, limit), count, service.serving.current, offset, limit, vectors)
    return {"request_id": request_id, "rows": count, **page}


def _page(
    rows: pa.Table, count: int, run: Any, offset: int, limit: int, vectors: bool
) -> dict[str, Any]:
    return {
        "offset": offset,
        "records": Read(rows, run).records(vectors),
        "next_offset": offset + limit if limit and offset + limit < count else None,
        "run_id": run.run_id if run else None,
        "schema_version": ANSWER_VERSION,
    }


def _missing(request_id: str) -> HTTPException:
    return HTTPException(404, f"there is no request {request_id[:80]!r} in the store")


def _first_rows(store: Any, request_id: str) -> tuple[pa.Table, int]:
    """The rows of a request by position and layer, `MOST_ROWS` at most, and how many it has."""
    count, rows = store.request(request_id, 0, PAGE_ROWS)
    tables = [rows]
    for offset in range(PAGE_ROWS, min(count, MOST_ROWS), PAGE_ROWS):
        tables.append(store.request(request_id, offset, PAGE_ROWS).rows)
    return pa.concat_tables(tables), count


class Read:
    """Rows of one request as arrays, classified.

    Args:
        table: n rows in `record.SCHEMA`, in the order of position and layer.
        run: what is served, or None.
    """

    def __init__(self, table: pa.Table, run: Any) -> None:
        # One dictionary for all of a column's chunks.
        self._table = table.unify_dictionaries().combine_chunks()
        self._run = run
        self._vectors: Floats = record.vectors(self._table) if table.num_rows else (
            np.empty((0, 20), np.float32)
        )  # fmt: skip
        layouts = self._numbers("layout")
        rules = ZoneRules(**run.manifest["zone_rules"]) if run else ZoneRules()
        self._zones = standard_zones(self._vectors, layouts, rules)
        self._cluster = np.full(table.num_rows, NOISE, np.int32)
        self._probability = np.zeros(table.num_rows, np.float32)
        self._second: dict[int, dict[str, Any] | None] = {}
        self._comparable = np.zeros(table.num_rows, bool)
        self._coordinates = np.zeros((table.num_rows, 2), np.float32)
        if run is not None and table.num_rows:
            self._classify()

    def _classify(self) -> None:
        classifier = self._run.classifier
        same = self._comparable = self._matching(
            model=self._run.manifest["model"], capture_id=classifier.capture_id,
            layout=int(classifier.layout),
        )  # fmt: skip
        found = classifier.classify(self._vectors[same])
        self._cluster[same], self._probability[same] = found.cluster_id, found.probability
        self._coordinates[same] = found.coordinates
        rows = np.flatnonzero(same)
        for at in np.flatnonzero(found.second_cluster_id != NOISE).tolist():
            self._second[int(rows[at])] = classifier.second(found, at)

    def _matching(self, **values: Any) -> Mask:
        batches = self._table.to_batches()  # one, as its chunks are combined
        return matching_rows(batches[0], **values) if batches else np.zeros(0, bool)

    def _numbers(self, name: str) -> NDArray[Any]:
        found: NDArray[Any] = self._table.column(name).to_numpy()
        return found

    def summary(self) -> dict[str, Any]:
        """All but the rows themselves."""
        first = {name: self._table.column(name)[0].as_py() for name in
                 ("session_id", "model", "capture_id", "prompt_len")}  # fmt: skip
        layers, counts = np.unique(self._numbers("layer"), return_counts=True)
        path_layer = int(layers[counts.argmax()])  # the mean over layers comes first
        times = self._numbers("captured_at")
        return {
            **first,
            "layout": Layout(int(self._numbers("layout")[0])).label,
            "summarised_rows": len(self._zones),
            "layers": layers.tolist(),
            "path_layer": path_layer,
            "first_at": _time(times.min()),
            "last_at": _time(times.max()),
            "zones": shares(self._zones),
            **self._path(path_layer),
            "phases": {
                phase: {
                    "rows": int(chosen.sum()),
                    "zones": shares(self._zones[chosen]),
                    "mean_entropy": round(float(self._vectors[chosen, 3].mean()), 6),
                }
                for phase in PHASES
                if (chosen := self._matching(phase=phase)).any()
            },
            "clusters": self._clusters(),
        }

    def _path(self, layer: int) -> dict[str, Any]:
        """Spans of steps in one zone, and how often a zone followed another."""
        rows = np.flatnonzero(self._numbers("layer") == layer)
        zones = self._zones[rows].astype(np.int64)
        cells = zones[:-1] * len(ZONES) + zones[1:]
        counts = np.bincount(cells, minlength=len(ZONES) ** 2).reshape(len(ZONES), -1)
        begins = np.flatnonzero(np.diff(zones, prepend=-1))
        ends = (np.append(begins[1:], len(zones)) - 1)[:MOST_PATH]
        first, last = (self._steps(rows[at]) for at in (begins[:MOST_PATH], ends))
        spans = zip(begins.tolist(), ends.tolist(), first, last, strict=False)
        return {
            "zone_path": [
                {"zone": ZONES[zones[begin]], "first_step": one, "last_step": other,
                 "rows": end - begin + 1}
                for begin, end, one, other in spans
            ],
            "zone_spans": len(begins),
            "transitions": counts.tolist(),
        }  # fmt: skip

    def _steps(self, rows: NDArray[np.intp]) -> list[int]:
        """The decode steps of some rows."""
        some = self._table.select(["position", "prompt_len"]).take(pa.array(rows))
        pairs = zip(*(column.to_pylist() for column in some.columns), strict=True)
        return [step_of(position, length) for position, length in pairs]

    def _clusters(self) -> dict[str, Any] | None:
        if self._run is None:
            return None
        known = self._cluster[self._comparable]
        ids, rows = np.unique(known[known != NOISE], return_counts=True)
        order = np.argsort(-rows, kind="stable")
        labels = self._run.classifier.labels
        return {
            "run_id": self._run.run_id,
            "comparable_rows": len(known),
            "noise_rows": int(np.count_nonzero(known == NOISE)),
            "clusters": [
                {"cluster_id": int(ids[i]), "label": labels.get(int(ids[i])), "rows": int(rows[i]),
                 "share": round(float(rows[i] / len(known)), 6)}
                for i in order
            ],
        }  # fmt: skip

    def records(self, vectors: bool) -> list[dict[str, Any]]:
        """Each row as JSON values, with its step, zone, cluster and point on the run's map."""
        hidden = {"request_id"} if vectors else {"request_id", "vector"}
        found = self._table.drop_columns(sorted(hidden)).to_pylist()
        for row, one in enumerate(found):
            one["step"] = step_of(one["position"], one["prompt_len"])
            one["zone"] = ZONES[self._zones[row]]
            one["cluster_id"] = int(self._cluster[row]) if self._comparable[row] else None
            one["probability"] = (
                round(float(self._probability[row]), 6) if self._comparable[row] else None
            )
            one["second"] = self._second.get(row)
            point = self._coordinates[row].tolist() if self._comparable[row] else (None, None)
            one["x"], one["y"] = point
        return found


def shares(zones: NDArray[np.int8]) -> dict[str, float]:
    """The share of each zone in [0, 1]."""
    counts = np.bincount(zones, minlength=len(ZONES)) / max(len(zones), 1)
    return dict(zip(ZONES, np.round(counts, 6).tolist(), strict=True))


def _time(at: np.datetime64) -> datetime:
    return from_micros(int(at.astype("datetime64[us]").astype(np.int64)))
