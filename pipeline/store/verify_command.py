"""`attn db verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from capture_kernels.errors import StoreError
from pipeline.progress import shown_progress

from .open import open_store

# Rows between two lines of progress without a terminal.
PROGRESS_ROWS = 1_000_000


def verify(
    db: Annotated[Path, typer.Option("--db", help="Store: a .db file or a Parquet folder.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Take out what is wrong, and keep it beside the store.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Read a whole store, and say which rows are not records and what is damaged."""
    done: list[str] = []
    with (
        open_store(db, read_only=not repair) as store,
        shown_progress(f"reading {db.name}", PROGRESS_ROWS) as display,
    ):
        found = left = store.verify(lambda rows: display.show(rows, f"{rows:,} rows"))
        if repair and not found.is_good:
            try:
                for step in store.repair():
                    done.append(step)
            except StoreError as error:
                done.append(f"cannot be repaired: {error}")
            left = store.verify()
    if as_json:
        facts = {"db": str(db), **vars(found), "done": done, "left": vars(left)}
        print(json.dumps(facts))
    else:
        print(f"{db}: {found.rows:,} rows read, {sum(found.bad.values()):,} are not records")
        for reason, count in sorted(found.bad.items()):
            print(f"  {count:,}: {reason}")
        for line in (*found.problems, *done):
            print(f"  {line}")
        if done and left.is_good:
            print("  nothing is wrong any more")
    if not left.is_good:
        raise typer.Exit(3)
