"""An offline capture with many prompts at once, whose records another process stores.

A prompt is finished when all of its records are in the store, which is looked at until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.arrays import Ints
from pipeline.engines.captured import CapturedPrompt
from pipeline.engines.options import PromptError
from pipeline.store.base import BATCH_ROWS, Appended, Store

from .capture import CaptureSummary, Prompt, first_interrupt_deferred, request_ids
from .record import MEAN_LAYER

if TYPE_CHECKING:
    from pipeline.engines.sglang.offline import Generated, OfflineEngine

# Seconds between two looks at the store.
POLL_S = 0.2
# Seconds without any new row in the store, after which what is missing counts as lost.
PATIENCE_S = 60.0
# Prompts that run at once, and rows that may be on their way to the store: fewer than make its
# queue drop (engines/serving/sinks.py).
MOST_RUNNING, MOST_ROWS = 512, 50_000


@dataclass(eq=False)
class _Running:
    """A prompt that was given to the engine.

    Attributes:
        rows: the most that it can have. before: positions that the store had of it already.
        stored: its rows in the store, those included. done: what came of it; None while it runs.
    """

    request_id: str
    rows: int
    before: Ints
    stored: pa.Table
    done: Generated | None = None

    def missing(self) -> int:
        """How many of its rows are not in the store."""
        assert self.done is not None
        return len(np.setdiff1d(self.done.positions, positions_of(self.stored)))

    def captured(self) -> CapturedPrompt:
        """What a prompt was that is in the store as a whole."""
        assert self.done is not None
        prompt_tokens, new_tokens, positions, blind_rows = self.done
        # Of a Parquet folder a row may be there twice until it is compacted.
        there, first = np.unique(positions_of(self.stored), return_index=True)
        rows = self.stored.take(pa.array(first[np.isin(there, positions)]))
        return CapturedPrompt(_one_batch(rows), prompt_tokens, new_tokens, blind_rows)

    def appended(self) -> Appended:
        """How many of its rows were added."""
        assert self.done is not None
        before = int(np.isin(self.done.positions, self.before).sum())
        return Appended(len(self.done.positions) - before, before, {})


class BatchedCapture:
    """Runs prompts, as `capture.run_capture` does, but many at once.

    Args:
        engine: whose records reach `store` by themselves.
        store: is only read here.
        warn: called with a line about a prompt that the model cannot take.
        patience_s: seconds without a new row until what is missing counts as lost.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        store: Store,
        summary: CaptureSummary,
        *,
        warn: Callable[[str], None],
        progress: Callable[[CaptureSummary], None] = lambda summary: None,
        patience_s: float = PATIENCE_S,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._store, self.summary = engine, store, summary
        self._warn, self._progress, self._stopwatch = warn, progress, stopwatch
        self._patience_s = patience_s
        self._tasks: dict[asyncio.Task[Generated], _Running] = {}
        self._arriving: list[_Running] = []
        self._seen = store.snapshot()  # what was looked at
        # When that was, when a row came or a prompt ended, and when all began.
        self._looked_at = self._arrived_at = self._began = 0.0

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Run all prompts; the summary grows on the way. The first Ctrl+C starts no further prompt
        and waits for those that run; a second one waits for nothing. When rows are lost, no further
        prompt is started either."""
        summary = self.summary
        self._began = self._arrived_at = self._stopwatch()
        with first_interrupt_deferred() as interrupts, suppress(KeyboardInterrupt):
            summary.interrupted = True  # unless it gets to its end
            left = self._engine.run(self._run(prompts, interrupts))
            summary.interrupted = bool(interrupts) and left
        summary.seconds = self._stopwatch() - self._began

    async def _run(self, prompts: Sequence[Prompt], interrupts: list[int]) -> bool:
        """Whether prompts are left that were not started."""
        ids = request_ids(prompts, self._engine.capture_id)
        work = zip(prompts, ids, strict=True)
        waiting = next(work, None)
        while True:
            while waiting is not None and not interrupts and not self.summary.missing:
                if not self._start(*waiting):
                    break
                waiting = next(work, None)
            if not self._tasks and not self._arriving:
                return waiting is not None
            if self._tasks:
                done, _ = await asyncio.wait(
                    self._tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    self._finish(task)
            else:
                await asyncio.sleep(POLL_S)
            if self._stopwatch() - self._looked_at >= POLL_S or not self._tasks:
                self._look()

    def _start(self, prompt: Prompt, request_id: str) -> bool:
        """Give a prompt to the engine; False if it has to wait for its turn."""
        try:
            tokens = self._engine.tokens(prompt.text, request_id)
        except PromptError as error:
            self._refuse(request_id, error)
            return True
        rows = self._engine.most_rows(tokens)
        started = [*self._tasks.values(), *self._arriving]
        under_way = sum(each.rows for each in started)
        if len(self._tasks) >= MOST_RUNNING or (started and under_way + rows > MOST_ROWS):
            return False
        stored = _of_mean(pa.concat_tables(_pages(self._store, request_id)))
        running = _Running(request_id, rows, positions_of(stored), stored)
        task = asyncio.ensure_future(
            self._engine.generate(tokens, request_id=request_id, session_id=self.summary.session_id)
        )
        self._tasks[task] = running
        return True

    def _finish(self, task: asyncio.Task[Generated]) -> None:
        running = self._tasks.pop(task)
        try:
            running.done = task.result()
        except PromptError as error:
            self._refuse(running.request_id, error)
            return
        running.rows = len(running.done.positions)
        self._arriving.append(running)
        self._arrived_at = self._stopwatch()

    def _refuse(self, request_id: str, error: PromptError) -> None:
        self.summary.refused.append(request_id)
        self._warn(str(error))
        self._report()

    def _look(self) -> None:
        """Take the rows that came into the store, count the prompts that are there as a whole, and
        give up the others if nothing came for too long."""
        now = self._looked_at = self._stopwatch()
        self._take()
        for running in [each for each in self._arriving if not each.missing()]:
            self._arriving.remove(running)
            self.summary.add(running.captured(), running.appended())
            self._report()
        if self._arriving and now - self._arrived_at > self._patience_s:
            for running in self._arriving:
                lost = running.missing()
                self.summary.missing += lost
                self._warn(f"prompt {running.request_id!r}: {lost} rows did not reach the store")
            self._arriving.clear()

    def _take(self) -> None:
        known = {each.request_id: each for each in (*self._tasks.values(), *self._arriving)}
        now = self._store.snapshot()
        for batch in self._store.scan(snapshot=now, after=self._seen):
            rows = _of_mean(pa.Table.from_batches([batch]))
            for request_id, own in _by_request(rows):
                if running := known.get(request_id):
                    running.stored = pa.concat_tables([running.stored, own])
                    self._arrived_at = self._stopwatch()
        self._seen = now

    def _report(self) -> None:
        self.summary.seconds = self._stopwatch() - self._began
        self._progress(self.summary)


def positions_of(rows: pa.Table) -> Ints:
    """int64[R]."""
    found: Ints = rows.column("position").to_numpy().astype(np.int64)
    return found


def _of_mean(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(rows.column("layer"), MEAN_LAYER))


def _by_request(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each request."""
    names = rows.column("request_id").combine_chunks().dictionary_encode()
    numbers = names.indices.to_numpy()
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=len(names.dictionary)))
    for name, own in zip(names.dictionary.to_pylist(), np.split(order, ends[:-1]), strict=True):
        yield name, rows.take(pa.array(own))


def _pages(store: Store, request_id: str) -> Iterator[pa.Table]:
    offset = 0
    while True:
        found = store.request(request_id, offset, BATCH_ROWS)
        yield found.rows
        offset += BATCH_ROWS
        if offset >= found.total:
            return


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [column.combine_chunks() for column in rows.columns], schema=rows.schema
    )
