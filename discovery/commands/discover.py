"""`attn discover`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capture_kernels.errors import BusyError, NewRunNeededError, OptionError
from capture_kernels.fingerprint.zones import ZoneRules
from discovery.artifacts.schema import Manifest, was_served
from discovery.events.log import Listener
from discovery.events.schema import RunStarted
from discovery.events.terminal import listener_for_terminal
from discovery.gate import GateRules
from discovery.options import FREE_ON_RESUME, DiscoverOptions, option_name
from discovery.runs.resume import AUTO, due_again
from pipeline.standard_streams import OutputLostError

from .runs import AsJson, Output, show_run

if TYPE_CHECKING:
    from .metrics_file import MetricsFile

# Exit code of a run that is published but failed its gate.
GATE_FAILED = 3


def discover(
    ctx: typer.Context,
    db: Annotated[str, typer.Option(help="Store: a .db file or a Parquet folder.")],
    output: Output = Path("discovery_outputs"),
    hours: Annotated[float, typer.Option(help="Window in hours; 0 takes all.")] = 24.0,
    late_hours: Annotated[
        float,
        typer.Option(help="Also take rows that old which the last run came too early for."),
    ] = 24.0,
    min_rows: Annotated[int, typer.Option(help="Fewest rows that a run needs.")] = 100,
    clustering: Annotated[
        str,
        typer.Option(help="consensus, what many halves of the requests agree on; or hdbscan."),
    ] = "consensus",
    min_samples: Annotated[
        int | None,
        typer.Option(help="Of --clustering hdbscan. Default: as the smallest cluster has rows."),
    ] = None,
    min_cluster_size: Annotated[
        int | None,
        typer.Option(help="Fewest rows of a cluster. Default: 1% of the fitted rows, at least 20."),
    ] = None,
    max_per_request: Annotated[
        int, typer.Option(help="Most rows taken from one request; 0 takes all.")
    ] = 256,
    umap_neighbors: Annotated[int, typer.Option(help="UMAP's n_neighbors.")] = 30,
    umap_min_dist: Annotated[float, typer.Option(help="UMAP's min_dist.")] = 0.0,
    umap_sample_size: Annotated[
        int | None,
        typer.Option(
            help="Most rows that the map is fitted on. Default: 25,000; a million on a GPU."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows in a chunk. Default: 65,536; 1,048,576 on a GPU.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 42,
    layout: Annotated[
        str | None, typer.Option(help="Only fingerprints of this layout: log16 or layered.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's fingerprints.")] = None,
    capture_id: Annotated[
        str | None, typer.Option(help="Only fingerprints of this capture.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Libraries: auto, cpu or rapids (GPU).")] = "auto",
    long_running: Annotated[
        bool,
        typer.Option("--long-running", help="Run on a Dask cluster: a worker per GPU or core."),
    ] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of an existing Dask scheduler, for --long-running.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Id of a stopped run to finish. auto: the newest that this job left, if any."
        ),
    ] = None,
    max_memory_gb: Annotated[
        float | None, typer.Option(help="Most memory, in GB, of all processes of the job.")
    ] = None,
    max_hours: Annotated[
        float | None, typer.Option(help="Stop at the next checkpoint after this many hours.")
    ] = None,
    websocket_port: Annotated[
        int | None,
        typer.Option(help="Serve events and take commands on this port of 127.0.0.1."),
    ] = None,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Make the run latest even if it fails its gate.")
    ] = False,
    new_lineage: Annotated[
        bool, typer.Option("--new-lineage", help="Follow no earlier run: all cluster ids are new.")
    ] = False,
    zone_thresholds: Annotated[
        Path | None, typer.Option(help="TOML file with zone thresholds.")
    ] = None,
    gate_thresholds: Annotated[
        Path | None, typer.Option(help="TOML file with gate limits.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The model's tokenizer.json, to put tokens into cluster names."),
    ] = None,
    now: Annotated[
        datetime | None,
        typer.Option(help="End of the window (UTC, or with an offset) instead of the clock."),
    ] = None,
    metrics_file: Annotated[
        Path | None,
        typer.Option(help="Write a .prom file for node-exporter's textfile collector."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the behaviours in a store's fingerprints and publish them.

    Exit codes: 0 published; 2 invalid input or options; 3 published, but it failed its gate and is
    not latest; 4 stopped at --max-hours or by a client's stop command; 5 another job is writing to
    the folder; 130 Ctrl+C; 143 SIGTERM. After 4, 130 and 143 the printed --resume command finishes
    the run, and so does --resume auto.
    """
    if resume and resume != AUTO:
        refuse_changes_on_resume(ctx)
    figures = None
    if metrics_file:
        from .metrics_file import MetricsFile

        figures = MetricsFile(metrics_file)
    try:
        code = run(ctx, resume, now, websocket_port, figures)
    except BaseException as error:
        if figures and not isinstance(error, BusyError):
            # What an interpreter ends with that nobody catches: a bug.
            figures.ended(getattr(error, "exit_code", 1))
        raise
    if figures:
        figures.ended(code)
    if code:
        raise typer.Exit(code)


