"""What a sidecar's client gives, as tables."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd

from capture_kernels.errors import AttnError
from sidecar.client import NotFoundError, SidecarClient

# Rows of a page, and seconds between two looks for a request whose rows are on their way.
PAGE, LOOK_S = 1000, 0.1


class NotStoredError(AttnError):
    """The rows of a request did not reach the sidecar in time."""


def stored_rows(
    client: SidecarClient, request_id: str, *, rows: int = 1, wait_s: float = 10.0
) -> list[dict[str, Any]]:
    """All rows that a sidecar stored of a request, with their vectors, as JSON objects.

    Args:
        rows: how many there are to be at least; rows of an answer are on their way for a moment.
        wait_s: seconds to wait for them.

    Raises:
        NotStoredError: there are fewer after that.
        SidecarError: as of `SidecarClient.request`.
    """
    until = time.monotonic() + wait_s
    while True:
        found = _all_pages(client, request_id)
        if len(found) >= rows:
            return found
        if time.monotonic() > until:
            raise NotStoredError(
                f"the sidecar has {len(found)} rows of request {request_id}, not {rows}"
            )
        time.sleep(LOOK_S)


def _all_pages(client: SidecarClient, request_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    offset: int | None = 0
    while offset is not None:
        try:
            page = client.request(request_id, offset=offset, limit=PAGE, vectors=True)
        except NotFoundError:
            return found
        found += page["records"]
        offset = page["next_offset"]
    return found


def compared(answer: dict[str, Any], what: str = "zones") -> pd.DataFrame:
    """A list of a comparison as a frame, by falling difference.

    Args:
        answer: of `SidecarClient.compare`.
        what: zones, clusters, axes, bands or phases.

    Returns:
        A row for each zone, cluster, ... with a, b, the ends of their intervals and differs, as
        docs/http.md has them, and difference, b - a. Empty where the answer has no such list.
    """
    found = pd.DataFrame(answer[what] or [])
    if found.empty:
        return found
    found["difference"] = found["b"] - found["a"]
    order = found["difference"].abs().sort_values(ascending=False, kind="stable").index
    return found.loc[order].reset_index(drop=True)
