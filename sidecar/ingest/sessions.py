"""What happens in sessions now: counts and zones since the service started."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc

from capture_kernels.arrays import Ints
from capture_kernels.fingerprint.zones import ZONES
from pipeline.store.columns import encoded
from sidecar.processed import Processed
from sidecar.times import iso_time

# Sessions that are remembered; the one without rows for longest is forgotten first. The store has
# them all.
MOST_SESSIONS = 4_096


@dataclass
class LiveSession:
    """Rows of a session since the service started.

    zones: rows by zone, int64[5], in the order of `ZONES`; empty if nothing was served.
    last_request, last_position, last_zone: of the row that came last.
    """

    fingerprints: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    zones: Ints = field(default_factory=lambda: np.zeros(len(ZONES), np.int64))
    last_request: str = ""
    last_position: int = 0
    last_zone: str | None = None


class Sessions:
    """An observer that keeps the sessions of the rows that arrive."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str | None, LiveSession] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, processed: Processed) -> None:
        codes, names = encoded(processed.batch.column("session_id"))
        rows = np.bincount(codes, minlength=len(names))
        last = np.zeros(len(names), np.int64)
        last[codes] = np.arange(len(codes))  # the last one written stays
        zones = np.zeros((len(names), len(ZONES)), np.int64)
        zone = processed.classified.zone if processed.classified else None
        if zone is not None:
            cells = codes * len(ZONES) + zone
            zones += np.bincount(cells, minlength=zones.size).reshape(zones.shape)
        picked = pc.take(processed.batch.column("request_id"), last).to_pylist()
        positions = processed.batch.column("position").to_numpy()[last].tolist()
        with self._lock:
            for code, name in enumerate(names.to_pylist()):
                live = self._sessions.pop(name, None) or LiveSession(first_at=processed.received_at)
                live.fingerprints += int(rows[code])
                live.last_at = processed.received_at
                live.zones += zones[code]
                live.last_request, live.last_position = picked[code], positions[code]
                live.last_zone = None if zone is None else ZONES[zone[last[code]]]
                self._sessions[name] = live  # the newest last
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def __len__(self) -> int:
        return len(self._sessions)

    def live(self, session_id: str | None = None) -> dict[str, Any] | None:
        """One session as JSON values, or None if it had no rows since the start."""
        with self._lock:
            found = self._sessions.get(session_id)
            return None if found is None else as_json(session_id, found)

    def newest(self, most: int) -> list[dict[str, Any]]:
        """The sessions whose rows came last, newest first, as JSON values."""
        with self._lock:
            names = list(reversed(self._sessions))[:most]
            return [as_json(name, self._sessions[name]) for name in names]


def as_json(session_id: str | None, live: LiveSession) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "fingerprints": live.fingerprints,
        "first_received_at": iso_time(live.first_at),
        "last_received_at": iso_time(live.last_at),
        "zones": dict(zip(ZONES, live.zones.tolist(), strict=True)),
        "last_request_id": live.last_request,
        "last_position": live.last_position,
        "last_zone": live.last_zone,
    }
