"""extract: the window's rows, frozen at the run's start, in chunks of `batch_size` rows."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Ints, Mask
from capture_kernels.errors import NewRunNeededError, RunError
from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.sampling import row_hashes
from discovery.artifacts.schema import identity_of
from discovery.execution.request_limit import RequestLimit
from discovery.options import DiscoverOptions, option_name
from discovery.runs.checkpoint import StageCheckpoint
from discovery.runs.state import survey
from pipeline.hashing import Hashes, request_hashes
from pipeline.record import impossible_rows
from pipeline.record import vectors as batch_vectors
from pipeline.store.base import Group, Selection, Store
from pipeline.store.open import open_store
from pipeline.store.times import to_micros

from .context import RunContext
from .fit_clusters import begin_search_process

COLUMNS = ("request_id", "position", "layer", "phase", "token_id", "captured_at", "vector")


def parameters(context: RunContext) -> dict[str, Any]:
    given = context.options.some("max_per_request", "seed", "batch_size")
    return {**given, "window": context.window, "columns": list(COLUMNS)}


def freeze_window(store: Store, options: DiscoverOptions, now: datetime) -> dict[str, Any]:
    """What this run reads, decided once and saved, so that a resumed run reads the same.

    Raises:
        RunError: too few rows; the message says how many there are and what would reach them.
    """
    wanted = wanted_rows(options, now, options.hours)
    groups = store.groups(wanted)
    if not groups:
        raise RunError(nothing_found(store, options, now))
    chosen = asdict(groups[0])
    if chosen["rows"] < options.min_rows:
        widen = "widen --hours or " if options.hours else ""
        raise RunError(
            f"only {chosen['rows']:,} fingerprints of {describe_group(groups[0])} in the window, "
            f"--min-rows is {options.min_rows:,}: {widen}lower --min-rows"
        )
    shown = ("model", "layout", "capture_id", "rows")
    window = replace(wanted, model=None, layout=None, capture_id=None)
    left_out = [{name: asdict(group)[name] for name in shown} for group in store.groups(window)]
    return {
        "start": wanted.start.isoformat() if wanted.start else None,
        "end": wanted.end.isoformat() if wanted.end else None,
        **{name: chosen[name] for name in shown},
        "snapshot": store.snapshot(),
        "late": late_rows(store, options, wanted, chosen),
        "left_out": [g for g in left_out if any(g[name] != chosen[name] for name in shown[:3])],
    }


def late_rows(
    store: Store, options: DiscoverOptions, wanted: Selection, chosen: dict[str, Any]
) -> dict[str, Any] | None:
    """The rows captured before the window that came too late for the last run on this store: those
    captured from `start` to before `end` that are not in the snapshot `after`. None without such a
    run in the output folder.
    """
    if wanted.start is None or not options.late_hours:
        return None
    recorded = {run["run_id"] for run in store.runs()}
    identity = identity_of({**chosen, "layout": Layout(chosen["layout"]).label})
    for run in reversed(survey(options.output_dir)):
        if run.manifest is None or run.run_id not in recorded:
            continue
        window = run.manifest["window"]
        if identity_of(run.manifest) == identity and "snapshot" in window:
            start = wanted.start - timedelta(hours=options.late_hours)
            end = datetime.fromisoformat(window["end"]) if window["end"] else wanted.start
            end = min(end, wanted.start)
            ends = {"start": start.isoformat(), "end": end.isoformat()}
            return {**ends, "after": window["snapshot"]} if start < end else None
    return None


def describe_group(group: Group) -> str:
    return f"{group.model} ({Layout(group.layout).label}, capture {group.capture_id})"


def nothing_found(store: Store, options: DiscoverOptions, now: datetime) -> str:
    """Why the window is empty, and which option would fill it."""
    everything = store.groups()
    total = sum(group.rows for group in everything)
    if total == 0:
        return f"{options.db} holds no fingerprints yet: run attn capture or attn db import first"
    matching = store.groups(wanted_rows(options, now, 0))
    if not matching:
        given = options.some("model", "layout", "capture_id").items()
        filters = " ".join(f"{option_name(name)} {value}" for name, value in given if value)
        there = "; ".join(describe_group(group) for group in everything[:3])
        return f"none of the {total:,} fingerprints matches {filters}; there are: {there}"
    oldest = min(group.first for group in matching)
    newest = max(group.last for group in matching)
    rows = sum(group.rows for group in matching)
    if newest >= now:
        return (
            f"no fingerprints in the {options.hours:g} hours before {now:%Y-%m-%d %H:%M} UTC: all "
            f"{rows:,} are newer or older (the newest is of {newest:%Y-%m-%d %H:%M}): use --hours 0"
        )

    def within(hours: float) -> int:
        groups = store.groups(wanted_rows(options, now, hours))
        return groups[0].rows if groups else 0

    reach, most = (math.ceil((now - t) / timedelta(hours=1)) for t in (newest, oldest))
    # The newest row alone is not enough for a run: widen until there are enough.
    while reach < most and within(reach) < options.min_rows:
        reach *= 2
    return (
        f"no fingerprints in the last {options.hours:g} hours: {options.db} holds {rows:,}, the "
        f"newest of {newest:%Y-%m-%d %H:%M} UTC: --hours {reach} reaches {within(reach):,}, "
        "--hours 0 takes all"
    )


def wanted_rows(options: DiscoverOptions, now: datetime, hours: float) -> Selection:
    """What the options select, in the `hours` before `now` (0: all)."""
    return Selection(
        start=now - timedelta(hours=hours) if hours else None,
        end=now if hours else None,
        model=options.model,
        layout=int(Layout.parse(options.layout)) if options.layout else None,
        capture_id=options.capture_id,
    )


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    begin_search_process(context)
    options, left_out = context.options, context.window["left_out"]
    most, expected = options.max_per_request, context.window["rows"]
    scratch = context.checkpoint.folder / ".hashes"
    with (
        open_store(options.db, read_only=True) as store,
        RequestLimit(scratch, most, expected, context.memory.scratch_bytes) as limit,
    ):
        window = first_pass(context, store, limit)
        keep = window.possible.copy()
        keep[keep] = limit.kept()
        kept = int(np.count_nonzero(keep))
        if kept < options.min_rows:
            raise RunError(too_few(options, window, kept))
        rows = kept_rows(second_pass(context, store, window.digest), keep)
        times = write_chunks(context, rows, kept)
    impossible = sum(window.impossible.values())
    summary = {
        "rows_in_window": len(keep) - window.late,
        "rows": kept,
        "captured_at": list(times),
        "late": window.late,
        "impossible": window.impossible,
        "over_request_limit": limit.rows - kept,
        "left_out": left_out,
    }
    says = f"{kept:,} rows of {context.window['model']}"
    if window.late:
        says += f"; {window.late:,} late ones of the window before"
    if limit.rows > kept:
        says += f"; {limit.rows - kept:,} over {most} a request left out"
    if impossible:
        says += f"; {impossible:,} that no attention row can have left out ({in_words(window)})"
    if left_out:
        other = sum(group["rows"] for group in left_out)
        says += f"; {other:,} of other models, layouts or captures left out"
    return summary, says


def in_words(window: Window) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in window.impossible.items())


def too_few(options: DiscoverOptions, window: Window, kept: int) -> str:
    rows, possible = len(window.possible), int(np.count_nonzero(window.possible))
    if possible < options.min_rows:
        return (
            f"{rows - possible:,} of {rows:,} rows are none that attention can have "
            f"({in_words(window)}), --min-rows is {options.min_rows}: see `attn db verify`"
        )
    return (
        f"--max-per-request {options.max_per_request} leaves {kept} of {possible:,} "
        f"rows, --min-rows is {options.min_rows}: raise it, or 0 for all"
    )


def write_chunks(
    context: RunContext, batches: Iterator[pa.RecordBatch], kept: int
) -> tuple[int, int]:
    """Save the rows in chunks; while one is written, the rows of the next are read.

    Args:
        batches: `kept` rows in all.

    Returns:
        When the first and the last of them were captured, in microseconds since 1970 UTC.
    """
    size = context.options.chunk_rows
    total = -(-kept // size)
    ends: list[int] = []
    writing: Future[None] | None = None
    # On an error or a stop, leaving this block waits for the chunk that is being written.
    with ThreadPoolExecutor(1) as writer:
        for index, rows in enumerate(full_chunks(batches, size)):
            for batch in rows:
                times = captured_at(batch)
                ends += [int(times.min()), int(times.max())]
            if writing:
                writing.result()
                context.chunk_done(index, total)
            writing = writer.submit(
                write_chunk, context.checkpoint, f"rows-{index:05d}.arrow", rows
            )
        if writing:
            writing.result()
            context.chunk_done(total, total)
    return min(ends), max(ends)


def write_chunk(checkpoint: StageCheckpoint, name: str, rows: list[pa.RecordBatch]) -> None:
    if not checkpoint.has(name):
        checkpoint.write_batch(name, merge(rows))


def captured_at(batch: pa.RecordBatch) -> Ints:
    """When each row was captured, in microseconds since 1970 UTC: int64[n]."""
    return np.asarray(batch.column("captured_at").cast(pa.int64()).to_numpy())


def scan(context: RunContext, store: Store) -> Iterator[pa.RecordBatch]:
    """The rows of the window as it was frozen, after those that came too late for the last run."""
    window = context.window
    identity = {name: window[name] for name in ("model", "layout", "capture_id")}
    parts = [window["late"], {**window, "after": None}]
    for part in filter(None, parts):
        ends = (part["start"], part["end"])
        start, end = (datetime.fromisoformat(moment) if moment else None for moment in ends)
        yield from store.scan(
            Selection(start, end, **identity),
            snapshot=window["snapshot"],
            after=part["after"],
            columns=COLUMNS,
            batch_rows=context.options.chunk_rows,
            as_stored=True,
        )


class Window(NamedTuple):
    """What the first pass found of the window's n rows.

    possible: bool[n], not in `impossible`, the number of rows for each reason; late: how many were
    captured before the window; digest: of all rows.
    """

    possible: Mask
    impossible: dict[str, int]
    late: int
    digest: bytes


def first_pass(context: RunContext, store: Store, limit: RequestLimit) -> Window:
    """Check all rows of the window, give the hashes of the possible ones to `limit`, and check that
    a resumed run finds the rows that it began with.

    Raises:
        NewRunNeededError: rows were deleted since.
    """
    digest = hashlib.sha256()
    possible, impossible = [np.empty(0, bool)], Counter[str]()
    start, late = context.window["start"], 0
    first = to_micros(datetime.fromisoformat(start)) if start else None
    for batch in scan(context, store):
        context.stop_if_asked()
        layouts = pa.array(np.full(batch.num_rows, context.layout, np.uint8))
        columns = {name: batch.column(name) for name in COLUMNS}
        faults = impossible_rows({**columns, "vector": batch_vectors(batch), "layout": layouts})
        fine = np.ones(batch.num_rows, bool)
        for reason, hit in faults.items():
            impossible[reason] += int(np.count_nonzero(hit & fine))
            fine &= ~hit
        requests, rows = hashes(context, batch)
        digest.update(rows.data)
        limit.add(requests[fine], rows[fine])
        possible.append(fine)
        late += int(np.count_nonzero(captured_at(batch) < first)) if first else 0
    found = np.frombuffer(digest.digest(), np.uint8)
    window = Window(np.concatenate(possible), dict(+impossible), late, digest.digest())
    if not len(window.possible):
        raise NewRunNeededError("this run's rows are no longer in the store: start a new run")
    if not context.checkpoint.has("found.npz"):
        context.checkpoint.write_arrays("found.npz", digest=found)
    elif not np.array_equal(context.checkpoint.read_arrays("found.npz")["digest"], found):
        raise NewRunNeededError("rows of this run were deleted from the store: start a new run")
    return window


def second_pass(context: RunContext, store: Store, digest: bytes) -> Iterator[pa.RecordBatch]:
    """The rows of the window once more.

    Raises:
        NewRunNeededError: they are not those of the first pass.
    """
    again = hashlib.sha256()

    def add(batch: pa.RecordBatch) -> None:
        again.update(hashes(context, batch)[1].data)

    # In a thread: meanwhile the rows are written and more of them are read.
    with ThreadPoolExecutor(1) as hasher:
        added: Future[None] | None = None
        for batch in scan(context, store):
            if added:
                added.result()
            added = hasher.submit(add, batch)
            yield batch
        if added:
            added.result()
    if again.digest() != digest:
        raise NewRunNeededError(
            "rows of this run were deleted from the store while it read them: start a new run"
        )


def hashes(context: RunContext, batch: pa.RecordBatch) -> tuple[Hashes, Hashes]:
    """64-bit hashes of the rows' requests, and of their keys: uint64[n] each."""
    requests = request_hashes(batch)
    return requests, row_hashes(requests, batch, context.options.seed)


def kept_rows(batches: Iterator[pa.RecordBatch], keep: Mask) -> Iterator[pa.RecordBatch]:
    """The rows to keep. No batch is empty."""
    end = 0
    for batch in batches:
        start, end = end, end + batch.num_rows
        own = keep[start:end]
        if own.any():
            yield batch if own.all() else batch.filter(pa.array(own))


def full_chunks(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[pa.RecordBatch]]:
    """The rows in chunks of exactly `size` (the last may be smaller), each as a list of batches."""
    waiting: list[pa.RecordBatch] = []
    room = size
    for batch in batches:
        while batch.num_rows >= room:
            yield [*waiting, batch.slice(0, room)]
            batch, waiting, room = batch.slice(room), [], size
        if batch.num_rows:
            waiting.append(batch)
            room -= batch.num_rows
    if waiting:
        yield waiting


def merge(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of several; their dictionaries are merged in order of first appearance."""
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    return table.to_batches()[0]
