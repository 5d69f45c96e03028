"""What senders say they sent, compared with what arrived."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.stream.wire import Message
from sidecar.watch.metrics import Metrics

# Senders that are remembered; the one that was silent longest is forgotten first.
MOST_SENDERS = 1_024

COUNTS = (
    "dropped_by_sender", "lost_in_transit", "lost_messages", "restarts", "repeated", "forgotten",
)  # fmt: skip


@dataclass
class Sender:
    """One sender: when it started, the number of its next message and row, and how many rows it
    has dropped."""

    started: int
    next_seq: int
    next_row: int
    dropped: int


class Senders:
    """Counts the rows that senders dropped and those that were lost on the way.

    A sender numbers its messages and rows: what comes after a gap shows how much is missing. One
    that was restarted counts from 0 again, which is counted as a restart and not as a loss.

    Attributes:
        counts: dropped_by_sender and lost_in_transit, in rows; restarts; lost_messages, of senders
            that do not number their rows; repeated messages, which came twice or out of order; and
            senders that were forgotten.
    """

    def __init__(self, metrics: Metrics, known: Mapping[str, Sender] | None = None) -> None:
        self._metrics = metrics
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._senders = OrderedDict(known or {})
        self._lock = threading.Lock()

    def note(self, message: Message) -> None:
        """Take note of a message that arrived."""
        with self._lock:
            known = self._senders.get(message.sender_id)
            if known is None:
                # What it sent before this service knew it went elsewhere.
                known = Sender(
                    message.started, message.seq, message.rows_before, message.dropped_total
                )
            elif message.started > known.started or (
                # Its clock was set back, or it does not say when it started.
                message.seq == 0 and (message.started != known.started or message.started < 0)
            ):
                self.counts["restarts"] += 1
                self._metrics.sender_restarted()
                known = Sender(message.started, 0, 0, 0)
            if message.started < known.started or message.seq < known.next_seq:
                self.counts["repeated"] += 1
                return
            if message.started < 0:
                self.counts["lost_messages"] += message.seq - known.next_seq
            else:
                self._lost("lost_in_transit", message.rows_before - known.next_row)
            self._lost("dropped_by_sender", message.dropped_total - known.dropped)
            known.next_seq = message.seq + 1
            known.next_row = message.rows_before + message.batch.num_rows
            known.dropped = message.dropped_total
            self._senders[message.sender_id] = known
            self._senders.move_to_end(message.sender_id)
            if len(self._senders) > MOST_SENDERS:
                self._senders.popitem(last=False)
                self.counts["forgotten"] += 1

    def _lost(self, how: str, rows: int) -> None:
        if rows > 0:
            self.counts[how] += rows
            self._metrics.rows("lost_by_sender", rows, how)

    def state(self) -> dict[str, Any]:
        """`known` of the next service, as JSON values."""
        with self._lock:
            return {sender_id: asdict(sender) for sender_id, sender in self._senders.items()}
