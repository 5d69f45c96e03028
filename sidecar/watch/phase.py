"""A phase of a request, as its span says it."""

from __future__ import annotations

from typing import NamedTuple

from capture_kernels.fingerprint.zones import ZONES


class Phase(NamedTuple):
    """A phase of a request that has ended.

    Args:
        traceparent, response_id, session_id: of its first row, None if they did not come.
        first_at, last_at: of its rows, microseconds since 1970.
        zone_rows: rows in each of ZONES. confidence: mean over the rows of the commonest zone.
        cluster_id: the commonest, -1 for none; cluster_label: None without a cluster.
        ended_by: "idle", "next phase", "no room", "reload" or "shutdown".
    """

    request_id: str
    phase: str
    traceparent: str | None
    response_id: str | None
    session_id: str | None
    model: str
    run_id: str
    first_at: int
    last_at: int
    zone_rows: list[int]
    confidence: float
    cluster_id: int
    cluster_label: str | None
    cluster_rows: int
    ended_by: str

    @property
    def rows(self) -> int:
        return sum(self.zone_rows)

    @property
    def zone(self) -> str:
        """The commonest zone of its rows."""
        return ZONES[self.zone_rows.index(max(self.zone_rows))]
