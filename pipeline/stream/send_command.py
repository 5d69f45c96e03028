"""`attn send`: replay stored records as a live stream."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.interrupts import INTERRUPTED, lost_interrupts_raised_again
from pipeline.progress import shown_progress
from pipeline.store.commands import PROGRESS_ROWS, AsJson, Format

# Exit code where the receiver did not get every row.
INCOMPLETE = 3


def send(
    source: Annotated[Path, typer.Argument(help="A store, a file of records, or -.")],
    to: Annotated[str, typer.Option(help="Where the receiver listens.")] = "tcp://127.0.0.1:9001",
    rate: Annotated[
        float | None, typer.Option(help="Rows a second, taken or not. Default: as it takes them.")
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="Rows in one message.")] = 256,
    repeat: Annotated[int, typer.Option(help="Send the source so many times.")] = 1,
    now: Annotated[
        bool, typer.Option("--now", help="Stamp rows with the time of sending.")
    ] = False,
    request_suffix: Annotated[
        str | None, typer.Option(help="Put after each request_id, with --repeat numbered.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Give up if nothing is received for so many seconds.")
    ] = 10.0,
    sender_id: Annotated[
        str | None, typer.Option(help="Name of this sender. Default: host and process.")
    ] = None,
    curve_keys: Annotated[
        Path | None, typer.Option(help="Folder of CURVE keys (attn stream keys).")
    ] = None,
    client: Annotated[str, typer.Option(help="Name of the sender's keys in it.")] = "client",
    kind: Format = None,
    as_json: AsJson = False,
) -> None:
    """Send the records of a store or a file to a receiver, as a running model would."""
    from .replay import Replayed, ReplayOptions, replay
    from .sender import Sender

    options = ReplayOptions(rate, batch_rows, repeat, now, request_suffix, timeout)
    replayed = Replayed()
    interrupted = False
    sender = Sender(to, sender_id=sender_id, curve_keys=curve_keys, client=client)
    try:
        with (
            lost_interrupts_raised_again(),
            shown_progress(f"sending {source.name}", PROGRESS_ROWS) as display,
        ):
            replay(
                source, sender, options, kind, replayed=replayed,
                progress=lambda rows: display.show(
                    rows, f"{rows:,} rows, {sender.dropped.rows:,} dropped"
                ),
            )  # fmt: skip
        sender.close(timeout)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sender.close(0.0 if interrupted or replayed.gave_up else timeout)
    sent, dropped = sender.sent, sender.dropped
    rejected = sum(replayed.rejected.values())
    if as_json:
        facts = {
            "to": to,
            "sender_id": sender.sender_id,
            "started": sender.started,
            "sent": sent._asdict(),
            "dropped": dropped._asdict(),
            "rejected": dict(replayed.rejected),
            "seconds": round(replayed.seconds, 3),
        }
        print(json.dumps(facts))
    else:
        print(
            f"{to}: {sent.rows:,} rows sent in {sent.messages:,} messages, {dropped.rows:,} "
            f"dropped, {rejected:,} rejected, {sent.rows / max(replayed.seconds, 1e-6):,.0f} rows/s"
        )
    for reason, count in sorted(replayed.rejected.items()):
        print(f"{source}: rejected {count:,}: {reason}", file=sys.stderr)
    if interrupted:
        print(f"interrupted: {sent.rows:,} rows were sent", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if problem := _problem(to, sent.rows, dropped.rows, replayed.gave_up, timeout):
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(INCOMPLETE)


def _problem(to: str, sent: int, dropped: int, gave_up: bool, timeout: float) -> str:
    """What the receiver lacks, and what to do; empty if it has got everything."""
    if not sent:
        return (
            f"nobody received at {to} within {timeout:g} s: start the receiver, and give both"
            " ends the same keys or none"
        )
    if gave_up:
        return f"{to} took nothing for {timeout:g} s: {dropped:,} rows were not sent"
    if dropped:
        return f"{dropped:,} rows were dropped: the receiver was too slow; lower --rate or leave it"
    return ""
