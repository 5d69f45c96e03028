"""What senders say they sent, compared with what arrived."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec

# Senders that are remembered; the one that was silent longest is forgotten first.
MOST_SENDERS = 1_024


class FromSender(Protocol):
    """The facts of a message (`pipeline.stream.wire.Message`)."""

    @property
    def sender_id(self) -> str: ...
    @property
    def started(self) -> int: ...
    @property
    def rows_before(self) -> int: ...
    @property
    def dropped_total(self) -> int: ...


@dataclass
class Sender:
    """One sender: when it started, how many rows it must have sent and has dropped so far."""

    started: int
    next_row: int
    dropped: int


class Senders:
    """Counts the rows that senders dropped and those that were lost on the way.

    A sender numbers its rows: the message after a gap shows how many are missing. One that was
    restarted counts from 0 again, which is counted as a restart and not as a loss; messages of its
    former self that come late are none of its.

    Attributes:
        counts: dropped_by_sender and lost_in_transit, in rows; restarts, repeated (messages that
            came twice or out of order) and forgotten senders.
    """

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._senders: OrderedDict[str, Sender] = OrderedDict()
        self._lock = threading.Lock()
        for sender_id, facts in (known or {}).items():
            self._senders[sender_id] = msgspec.convert(facts, Sender)

    def note(self, message: FromSender, rows: int) -> None:
        """Take note of a message that brought this many rows."""
        with self._lock:
            known = self._senders.get(message.sender_id)
            if known is None or message.started > known.started:
                # What it sent before this service knew it went elsewhere.
                restarted = known is not None
                self.counts["restarts"] += restarted
                known = Sender(
                    message.started,
                    0 if restarted else message.rows_before,
                    0 if restarted else message.dropped_total,
                )
                self._senders[message.sender_id] = known
            if message.started < known.started or message.rows_before < known.next_row:
                self.counts["repeated"] += 1
                return
            self.counts["lost_in_transit"] += message.rows_before - known.next_row
            self.counts["dropped_by_sender"] += max(0, message.dropped_total - known.dropped)
            known.next_row = message.rows_before + rows
            known.dropped = max(known.dropped, message.dropped_total)
            self._senders.move_to_end(message.sender_id)
            if len(self._senders) > MOST_SENDERS:
                self._senders.popitem(last=False)
                self.counts["forgotten"] += 1

    def state(self) -> dict[str, Any]:
        """What `known` takes: JSON values by sender."""
        with self._lock:
            return {sender_id: asdict(sender) for sender_id, sender in self._senders.items()}
