"""Where `attn explore` keeps its data, and what the demo model is asked to begin with."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.examples.prompts import CODENAME, NEEDLE

NEEDED = ("torch", "transformers")
# The demo model knows such tasks and nothing else: it goes on with a text. What is said of each was
# seen in its raw entries.
PROMPTS: tuple[dict[str, Any], ...] = (
    {
        "name": "a number by its key", "prompt": NEEDLE.prompt, "style": "plain",
        "says": f"layer 2 reads the answer from the line {NEEDLE.line!r}, a digit ahead",
    },
    {
        "name": "a codename in a log", "prompt": CODENAME.prompt, "style": "plain",
        "says": "layer 2 reads the answer from the entry of the same agent",
    },
    {
        "name": "a table", "style": "plain",
        "prompt": "|   # | name    | value |\n|   1 | droucai |     6 |\n"
        "|   2 | key_o   |     8 |\n|   3 | droucai |    10 |\n|   4 | key_o   |    12 |",
        "says": "layer 2 looks at the rows above with the same name in this cell",
    },
    {
        "name": "thinking", "style": "plain",
        "prompt": "Feafise: 42\nThegeas: 437\nQuestion: which is larger, Feafise or Thegeas?\n"
        "Answer:",
        "says": "in the thought, layer 2 reads names and numbers from the first lines",
    },
    {
        "name": "brackets", "style": "plain",
        "prompt": "Close: ( [ ] ) ( [ [ ] ( ) ] ( ) { } ) ( ( ) ) { { [ { ( ) [ ] [ ]",
        "says": "layer 2 rests on the first token, layer 3 looks among the brackets",
    },
)  # fmt: skip


def missing_packages() -> list[str]:
    """What the demo model needs and is not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def data_folder(given: Path | None) -> Path:
    """The folder of store, runs and logs: by default in the user's own folder for data."""
    if given is not None:
        return given.absolute()
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base).absolute() / "attn" / "explore"
