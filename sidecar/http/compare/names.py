"""A side as it is asked for: KIND:ID."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from starlette.exceptions import HTTPException

from pipeline.store.base import Selection

KINDS = ("session", "request", "run", "model", "window")
# Characters of an id that messages show.
SHOWN = 80


class Name(NamedTuple):
    """What it is, and which."""

    kind: str
    id: str

    @classmethod
    def parse(cls, text: str) -> Name:
        """HTTPException 400 if it is none."""
        kind, colon, id_ = text.partition(":")
        if not colon or kind not in KINDS or not id_:
            raise HTTPException(
                400, f"{text[:SHOWN]!r} is no side: use KIND:ID with KIND one of {', '.join(KINDS)}"
            )
        return cls(kind, id_)

    @property
    def window(self) -> Selection:
        """The window that the id of a `window` says. HTTPException 400 if it says none."""
        start, dots, end = self.id.partition("..")
        try:
            ends = [datetime.fromisoformat(text) for text in (start, end)]
            ends = [at.replace(tzinfo=at.tzinfo or UTC) for at in ends]
            if not dots or not ends[0] < ends[1]:
                raise ValueError
            return Selection(ends[0], ends[1])
        except (ValueError, OverflowError):
            raise HTTPException(
                400, f"{self.id[:SHOWN]!r} is no window: use window:2026-01-10T00:00:00Z.."
                "2026-01-11T00:00:00Z, the earlier time first",
            ) from None  # fmt: skip
