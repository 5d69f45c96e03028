"""`attn db`: create, inspect, fill, export and prune a store."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from capture_kernels.errors import AttnError, OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.progress import ProgressDisplay, shown_progress
from pipeline.store.base import Selection
from pipeline.store.open import open_store
from pipeline.store.times import as_utc

from .sources import STANDARD, file_format
from .transfer import Imported, ImportTarget, export_file, import_file
from .verify_command import verify

# Rows between two lines of progress without a terminal.
PROGRESS_ROWS = 1_000_000

db_app = typer.Typer(no_args_is_help=True, help="Create, inspect, fill and prune a store.")
db_app.command("verify")(verify)

Db = Annotated[Path, typer.Option("--db", help="Store: a .db file or a Parquet folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Format = Annotated[
    str | None, typer.Option("--format", help="parquet, jsonl or jsonl.gz, whatever the name is.")
]


@db_app.command("init")
def init(db: Db, as_json: AsJson = False) -> None:
    """Create an empty store, or migrate an old one to the current schema."""
    with open_store(db, create=True) as store:
        rows = store.counts().rows
    done = {"db": str(db), "rows": rows}
    _say(done, f"{db} is ready, with {rows:,} fingerprints", as_json)


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
        layout = Layout(g.layout).label if g.layout in list(Layout) else str(g.layout)
        rows.append((g.model, layout, g.capture_id, f"{g.rows:,}", *times))
    if rows:
        titles = ("model", "layout", "capture_id", "fingerprints", "first", "last")
        _show("Groups of comparable fingerprints", titles, rows)


@db_app.command("import")
def import_command(
    files: Annotated[list[Path], typer.Argument(help="Files, or - for standard input.")],
    db: Db,
    kind: Format = None,
    max_rejected: Annotated[
        int | None, typer.Option(min=0, help="End if more rows of a file than this are rejected.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Append the records of files; the store is created if there is none."""
    results: dict[Path, Imported] = {}
    try:
        with ImportTarget(db) as target:
            for path in dict.fromkeys(files):
                imported = results[path] = Imported()
                with (
                    shown_progress(f"importing {path.name}", PROGRESS_ROWS) as display,
                    target.counted(imported),
                ):
                    import_file(
                        target.append, path, kind, _show_rows(display), imported=imported,
                        max_rejected=max_rejected,
                    )  # fmt: skip
            target.store().compact()
    except AttnError as error:
        if not imported.inserted:
            raise
        raise type(error)(
            f"{error}; {imported.inserted:,} rows of {path} are stored, and importing it again "
            "adds the rest"
        ) from None
    finally:
        _show_imported({path: done for path, done in results.items() if done.rows}, kind, as_json)


@db_app.command("export")
def export_command(
    path: Annotated[Path, typer.Argument(help="A file to write, or - for standard output.")],
    db: Db,
    start: Annotated[datetime | None, typer.Option(help="Captured at or after (UTC).")] = None,
    end: Annotated[datetime | None, typer.Option(help="Captured before (UTC).")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    layout: Annotated[str | None, typer.Option(help="Only log16 or layered.")] = None,
    capture_id: Annotated[str | None, typer.Option(help="Only this capture's.")] = None,
    kind: Format = None,
    as_json: AsJson = False,
) -> None:
    """Write records to a file, all of them or a selection."""
    chosen = None if layout is None else int(Layout.parse(layout))
    selection = Selection(start, end, model, chosen, capture_id)
    with (
        open_store(db, read_only=True) as store,
        shown_progress(f"exporting to {path.name}", PROGRESS_ROWS) as display,
    ):
        rows = export_file(store, path, selection, _show_rows(display), kind)
    # Standard output that has the records gets nothing else.
    stream = sys.stderr if path == STANDARD else sys.stdout
    _say({"file": str(path), "rows": rows}, f"{path}: {rows:,} fingerprints", as_json, stream)


@db_app.command("prune")
def prune(
    db: Db,
    before: Annotated[datetime | None, typer.Option(help="Captured before this (UTC).")] = None,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="Captured longer ago than this.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print how many.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    now: Annotated[
        datetime | None, typer.Option(help="Count --older-than-days back from this time (UTC).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete old fingerprints, and compact a Parquet folder."""
    limit = _limit(before, older_than_days, now or datetime.now(UTC))
    with open_store(db, read_only=dry_run) as store:
        rows = sum(group.rows for group in store.groups(Selection(end=limit)))
        what = f"{rows:,} fingerprints captured before {_time(limit)}"
        done = {"db": str(db), "before": limit.isoformat(), "rows": rows, "deleted": 0}
        if dry_run:
            _say(done, f"{what} would be deleted from {db}", as_json)
            return
        if rows and not yes:
            if not sys.stdin.isatty():
                raise OptionError("nothing was deleted: add --yes, or --dry-run to see how much")
            typer.confirm(f"Delete {what} from {db}?", abort=True, err=True)
        deleted = store.prune(limit)
        store.compact()
    _say(done | {"deleted": deleted}, f"deleted {deleted:,} fingerprints from {db}", as_json)


def _limit(before: datetime | None, older_than_days: float | None, now: datetime) -> datetime:
    if (before is None) == (older_than_days is None):
        raise OptionError("give either --before TIME or --older-than-days DAYS")
    try:
        limit = before or as_utc(now) - timedelta(days=older_than_days or 0)
        return as_utc(limit).astimezone(UTC)
    except (OverflowError, ValueError):
        what = f"--before {before}" if before else f"--older-than-days {older_than_days}"
        raise OptionError(f"{what} is out of range") from None


def _time(time: datetime | None) -> str:
    return "-" if time is None else time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _show(title: str, titles: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """A table on a terminal, lines with tabs otherwise."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    table = Table(title=Text(title), title_justify="left", show_header=any(titles))
    for name in titles:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(Text, row))  # a model's name is no markup
    Console().print(table)


def _say(facts: dict[str, Any], sentence: str, as_json: bool, stream: TextIO | None = None) -> None:
    print(json.dumps(facts) if as_json else sentence, file=stream)


def _show_imported(results: dict[Path, Imported], kind: str | None, as_json: bool) -> None:
    """Counts on stdout; why rows were rejected on stderr as well."""
    if as_json:
        print(json.dumps({str(path): vars(imported) for path, imported in results.items()}))
    for path, imported in results.items():
        if not as_json:
            print(
                f"{path}: {imported.rows:,} rows, {imported.inserted:,} stored, "
                f"{imported.duplicates:,} duplicates, {sum(imported.rejected.values()):,} rejected"
            )
        unit = "row" if file_format(path, kind) == "parquet" else "line"
        for reason, count in sorted(imported.rejected.items()):
            first = f"first on {unit} {imported.first_lines[reason]:,}"
            print(f"{path}: rejected {count:,}: {reason}, {first}", file=sys.stderr)


def _show_rows(display: ProgressDisplay) -> Callable[[int], None]:
    return lambda rows: display.show(rows, f"{rows:,} rows")
