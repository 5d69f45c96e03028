"""One request's captured rows: which are wanted, what its response says, and its records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from itertools import compress, count
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats
from capture_kernels.fingerprint.columns import vectors_of_columns
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules
from pipeline.record import MEAN_LAYER, SCHEMA, make_batch

from .entry_numbers import EntryNumbers, Statistics
from .phases import PhaseTracker
from .request import CaptureRequest
from .responses import (
    Entry,
    decoded,
    fingerprint_entry,
    hub_list,
    raw_entry,
    routing_of,
    sketch_entry,
)
from .rows import Row

T = TypeVar("T")
_numbers = count()
NO_RECORDS = pa.RecordBatch.from_pylist([], SCHEMA)


class RequestCollector:
    """Makes the response's entries and the records of one request's captured rows.

    The engine gives every generated token that it feeds to `feed`, and every row that `wants`
    names to `add`; a row may come later than its token.

    Args:
        request: what is wanted. Its `mask_prefix` is what is in force: with `mask_system`, too.
        request_id: of its records.
        model: what the records call the model.
        capture_id: what makes its vectors comparable (`record.capture_id`).
        layout: of the fingerprints.
        prompt_len: tokens of the prompt.
        phases: of its generated tokens; by default all are output.
        response_id: the response's `id`.
        keep_records: whether `records` will be taken.
        records_elsewhere: whether the engine makes records of the wanted rows itself.
        rules: what decides zones.

    Attributes:
        number: among all collectors of this process.
    """

    def __init__(
        self,
        request: CaptureRequest,
        *,
        request_id: str,
        model: str,
        capture_id: str,
        layout: Layout,
        prompt_len: int,
        phases: PhaseTracker | None = None,
        response_id: str | None = None,
        keep_records: bool = True,
        records_elsewhere: bool = False,
        rules: ZoneRules | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.request, self.prompt_len, self.layout = request, prompt_len, layout
        self.common: dict[str, Any] = {  # columns of its records that never change
            "request_id": request_id,
            "session_id": request.session_id,
            "prompt_len": prompt_len,
            "layer": MEAN_LAYER,
            "model": model,
            "capture_id": capture_id,
            "layout": int(layout),
            "response_id": response_id,
            "traceparent": request.traceparent,
        }
        self._tracker = phases or PhaseTracker(None)
        self._phases: list[str] = []  # of the generated tokens
        self._keep, self._elsewhere = keep_records, records_elsewhere
        # What its entries say of a row.
        self.entry_numbers = EntryNumbers(request.mode, request.top_k, layout, rules or ZoneRules())
        self._kept: list[tuple[Row, str]] = []
        self.rows = 0  # captured, with a key to describe or not
        self.bytes = 0  # of entries, as JSON
        self.seconds = 0.0  # spent on capture

    def feed(self, token: int) -> str:
        """The phase of the next generated token, which is now fed to the model."""
        self._phases.append(self._tracker.feed(token))
        return self._phases[-1]

    def wants(self, position: int) -> bool:
        """Whether the row at an absolute position is to be captured.

        Of the prompt's last `prompt_rows` rows those at multiples of `prompt_stride`; of the
        generated ones those at multiples of `stride`, up to `max_steps` of them; none within the
        masked prefix, and none at all if nobody gets anything of them, as where full scores alone
        are asked for.
        """
        request = self.request
        used = request.stream_entries or request.hubs or self._keep or self._elsewhere
        if position < request.mask_prefix or not used:
            return False
        if position < self.prompt_len:
            last = position >= self.prompt_len - request.prompt_rows
            return last and position % request.prompt_stride == 0
        if position % request.stride:
            return False
        before = (position - 1) // request.stride - (self.prompt_len - 1) // request.stride
        return not request.max_steps or before < request.max_steps

    def phase(self, position: int) -> str:
        """prompt, think or output."""
        return "prompt" if position < self.prompt_len else self._phases[position - self.prompt_len]

    def add(self, row: Row) -> list[Entry]:
        """Take a captured row; returns its entries of the response: one, in raw mode one a layer,
        none where the row has no key to describe or the response has no entries."""
        return decoded(self.add_encoded(row))

    def add_encoded(self, row: Row) -> list[bytes]:
        """As `add`, but each entry is JSON, which other processes are sent and Python's garbage
        collector need not look at: a sketch is some forty lists."""
        started = time.perf_counter()
        self.rows += 1
        phase = self.phase(row.position)
        if self._keep:
            self._kept.append((row, phase))
        found = self._entries(row, phase) if self.request.stream_entries else []
        entries = [msgspec.json.encode(entry) for entry in found]
        self.bytes += sum(map(len, entries))
        self.add_seconds(time.perf_counter() - started)
        return entries

    def add_seconds(self, seconds: float) -> None:
        """Count time that the engine spent on this request's capture."""
        self.seconds += seconds

    @property
    def waiting(self) -> int:
        """Rows that `records` would take."""
        return len(self._kept)

    def records(self) -> pa.RecordBatch:
        """The records of rows that have not been taken yet, in `record.SCHEMA`; rows without a key
        to describe have none."""
        kept, self._kept = self._kept, []
        if not kept:
            return NO_RECORDS
        columns = np.stack([[layer.mean for layer in row.layers] for row, _ in kept], axis=1)
        routings = [routing_of(row.layers) for row, _ in kept]
        rows = RecordedRows(
            [self.common] * len(kept),
            [row.position for row, _ in kept],
            [row.token_id for row, _ in kept],
            [phase for _, phase in kept],
            [row.captured_at for row, _ in kept],
            [experts for experts, _ in routings],
            [entropy for _, entropy in routings],
        )
        return record_batch(rows, columns, self.layout)

    def finish(self, hubs: Floats | None = None) -> dict[str, Any]:
        """`usage.attention` of the response.

        Args:
            hubs: float32[n], what the request's rows and layers added up by position.
        """
        usage: dict[str, Any] = {
            "mode": self.request.mode,
            "rows": self.rows,
            "bytes": self.bytes,
            "overhead_ms": round(1e3 * self.seconds, 3),
        }
        if hubs is not None:
            usage["hubs"] = hub_list(hubs, len(self.request.layers))
        return usage

    def _entries(self, row: Row, phase: str) -> list[Entry]:
        request = self.request
        layers = row.layers
        if not request.routing:
            layers = [layer._replace(routing=None) for layer in layers]
        numbers = row.entry_numbers
        if numbers is None:
            [numbers] = self.entry_numbers.of_rows(Statistics.of_row(layers))
        step = row.position - self.prompt_len + 1
        if request.mode == "fingerprint":
            return [fingerprint_entry(own, step=step, phase=phase, rows=layers) for own in numbers]
        seen = [(layer, own) for layer, own in zip(layers, numbers, strict=True) if own is not None]
        if request.mode == "sketch":
            return [sketch_entry(seen, step=step, phase=phase)] if seen else []
        # Counted as the positions of its keys are, so that no entry shows how much is hidden.
        position = row.position - request.mask_prefix
        return [
            raw_entry(layer, own, request.top_k, step=step, position=position, phase=phase)
            for layer, own in seen
        ]


