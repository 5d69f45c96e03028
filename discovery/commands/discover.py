"""`attn discover` and `attn runs`."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from capture_kernels.errors import ArtifactError, NewRunNeededError, OptionError
from capture_kernels.fingerprint.zones import ZoneRules
from discovery.artifacts.read import MANIFEST, load_artifacts, read_manifest
from discovery.events.log import Event, Listener, listener_for_terminal
from discovery.gate import GateRules
from discovery.options import FREE_ON_RESUME, DiscoverOptions, option_name
from discovery.runs import folder as runs
from discovery.runs.parent import was_served

from . import history as history_commands

# Exit code of a run that is kept but not served.
GATE_FAILED = 3

runs_app = typer.Typer(no_args_is_help=True, help="Look at the runs of an output folder.")
runs_app.command("diff")(history_commands.diff)
runs_app.command("lineage")(history_commands.lineage)
runs_app.command("gc")(history_commands.gc)

Output = Annotated[Path, typer.Option("--output", "--output-dir", help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def discover(
    ctx: typer.Context,
    db: Annotated[str, typer.Option(help="Store: a .db file or a Parquet folder.")],
    output: Output = Path("discovery_outputs"),
    hours: Annotated[float, typer.Option(help="Window in hours; 0 takes all.")] = 24.0,
    min_rows: Annotated[int, typer.Option(help="Fewest rows worth a run.")] = 100,
    min_samples: Annotated[int, typer.Option(help="HDBSCAN's min_samples.")] = 10,
    min_cluster_size: Annotated[
        int | None,
        typer.Option(help="Fewest rows of a cluster. Default: 1% of the map, 20 or more."),
    ] = None,
    max_per_request: Annotated[int, typer.Option(help="Most rows of one request; 0: all.")] = 256,
    umap_neighbors: Annotated[int, typer.Option(help="UMAP's n_neighbors.")] = 30,
    umap_min_dist: Annotated[float, typer.Option(help="UMAP's min_dist.")] = 0.0,
    umap_sample_size: Annotated[
        int | None,
        typer.Option(help="Most rows the map is fitted on. Default: 25,000; a million on a GPU."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows of a chunk. Default: 65,536; 1,048,576 on a GPU.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 42,
    layout: Annotated[str | None, typer.Option(help="log16 or layered.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's fingerprints.")] = None,
    capture_id: Annotated[str | None, typer.Option(help="Only this capture's.")] = None,
    engine: Annotated[str, typer.Option(help="auto, cpu or rapids.")] = "auto",
    long_running: Annotated[
        bool, typer.Option("--long-running", help="Spread the work over a Dask cluster.")
    ] = False,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    resume: Annotated[str | None, typer.Option(help="Finish this stopped run.")] = None,
    max_memory_gb: Annotated[
        float | None, typer.Option(help="Most memory of all processes of the job.")
    ] = None,
    max_hours: Annotated[float | None, typer.Option(help="Stop at a checkpoint after.")] = None,
    websocket_port: Annotated[
        int | None,
        typer.Option(help="Serve progress here, and take pause, resume and stop; on 127.0.0.1."),
    ] = None,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Serve the run even if its quality check fails.")
    ] = False,
    zone_thresholds: Annotated[
        Path | None, typer.Option(help="TOML file with the strong values of zones.")
    ] = None,
    gate_thresholds: Annotated[
        Path | None, typer.Option(help="TOML file with the limits of the quality check.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of the model, to name clusters by tokens.")
    ] = None,
    now: Annotated[
        datetime | None, typer.Option(help="End the window here (UTC) instead of now.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the behaviours in a store's fingerprints and publish them.

    Exit codes: 0 published, 2 cannot be done as asked, 3 published but not made latest, since its
    quality check failed, 4 stopped at --max-hours or by a client's stop command, 130 Ctrl+C, 143
    SIGTERM; after 4, 130 and 143 the printed --resume command finishes the run.
    """
    from discovery.events.websocket import LiveEvents
    from discovery.execution.stopping import Interrupted, StopRequest, stop_on_signals
    from discovery.job import discover as run_job

    if resume:
        refuse_changes_on_resume(ctx)
    options = DiscoverOptions(
        db=db, output=str(output), hours=hours, min_rows=min_rows, min_samples=min_samples,
        min_cluster_size=min_cluster_size, max_per_request=max_per_request,
        umap_neighbors=umap_neighbors, umap_min_dist=umap_min_dist,
        umap_sample_size=umap_sample_size, batch_size=batch_size, seed=seed, layout=layout,
        model=model, capture_id=capture_id, engine=engine, long_running=long_running,
        scheduler=scheduler, max_memory_gb=max_memory_gb, max_hours=max_hours, no_gate=no_gate,
        tokenizer=str(tokenizer) if tokenizer else None,
        gate_rules=GateRules.from_toml(gate_thresholds) if gate_thresholds else GateRules(),
        zone_rules=ZoneRules.from_toml(zone_thresholds) if zone_thresholds else ZoneRules(),
    )  # fmt: skip
    stop = StopRequest()
    begun: dict[str, str] = {}

    def note_run(event: Event) -> None:
        begun["run_id"] = event["run_id"]

    listeners: list[Listener] = [note_run, listener_for_terminal()]
    live = LiveEvents(websocket_port, stop) if websocket_port is not None else None
    if live:
        listeners.append(live)
    try:
        with stop_on_signals(stop):
            manifest = run_job(
                options,
                resume=resume,
                now=now.replace(tzinfo=UTC) if now else None,
                listeners=listeners,
                stop=stop,
            )
    except BaseException as error:
        # However it ended, what is done is kept.
        if (run_id := begun.get("run_id")) and not isinstance(error, NewRunNeededError):
            again = resume_command(options, run_id)
            print(f"finish it with: {again}", file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted("stopped at once", 128 + signal.SIGINT) from None
        raise
    finally:
        if live:
            live.close()
    if as_json:
        print(json.dumps(manifest, sort_keys=True))
    else:
        show_run(output / manifest["run_id"], manifest)
    if not manifest["quality"]["gate"]["passed"] and not no_gate:
        raise typer.Exit(GATE_FAILED)


def resume_command(options: DiscoverOptions, run_id: str) -> str:
    """The command that finishes a run in the way that it was begun."""
    words = ["attn", "discover", "--db", options.db, "--output", options.output]
    words += ["--resume", run_id]
    words += ["--long-running"] if options.long_running else []
    words += ["--no-gate"] if options.no_gate else []
    for name in ("scheduler", "max_memory_gb", "tokenizer"):
        if (value := getattr(options, name)) is not None:
            words += [option_name(name), str(value)]
    return shlex.join(words)


def refuse_changes_on_resume(ctx: typer.Context) -> None:
    """A resumed run keeps what it was started with; a changed option would make it another run."""
    free = {*FREE_ON_RESUME, "resume", "as_json", "websocket_port"}
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in free and source is not None and source.name == "COMMANDLINE":
            raise OptionError(
                f"{option_name(name)} cannot change when a run is resumed: leave it out"
            )


@runs_app.command("list")
def list_runs(output: Output = Path("discovery_outputs"), as_json: AsJson = False) -> None:
    """All runs, oldest first."""
    latest = runs.latest_id(output)
    rows = []
    for run_id in runs.run_ids(output):
        folder = output / run_id
        if not (folder / MANIFEST).exists():
            rows.append({"run_id": run_id, "state": "unfinished"})
            continue
        try:
            manifest = read_manifest(folder)
        except ArtifactError as error:
            rows.append({"run_id": run_id, "state": "unreadable", "reason": str(error)})
            continue
        rows.append(
            {
                "run_id": run_id,
                "state": state_of(manifest, latest),
                "rows": manifest["counts"]["rows"],
                "clusters": manifest["counts"]["clusters"],
                "noise_share": manifest["quality"]["noise_share"],
                "model": manifest["model"],
            }
        )
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        print(f"no runs in {output}")
    else:
        table = Table("run", "state", "rows", "clusters", "noise", "model", box=None)
        for row in rows:
            noise = f"{row['noise_share']:.1%}" if "noise_share" in row else ""
            count = f"{row['rows']:,}" if "rows" in row else ""
            table.add_row(row["run_id"], row["state"], count, str(row.get("clusters", "")), noise,
                          row.get("model", ""))  # fmt: skip
        console().print(table)


def state_of(manifest: dict[str, Any], latest: str | None) -> str:
    if manifest["run_id"] == latest:
        return "latest"
    return "published" if was_served(manifest) else "failed its check"


@runs_app.command("show")
def show(
    run: Annotated[str, typer.Argument(help="Run id, or latest.")] = "latest",
    output: Output = Path("discovery_outputs"),
    as_json: AsJson = False,
) -> None:
    """One run: its clusters, zones and quality."""
    folder = runs.run_folder(output, run)
    manifest = read_manifest(folder)
    if as_json:
        clusters = load_artifacts(folder).table("clusters").to_pylist()
        print(json.dumps({"manifest": manifest, "clusters": clusters}))
    else:
        show_run(folder, manifest)


def show_run(folder: Path, manifest: dict[str, Any]) -> None:
    """Print a run for a person: clusters by size, zones, and the figures of its quality."""
    screen = console()
    table = Table("id", "cluster", "traits", "rows", "share", "persistence", box=None)
    for cluster in load_artifacts(folder).table("clusters").to_pylist():
        table.add_row(
            str(cluster["cluster_id"]), cluster["label"], ", ".join(cluster["traits"]),
            f"{cluster['size']:,}", f"{cluster['share']:.1%}", f"{cluster['persistence']:.2f}",
        )  # fmt: skip
    screen.print(table)
    quality = manifest["quality"]
    zones = sorted(manifest["stages"]["zones"]["shares"].items(), key=lambda item: -item[1])
    agreement = quality["classifier_agreement"]
    screen.print(
        f"zones: {', '.join(f'{zone} {share:.1%}' for zone, share in zones)}\n"
        f"rows: {manifest['counts']['rows']:,}, noise {quality['noise_share']:.1%}, "
        f"trustworthiness {quality['trustworthiness']:.3f}, neighbours kept "
        f"{quality['neighbor_recall']:.1%}"
        + (f", classifier agreement {agreement:.1%}" if agreement is not None else "")
        + f"\n{folder}"
    )


def console() -> Console:
    """Standard output; as wide as its table needs where it is not a terminal."""
    # No markup: a label may hold a token such as [/INST].
    return Console(width=None if sys.stdout.isatty() else 160, markup=False)
