"""The model's thread: all requests in turn, a token each, so that none waits for another's end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import pyarrow as pa
import torch

from capture_kernels.errors import AttnError
from pipeline.engines.attention_tap import AttentionCall, AttentionTap
from pipeline.engines.serving.budget import OverheadBudget
from pipeline.engines.serving.request import RequestError

from .errors import BusyError
from .hidden import Inside
from .model import ServedModel
from .sequence import Sequence, Step, Work

LOG = logging.getLogger("attn.serve")
# The defaults of `ModelLoop`.
MOST_ACTIVE, MOST_WAITING, MOST_BEHIND = 64, 256, 256


class Job:
    """A request that was given to the loop.

    Args:
        emit: takes its steps, or the error that ends it, from the model's thread.
    """

    def __init__(self, work: Work, emit: Callable[[Step | Exception], None]) -> None:
        self.work, self.emit = work, emit
        self.sequence: Sequence | None = None  # in the model's thread only
        self.behind = 0  # steps that were emitted and not taken
        self.cancelled = False


class ModelLoop:
    """Runs requests in a thread of its own; `close` it, or leave its `with` block.

    Args:
        records: takes the records of captured rows, without waiting.
        most_active: requests that run in turn.
        most_waiting: requests that wait for their turn.
        most_behind: steps that a client may be behind before its request is left out.

    Attributes:
        budget: what capture costs, and whether that is too much.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        records: Callable[[pa.RecordBatch], object] | None = None,
        most_active: int = MOST_ACTIVE,
        most_waiting: int = MOST_WAITING,
        most_behind: int = MOST_BEHIND,
    ) -> None:
        self._model, self._records = model, records
        self.budget = OverheadBudget(model.options.overhead_budget)
        self._most_active, self._most_waiting = most_active, most_waiting
        self._most_behind = most_behind
        self._active: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="attn-model", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request. BusyError: too many wait already, or the server ends."""
        with self._changed:
            if self._closed:
                raise BusyError("the server is ending")
            if len(self._waiting) >= self._most_waiting:
                raise BusyError(f"{len(self._waiting)} requests are waiting: try again later")
            self._waiting.append(job)
            self._changed.notify()

    def taken(self, job: Job) -> None:
        """One of the job's steps was taken by its client."""
        with self._changed:
            job.behind -= 1
            if job.behind == self._most_behind // 2:
                self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Drop a request, and free what it holds, after the step that is running. It may have ended
        already."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    @property
    def counts(self) -> dict[str, int]:
        """Requests that hold a cache, and requests that wait for one."""
        with self._changed:
            return {"active": len(self._active), "waiting": len(self._waiting)}

    def end(self) -> None:
        """End after the step that is running, without waiting for it; what is unfinished gets a
        BusyError. A signal handler may call it: the lock is one that its thread may have."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """`end`, and wait for it."""
        self.end()
        self._thread.join()

    def __enter__(self) -> ModelLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        model = self._model
        with (
            torch.inference_mode(),
            AttentionTap(model.engine.model, self._observe),
            model.hidden.observed_by(self._observe),
        ):
            while (job := self._next()) is not None:
                self._step(job)
                del job

    def _next(self) -> Job | None:
        """The next job in turn; waits for one. None at the end."""
        job: Job | None
        with self._changed:
            while True:
                self._running = None
                self._drop_cancelled()
                if self._closed:
                    left, self._active, self._waiting = (
                        [*self._active, *self._waiting], deque(), deque(),
                    )  # fmt: skip
                    for job in left:
                        self._leave(job)
                        job.emit(BusyError("the server is ending"))
                    return None
                while self._waiting and len(self._active) < self._most_active:
                    self._active.append(self._waiting.popleft())
                for _ in range(len(self._active)):
                    job = self._active[0]
                    self._active.rotate(-1)
                    if job.behind < self._most_behind:
                        self._running = job
                        return job
                job = None  # hold nothing of it while waiting
                self._changed.wait()

    def _drop_cancelled(self) -> None:
        for queue in (self._active, self._waiting):
            for job in [job for job in queue if job.cancelled]:
                queue.remove(job)
                self._leave(job)

    def _leave(self, job: Job) -> None:
        if job.sequence is not None:
            job.sequence.hand_on_records()
            job.sequence = None

    def _step(self, job: Job) -> None:
        event: Step | Exception
        try:
            if job.sequence is None:
                job.sequence = Sequence(self._model, job.work, self._records)
            event = self._timed(job.sequence)
        except Exception as error:  # of this request: the others go on
            if not isinstance(error, AttnError | RequestError):
                LOG.error("request %s failed: %s", job.work.id, error, exc_info=error)
            event = error
        over = isinstance(event, Exception) or event.finish_reason is not None
        with self._changed:
            if over:
                self._active.remove(job)
            job.behind += 1
        if over:
            job.sequence = None
        job.emit(event)

    def _timed(self, sequence: Sequence) -> Step:
        before, started = sequence.capture_seconds, time.perf_counter()
        event = sequence.step()
        after = sequence.capture_seconds
        # Not the prompt's step, and no step of which nothing was wanted.
        if before is not None and after is not None and sequence.generated > 1 and event.entries:
            seconds = time.perf_counter() - started
            if self.budget.add(seconds, after - before):
                LOG.warning("capture is off: %s", self.budget.exceeded)
        return event

    def _observe(self, call: AttentionCall | Inside) -> None:
        job = self._running
        if job is not None and job.sequence is not None:
            job.sequence.observe(call)
