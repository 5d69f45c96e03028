"""What some rows of a Parquet store hold, in a few numbers that fit into a file's footer."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.arrays import Ints
from pipeline.hashing import Hashes, string_hashes
from pipeline.store.base import Selection
from pipeline.store.columns import encoded, integers, readable

_REQUESTS = np.dtype([("hash", "<u8"), ("low", "<i8"), ("high", "<i8")])
_GROUP = ["model", "layout", "capture_id"]
# The value of each base-85 digit, by its ASCII code.
_DIGITS = np.zeros(256, np.int64)
_DIGITS[list(base64.b85encode(np.arange(85, dtype=">u4").tobytes())[4::5])] = np.arange(85)

GroupKey = tuple[str, int, str]


@dataclass(frozen=True)
class Summary:
    """What some rows hold.

    Args:
        groups: (model, layout, capture_id) -> rows, first and last captured_at in microseconds.
        requests: hash, lowest and highest position of each distinct request_id, by ascending hash.
        sessions: hashes of the distinct session_ids, ascending.
    """

    groups: dict[GroupKey, tuple[int, int, int]]
    requests: NDArray[np.void]
    sessions: Hashes

    @property
    def rows(self) -> int:
        return sum(rows for rows, _, _ in self.groups.values())

    @property
    def first(self) -> int:
        return min(first for _, first, _ in self.groups.values())

    @property
    def last(self) -> int:
        return max(last for _, _, last in self.groups.values())

    def is_within(self, selection: Selection) -> bool:
        """Whether all rows lie in the selection's time window."""
        first, last = selection.window
        return first <= self.first and self.last <= last

    def matching(self, selection: Selection) -> list[GroupKey]:
        """The groups that the selection names and whose times touch its window."""
        start, end = selection.window
        return [
            group
            for group, (_, first, last) in self.groups.items()
            if selection.exact.items() <= dict(zip(_GROUP, group, strict=True)).items()
            and last >= start
            and first <= end
        ]


def summarize(batch: pa.RecordBatch) -> Summary:
    """The summary of at least one row."""
    codes, ids = encoded(batch.column("request_id"))
    positions = integers(batch.column("position"))
    keys = {name: batch.column(name) for name in _GROUP}
    keys |= {name: readable(keys[name]).cast(pa.string()) for name in ("model", "capture_id")}
    times = pa.table({**keys, "at": batch.column("captured_at").cast(pa.int64())})
    found = times.group_by(_GROUP, use_threads=False).aggregate(
        [("at", "count"), ("at", "min"), ("at", "max")]
    )
    return Summary(
        {
            tuple(row[name] for name in _GROUP): (row["at_count"], row["at_min"], row["at_max"])
            for row in found.to_pylist()
        },
        _position_ranges(string_hashes(ids)[codes], positions, positions),
        np.sort(string_hashes(batch.column("session_id").drop_null().unique())),
    )


def merge(summaries: list[Summary]) -> Summary:
    """The summary of the rows of all of `summaries`."""
    groups: dict[GroupKey, tuple[int, int, int]] = {}
    for summary in summaries:
        for group, (rows, first, last) in summary.groups.items():
            old = groups.get(group, (0, first, last))
            groups[group] = old[0] + rows, min(old[1], first), max(old[2], last)
    requests = np.concatenate([np.empty(0, _REQUESTS), *(s.requests for s in summaries)])
    sessions = np.concatenate([np.empty(0, np.uint64), *(s.sessions for s in summaries)])
    ranges = _position_ranges(requests["hash"], requests["low"], requests["high"])
    return Summary(groups, ranges, np.unique(sessions))


def _position_ranges(hashes: Hashes, low: Ints, high: Ints) -> NDArray[np.void]:
    """Each distinct hash with the least of `low` and the greatest of `high`, by ascending hash."""
    order = np.argsort(hashes)
    hashes = hashes[order]
    starts = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]))
    ranges = np.empty(len(starts), _REQUESTS)
    ranges["hash"] = hashes[starts]
    ranges["low"] = np.minimum.reduceat(low[order], starts)
    ranges["high"] = np.maximum.reduceat(high[order], starts)
    return ranges


def pack(summary: Summary) -> dict[str, Any]:
    """A summary as JSON values."""
    return {
        "groups": [[*group, *values] for group, values in summary.groups.items()],
        "requests": base64.b85encode(zlib.compress(summary.requests.tobytes(), 1)).decode(),
        "sessions": base64.b85encode(zlib.compress(summary.sessions.tobytes(), 1)).decode(),
    }


def unpack(about: dict[str, Any]) -> Summary:
    """The reverse of `pack`."""
    requests, sessions = (zlib.decompress(_b85decode(about[n])) for n in ("requests", "sessions"))
    return Summary(
        {(model, layout, capture): tuple(v) for model, layout, capture, *v in about["groups"]},
        np.frombuffer(requests, _REQUESTS),
        np.frombuffer(sessions, np.uint64),
    )


def _b85decode(text: str) -> bytes:
    """`base64.b85decode` in NumPy: that takes 20 ms for the requests of a million rows."""
    digits = _DIGITS[np.frombuffer(text.encode("ascii"), np.uint8)]
    missing = -len(digits) % 5
    padded = np.pad(digits, (0, missing), constant_values=84).reshape(-1, 5)
    whole: bytes = (padded @ 85 ** np.arange(4, -1, -1)).astype(">u4").tobytes()
    return whole[: len(whole) - missing]
