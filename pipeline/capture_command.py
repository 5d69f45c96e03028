"""`attn capture`: run prompts through a local model and store the fingerprints of its attention."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer

from capture_kernels.errors import MissingExtraError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.options import CaptureOptions

from .capture import CaptureSummary, read_prompts, run_capture
from .interrupts import INTERRUPTED
from .progress import shown_progress
from .store.commands import AsJson


def capture(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="Model folder, or name on the Hugging Face hub.")],
    prompts: Annotated[
        Path, typer.Option(help='Prompts: JSON Lines of {"id", "prompt"}, or one per line.')
    ],
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
    try:
        from transformers.utils import logging as transformers_logging

        from pipeline.engines.loading import load_engine
        from pipeline.engines.transformers import utc_now
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformers"):
            raise
        missing = "capture needs torch and transformers: pip install 'attn[capture]'"
        raise MissingExtraError(missing) from None
    from .store.open import open_store

    # Its bars and warnings about generation would mix with ours.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    engine = load_engine(model, options)
    summary = CaptureSummary(
        session_id=session_id or f"capture-{uuid4().hex[:12]}",
        model=engine.name,
        capture_id=engine.capture_id,
        layers=engine.layers,
        layout=options.layout,
    )

    def show(summary: CaptureSummary) -> None:
        display.show(
            done := summary.prompts + len(summary.refused),
            f"{done}/{len(work)} prompts, {summary.inserted} rows, "
            f"{summary.tokens_per_second:.0f} tokens/s",
        )

    with (
        open_store(db, create=True) as store,
        # A plain line for each tenth of the prompts, so that a log stays readable.
        shown_progress("capture", len(work) // 10, len(work)) as display,
    ):
        run_capture(
            engine,
            work,
            store,
            summary,
            clock=utc_now,
            warn=lambda line: display.say(f"warning: {line}"),
            progress=show,
        )
    print(json.dumps(summary.as_dict()) if as_json else "\n".join(summary.lines()))
    if summary.interrupted:
        print(f"interrupted: {summary.prompts} of {len(work)} prompts are stored", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
