"""`attn explore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explore(
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = 9009,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of store, runs and logs. Default: one in the user's own."),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print the address of the page.")
    ] = False,
    engine_url: Annotated[
        str | None, typer.Option(help="Engine to ask, in the place of the demo model.")
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that the engine wants.")
    ] = None,
) -> None:
    """Look at a model's attention in the browser: the demo model, its page, and the sample's map.

    Ctrl+C ends everything. Exit codes: 0 ended by Ctrl+C or SIGTERM; 2 invalid options, a port or
    folder that is taken; 3 the sidecar could not store everything; 1 it failed.
    """
    from .supervisor import ExploreOptions, run

    raise typer.Exit(
        run(ExploreOptions(port, data_dir, not no_browser, engine_url, engine_key_file))
    )
