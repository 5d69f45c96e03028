"""What can be captured, from the processes of the model to the one that answers: a file of each, as
they share nothing else. It is written again when capture is switched off.

Where a server runs several copies of a model, or of its attention (data parallelism), each has a
process that writes; else there is one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from capture_kernels.errors import AttnError

from .request import ModelFacts

# Why nothing is captured once all records are delivered.
ENDED = "the server ends"


def is_chosen() -> bool:
    """Whether the folder was chosen: by the first process of a server, so not by this one."""
    return "ATTN_ENGINE_FACTS" in os.environ


def choose_folder() -> None:
    """Of this process and its children. Nothing is made yet."""
    path = Path(tempfile.gettempdir()) / f"attn-{secrets.token_hex(8)}"
    os.environ["ATTN_ENGINE_FACTS"] = str(path)


def folder() -> Path:
    """Of the files; for this user alone. Made when something is written to it."""
    return Path(os.environ["ATTN_ENGINE_FACTS"])


def write(facts: ModelFacts | str) -> None:
    """Write this process's facts, or why nothing can be captured."""
    folder().mkdir(mode=0o700, exist_ok=True)
    content = {"error": facts} if isinstance(facts, str) else asdict(facts)
    path = folder() / f"{os.getpid()}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.replace(path)


def remove() -> None:
    """Remove the files, if there are any."""
    if path := os.environ.get("ATTN_ENGINE_FACTS"):
        shutil.rmtree(path, ignore_errors=True)


class LiveFacts:
    """The facts as they were last written by the processes that have written any by now.

    Raises:
        AttnError: there are none, or nothing can be captured.
    """

    def __init__(self) -> None:
        # By file: when it was written, and what it said.
        self._found = {path: _read(path) for path in sorted(folder().glob("*.json"))}
        if not self._found:
            raise AttnError("the hooks in the model's process did not take: see its log above")
        self._facts = of_all([facts for _, facts in self._found.values()])

    def __call__(self) -> ModelFacts:
        for path, (written, _) in self._found.items():
            # Somebody may clear the folder for temporary files.
            with suppress(OSError):
                if path.stat().st_mtime_ns != written:
                    self._found[path] = _read(path)
                    self._facts = of_all([facts for _, facts in self._found.values()])
        return self._facts


def _read(path: Path) -> tuple[int, ModelFacts]:
    """When a file was written, by its system's clock, and the facts in it."""
    written = path.stat().st_mtime_ns
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if error := content.get("error"):
        raise AttnError(error)
    lists = {name: tuple(content[name]) for name in ("layers", "score_layers")}
    return written, ModelFacts(**content | lists)


def of_all(found: Sequence[ModelFacts]) -> ModelFacts:
    """The facts of a server by those of its processes. It captures as long as one of them does, and
    has ended when all have; what one of them cannot do otherwise, the server cannot."""
    reasons = {name: why for each in found for name, why in each.reasons.items()}
    off = [each.reasons["capture"] for each in found if "capture" in each.reasons]
    if len(off) < len(found):
        reasons.pop("capture", None)
    else:
        # The server has not ended while one of them is off for another reason.
        reasons["capture"] = next((why for why in off if why != ENDED), ENDED)
    return dataclasses.replace(found[0], reasons=reasons)
