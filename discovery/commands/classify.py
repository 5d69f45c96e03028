"""`attn classify`: names the behaviour of fingerprints, from a file or a live stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer

from capture_kernels.errors import OptionError, RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS
from discovery.artifacts.classifier import Classifier

# Most bytes that are classified together.
READ_BYTES = 1 << 20
LARGEST = float(np.finfo(np.float32).max)
Line = tuple[list[float], dict[str, Any]]


def classify(
    artifacts: Annotated[Path, typer.Option(help="A run folder, or an output folder.")],
    file: Annotated[Path | None, typer.Argument(help="JSON lines; stdin when left out.")] = None,
) -> None:
    """Name the behaviour of fingerprints: JSON lines in, JSON lines out.

    A line is a list of 20 numbers, or an object whose "vector" is one; an object's other fields
    come back beside the answer. A wrong line ends it, once the lines before it are answered.
    """
    classifier = Classifier.load(artifacts)
    try:
        stream = cast(BufferedReader, file.open("rb") if file else sys.stdin.buffer)
    except OSError as error:
        raise OptionError(f"cannot read {file}: {error.strerror}") from None
    number = 0
    with stream:
        for lines in lines_as_they_come(stream):
            parsed: list[Line] = []
            wrong: RecordError | None = None
            for line in lines:
                number += 1
                try:
                    if line.strip():
                        parsed.append(parse_line(line, number, classifier))
                except RecordError as error:
                    wrong = error
                    break
            answers = classifier.answer([vector for vector, _ in parsed])
            for answer, (_, rest) in zip(answers, parsed, strict=True):
                print(json.dumps({**rest, **answer}))
            sys.stdout.flush()
            if wrong:
                raise wrong


def lines_as_they_come(stream: BufferedReader) -> Iterator[list[bytes]]:
    """Whole lines in the portions in which they can be read, so that a live pipe is answered."""
    rest = b""
    while portion := stream.read1(READ_BYTES):
        *lines, rest = (rest + portion).split(b"\n")
        yield lines
    yield [rest]


def parse_line(line: bytes, number: int, classifier: Classifier) -> Line:
    """A line's vector, and what else it held. RecordError names the line that is neither, or that
    says itself that it cannot be compared with the run."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError(f"line {number} is not JSON") from None
    rest = {}
    if isinstance(value, dict):
        rest = {k: v for k, v in value.items() if k != "vector"}
        value = value.get("vector")
    numbers = isinstance(value, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= LARGEST for x in value
    )
    if not numbers or len(value) != DIMENSIONS:
        raise RecordError(
            f"line {number} needs a vector of {DIMENSIONS} finite numbers, none of them negative"
        )
    layout = classifier.layout
    if rest.get("layout") not in (None, layout.label, int(layout)):
        raise RecordError(
            f"line {number} has layout {rest['layout']}, the run has {layout.label}: "
            "classify it against a run of its own layout"
        )
    if rest.get("capture_id") not in (None, classifier.capture_id):
        raise RecordError(
            f"line {number} is of capture {rest['capture_id']}, the run of {classifier.capture_id}:"
            " vectors of different captures cannot be compared"
        )
    return value, rest
