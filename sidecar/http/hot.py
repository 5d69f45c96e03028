"""The routes that carry the load: POST /classify, /predict, /fingerprint and /fingerprints.

They are bare ASGI with msgspec, beside the FastAPI app and under the same limits: FastAPI's own
path takes a single /classify over 5 ms at the 99th percentile (benchmarks/sidecar.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET, UnsetType

from capture_kernels.arrays import Floats
from capture_kernels.errors import AttnError, RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout, broken_invariants
from discovery.artifacts.classifier import ANSWER_VERSION, Classifier
from pipeline import record
from pipeline.store.columns import matching_rows
from pipeline.store.sources import batch_of, record_values
from pipeline.stream.wire import read_batches
from sidecar.ingest.process import Processed
from sidecar.ingest.queue import Ticket
from sidecar.service import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
ARROW = "application/vnd.apache.arrow.stream"
# Rows that are classified in the event loop; more of them would hold up other requests.
LOOP_ROWS = 1_024
# How long ?wait=1 waits for the store, in seconds.
WAIT_S = 30.0
RETRY_AFTER_S = 1


class Refusal(Exception):
    """A request that is answered with an error: status, one line, seconds to retry after."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after


class Vector(msgspec.Struct):
    """One fingerprint to classify. position is checked and not used: the vector says it all."""

    vector: list[float]
    position: int | None = None
    layout: str | int | None = None
    capture_id: str | None = None


class Body(msgspec.Struct):
    """Of /classify and /predict: one fingerprint, or `records`."""

    vector: list[float] | UnsetType = UNSET
    position: int | None = None
    layout: str | int | None = None
    capture_id: str | None = None
    records: list[Vector] | UnsetType = UNSET


DECODE = msgspec.json.Decoder(Body)
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
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = [(b"content-type", JSON)]
        try:
            status, answer = await route(scope, await body_of(receive))
        except Refusal as refusal:
            status, answer = refusal.status, {"error": refusal.reason}
            if refusal.retry_after is not None:
                headers.append((b"retry-after", str(refusal.retry_after).encode()))
        except RecordError as error:
            status, answer = 400, {"error": str(error)}
        content = ENCODE.encode(answer)
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
        self._service.metrics.answered("POST", scope["path"], status, time.perf_counter() - began)

    # -- classification

    async def _classify(self, scope: Scope, content: bytes) -> tuple[int, Any]:
        run = self._service.serving.current
        if run is None:
            raise Refusal(503, self._service.nothing_served, RETRY_AFTER_S)
        classifier = run.classifier
        head = {"schema_version": ANSWER_VERSION, "run_id": run.run_id}
        if is_arrow(scope):
            batch = self._batch_of(content)
            answers = await off_loop(batch.num_rows, classify_batch, classifier, batch)
            return 200, {"results": answers, **head}
        body = decode(content)
        if body.records is UNSET:
            if body.vector is UNSET:
                raise Refusal(400, 'send {"vector": [20 numbers]} or {"records": [...]}')
            one = Vector(body.vector, body.position, body.layout, body.capture_id)
            (answer,) = classify_records(classifier, [one])
            return (400 if "error" in answer else 200), {**answer, **head}
        self._check_rows(len(body.records))
        answers = await off_loop(len(body.records), classify_records, classifier, body.records)
        return 200, {"results": answers, **head}

    async def _predict(self, scope: Scope, content: bytes) -> tuple[int, Any]:
        live = self._service.live_clusters
        body = decode(content)
        if body.records is not UNSET:
            vectors = [one.vector for one in body.records]
        elif body.vector is not UNSET:
            vectors = [body.vector]
        else:
            raise Refusal(400, 'send {"vector": [20 numbers]} or {"records": [...]}')
        self._check_rows(len(vectors))
        matrix = matrix_of(vectors)
        if matrix is None or not (np.isfinite(matrix).all() and (matrix >= 0).all()):
            raise Refusal(400, f"a vector has {DIMENSIONS} finite numbers, none of them negative")
        clusters = {one.cluster_id: one for one in live.clusters()}
        if not clusters:
            raise Refusal(503, "there are no live clusters yet: send fingerprints", RETRY_AFTER_S)
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
        return 200, answers[0] if body.records is UNSET else {"results": answers}

    # -- ingest

    async def _fingerprint(self, scope: Scope, content: bytes) -> tuple[int, Any]:
        batch, rejected = self._records_of([parsed(content, dict)])
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
            body = parsed(content, list | dict)
            rows = body.get("records") if isinstance(body, dict) else body
            if not isinstance(rows, list):
                raise Refusal(400, 'send a list of fingerprints, or {"records": [...]}')
            self._check_rows(len(rows))
            batch, rejected = await off_loop(4 * len(rows), self._records_of, rows)
            self._service.intake.count_rejected(rejected, "http")
        ticket, processed = await off_loop(batch.num_rows, self._submit, batch)
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
                RETRY_AFTER_S,
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
            with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(settled.set)

        ticket.when_settled(wake)
        try:
            async with asyncio.timeout(WAIT_S):
                await settled.wait()
        except asyncio.CancelledError:
            raise Refusal(
                503, "the service is stopping: the rows are queued, and not stored yet",
                RETRY_AFTER_S,
            ) from None  # fmt: skip
        except TimeoutError:
            raise Refusal(
                503, f"not in the store after {WAIT_S:g} s; the rows are still queued",
                RETRY_AFTER_S,
            ) from None  # fmt: skip
        if ticket.refused:
            raise Refusal(400, f"not fingerprints: {ticket.error}")
        if ticket.error is not None:
            raise Refusal(
                503, f"not in the store yet: {ticket.error}; the rows are still queued",
                RETRY_AFTER_S,
            )  # fmt: skip
        return 200, {"committed": rows, **answer}

    def _batch_of(self, content: bytes) -> pa.RecordBatch:
        """The rows of a body that is an Arrow stream."""
        options = self._service.options
        batches = read_batches(
            content, max_rows=options.max_batch, max_bytes=options.max_body_bytes
        )
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