def run(
    ctx: typer.Context,
    resume: str | None,
    now: datetime | None,
    websocket_port: int | None,
    figures: MetricsFile | None,
) -> int:
    """Run the job of these parameters; its exit code if it published."""
    from discovery.events.websocket import LiveEvents
    from discovery.execution.stopping import Interrupted, StopRequest, stop_on_signals
    from discovery.job import discover as run_job

    # The parameters of this command have the names of the options; paths are saved as text.
    names = {field.name for field in fields(DiscoverOptions)} & ctx.params.keys()
    given: dict[str, Any] = {name: ctx.params[name] for name in names}
    zones, limits = ctx.params["zone_thresholds"], ctx.params["gate_thresholds"]
    options = DiscoverOptions(
        **given | {n: str(path) for n, path in given.items() if isinstance(path, Path)},
        gate_rules=GateRules.from_toml(limits) if limits else GateRules(),
        zone_rules=ZoneRules.from_toml(zones) if zones else ZoneRules(),
    )
    stop = StopRequest()
    begun: list[RunStarted] = []
    listeners: list[Listener] = [
        lambda event: begun.append(event) if isinstance(event, RunStarted) else None,
        listener_for_terminal(),
    ]
    live = LiveEvents(websocket_port, stop) if websocket_port is not None else None
    if live:
        print(f"live events on port {live.port}: see {live.client_file}", file=sys.stderr)
        listeners.append(live)
    if figures:
        listeners.append(figures.listen)
    try:
        with stop_on_signals(stop):
            job = partial(
                run_job, options, resume=resume, now=now, listeners=listeners, stop=stop,
                client_file=live.client_file if live else None,
            )  # fmt: skip
            manifest = job()
            if figures:
                figures.finished(manifest)
            late = resume == AUTO and begun[-1].resumed and now is None
            if late and due_again(manifest, options.hours, datetime.now(UTC)):
                show(options, manifest, ctx.params["as_json"])
                begun.clear()
                manifest = job()
                if figures:
                    figures.finished(manifest)
    except BaseException as error:
        at_once = isinstance(error, KeyboardInterrupt)
        ended = Interrupted("at once", stop.exit_code) if at_once else error
        # However it ended, the finished chunks are kept.
        if begun and not isinstance(error, NewRunNeededError):
            ended.add_note(f"finish it with: {resume_command(options, begun[-1].run_id)}")
        if at_once:
            raise ended from None
        raise
    finally:
        if live:
            live.close()
    show(options, manifest, ctx.params["as_json"])
    return 0 if was_served(manifest) else GATE_FAILED


def show(options: DiscoverOptions, manifest: Manifest, as_json: bool) -> None:
    """Print what a run published."""
    try:
        if as_json:
            print(json.dumps(manifest, sort_keys=True))
        else:
            show_run(options.output_dir / manifest["run_id"], manifest)
        sys.stdout.flush()
    except OutputLostError as lost:
        # What came of the run stands, and so does its exit code.
        if lost.exit_code:
            print(f"{lost}; attn runs show {manifest['run_id']} prints it again", file=sys.stderr)


def resume_command(options: DiscoverOptions, run_id: str) -> str:
    """The command that finishes a run in the way that it was started."""
    words = ["attn", "discover", "--db", options.db, "--output", options.output, "--resume", run_id]
    kept = ("long_running", "scheduler", "max_memory_gb", "tokenizer")
    for name, value in options.some(*kept).items():
        if value not in (None, False):
            words += [option_name(name)] if value is True else [option_name(name), str(value)]
    return shlex.join(words)


def refuse_changes_on_resume(ctx: typer.Context) -> None:
    """A resumed run keeps what it was started with; a changed option would make it another run."""
    free = {*FREE_ON_RESUME, "resume", "as_json", "websocket_port", "metrics_file"}
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in free and source is not None and source.name == "COMMANDLINE":
            raise OptionError(
                f"{option_name(name)} cannot change when a run is resumed: leave it out"
            )
