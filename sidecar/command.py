"""`attn sidecar`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from capture_kernels.errors import OptionError

from .options import MAX_BATCH, QUEUE_ROWS, SidecarOptions

NONE = "none"


def sidecar(
    ctx: typer.Context,
    port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = 9009,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    db: Annotated[
        Path, typer.Option(help="Store: a .db file or a Parquet folder; made if missing.")
    ] = Path("fingerprints.db"),
    discovery_dir: Annotated[
        Path, typer.Option(help="Output folder of attn discover, whose latest run is served.")
    ] = Path("discovery_outputs"),
    zmq_bind: Annotated[
        str, typer.Option(help="Address that fingerprints are received at; none for no stream.")
    ] = "tcp://127.0.0.1:9001",
    hints_bind: Annotated[
        str | None, typer.Option(help="Address that hints are published at.")
    ] = None,
    curve_keys: Annotated[
        Path | None,
        typer.Option(help="Folder of attn stream keys; needed off 127.0.0.1."),
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Cluster while rows arrive, not every interval.")
    ] = False,
    online_threshold: Annotated[
        float, typer.Option(help="How far from a micro-cluster a row may be, in its radii.")
    ] = 2.0,
    online_max_clusters: Annotated[int, typer.Option(help="Most micro-clusters.")] = 50,
    recluster_interval: Annotated[
        float, typer.Option(help="Seconds between clusterings of the recent rows.")
    ] = 60.0,
    buffer_size: Annotated[int, typer.Option(help="Recent rows that are clustered.")] = 10_000,
    min_cluster_size: Annotated[
        int | None, typer.Option(help="Fewest rows of a live cluster.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What re-clusters: cpu, rapids, or auto (rapids if a GPU answers).")
    ] = "cpu",
    auto_reload_interval: Annotated[
        float, typer.Option(help="Seconds until a run that was refused is tried again.")
    ] = 300.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API keys, one a line.")
    ] = None,
    cors_origins: Annotated[
        list[str] | None, typer.Option(help="Origin that browsers may call from; repeatable.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Most rows of one request.")] = MAX_BATCH,
    queue_rows: Annotated[
        int, typer.Option(help="Most rows that wait for the store.")
    ] = QUEUE_ROWS,
    drift_hours: Annotated[
        float, typer.Option(help="Hours of rows that are compared with the run.")
    ] = 1.0,
    page: Annotated[bool, typer.Option("--page", help="Serve the web page at /.")] = False,
    engine_url: Annotated[
        str | None, typer.Option(help="Engine that the page asks through this service.")
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that the engine wants.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="OTLP/HTTP address that spans are sent to.")
    ] = None,
) -> None:
    """Classify fingerprints live, store them, and serve the latest discovery run.

    Exit codes: 0 stopped by Ctrl+C or SIGTERM, everything stored; 2 invalid options, or an address
    or store that cannot be used; 3 rows could not be stored before the end.
    """
    from .logs import log_to_stderr
    from .server import serve

    given: dict[str, Any] = {field.name: ctx.params[field.name] for field in fields(SidecarOptions)}
    given["cors_origins"] = tuple(cors_origins or ())
    given["zmq_bind"] = None if zmq_bind.lower() in ("", NONE) else zmq_bind
    options = SidecarOptions(**given)
    if not page and (engine_url or engine_key_file):
        raise OptionError("--engine-url and --engine-key-file are for the page: add --page")
    log_to_stderr(as_json=log_json)
    if not page:
        serve(options)
        return
    from .page.config import PageOptions

    serve(options, PageOptions(engine_url, engine_key_file))
