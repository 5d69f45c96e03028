"""What lookups of sessions and requests return, of any store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from capture_kernels.fingerprint.zones import ZONES

from .times import MICROS, from_micros


class RequestRows(NamedTuple):
    """Some rows of a request.

    Args:
        total: how many the request has.
        rows: the chosen ones, in `record.SCHEMA`, by position and then by layer.
    """

    total: int
    rows: pa.Table


def check_cursor(last_at: int, tie: int) -> tuple[int, int]:
    """ValueError if one of the numbers is none that a store can hold."""
    if not all(MICROS[0] <= number <= MICROS[1] for number in (last_at, tie)):
        raise ValueError
    return last_at, tie


def session_facts(
    values: Mapping[str, Any], zones: Sequence[int], times: tuple[int, int], tie: int
) -> dict[str, Any]:
    """A session as `Store.sessions` returns it.

    Args:
        values: session_id, model, capture_id, layout, requests, fingerprints.
        zones: rows of each of `ZONES`.
        times: of its first and last row, in microseconds.
        tie: orders the sessions of one time.
    """
    first, last = times
    return {
        **values,
        "first_at": from_micros(first),
        "last_at": from_micros(last),
        "zones": dict(zip(ZONES, zones, strict=True)),
        "cursor": f"{last}:{tie}",
    }
