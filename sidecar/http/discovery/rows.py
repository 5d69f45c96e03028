"""Rows of a run's map by number or by request: whose they are, and what the run says of them."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections import OrderedDict
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from capture_kernels.arrays import Ints
from capture_kernels.errors import ArtifactError, WriteError
from discovery.artifacts.read import Artifacts
from discovery.artifacts.schema import EMBEDDING_COLUMNS, SCHEMA_VERSION
from discovery.artifacts.tables import with_second_clusters
from pipeline.record import TEXT_BYTES

from ..errors import Json, documented
from ..reads import FILES
from .maps import EMBEDDING
from .runs import RUN_ERRORS, RunId, open_run

# Rows that are asked for by number, requests that are asked for, and rows of these in an answer.
MOST_NUMBERS, MOST_REQUESTS, MOST_ROWS = 1_000, 500, 10_000
# Bytes of all tables that are kept; that of a million rows has some 40 MB.
MOST_KEPT_BYTES = 1 << 28

router = APIRouter(prefix="/discovery/runs", tags=["discovery"])


class Tables:
    """Rows of runs that were asked for lately, in files without a name, as `maps.Maps` keeps maps.

    Safe to call from several threads; one table is made at a time.
    """

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[pa.Table, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, artifacts: Artifacts) -> pa.Table:
        """The run's embedding, `EMBEDDING_COLUMNS` in one chunk, `request_id` as a dictionary.

        Raises:
            ArtifactError: the file is missing, damaged, or not what it should be.
            WriteError: there is no room for it.
        """
        published = artifacts.manifest["files"][EMBEDDING]["sha256"]
        key = f"{artifacts.folder}:{published}"
        with self._lock:
            found = self._kept.pop(key, None) or _mapped(artifacts)
            self._kept[key] = found  # the newest last
            while len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > self._most_bytes:
                self._kept.popitem(last=False)  # whoever reads it still does
        return found[0]


def _mapped(artifacts: Artifacts) -> tuple[pa.Table, int]:
    try:
        table = with_second_clusters(artifacts.table("embedding"))
        table = table.select(EMBEDDING_COLUMNS.names).cast(EMBEDDING_COLUMNS)
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise ArtifactError(
            f"{artifacts.folder} has no rows to show ({error}): run attn discover again"
        ) from None
    requests = table.column("request_id").dictionary_encode()
    at = table.schema.get_field_index("request_id")
    table = table.set_column(at, "request_id", requests).unify_dictionaries().combine_chunks()
    try:
        with tempfile.TemporaryFile(prefix="attn-rows-") as file:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            file.flush()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WriteError(f"no room for the rows of {artifacts.run_id}: {error.strerror}") from None
    found: pa.Table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
    return found, len(content)


Text = Annotated[str, Field(max_length=TEXT_BYTES)]


class Wanted(BaseModel):
    """Rows by number, or all rows of some requests: one of the two."""

    rows: list[Annotated[int, Field(ge=0, lt=1 << 31)]] | None = Field(
        None, max_length=MOST_NUMBERS, description="numbers of rows, in the order of the map"
    )
    requests: list[Text] | None = Field(None, max_length=MOST_REQUESTS, description="request ids")


class RowOfMap(BaseModel):
    row: int = Field(description="its number on the map, from 0")
    request_id: str
    position: int
    layer: int
    phase: str
    token_id: int | None
    x: float | None
    y: float | None
    cluster_id: int
    probability: float | None
    second_cluster_id: int = Field(description="the cluster that it belongs to next, -1 for none")
    second_probability: float | None
    zone: str
    zone_confidence: float | None


class RowsOfMap(BaseModel):
    run_id: str
    schema_version: int
    rows: list[RowOfMap] = Field(
        description="as they were asked for; of requests in the order in which these were asked "
        f"for, by position and layer, {MOST_ROWS:,} at most"
    )
    is_whole: bool = Field(description="whether these are all")


TABLES = Tables()


@router.post(
    "/{run_id}/rows",
    summary="Rows of the map of a run: by number, or those of some requests",
    response_model=RowsOfMap,
    responses={
        **RUN_ERRORS,
        **documented((400, "not one of rows and requests, or no such row"), (507, "no room")),
    },
)
async def rows_of_map(request: Request, run_id: RunId, wanted: Wanted) -> Response:
    """Requests that are not on the map have no rows: a run takes a sample of each request."""
    if (wanted.rows is None) == (wanted.requests is None):
        raise HTTPException(400, "give rows (numbers) or requests (ids), and not both")
    return Json(await FILES(_rows, request.app.state.service, run_id, wanted))


def _rows(service: Any, run_id: str, wanted: Wanted) -> dict[str, Any]:
    artifacts = open_run(service, run_id)
    try:
        table = TABLES.get(artifacts)
    except ArtifactError as error:
        raise HTTPException(410, str(error)) from None
    except WriteError as error:
        raise HTTPException(507, str(error)) from None
    if wanted.rows is not None:
        numbers, is_whole = np.array(wanted.rows, np.int64), True
        if len(numbers) and numbers.max() >= table.num_rows:
            raise HTTPException(
                400, f"run {artifacts.run_id} has no row {numbers.max()}, only {table.num_rows:,}"
            )
    else:
        found = _numbers_of(table, wanted.requests or [])
        numbers, is_whole = found[:MOST_ROWS], len(found) <= MOST_ROWS
    return {
        "run_id": artifacts.run_id, "schema_version": SCHEMA_VERSION,
        "rows": [
            {"row": number, **row} for number, row in
            zip(numbers.tolist(), table.take(pa.array(numbers)).to_pylist(), strict=True)
        ],
        "is_whole": is_whole,
    }  # fmt: skip


def _numbers_of(table: pa.Table, requests: list[str]) -> Ints:
    """The numbers of the rows of some requests, by request, position and layer: int64[n]."""
    if not table.num_rows:
        return np.zeros(0, np.int64)
    column = table.column("request_id").chunk(0)
    known = pc.index_in(pa.array(requests, pa.string()), value_set=column.dictionary).to_pylist()
    # The rank of each request id of the run among those asked for; -1 for the others.
    rank = np.full(len(column.dictionary), -1, np.int64)
    for place, code in reversed([*enumerate(known)]):
        if code is not None:
            rank[code] = place
    ranks = rank[column.indices.to_numpy()]
    rows = np.flatnonzero(ranks >= 0)
    position, layer = (table.column(name).to_numpy()[rows] for name in ("position", "layer"))
    return rows[np.lexsort((layer, position, ranks[rows]))]