def is_arrow(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bool(value.partition(b";")[0].strip().decode("latin-1").lower() == ARROW)
    return False


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request, whose size the limits have bounded."""
    message = await receive()
    if not message.get("more_body"):
        return bytes(message.get("body", b""))
    parts = [message.get("body", b"")]
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the connection was closed before the whole body had come")
        parts.append(message.get("body", b""))
    return b"".join(parts)


def decode(content: bytes) -> Body:
    """The body of /classify or /predict. Refusal: it is not one."""
    try:
        return DECODE.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not what this route takes: {error}") from None


def parsed(content: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not what this route takes: {error}") from None


async def off_loop(rows: int, work: Callable[..., Any], *given: Any) -> Any:
    """Call `work` here, or in a thread if there are so many rows that others would wait."""
    if rows <= LOOP_ROWS:
        return work(*given)
    return await asyncio.to_thread(work, *given)


def matrix_of(vectors: list[list[float]]) -> Floats | None:
    """Lists as float32[n, 20]; None if one of them has another length."""
    if any(len(vector) != DIMENSIONS for vector in vectors):
        return None
    flat = np.fromiter(chain.from_iterable(vectors), np.float64, DIMENSIONS * len(vectors))
    with np.errstate(over="ignore"):  # infinity is refused where numbers are checked
        return flat.astype(np.float32).reshape(-1, DIMENSIONS)


def classify_records(classifier: Classifier, records: list[Vector]) -> list[dict[str, Any]]:
    """An answer for each record: {"manifold": ...} or {"error": why}."""
    matrix = matrix_of([one.vector for one in records])
    same = all(one.layout is None and one.capture_id is None for one in records)
    if matrix is not None and same and is_possible(matrix, classifier):
        found = classifier.manifolds(classifier.classify(matrix))
        return [{"manifold": manifold} for manifold in found]
    # One of them at least is wrong: say of each what it is.
    answers = classifier.answer(msgspec.to_builtins(records))
    return [{n: a[n] for n in ("manifold", "error") if n in a} for a in answers]


def classify_batch(classifier: Classifier, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """An answer for each row of a batch of records, which need not be conformed."""
    lists = batch.column("vector")
    if is_plain(lists):
        vectors = record.vectors(batch)
        same = matching_rows(batch, layout=int(classifier.layout), capture_id=classifier.capture_id)
        if same.all() and is_possible(vectors, classifier):
            found = classifier.manifolds(classifier.classify(vectors))
            return [{"manifold": manifold} for manifold in found]
    # One of them at least is wrong, or of another type: say of each what it is.
    names = ("vector", "layout", "capture_id")
    columns = lists.to_pylist(), batch.column(names[1]).to_pylist(), texts(batch.column(names[2]))
    answers = classifier.answer(
        [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    )
    return [{n: a[n] for n in ("manifold", "error") if n in a} for a in answers]


def is_plain(lists: pa.Array) -> bool:
    """Whether a column of vectors can be viewed as float32[n, 20]."""
    wanted = lists.type == record.SCHEMA.field("vector").type
    return bool(wanted and not lists.null_count and not lists.flatten().null_count)


def texts(column: pa.Array) -> list[str | None]:
    """A column of text as Python's, with U+FFFD for each byte that is not UTF-8."""
    if pa.types.is_dictionary(column.type):
        known = texts(column.dictionary)
        return [None if index is None else known[index] for index in column.indices.to_pylist()]
    if pa.types.is_null(column.type):
        return [None] * len(column)
    large = pa.types.is_large_string(column.type)
    found = column.view(pa.large_binary() if large else pa.binary()).to_pylist()
    return [None if text is None else text.decode(errors="replace") for text in found]


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches of one stream as one. Their dictionaries may differ, and have too many entries
    together for the type of their indices: text takes their place."""
    if len(batches) == 1:
        return batches[0]
    plain = [
        pa.RecordBatch.from_arrays(
            [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns],
            batch.schema.names,
        )
        for batch in batches
    ]
    return pa.concat_batches(plain)


def is_possible(vectors: Floats, classifier: Classifier) -> bool:
    """Whether all vectors, float32[n, 20], could be fingerprints of the classifier's layout."""
    if not np.isfinite(vectors).all():
        return False
    layouts = np.full(len(vectors), classifier.layout)
    return not any(hit.any() for hit in broken_invariants(vectors, layouts).values())