class RecordedRows(NamedTuple):
    """What the records of R rows have beside their numbers, each of R. common: of
    `RequestCollector`; experts, entropy: as in `responses.routing_of`."""

    common: list[dict[str, Any]]
    position: list[int]
    token: list[int | None]
    phase: list[str]
    at: list[datetime]
    experts: list[list[int] | None]
    entropy: list[float | None]


def record_batch(rows: RecordedRows, columns: Floats, layout: Layout) -> pa.RecordBatch:
    """The records of rows of any requests, in `record.SCHEMA`; rows without a key to describe have
    none.

    Args:
        columns: float32[L, R, 32] of the captured layers (`capture_kernels.decode.answers`).
    """
    vector, sink_mass, valid = vectors_of_columns(columns, layout)
    if not valid.any():
        return NO_RECORDS
    if not valid.all():
        kept: list[Any] = [list(compress(each, valid)) for each in rows]
        rows = RecordedRows(*kept)
    commons, common_at = once_each(rows.common)
    times, time_at = once_each(rows.at)
    columns_of = {
        name: pa.array([common[name] for common in commons]).take(common_at) for name in commons[0]
    }
    changing = {
        "position": pa.array(rows.position, pa.int32()),
        "captured_at": pa.array(times, pa.timestamp("us", tz="UTC")).take(time_at),
        "phase": pa.array(rows.phase, pa.string()),
        "token_id": pa.array(rows.token, pa.int32()),
        "sink_mass": sink_mass[valid],
        "vector": vector[valid],
        "top_experts": pa.array(rows.experts, pa.list_(pa.int16())),
        "router_entropy": pa.array(rows.entropy, pa.float32()),
    }
    return make_batch({**columns_of, **changing}, len(rows.position))


def once_each(objects: Sequence[T]) -> tuple[list[T], pa.Array]:
    """The different ones of n objects, and which of them each is, int32[n]: Arrow makes a column of
    many rows of a few faster than of each row's."""
    found = {id(each): each for each in objects}
    number = dict(zip(found, range(len(found)), strict=True))
    return list(found.values()), pa.array([number[id(each)] for each in objects], pa.int32())
