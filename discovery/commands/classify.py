"""`attn classify`: names the behaviour of fingerprints, from a file or a live stream."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from capture_kernels.errors import OptionError, RecordError
from discovery.artifacts.classifier import Classifier

# Most bytes that are classified together.
READ_BYTES = 1 << 20


def classify(
    artifacts: Annotated[Path, typer.Option(help="A run folder, or an output folder.")],
    file: Annotated[Path | None, typer.Argument(help="JSON lines; default: stdin.")] = None,
) -> None:
    """Name the behaviour of fingerprints: JSON lines in, JSON lines out.

    A line is a list of 20 numbers, or an object with such a list as "vector"; the other fields of
    an object are repeated in its answer. The command stops at the first bad line, after it has
    answered the lines before it.
    """
    classifier = Classifier.load(artifacts)
    try:
        stream = cast(BufferedReader, file.open("rb") if file else sys.stdin.buffer)
    except OSError as error:
        raise OptionError(f"cannot read {file}: {error.strerror}") from None
    number = itertools.count(1)
    with stream:
        for lines in lines_as_they_come(stream):
            numbered = [(i, line) for line, i in zip(lines, number, strict=False) if line.strip()]
            for answer in answers(numbered, classifier):
                print(json.dumps(answer))
            sys.stdout.flush()


def lines_as_they_come(stream: BufferedReader) -> Iterator[list[bytes]]:
    """Whole lines as soon as they can be read, so that a live pipe is answered."""
    rest = b""
    while portion := stream.read1(READ_BYTES):
        *lines, rest = (rest + portion).split(b"\n")
        yield lines
    yield [rest]


def answers(lines: list[tuple[int, bytes]], classifier: Classifier) -> Iterator[dict[str, Any]]:
    """The answer to each numbered line; RecordError, with the number, at the first bad one."""
    records, bad = [], None
    for number, line in lines:
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            bad = f"line {number} is not JSON"
            break
    for (number, _), record, answer in zip(
        lines[: len(records)], records, classifier.answer(records), strict=True
    ):
        if "error" in answer:
            raise RecordError(f"line {number} {answer['error']}")
        given = record if isinstance(record, dict) else {}
        yield {**{k: v for k, v in given.items() if k != "vector"}, **answer}
    if bad:
        raise RecordError(bad)
