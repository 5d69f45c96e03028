"""Where every record of an engine went whose sidecar was killed: accounts, in rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import WrongAnswerError
from pipeline.store.open import open_store

DELIVERED = re.compile(r"records: (given \d+ delivered.*)")


class Accounts(NamedTuple):
    """Rows, by who counted them."""

    expected: int  # by the answers
    given: int  # by the plug-in, as its process ended
    handed_over: int
    dropped: int
    seen_handed_over: int  # by the second sidecar, of the sender's messages
    seen_dropped: int
    received: int  # by the second sidecar
    lost_in_transit: int
    stored: int
    duplicates: int
    invalid: int
    in_store_when_killed: int
    in_store: int

    @property
    def lost_with_the_killed(self) -> int:
        """What was handed over before the second sidecar's first message, and is not stored."""
        before = self.seen_handed_over - self.received - self.lost_in_transit
        return before - self.in_store_when_killed

    def faults(self) -> Iterator[str]:
        """Which sums are not what they must be."""
        sums = {
            "the plug-in was given what the answers have": (self.given, self.expected),
            "what it was given it handed over or dropped": (
                self.handed_over + self.dropped, self.given,
            ),
            "the sidecar knows what was handed over": (self.seen_handed_over, self.handed_over),
            "and what was dropped": (self.seen_dropped, self.dropped),
            "what it received it stored": (self.stored, self.received),
            "nothing came twice, and nothing was refused": (self.duplicates + self.invalid, 0),
            "what it stored is in the store": (
                self.in_store_when_killed + self.stored, self.in_store,
            ),
        }  # fmt: skip
        for what, (one, other) in sums.items():
            if one != other:
                yield f"{what}: {one:,} and {other:,} rows"
        if self.lost_with_the_killed < 0:
            yield f"the store has {-self.lost_with_the_killed:,} rows that nobody handed over"


def accounts_of(
    folder: Path, log: Path, stats: dict[str, Any], *, expected: int, in_store_when_killed: int,
    in_store: int,
) -> Accounts:  # fmt: skip
    """The accounts of one sender whose sidecar was killed once.

    Args:
        folder: has the file in which the second sidecar left what it knows of senders.
        log: of the engine, which has ended.
        stats: of the second sidecar, once no more rows came.

    Raises:
        WrongAnswerError: the log does not say what became of the records, or not of all.
    """
    (path,) = folder.glob("*.senders.json")
    (sender,) = json.loads(path.read_bytes()).values()
    said, rows = log_counts(log), stats["fingerprints"]
    if said["queued"]:
        raise WrongAnswerError(f"{said['queued']} rows were queued as the server ended")
    return Accounts(
        expected=expected,
        given=said["given"],
        handed_over=said["delivered"],
        dropped=said["dropped"],
        seen_handed_over=sender["next_row"],
        seen_dropped=sender["dropped"],
        received=rows["received"],
        lost_in_transit=stats["stream"]["lost_in_transit"],
        stored=rows["stored"],
        duplicates=rows["duplicate"],
        invalid=rows["invalid"],
        in_store_when_killed=in_store_when_killed,
        in_store=in_store,
    )


def log_counts(log: Path) -> dict[str, int]:
    """What the plug-in says of its records as it ends."""
    found = DELIVERED.findall(log.read_text(encoding="utf-8", errors="replace"))
    if len(found) != 1:
        raise WrongAnswerError(f"the server's log has {len(found)} lines of its records, not one")
    words = found[0].split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


def rows_of(store_path: Path) -> Counter[str]:
    """How many rows each request has in a store."""
    found: Counter[str] = Counter()
    with open_store(store_path, read_only=True) as store:
        for batch in store.scan(columns=["request_id"]):
            found.update(batch.column("request_id").to_pylist())
    return found
