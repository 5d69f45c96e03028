"""The routes that carry the load: POST /classify, /predict, /fingerprint and /fingerprints.

They are bare ASGI with msgspec, beside the FastAPI app and under the same limits: FastAPI's own
path takes a single /classify over 5 ms at the 99th percentile (benchmarks/sidecar.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET
from starlette.exceptions import HTTPException

from capture_kernels.arrays import Floats
from capture_kernels.errors import AttnError, RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.artifacts.classifier import ANSWER_VERSION
from pipeline import record
from pipeline.store.sources import batch_of, record_values
from pipeline.stream.wire import TooManyRowsError, read_batches
from sidecar.ingest.queue import Ticket
from sidecar.processed import Processed
from sidecar.service import Service

from .answers import Vector, classify_batch, classify_records, joined, matrix_of, matrix_of_batch
from .bodies import (
    JSON,
    LOOP_ROWS,
    Receive,
    Refusal,
    Scope,
    body_of,
    fingerprints_of,
    is_arrow,
    off_loop,
    row_of,
    rows_of,
)

LOG = logging.getLogger("attn.sidecar")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# How long ?wait=1 waits for the store, in seconds.
WAIT_S = 30.0
LATER = {"retry_after": "1"}
ONE_OR_MANY = 'send {"vector": [20 numbers]} or {"records": [...]}'
ENCODE = msgspec.json.Encoder()


class HotRoutes:
    """An ASGI app that answers the hot routes and passes on everything else."""

    def __init__(self, app: Callable[..., Awaitable[None]], service: Service) -> None:
        self._app, self._service = app, service
        self._routes: dict[str, Callable[[Scope, bytes], Awaitable[tuple[int, Any]]]] = {
            "/classify": self._classify,
            "/predict": self._predict,
            "/fingerprint": self._fingerprint,
            "/fingerprints": self._fingerprints,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        began, method = time.perf_counter(), scope["method"]
        headers = [(b"content-type", JSON)]
        try:
            if method != "POST":
                reason = f"{scope['path']} does not take {method}: use POST"
                raise Refusal(405, reason, allow="POST")
            status, answer = await route(scope, await body_of(receive))
        except Refusal as refusal:
            status, answer = refusal.status, {"error": refusal.reason}
            headers += refusal.headers
        except AttnError as error:
            status, answer = 400, {"error": str(error)}
        except HTTPException:
            raise  # of the limits, which answer it
        except Exception:
            LOG.exception("a bug in %s", scope["path"])
            status, answer = 500, {"error": "an unexpected error: the log of the service has it"}
        content = ENCODE.encode(answer)
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
        seconds = time.perf_counter() - began
        self._service.metrics.answered(method, scope["path"], status, seconds)

    # -- classification

    async def _classify(self, scope: Scope, content: bytes) -> tuple[int, Any]:
        run = self._service.serving.current
        if run is None:
            raise Refusal(503, self._service.nothing_served, **LATER)
        classifier = run.classifier
        head = {"schema_version": ANSWER_VERSION, "run_id": run.run_id}
        if is_arrow(scope):
            batch = self._batch_of(content)
            answers = await self._timed(batch.num_rows, classify_batch, classifier, batch)
            return 200, {"results": answers, **head}
        body = await fingerprints_of(content)
        if body.records is UNSET:
            if body.vector is UNSET:
                raise Refusal(400, ONE_OR_MANY)
            one = Vector(body.vector, body.position, body.layout, body.capture_id)
            (answer,) = await self._timed(1, classify_records, classifier, [one])
            return (400 if "error" in answer else 200), {**answer, **head}
        self._check_rows(len(body.records))
        answers = await self._timed(len(body.records), classify_records, classifier, body.records)
        return 200, {"results": answers, **head}

    async def _timed(self, rows: int, work: Callable[..., Any], *given: Any) -> Any:
        began = time.perf_counter()
        answers = await off_loop(rows > LOOP_ROWS, work, *given)
        self._service.metrics.classified("http", time.perf_counter() - began)
        return answers

    async def _predict(self, scope: Scope, content: bytes) -> tuple[int, Any]:
        if is_arrow(scope):
            batch = self._batch_of(content)
            return 200, await self._predictions(batch.num_rows, matrix_of_batch, batch)
        body = await fingerprints_of(content)
        if body.records is not UNSET:
            vectors = [one.vector for one in body.records]
            self._check_rows(len(vectors))
            return 200, await self._predictions(len(vectors), matrix_of, vectors)
        if body.vector is UNSET:
            raise Refusal(400, ONE_OR_MANY)
        (answer,) = (await self._predictions(1, matrix_of, [body.vector]))["results"]
        return 200, answer

    async def _predictions(
        self, rows: int, matrix: Callable[[Any], Floats | None], given: Any
    ) -> dict[str, Any]:
        return await off_loop(rows > LOOP_ROWS, lambda: self._predicted(matrix(given)))

    def _predicted(self, matrix: Floats | None) -> dict[str, Any]:
        live = self._service.live_clusters
        if matrix is None or not (np.isfinite(matrix).all() and (matrix >= 0).all()):
            raise Refusal(400, f"a vector has {DIMENSIONS} finite numbers, none of them negative")
        clusters = {one.cluster_id: one for one in live.clusters()}
        if not clusters:
            raise Refusal(503, "there are no live clusters yet: send fingerprints", **LATER)
        found = zip(*(column.tolist() for column in live.predict(matrix)), strict=True)
        answers = []
        for cluster_id, distance, within in found:
            known = clusters.get(cluster_id) if within else None
            answers.append(
                {
                    "cluster_id": cluster_id if known else -1,
                    "distance": round(distance, 6),
                    "traits": known.traits if known else [],
                    "sampling_hint": known.sampling_hint if known else None,
                }
            )
        return {"results": answers}

    # -- ingest

    async def _fingerprint(self, scope: Scope, content: bytes) -> tuple[int, Any]:
        batch, rejected = self._records_of([await row_of(content)])
        if rejected:
            self._service.intake.count_rejected(rejected, "http")
            raise Refusal(400, f"not a fingerprint: {next(iter(rejected))}")
        ticket, processed = self._submit(batch)
        if ticket.rejected:
            raise Refusal(400, f"not a fingerprint: {next(iter(ticket.rejected))}")
        answer: dict[str, Any] = {"schema_version": ANSWER_VERSION, "run_id": processed.run_id}
        if processed.run is not None and processed.classified is not None:
            (answer["manifold"],) = processed.run.classifier.manifolds(processed.classified)
        return await self._accepted(scope, ticket, answer)

    async def _fingerprints(self, scope: Scope, content: bytes) -> tuple[int, Any]:
        rejected: dict[str, int] = {}
        if is_arrow(scope):
            batch = self._batch_of(content)
        else:
            rows = await rows_of(content)
            self._check_rows(len(rows))
            batch, rejected = await off_loop(4 * len(rows) > LOOP_ROWS, self._records_of, rows)
            self._service.intake.count_rejected(rejected, "http")
        ticket, processed = await off_loop(batch.num_rows > LOOP_ROWS, self._submit, batch)
        for reason, count in ticket.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
        answer = {
            "rejected": rejected, "schema_version": ANSWER_VERSION, "run_id": processed.run_id,
        }  # fmt: skip
        return await self._accepted(scope, ticket, answer)

    def _submit(self, batch: pa.RecordBatch) -> tuple[Ticket, Processed]:
        ticket, processed = self._service.intake.submit(batch, "http")
        if ticket is None:
            raise Refusal(
                503, "the queue to the store is full: nothing was taken, send it again later",
                **LATER,
            )  # fmt: skip
        return ticket, processed

    async def _accepted(
        self, scope: Scope, ticket: Ticket, answer: dict[str, Any]
    ) -> tuple[int, Any]:
        """202 for rows that are queued, 200 for rows that are in the store (?wait=1)."""
        rows = ticket.batch.num_rows
        # As text: of bytes `parse_qs` raises what is not ASCII.
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("wait", ["0"])[-1]
        if asked not in ("1", "true"):
            return 202, {"queued": rows, **answer}
        loop, settled = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended: the writer must not end with it
                loop.call_soon_threadsafe(settled.set)

        ticket.when_settled(wake)
        try:
            async with asyncio.timeout(WAIT_S):
                await settled.wait()
        except TimeoutError:
            raise Refusal(
                503, f"not in the store after {WAIT_S:g} s; the rows are still queued",
                **LATER,
            ) from None  # fmt: skip
        except asyncio.CancelledError:  # uvicorn's, of requests that outlast its end
            raise Refusal(
                503, "the service is ending, and the rows are not in the store yet", **LATER
            ) from None
        if ticket.refused:
            raise Refusal(400, f"not fingerprints: {ticket.error}")
        if ticket.error is not None:
            raise Refusal(
                503, f"not in the store yet: {ticket.error}; the rows are still queued",
                **LATER,
            )  # fmt: skip
        return 200, {"committed": rows, **answer}

    def _batch_of(self, content: bytes) -> pa.RecordBatch:
        """The rows of a body that is an Arrow stream."""
        options = self._service.options
        try:
            batches = read_batches(
                content, max_rows=options.max_batch, max_bytes=options.max_body_bytes
            )
        except TooManyRowsError as error:
            raise Refusal(413, f"{error} (--max-batch)") from None
        return joined(batches)

    def _records_of(self, rows: list[Any]) -> tuple[pa.RecordBatch, dict[str, int]]:
        """JSON fingerprints as a batch, and how many cannot be one, by reason."""
        run = self._service.serving.current
        given: dict[str, Any] = {"layer": record.MEAN_LAYER, "phase": "output", "layout": 1}
        if run is not None:
            classifier = run.classifier
            given |= {"model": run.model, "capture_id": classifier.capture_id}
            given["layout"] = int(classifier.layout)
        given["captured_at"] = datetime.now(UTC).isoformat()
        values: list[tuple[Any, ...]] = []
        rejected: dict[str, int] = {}
        for row in rows:
            try:
                values.append(record_values(with_defaults(row, given)))
            except RecordError as error:
                rejected[str(error)] = rejected.get(str(error), 0) + 1
        return batch_of(values), rejected

    def _check_rows(self, rows: int) -> None:
        if rows > (most := self._service.options.max_batch):
            raise Refusal(413, f"{rows:,} rows in one request: send at most {most:,} (--max-batch)")


def with_defaults(row: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint from JSON with what it may leave out, and `step` as a position.

    Raises:
        RecordError: it is not an object, or has neither position nor step.
    """
    if not isinstance(row, dict):
        raise RecordError("a fingerprint is a JSON object")
    full = {**given, **{name: value for name, value in row.items() if value is not None}}
    if isinstance(layout := full["layout"], str):
        try:
            full["layout"] = int(Layout.parse(layout))
        except AttnError as error:
            raise RecordError(f"layout: {error}") from None
    if "position" not in full:
        step, prompt = full.get("step"), full.get("prompt_len", 0)
        if type(step) is not int or type(prompt) is not int:
            raise RecordError("position: missing, and so is step")
        full["position"] = step - 1 + prompt
    if missing := [name for name in ("model", "capture_id") if name not in full]:
        raise RecordError(f"{missing[0]}: missing, and no run is served that has one")
    return full
