"""`attn capture`: run prompts through a local model and store the fingerprints of its attention."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import typer

from capture_kernels.errors import MissingExtraError, StoreError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.options import CaptureOptions, Engine

from .capture import CaptureSummary, Prompt, read_prompts, run_capture
from .capture_batches import BatchedCapture
from .interrupts import INTERRUPTED
from .progress import ProgressDisplay, shown_progress
from .store.commands import AsJson
from .store.open import open_store

if TYPE_CHECKING:
    from pipeline.engines.sglang.offline import OfflineEngine
    from pipeline.engines.transformers import TransformersEngine


def capture(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="Model folder, or name on the Hugging Face hub.")],
    prompts: Annotated[
        Path, typer.Option(help='Prompts: JSON Lines of {"id", "prompt"}, or one per line.')
    ],
    engine: Annotated[
        Engine, typer.Option(help="What runs the model: transformers, or sglang (many at once).")
    ] = Engine.TRANSFORMERS,
    db: Annotated[str, typer.Option(help="Store: a .db file or a folder.")] = "fingerprints.db",
    layers: Annotated[
        str, typer.Option(help="last, auto (4 over the depth), all, or indices: 2,18,27.")
    ] = "last",
    layout: Annotated[str, typer.Option(help="Vector layout: log16 or layered.")] = "log16",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 64,
    stride: Annotated[int, typer.Option(help="Capture every Nth position.")] = 1,
    max_steps: Annotated[
        int, typer.Option(help="Captured generated rows per prompt at most; 0 for all.")
    ] = 0,
    window: Annotated[int, typer.Option(help="Count only the last N keys; 0 for all.")] = 0,
    mask_prefix: Annotated[int, typer.Option(help="Mask the first N tokens (privacy).")] = 0,
    sink_tokens: Annotated[int, typer.Option(help="First N tokens count as sink mass only.")] = 1,
    heads: Annotated[
        str | None, typer.Option(help="Query heads to average over: 0,3. Default: all.")
    ] = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="One record per layer, not for their mean.")
    ] = False,
    think_tags: Annotated[
        bool, typer.Option("--think-tags", help="Mark <think> to </think> as phase think.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    session_id: Annotated[
        str | None, typer.Option(help="Session id of the records. Default: a new one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Capture the attention of a local model on a file of prompts."""
    # Every field of the options is an option of this command, by the same name.
    chosen = {field.name: ctx.params[field.name] for field in fields(CaptureOptions)}
    options = CaptureOptions(**chosen | {"layout": Layout.parse(layout)})
    work = read_prompts(prompts)
    run = _run_sglang if engine is Engine.SGLANG else _run_transformers
    summary = run(model, options, work, db, session_id or f"capture-{uuid4().hex[:12]}")
    print(json.dumps(summary.as_dict()) if as_json else "\n".join(summary.lines()))
    if summary.missing:
        raise StoreError(
            f"{summary.missing} rows did not reach {db}: run the same command again to add them"
        )
    if summary.interrupted:
        print(f"interrupted: {summary.prompts} of {len(work)} prompts are stored", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _run_transformers(
    model: str, options: CaptureOptions, work: Sequence[Prompt], db: str, session_id: str
) -> CaptureSummary:
    try:
        from pipeline.engines.loading import load_engine
        from pipeline.engines.transformers import utc_now
    except ImportError as error:
        raise _missing(error, "capture") from None
    _quiet_transformers()
    engine = load_engine(model, options)
    summary = _new_summary(engine, options, session_id)
    with open_store(db, create=True) as store, _shown(work) as display:
        run_capture(
            engine,
            work,
            store,
            summary,
            clock=utc_now,
            warn=lambda line: display.say(f"warning: {line}"),
            progress=lambda summary: _show(display, summary, work),
        )
    return summary


def _run_sglang(
    model: str, options: CaptureOptions, work: Sequence[Prompt], db: str, session_id: str
) -> CaptureSummary:
    try:
        from pipeline.engines.sglang.offline import OfflineEngine
    except ImportError as error:
        raise _missing(error, "--engine sglang") from None
    _quiet_transformers()
    # Made here, so that it can be read from the start.
    with (
        open_store(db, create=True) as store,
        OfflineEngine(model, options, Path(db)) as engine,
        _shown(work) as display,
    ):
        summary = _new_summary(engine, options, session_id)
        BatchedCapture(
            engine,
            store,
            summary,
            warn=lambda line: display.say(f"warning: {line}"),
            progress=lambda summary: _show(display, summary, work),
        ).run(work)
    return summary


def _missing(error: ImportError, what: str) -> Exception:
    """What to raise for an import that failed."""
    if (error.name or "").split(".")[0] not in ("torch", "transformers"):
        return error
    return MissingExtraError(f"{what} needs torch and transformers: pip install 'attn[capture]'")


def _quiet_transformers() -> None:
    """Its bars and warnings about generation would mix with ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _new_summary(
    engine: TransformersEngine | OfflineEngine, options: CaptureOptions, session_id: str
) -> CaptureSummary:
    return CaptureSummary(
        session_id=session_id,
        model=engine.name,
        capture_id=engine.capture_id,
        layers=engine.layers,
        layout=options.layout,
    )


def _shown(work: Sequence[Prompt]) -> AbstractContextManager[ProgressDisplay]:
    # A plain line for each tenth of the prompts, so that a log stays readable.
    return shown_progress("capture", len(work) // 10, len(work))


def _show(display: ProgressDisplay, summary: CaptureSummary, work: Sequence[Prompt]) -> None:
    display.show(
        done := summary.prompts + len(summary.refused),
        f"{done}/{len(work)} prompts, {summary.inserted} rows, "
        f"{summary.tokens_per_second:.0f} tokens/s",
    )
