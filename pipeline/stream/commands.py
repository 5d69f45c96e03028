"""`attn stream`: what senders and receivers of live records need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.store.commands import AsJson

stream_app = typer.Typer(no_args_is_help=True, help="Keys for streams between machines.")


@stream_app.callback()
def stream() -> None:
    """Keys for streams between machines."""


@stream_app.command("keys")
def keys(
    folder: Annotated[Path, typer.Argument(help="Folder of the keys; made if there is none.")],
    client: Annotated[str, typer.Option(help="Name of the sender's pair of keys.")] = "client",
    as_json: AsJson = False,
) -> None:
    """Make the receiver's pair of keys, if there is none, and one of a sender."""
    from .curve import make_keys

    made = make_keys(folder, client)
    if as_json:
        print(json.dumps({"made": list(map(str, made))}))
        return
    for path in made:
        print(f"made {path}" + (", which stays secret" if path.suffix == ".key_secret" else ""))
    print(
        f"the receiver takes {folder} as --curve-keys; a sender elsewhere needs server.key, "
        f"{client}.key and {client}.key_secret of it"
    )
