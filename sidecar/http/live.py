"""GET /live: what arrives now, sampled, as server-sent events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules

from .errors import documented
from .streams import Events, EventStreams, event

if TYPE_CHECKING:
    from sidecar.processed import Processed

# Classified records that are sent in a second, and how often they are sent.
RECORDS_PER_S, TICKS_PER_S = 20, 4
# Messages that wait for a client: some ten seconds. Then the oldest are dropped.
MOST_WAITING = 256
# Columns of a record that are sent.
SHOWN = ("request_id", "session_id", "position", "prompt_len", "layer", "captured_at", "model",
         "phase", "token_id")  # fmt: skip

Row = tuple[float, "Processed", int]


class Client:
    """Messages that wait for one client; `dropped` of them had to go."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.dropped = 0
        self.ready = asyncio.Event()

    def put(self, message: bytes) -> None:
        if len(self.waiting) >= MOST_WAITING:
            self.waiting.popleft()
            self.dropped += 1
        self.waiting.append(message)
        self.ready.set()


class Broadcast:
    """An observer that shows clients of /live what arrives: a random sample of the records, and the
    zones of all of them in each second. Without clients it does nothing.

    Args:
        streams: of all event streams of the service.
    """

    def __init__(self, streams: EventStreams | None = None) -> None:
        self.streams = streams or EventStreams()
        self._clients: set[Client] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._random = np.random.default_rng()
        self._sample: list[Row] = []
        self._counts = np.zeros(len(ZONES), np.int64)
        self._comparable = self._clustered = 0

    def __call__(self, processed: Processed) -> None:
        if not self._clients or not len(processed.vectors):
            return
        counts = np.bincount(zones_of(processed), minlength=len(ZONES))
        found = processed.classified
        clustered = 0 if found is None else int(np.count_nonzero(found.cluster_id >= 0))
        with self._lock:
            self._counts += counts
            self._comparable += int(np.count_nonzero(processed.comparable))
            self._clustered += clustered
            # Every row since the last tick has a random number; those with the least are sent.
            most = RECORDS_PER_S // TICKS_PER_S
            keys = self._random.random(len(processed.vectors), np.float32)
            least = np.argpartition(keys, most)[:most] if len(keys) > most else np.arange(len(keys))
            self._sample += [(float(keys[row]), processed, int(row)) for row in least]
            self._sample.sort(key=lambda one: one[0])
            del self._sample[most:]

    def close(self) -> None:
        """End all event streams. May be called from any thread."""
        self.streams.close()

    async def events(self) -> Events:
        """The messages of one client."""
        client = Client()
        self._clients.add(client)
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick())
        try:
            while True:
                await client.ready.wait()  # at least once a second
                client.ready.clear()
                if client.dropped:
                    dropped, client.dropped = client.dropped, 0
                    yield event("dropped", b'{"dropped":%d}' % dropped)
                while client.waiting:
                    yield client.waiting.popleft()
        finally:
            self._clients.discard(client)

    async def _tick(self) -> None:
        """Send samples and zones as long as there are clients."""
        with self._lock:
            self._sample, self._counts[:] = [], 0
            self._comparable = self._clustered = 0
        ticks, since = 0, time.monotonic()
        while self._clients:
            await asyncio.sleep(1 / TICKS_PER_S)
            ticks += 1
            with self._lock:
                sample, self._sample = self._sample, []
            messages = await asyncio.to_thread(messages_of, sample) if sample else []
            if ticks % TICKS_PER_S == 0:
                now = time.monotonic()
                messages.append(self._mix(now - since))
                since = now
            for client in self._clients:
                for message in messages:
                    client.put(message)

    def _mix(self, seconds: float) -> bytes:
        with self._lock:
            counts = self._counts.tolist()
            comparable, clustered = self._comparable, self._clustered
            self._counts[:] = 0
            self._comparable = self._clustered = 0
        mix = {
            "at": datetime.now(UTC),
            "seconds": round(seconds, 3),
            "rows": sum(counts),
            "comparable": comparable,
            "clustered": clustered,
            "zones": dict(zip(ZONES, counts, strict=True)),
        }
        return event("zones", msgspec.json.encode(mix))


def zones_of(processed: Processed) -> NDArray[np.int8]:
    """The zone of each row, int8[n]; by the standard rules if no run is served."""
    if processed.classified is not None:
        return processed.classified.zone
    return standard_zones(processed.vectors, processed.batch.column("layout").to_numpy())


