"""What a sidecar answers, as far as a client relies on it. Further fields are ignored, so that a
client understands a newer sidecar."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

# Cluster of a row of the map that is in none.
NO_CLUSTER = 2**16 - 1


class Answer(msgspec.Struct, frozen=True):
    """A JSON object."""


class Health(Answer, frozen=True):
    status: str


class Ready(Answer, frozen=True):
    """ready: whether artifacts are loaded and the store takes rows; problems: what is wrong if not;
    drift: a state, as 'drifting'; run_id: of the served run."""

    ready: bool
    problems: list[str] = []
    drift: str | None = None
    run_id: str | None = None


class Second(Answer, frozen=True):
    """The other cluster of a row between two."""

    cluster_id: int
    cluster_label: str | None = None
    probability: float = 0.0


class Manifold(Answer, frozen=True):
    zone: str
    confidence: float
    cluster_id: int
    cluster_label: str | None = None
    probability: float = 0.0
    second: Second | None = None


class Classified(Answer, frozen=True):
    """error: why this record of a batch could not be classified; then there is no manifold."""

    schema_version: int
    run_id: str
    manifold: Manifold | None = None
    error: str | None = None


class Result(Answer, frozen=True):
    """One of a batch: a manifold, or the reason why there is none."""

    manifold: Manifold | None = None
    error: str | None = None


class Batch(Answer, frozen=True):
    results: list[Result]
    schema_version: int
    run_id: str


class Added(Answer, frozen=True):
    """What became of the rows of an insert: how many are queued or, with `wait`, committed (rows
    that were there before are among them), and how many are not records, by reason; and of a single
    one how the run classifies it."""

    queued: int = 0
    committed: int = 0
    rejected: dict[str, int] = {}
    run_id: str | None = None
    manifold: Manifold | None = None


class LiveEvent(Answer, frozen=True):
    """A server-sent event: its name, id and data (parsed JSON)."""

    event: str
    id: str
    data: Any


class RunMap(NamedTuple):
    """The map of a run, a row for each fingerprint: coordinates float32[n], cluster uint16[n], an
    index of `cluster_ids` of the map's description (`NO_CLUSTER` for none), and zone uint8[n], an
    index of its `zones`."""

    x: NDArray[np.float32]
    y: NDArray[np.float32]
    cluster: NDArray[np.uint16]
    zone: NDArray[np.uint8]


# The columns of a map in their order, little-endian.
MAP_COLUMNS = (("x", "<f4"), ("y", "<f4"), ("cluster", "<u2"), ("zone", "u1"))


def decode_map(content: bytes) -> RunMap:
    """The columns of a map, one after the other in `content`.

    Raises:
        ValueError: it does not hold whole rows.
    """
    sizes = [np.dtype(kind).itemsize for _, kind in MAP_COLUMNS]
    rows, rest = divmod(len(content), sum(sizes))
    if rest:
        raise ValueError(f"a map of {len(content)} bytes has no whole number of rows")
    columns, start = [], 0
    for (_, kind), size in zip(MAP_COLUMNS, sizes, strict=True):
        columns.append(np.frombuffer(content, kind, rows, start))
        start += rows * size
    return RunMap(*columns)
