"""Times as answers and logs have them."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(at: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC, in milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