def standard_zones(
    vectors: NDArray[np.float32], layouts: NDArray[np.uint8], rules: ZoneRules | None = None
) -> NDArray[np.int8]:
    """Zones of vectors float32[n, 20] of several layouts: int8[n], indices into `ZONES`."""
    zones = np.empty(len(vectors), np.int8)
    for layout in np.unique(layouts):
        chosen = layouts == layout
        zones[chosen] = (rules or ZoneRules()).classify(vectors[chosen], Layout(int(layout))).zone
    return zones


def messages_of(sample: list[Row]) -> list[bytes]:
    """The events of sampled rows: each as a record and, if a run is served, with its hint."""
    messages = []
    for _, processed, row in sample:
        shown = shown_record(processed, row)
        messages.append(event("record", msgspec.json.encode(shown)))
        if processed.run is not None:
            names = ("request_id", "position", "phase", "zone", "confidence", "cluster_id",
                     "cluster_label", "run_id")  # fmt: skip
            hint = {name: shown[name] for name in names}
            hint["sampling_hint"] = processed.run.hint(shown["cluster_id"], shown["zone"])
            messages.append(event("hint", msgspec.json.encode(hint)))
    return messages


def shown_record(processed: Processed, row: int) -> dict[str, Any]:
    """One row of a batch as JSON values, with what the run says of it."""
    one = processed.batch.slice(row, 1)
    shown = {name: one.column(name)[0].as_py() for name in SHOWN}
    shown["step"] = step_of(shown["position"], shown.pop("prompt_len"))
    shown["comparable"] = bool(processed.comparable[row])
    shown |= {"run_id": processed.run_id, "cluster_id": -1, "cluster_label": None,
              "probability": 0.0, "second": None, "x": None, "y": None}  # fmt: skip
    run, found = processed.run, processed.classified
    layout = Layout(one.column("layout")[0].as_py())
    rules = ZoneRules() if run is None else run.classifier.rules
    evidence = rules.evidence(processed.vectors[row], layout)[0].astype(np.float64)
    shown["evidence"] = dict(zip(ZONES, np.round(evidence, 6).tolist(), strict=True))
    if found is None:
        zoned = ZoneRules().classify(processed.vectors[row], layout)
        zone, confidence = zoned.zone[0], zoned.confidence[0]
    else:
        zone, confidence = found.zone[row], found.zone_confidence[row]
        if run is not None and shown["comparable"]:
            cluster = int(found.cluster_id[row])
            shown |= {
                "cluster_id": cluster,
                "cluster_label": run.classifier.labels.get(cluster),
                "probability": round(float(found.probability[row]), 6),
                "second": run.classifier.second(found, row),
                "x": float(found.coordinates[row, 0]),
                "y": float(found.coordinates[row, 1]),
            }
    return shown | {"zone": ZONES[zone], "confidence": round(float(confidence), 6)}


def step_of(position: int, prompt_len: int | None) -> int:
    """The decode step of a position (DESIGN.md section 3)."""
    return position + 1 if prompt_len is None else position - prompt_len + 1


EXAMPLE = """retry: 2000

event: record
data: {"request_id":"r-1","session_id":null,"position":41,"layer":-1,"captured_at":\
"2026-01-10T04:02:11Z","model":"m","phase":"output","token_id":5,"step":12,\
"comparable":true,"run_id":"2026-01-10T04-02-11","cluster_id":3,"cluster_label":"induction",\
"probability":0.98,"second":null,"x":1.5,"y":-0.25,"zone":"semantic_bridge","confidence":0.61,"evidence":{"syntax_floor":0.11,\
"semantic_bridge":0.72,"long_range":0.05,"structure_ripple":0.1,"diffuse":0.2}}

event: zones
data: {"at":"2026-01-10T04:02:12.000000Z","seconds":1.0,"rows":8192,"comparable":8192,\
"clustered":7500,"zones":{"syntax_floor":4000,"semantic_bridge":2100,"long_range":900,\
"structure_ripple":192,"diffuse":1000}}
"""

router = APIRouter(tags=["live"])


@router.get(
    "/live",
    summary="Records as they arrive",
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: `record` (up to 20 a second, a random sample), "
            "`hint` (the sampling hint of a record's cluster or, without one, of its zone), "
            "`zones` (of all rows, each second) and `dropped` (messages that this client was too "
            "slow for).",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": EXAMPLE}},
        },
        **documented((503, "too many clients, or the service is ending")),
    },
)
async def live(request: Request) -> Response:
    broadcast: Broadcast = request.app.state.broadcast
    return broadcast.streams.response(broadcast.events)
