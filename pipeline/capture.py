"""An offline capture: prompts in, records in a store, and a summary of what the attention did."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from pipeline.engines.options import PromptError
from pipeline.store.base import Appended, Store

from .interrupts import lost_interrupts_raised_again
from .record import PHASES, vectors

if TYPE_CHECKING:
    from pipeline.engines.captured import CapturedPrompt
    from pipeline.engines.transformers import TransformersEngine

JSON_LINES = (".jsonl", ".ndjson")


class Prompt(NamedTuple):
    """One prompt, and its id if the file gave one."""

    id: str | None
    text: str


@dataclass
class CaptureSummary:
    """Running totals of a capture. Prompts are counted once their rows are in the store; missing:
    rows of the others that should be there and are not."""

    session_id: str
    model: str
    capture_id: str
    layers: tuple[int, ...]
    layout: Layout
    prompts: int = 0
    refused: list[str] = field(default_factory=list)
    interrupted: bool = False
    prompt_tokens: int = 0
    new_tokens: int = 0
    inserted: int = 0
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    blind_rows: int = 0
    missing: int = 0
    seconds: float = 0.0
    zones: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        tokens = self.prompt_tokens + self.new_tokens
        return tokens / self.seconds if self.seconds else 0.0

    def add(self, captured: CapturedPrompt, appended: Appended) -> None:
        """Count one prompt that is in the store."""
        self.prompts += 1
        self.prompt_tokens += captured.prompt_tokens
        self.new_tokens += len(captured.new_tokens)
        self.blind_rows += captured.blind_rows
        self.inserted += appended.inserted
        self.duplicates += appended.duplicates
        self.rejected.update(appended.rejected)
        rows = vectors(captured.batch)
        finite = np.isfinite(rows).all(axis=1)
        phases = np.array(captured.batch.column("phase").to_pylist(), dtype=object)[finite]
        names = ZoneRules().classify(rows[finite], self.layout).names
        for phase, zone in zip(phases, names, strict=True):
            self.zones.setdefault(phase, Counter())[zone] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "session_id": self.session_id,
            "model": self.model,
            "capture_id": self.capture_id,
            "layers": list(self.layers),
            "layout": self.layout.label,
            "prompts": self.prompts,
            "refused": self.refused,
            "interrupted": self.interrupted,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "rows": {
                "inserted": self.inserted,
                "duplicates": self.duplicates,
                "rejected": dict(self.rejected),
                "without_visible_key": self.blind_rows,
                "missing": self.missing,
            },
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "zones": {p: {z: self.zones[p][z] for z in ZONES} for p in PHASES if p in self.zones},
        }

    def lines(self) -> list[str]:
        """The summary for people to read."""
        layers = ", ".join(map(str, self.layers))
        out = [
            f"{self.prompts} prompts, {self.prompt_tokens} prompt and {self.new_tokens} new tokens "
            f"in {self.seconds:.1f} s ({self.tokens_per_second:.0f} tokens/s), layers {layers}",
            f"{self.inserted} rows stored, {self.duplicates} were there already "
            f"(session {self.session_id}, capture {self.capture_id})",
        ]
        if self.duplicates:
            out.append(
                "rows with the same id and position are stored once: to capture the same prompts "
                "with another model or other options, give them other ids or another --db"
            )
        for reason, count in sorted(self.rejected.items()):
            out.append(f"{count} rows rejected: {reason}")
        if self.missing:
            out.append(f"{self.missing} rows did not reach the store")
        if self.refused:
            out.append(f"{len(self.refused)} prompts refused: {', '.join(self.refused[:10])}")
        table = {p: [self.zones[p][z] for z in ZONES] for p in PHASES if p in self.zones}
        for name, cells in {"phase": ZONES, **table}.items() if table else ():
            out.append(f"{name:<8}" + "".join(f"{cell:>18}" for cell in cells))
        return out


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: JSON Lines of {"id", "prompt"} (.jsonl, .ndjson), or one a line.

    Blank lines are left out. Other fields of a JSON line are ignored, and `id` may be left out.

    Raises:
        OptionError: the file cannot be read, has no prompt, has a line that is not a prompt, or
            has an id twice; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{path} is not UTF-8 text") from None
    # Not splitlines, which also splits at separators that may stand in a prompt.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix.lower() in JSON_LINES:
        prompts = list(_json_prompts(path, lines))
    else:
        prompts = [Prompt(None, line.rstrip("\r")) for _, line in lines]
    if not prompts:
        raise OptionError(f"{path} has no prompts")
    return prompts


def _json_prompts(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Prompt]:
    seen: dict[str, int] = {}
    for number, line in lines:
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise OptionError(f"{where} is not JSON: {error.msg}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise OptionError(f'{where} must be an object with a string "prompt"')
        if not row["prompt"].strip():
            raise OptionError(f"{where} has an empty prompt")
        request_id = row.get("id")
        if isinstance(request_id, int) and not isinstance(request_id, bool):
            request_id = str(request_id)
        if request_id is not None:
            if not isinstance(request_id, str) or not request_id:
                raise OptionError(f"{where} must have a string or an integer as its id")
            if request_id in seen:
                raise OptionError(f"{where} has the id {request_id!r} of line {seen[request_id]}")
            seen[request_id] = number
        yield Prompt(request_id, row["prompt"])


def request_ids(prompts: Sequence[Prompt], capture_id: str) -> list[str]:
    """An id for each prompt: its own, or one made of its text and the capture.

    The same prompt of the same capture has the same id every time, so that a second run adds
    nothing. Another model or other options make another id. A prompt's own id is used as it is.
    """
    taken = Counter(prompt.id for prompt in prompts if prompt.id is not None)
    ids = []
    for prompt in prompts:
        if prompt.id is not None:
            ids.append(prompt.id)
            continue
        digest = hashlib.sha256(f"{capture_id}\n{prompt.text}".encode()).hexdigest()[:16]
        taken[digest] += 1
        ids.append(f"prompt-{digest}" + (f"-{taken[digest]}" if taken[digest] > 1 else ""))
    return ids


def run_capture(
    engine: TransformersEngine,
    prompts: Sequence[Prompt],
    store: Store,
    summary: CaptureSummary,
    *,
    clock: Callable[[], datetime],
    warn: Callable[[str], None],
    progress: Callable[[CaptureSummary], None] = lambda summary: None,
    stopwatch: Callable[[], float] = time.perf_counter,
) -> None:
    """Run the prompts and append their records, prompt by prompt; `summary` grows on the way.

    A prompt that the model cannot take is counted, reported to `warn` and skipped. Ctrl+C ends the
    run: the prompts that are finished are stored and counted, and `summary.interrupted` is set.
    """
    began = stopwatch()
    with first_interrupt_deferred() as interrupts, suppress(KeyboardInterrupt):
        ids = request_ids(prompts, engine.capture_id)
        for prompt, request_id in zip(prompts, ids, strict=True):
            summary.interrupted = True  # unless this prompt gets to its end
            if interrupts:
                break
            try:
                captured = engine.capture(
                    prompt.text, request_id=request_id, session_id=summary.session_id, clock=clock
                )
            except PromptError as error:
                summary.refused.append(request_id)
                warn(str(error))
            else:
                summary.add(captured, store.append(captured.batch))
            summary.interrupted = False
            summary.seconds = stopwatch() - began
            progress(summary)
    summary.seconds = stopwatch() - began


@contextmanager
def first_interrupt_deferred() -> Iterator[list[int]]:
    """Inside the block the first Ctrl+C is only added to the list, so that it can neither fall into
    the middle of an append nor get lost in a library's callback. A second one raises."""
    interrupts: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # only the main thread can have a handler, and only it is interrupted
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        with lost_interrupts_raised_again():
            yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
