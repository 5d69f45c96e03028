"""What is missing between a sender and the service is counted in rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pipeline.stream.wire import Message
from sidecar.ingest.senders import Sender, Senders
from sidecar.watch.metrics import Metrics

BATCH = pa.RecordBatch.from_pydict({"position": list(range(10))})


def message(seq: int, *, started: int = 1_000, dropped: int = 0, **given: Any) -> Message:
    """One of messages of ten rows each."""
    said = {"sender_id": "s", "started": started, "seq": seq, "rows_before": 10 * seq}
    return Message(BATCH, **{**said, "dropped_total": dropped, **given})


def counted(*messages: Message, before: Senders | None = None) -> dict[str, int]:
    """The counts that are not 0 after these messages."""
    senders = before or Senders(Metrics())
    for one in messages:
        senders.note(one)
    return {name: count for name, count in senders.counts.items() if count}


def test_rows_of_messages_that_did_not_come_are_lost_in_transit():
    assert counted(message(0), message(1), message(4), message(5)) == {"lost_in_transit": 20}


def test_rows_that_a_sender_dropped_are_counted_once():
    found = counted(message(0), message(1, dropped=30), message(2, dropped=35))
    assert found == {"dropped_by_sender": 35}


def test_what_came_before_the_service_knew_a_sender_is_no_loss():
    assert counted(message(7, dropped=90), message(8, dropped=90)) == {}


@pytest.mark.parametrize("started", [2_000, 500], ids=["later", "with its clock set back"])
def test_a_sender_that_was_started_again_is_a_restart_and_no_loss(started):
    again = [message(seq, started=started) for seq in (0, 1, 3)]
    assert counted(message(0), message(1), *again) == {"restarts": 1, "lost_in_transit": 10}


def test_a_message_that_came_twice_is_repeated():
    assert counted(message(0), message(1), message(1), message(0), message(2)) == {"repeated": 2}


def test_the_next_service_counts_what_was_lost_while_none_was_there():
    first = Senders(Metrics())
    counted(message(0), message(1), before=first)
    kept = {name: Sender(**state) for name, state in first.state().items()}
    assert counted(message(5), before=Senders(Metrics(), kept)) == {"lost_in_transit": 30}


def test_senders_without_end_do_not_fill_the_memory():
    senders = Senders(Metrics())
    found = counted(*(message(0, sender_id=f"s{n}") for n in range(3_000)), before=senders)
    assert len(senders.state()) == 1_024 and found == {"forgotten": 3_000 - 1_024}
