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
# A longer line is not a fingerprint.
LONGEST_LINE = 1 << 20
# Exit code if lines were skipped.
SKIPPED = 3


def classify(
    artifacts: Annotated[Path, typer.Option(help="A run folder, or an output folder.")],
    file: Annotated[Path | None, typer.Argument(help="JSON lines; default: stdin.")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Answer bad lines with an error, and go on.")
    ] = False,
) -> None:
    """Name the behaviour of fingerprints: JSON lines in, JSON lines out.

    A line is a list of 20 numbers, or an object with such a list as "vector"; the other fields of
    an object are repeated in its answer. The command stops at the first bad line, after it has
    answered the lines before it. With --skip-bad each bad line is answered with its number and the
    reason, and the exit code is 3.
    """
    classifier = Classifier.load(artifacts)
    try:
        stream = cast(BufferedReader, file.open("rb") if file else sys.stdin.buffer)
    except OSError as error:
        raise OptionError(f"cannot read {file}: {error.strerror}") from None
    number, skipped = itertools.count(1), 0
    with stream:
        for lines in lines_as_they_come(stream):
            numbered = [(i, line) for line, i in zip(lines, number, strict=False) if line.strip()]
            for answer in answers(numbered, classifier):
                if "error" in answer:
                    if not skip_bad:
                        raise RecordError(f"line {answer['line']} {answer['error']}")
                    skipped += 1
                print(json.dumps(answer))
            print(end="", flush=True)
    if skipped:
        print(f"lines that could not be classified: {skipped:,}", file=sys.stderr)
        raise typer.Exit(SKIPPED)


def lines_as_they_come(stream: BufferedReader) -> Iterator[list[bytes]]:
    """Whole lines as soon as they can be read, so that a live pipe is answered. Of a line that is
    too long the first bytes are given, still too many, and the others dropped."""
    rest, dropping = b"", False
    while portion := stream.read1(READ_BYTES):
        *lines, rest = (rest + portion).split(b"\n")
        if dropping:
            if not lines:
                rest = b""
            dropping = not lines
            del lines[:1]
        if len(rest) > LONGEST_LINE:
            lines, rest, dropping = [*lines, rest], b"", True
        yield lines
    yield [rest]


def answers(lines: list[tuple[int, bytes]], classifier: Classifier) -> Iterator[dict[str, Any]]:
    """The answer to each numbered line; for a bad one the reason as error, and its line."""
    records, bad = [], {}
    for number, line in lines:
        record = None
        try:
            if len(line) > LONGEST_LINE:
                bad[number] = f"is longer than {LONGEST_LINE:,} bytes"
            else:
                record = json.loads(line)
        except (ValueError, RecursionError):
            bad[number] = "is not JSON"
        records.append(record)
    for (number, _), record, answer in zip(lines, records, classifier.answer(records), strict=True):
        if number in bad:
            answer["error"] = bad[number]
        if "error" in answer:
            answer["line"] = number
        given = record if isinstance(record, dict) else {}
        yield {**{k: v for k, v in given.items() if k not in ("vector", "error")}, **answer}
