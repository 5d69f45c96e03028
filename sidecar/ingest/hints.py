"""Hints back to the senders: the zone, the cluster and a sampling hint for each request."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.compute as pc
import zmq

from capture_kernels.fingerprint.zones import ZONES
from pipeline.store.columns import encoded
from sidecar.processed import Processed

from .binding import Bound

# Messages that a slow subscriber may be behind: ZMQ drops what comes after.
HIGH_WATER = 10_000


class Hints:
    """An observer that publishes, for each request of a batch, what its newest row says.

    A message has two parts: the request id, which subscribers select by its beginning, and JSON.
    A subscriber that does not read misses messages and holds up nobody.

    Raises:
        OptionError: the address cannot be bound, or the keys cannot be read.
    """

    def __init__(self, address: str, curve_keys: Path | None) -> None:
        self.published = 0
        # Sockets are not safe to use in several threads, and batches arrive by HTTP too.
        self._lock = threading.Lock()
        self._bound = Bound(zmq.PUB, "--hints-bind", address, curve_keys, {zmq.SNDHWM: HIGH_WATER})
        self.address = self._bound.address

    def __call__(self, processed: Processed) -> None:
        messages = [
            (hint["request_id"].encode(), msgspec.json.encode(hint)) for hint in hints(processed)
        ]
        with self._lock:
            for message in messages:
                self._bound.socket.send_multipart(message, zmq.NOBLOCK)
            self.published += len(messages)

    def close(self) -> None:
        with self._lock:
            self._bound.close()


def hints(processed: Processed) -> list[dict[str, Any]]:
    """One hint for each request of the batch, from its row that came last; none if nothing is
    served."""
    run, found = processed.run, processed.classified
    if run is None or found is None:
        return []
    codes, names = encoded(processed.batch.column("request_id"))
    last = np.zeros(len(names), np.int64)
    last[codes] = np.arange(len(codes))
    batch = processed.batch
    rows = zip(
        names.to_pylist(),
        batch.column("position").to_numpy()[last].tolist(),
        pc.take(batch.column("phase").dictionary_decode(), last).to_pylist(),
        found.zone[last].tolist(),
        np.round(found.zone_confidence[last].astype(np.float64), 6).tolist(),
        found.cluster_id[last].tolist(),
        strict=True,
    )
    return [
        {
            "request_id": request_id,
            "position": position,
            "phase": phase,
            "zone": ZONES[zone],
            "confidence": confidence,
            "cluster_id": cluster,
            "cluster_label": run.classifier.labels.get(cluster),
            "sampling_hint": run.hint(cluster, ZONES[zone]),
            "run_id": run.run_id,
        }
        for request_id, position, phase, zone, confidence, cluster in rows
    ]
