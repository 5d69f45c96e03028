"""What can be captured, from the model's process to the one that answers: a file, as they share
nothing else. It is written again when capture is switched off."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from capture_kernels.errors import AttnError

from .request import ModelFacts

# Why nothing is captured once all records are delivered.
ENDED = "the server ends"


def is_chosen() -> bool:
    """Whether the path was chosen: by the first process of a server, which this one then is not."""
    return "ATTN_ENGINE_FACTS" in os.environ


def choose_path() -> None:
    """Of this process and its children. Nothing is made yet."""
    folder = Path(tempfile.gettempdir()) / f"attn-{secrets.token_hex(8)}"
    os.environ["ATTN_ENGINE_FACTS"] = str(folder / "facts.json")


def folder() -> Path:
    """Of the file; for this user alone. Made when something is written to it."""
    return Path(os.environ["ATTN_ENGINE_FACTS"]).parent


def write(facts: ModelFacts | str) -> None:
    """Write facts, or why nothing can be captured."""
    path = Path(os.environ["ATTN_ENGINE_FACTS"])
    path.parent.mkdir(mode=0o700, exist_ok=True)
    content = {"error": facts} if isinstance(facts, str) else asdict(facts)
    # Of several processes each says the same.
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.replace(path)


def remove() -> None:
    """Remove the file, if there is one."""
    if path := os.environ.get("ATTN_ENGINE_FACTS"):
        shutil.rmtree(Path(path).parent, ignore_errors=True)


class LiveFacts:
    """The facts as they were last written.

    Raises:
        AttnError: there are none, or nothing can be captured.
    """

    def __init__(self) -> None:
        self._path = Path(os.environ["ATTN_ENGINE_FACTS"])
        try:
            self._changed, self._facts = self._read()
        except OSError as error:
            raise AttnError(
                "the hooks in the model's process did not take: see its log above"
            ) from error

    def __call__(self) -> ModelFacts:
        try:
            if self._path.stat().st_mtime_ns != self._changed:
                self._changed, self._facts = self._read()
        except OSError:  # somebody has cleared the folder for temporary files
            pass
        return self._facts

    def _read(self) -> tuple[int, ModelFacts]:
        changed = self._path.stat().st_mtime_ns
        content: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        if error := content.get("error"):
            raise AttnError(error)
        lists = {name: tuple(content[name]) for name in ("layers", "score_layers")}
        return changed, ModelFacts(**content | lists)
