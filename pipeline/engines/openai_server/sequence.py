"""One request while it is served: its tokens, cache and capture, a forward pass at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.engines.attention_tap import AttentionCall
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.full_scores import FullScores
from pipeline.engines.serving.request import CaptureRequest, RequestError

from .capture import RequestCapture
from .hidden import Inside
from .model import ServedModel
from .sampling import Chosen, Sampler
from .text import TextStream

# Records that a request may gather before they are handed on.
RECORD_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be generated.

    Args:
        id: of the response, and of its records.
        tokens: of the prompt.
        limit: the most tokens to generate; None for as many as the context holds.
        capture: what to capture, its mask as it is to be; None for nothing.
    """

    id: str
    tokens: list[int]
    limit: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    alternatives: int | None = None
    capture: CaptureRequest | None = None


class Step(NamedTuple):
    """One generated token, and what came with it."""

    chosen: Chosen
    text: str  # of this token and of earlier ones that were held back
    entries: list[dict[str, Any]]
    finish_reason: str | None = None
    end: End | None = None


@dataclass(frozen=True)
class End:
    """What a finished request leaves."""

    usage: dict[str, Any] | None  # `RequestCollector.finish`
    scores: FullScores | None = None


class Sequence:
    """Runs one request, `step` by `step`; made and used in one thread.

    Args:
        records: takes the records of captured rows; None if nobody wants them.

    Raises:
        RequestError: the prompt, or what it asks for, does not fit the model's context.
    """

    def __init__(
        self,
        model: ServedModel,
        work: Work,
        records: Callable[[pa.RecordBatch], object] | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._model, self._work, self._clock, self._records = model, work, clock, records
        prompt = len(work.tokens)
        self._limit = token_limit(model, prompt, work.limit)
        self._sampler = Sampler(work.temperature, work.top_p, work.seed, work.alternatives)
        self._text = TextStream(model.tokenizer, work.stops)
        self._cache = model.cache()
        self._feed, self._begin, self.generated = work.tokens, 0, 0
        self._capture: RequestCapture | None = None
        if work.capture is not None:
            collector = RequestCollector(
                work.capture,
                request_id=work.id,
                model=model.name,
                capture_id=model.capture_id(work.capture),
                layout=model.options.layout,
                prompt_len=prompt,
                phases=model.phases(work.tokens),
                response_id=work.id,
                keep_records=records is not None,
            )
            self._capture = RequestCapture(
                collector,
                windows=model.windows,
                heads=model.heads,
                sink_tokens=model.options.sink_tokens,
                lens=model.lens,
                longest=prompt + self._limit,
            )

    def observe(self, call: AttentionCall | Inside) -> None:
        """Take what one layer does in the step that is running."""
        if self._capture is None:
            return
        if isinstance(call, AttentionCall):
            self._capture.observe(call)
        else:
            self._capture.observe_inside(call)

    @property
    def capture_seconds(self) -> float | None:
        """What capture has cost so far; None without."""
        return None if self._capture is None else self._capture.collector.seconds

    def step(self) -> Step:
        """Generate one token; the last one has a `finish_reason` and the request's `end`."""
        capture = self._capture
        if capture is not None:
            if self._begin:
                capture.collector.feed(self._feed[0])
            capture.begin(self._begin, self._feed)
        logits = self._model.forward(self._feed, self._cache)
        entries = [] if capture is None else capture.end(self._clock())
        chosen = self._sampler.choose(logits)
        self._begin += len(self._feed)
        self._feed = [chosen.token]
        self.generated += 1
        text = self._text.push(chosen.token)
        reason = None
        at_end = chosen.token in self._model.end_tokens and not self._work.ignore_eos
        if at_end or self._text.stopped:
            reason = "stop"
        elif self.generated == self._limit:
            reason = "length"
        if reason is not None:
            text += self._text.end()
            # A stop text may be complete with what was held back only.
            reason = "stop" if self._text.stopped else reason
        self.hand_on_records(all_of_them=reason is not None)
        return Step(chosen, text, entries, reason, None if reason is None else self._end())

    def hand_on_records(self, *, all_of_them: bool = True) -> None:
        """Hand on the records gathered so far: those of a request that was cut off, too."""
        if self._records is None or self._capture is None:
            return
        collector = self._capture.collector
        if collector.waiting >= (1 if all_of_them else RECORD_ROWS):
            self._records(collector.records())

    def _end(self) -> End:
        capture = self._capture
        if capture is None:
            return End(None)
        return End(capture.collector.finish(capture.hubs), capture.scores)


def token_limit(model: ServedModel, prompt: int, limit: int | None) -> int:
    """The most tokens to generate after a prompt of so many.

    Raises:
        RequestError: they do not fit the model's context.
    """
    if model.context is None:
        if limit is None:
            raise RequestError("the model's context is not known: give max_tokens", "max_tokens")
        return limit
    # The last generated token is never fed, but counts as it does elsewhere.
    room = model.context - prompt
    if room < (limit or 1):
        raise RequestError(
            f"{prompt} tokens of the prompt and {limit or 1} to generate are more than the model's "
            f"context of {model.context}",
            "max_tokens" if room >= 1 else "messages",
        )
    return room if limit is None else limit
