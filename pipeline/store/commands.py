"""`attn db`: create, inspect, fill, export and prune a store."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.progress import ProgressDisplay, shown_progress
from pipeline.store.base import Selection, as_utc
from pipeline.store.open import open_store

from .transfer import export_file, import_file

# Rows between two lines of progress without a terminal.
PROGRESS_ROWS = 1_000_000

db_app = typer.Typer(no_args_is_help=True, help="Create, inspect, fill and prune a store.")

Db = Annotated[Path, typer.Option("--db", help="Store: a .db file or a Parquet folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@db_app.command("init")
def init(db: Db) -> None:
    """Create an empty store, or migrate an old one to the current schema."""
    with open_store(db, create=True) as store:
        print(f"{db} is ready, with {store.counts().rows:,} fingerprints")


@db_app.command("info")
def info(db: Db, as_json: AsJson = False) -> None:
    """Show what a store holds."""
    with open_store(db, read_only=True) as store:
        counts, groups, runs = store.counts(), store.groups(), store.runs()
    if as_json:
        found = {"db": str(db), **vars(counts), "groups": list(map(vars, groups)), "runs": runs}
        print(json.dumps(found, default=datetime.isoformat))
        return
    facts = {
        "fingerprints": f"{counts.rows:,}",
        "requests": f"{counts.requests:,}",
        "sessions": f"{counts.sessions:,}",
        "first": _time(counts.first),
        "last": _time(counts.last),
        "duplicates seen": f"{counts.duplicates:,}",
        **{f"rejected, {reason}": f"{n:,}" for reason, n in sorted(counts.rejected.items())},
        "discovery runs": f"{len(runs):,}" + (f", last {runs[0]['run_id']}" if runs else ""),
    }
    _show(str(db), ("", ""), list(facts.items()))
    rows = []
    for g in groups:
        times = _time(g.first), _time(g.last)
        rows.append((g.model, Layout(g.layout).label, g.capture_id, f"{g.rows:,}", *times))
    if rows:
        titles = ("model", "layout", "capture_id", "fingerprints", "first", "last")
        _show("Groups of comparable fingerprints", titles, rows)


@db_app.command("import")
def import_command(
    files: Annotated[list[Path], typer.Argument(help=".parquet, .jsonl or .jsonl.gz files.")],
    db: Db,
    as_json: AsJson = False,
) -> None:
    """Append the records of files; the store is created if there is none."""
    results = {}
    with open_store(db, create=True) as store:
        for path in files:
            with shown_progress(f"importing {path.name}", PROGRESS_ROWS) as display:
                results[str(path)] = import_file(store, path, _show_rows(display))
        store.compact()
    if as_json:
        print(json.dumps({name: vars(imported) for name, imported in results.items()}))
        return
    for name, imported in results.items():
        print(
            f"{name}: {imported.rows:,} rows, {imported.inserted:,} stored, "
            f"{imported.duplicates:,} duplicates, {sum(imported.rejected.values()):,} rejected"
        )
        for reason, count in sorted(imported.rejected.items()):
            line = imported.first_lines.get(reason)
            where = f", first on line {line:,}" if line else ""
            print(f"  rejected {count:,}: {reason}{where}")


@db_app.command("export")
def export_command(
    path: Annotated[Path, typer.Argument(help="A .parquet, .jsonl or .jsonl.gz file to write.")],
    db: Db,
    start: Annotated[datetime | None, typer.Option(help="Captured at or after (UTC).")] = None,
    end: Annotated[datetime | None, typer.Option(help="Captured before (UTC).")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    layout: Annotated[str | None, typer.Option(help="Only log16 or layered.")] = None,
    capture_id: Annotated[str | None, typer.Option(help="Only this capture's.")] = None,
) -> None:
    """Write records to a file, all of them or a selection."""
    chosen = None if layout is None else int(Layout.parse(layout))
    selection = Selection(start, end, model, chosen, capture_id)
    with (
        open_store(db, read_only=True) as store,
        shown_progress(f"exporting to {path.name}", PROGRESS_ROWS) as display,
    ):
        rows = export_file(store, path, selection, _show_rows(display))
    print(f"{path}: {rows:,} fingerprints")


@db_app.command("prune")
def prune(
    db: Db,
    before: Annotated[datetime | None, typer.Option(help="Captured before this (UTC).")] = None,
    older_than_days: Annotated[
        float | None, typer.Option(help="Captured longer ago than this.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print how many.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    now: Annotated[
        datetime | None, typer.Option(help="Count --older-than-days back from this time (UTC).")
    ] = None,
) -> None:
    """Delete old fingerprints, and compact a Parquet folder."""
    limit = _limit(before, older_than_days, now or datetime.now(UTC))
    with open_store(db, read_only=dry_run) as store:
        rows = sum(group.rows for group in store.groups(Selection(end=limit)))
        what = f"{rows:,} fingerprints captured before {_time(limit)}"
        if dry_run:
            print(f"{what} would be deleted from {db}")
            return
        if rows and not yes:
            if not sys.stdin.isatty():
                raise OptionError("nothing was deleted: add --yes, or --dry-run to see how much")
            typer.confirm(f"Delete {what} from {db}?", abort=True)
        deleted = store.prune(limit)
        store.compact()
    print(f"deleted {deleted:,} fingerprints from {db}")


def _limit(before: datetime | None, older_than_days: float | None, now: datetime) -> datetime:
    if before is not None and older_than_days is None:
        return as_utc(before)
    if before is not None or older_than_days is None:
        raise OptionError("give either --before TIME or --older-than-days DAYS")
    try:
        return as_utc(now) - timedelta(days=older_than_days)
    except (OverflowError, ValueError):
        raise OptionError(f"--older-than-days {older_than_days} is out of range") from None


def _time(time: datetime | None) -> str:
    return "-" if time is None else time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _show(title: str, titles: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """A table on a terminal, lines with tabs otherwise."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    table = Table(title=title, title_justify="left", show_header=any(titles))
    for name in titles:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _show_rows(display: ProgressDisplay) -> Callable[[int], None]:
    return lambda rows: display.show(rows, f"{rows:,} rows")
