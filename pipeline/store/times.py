"""Times of records: microseconds since 1970, UTC, and `datetime`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

# The first and the last time that a record's captured_at can hold, in microseconds since 1970.
MICROS = -(2**63), 2**63 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def as_utc(time: datetime) -> datetime:
    """`time`, in UTC if it has no zone."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def to_micros(time: datetime) -> int:
    """Microseconds since 1970, UTC, exact; a time without a zone is taken as UTC."""
    return (as_utc(time) - _EPOCH) // timedelta(microseconds=1)


# The first and the last time that a `datetime` can hold.
TIMES = to_micros(datetime.min), to_micros(datetime.max)


def from_micros(micros: int) -> datetime:
    """The UTC time `micros` microseconds after 1970, clipped to the years 1 to 9999."""
    return _EPOCH + timedelta(microseconds=min(max(micros, TIMES[0]), TIMES[1]))
