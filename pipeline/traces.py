"""Traces: what was said and attended to in one conversation, as JSON lines (docs/formats.md).

The page exports and imports the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from capture_kernels.errors import AttnError
from capture_kernels.fingerprint.vector import DIMENSIONS

from .durable import write_atomically

VERSION = "1.0"
# A line is one step of one token at most.
MOST_LINE_BYTES = 16 << 20
Line = dict[str, Any]
Refused = Callable[[int, str], object]

_TEXT, _COUNT = (str,), (int,)
_MAYBE_TEXT = (str, type(None))
# Of each kind of line: the types of its fields, and those that it may lack.
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "header": {
        "version": _TEXT, "trace_id": _TEXT, "model": _MAYBE_TEXT, "run_id": _MAYBE_TEXT,
        "response_id": _MAYBE_TEXT,
    },
    "message": {"id": _TEXT, "role": _TEXT, "content": _TEXT},
    "token": {
        "index": _COUNT, "text": _TEXT, "segmentId": _MAYBE_TEXT, "id": (int, type(None)),
        "step": (int, type(None)), "role": _MAYBE_TEXT,
    },
    "step": {
        "tokenIndex": _COUNT, "attention": (dict, list, type(None)),
        "fingerprint": (dict, list, type(None)),
    },
    "segment": {
        "id": _TEXT, "type": _TEXT, "startIndex": (int, type(None)), "endIndex": (int, type(None)),
        "messageId": _MAYBE_TEXT, "base": (int, type(None)),
    },
    "metrics": {},
}  # fmt: skip
OPTIONAL = {
    "header": {"model", "run_id", "response_id"},
    "token": {"segmentId", "id", "step", "role"},
    "step": {"attention", "fingerprint"},
    "segment": {"startIndex", "endIndex", "messageId", "base"},
}
_WORDS = {
    str: "text", int: "a whole number from 0", dict: "an object", list: "a list",
    type(None): "null",
}  # fmt: skip


class TraceError(AttnError):
    """A file or value that is not a trace. Its message names the line."""


@dataclass
class Trace:
    """One trace. Every line is a dict as it stands in the file, without `record_type`.

    Args:
        header: version, trace_id, model, run_id, response_id.
        messages, tokens, steps, segments, metrics: in the order of the file.
    """

    header: Line
    messages: list[Line] = field(default_factory=list)
    tokens: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)
    segments: list[Line] = field(default_factory=list)
    metrics: list[Line] = field(default_factory=list)

    def lines(self) -> Iterator[tuple[str, Line]]:
        """Each line with its kind, as `write_trace` writes them: the header first."""
        yield "header", self.header
        for kind, lines in self._lists().items():
            for line in lines:
                yield kind, line

    def add(self, kind: str, line: Line) -> None:
        """Add a line that is not the header."""
        self._lists()[kind].append(line)

    def _lists(self) -> dict[str, list[Line]]:
        return {
            "message": self.messages, "segment": self.segments, "token": self.tokens,
            "step": self.steps, "metrics": self.metrics,
        }  # fmt: skip


def read_trace(path: str | Path, refused: Refused | None = None) -> Trace:
    """Read a trace.

    Args:
        refused: called with number (from 1) and reason of each malformed line, which is then left
            out. By default the first one ends the reading.

    Raises:
        TraceError: a malformed line, or the file cannot be read, or has no header.
    """
    trace: Trace | None = None
    for kind, line in read_lines(path, refused):
        if trace is None:
            trace = Trace(line)
        else:
            trace.add(kind, line)
    assert trace is not None, "its first line is a header"
    return trace


def read_lines(path: str | Path, refused: Refused | None = None) -> Iterator[tuple[str, Line]]:
    """The lines of a trace as they are read, each with its kind; the header first.

    Args and Raises: as of `read_trace`. Without a header nothing can be read, whatever `refused`.
    """
    try:
        with Path(path).open("rb") as file:
            yield from _lines(file, str(path), refused)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None


def _lines(file: IO[bytes], name: str, refused: Refused | None) -> Iterator[tuple[str, Line]]:
    seen: set[int] = set()
    begun = False
    for number, raw in _numbered(file):
        try:
            kind, line = _parsed(raw)
            _check_place(kind, line, begun, seen)
        except TraceError as error:
            if refused is None or not begun:
                raise TraceError(f"{name}, line {number}: {error}") from None
            refused(number, str(error))
            continue
        begun = True
        yield kind, line
    if not begun:
        raise TraceError(f"{name} is empty: a trace begins with its header")


def _numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, each with its number; of one that is too long a beginning that is
    too long as well."""
    number = 0
    while raw := file.readline(MOST_LINE_BYTES + 2):
        number += 1
        part = raw
        while len(part) == MOST_LINE_BYTES + 2 and not part.endswith(b"\n"):
            part = file.readline(MOST_LINE_BYTES + 2)
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield number, raw


def _parsed(raw: bytes) -> tuple[str, Line]:
    """Kind and fields of a line. TraceError: it is not one."""
    if len(raw) > MOST_LINE_BYTES:
        raise TraceError(f"it is longer than {MOST_LINE_BYTES:,} bytes")
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"it is no JSON ({error})") from None
    if not isinstance(line, dict):
        raise TraceError("it is no JSON object")
    kind = line.pop("record_type", None)
    if not isinstance(kind, str) or kind not in FIELDS:
        raise TraceError(f"record_type must be one of {', '.join(FIELDS)}")
    return kind, check_line(kind, line)


def check_line(kind: str, line: Line) -> Line:
    """The line. TraceError: it lacks a field, or has one of another type."""
    for name, types in FIELDS[kind].items():
        if name not in line:
            if name in OPTIONAL.get(kind, ()):
                continue
            raise TraceError(f"a {kind} line needs {name}")
        value = line[name]
        is_right = isinstance(value, types) and not isinstance(value, bool)
        if not is_right or (isinstance(value, int) and value < 0):
            raise TraceError(f"{name} must be {' or '.join(_WORDS[one] for one in types)}")
    if kind == "header" and line["version"].partition(".")[0] != VERSION.partition(".")[0]:
        raise TraceError(f"version {line['version'][:20]} is unknown: upgrade attn")
    if kind == "step":
        entries = line.get("attention")
        for entry in [entries] if isinstance(entries, dict) else entries or []:
            _check_entry(entry)
        _check_fingerprint(line.get("fingerprint"))
    return line


def _check_entry(entry: Any) -> None:
    """TraceError if an entry of attention is not one of a response."""
    if not isinstance(entry, dict):
        raise TraceError("attention must be an entry of a response, or a list of them")
    if (layers := entry.get("layer_sketches")) is not None:
        for sketch in layers.values() if isinstance(layers, dict) else [None]:
            hubs = sketch.get("top_hubs") if isinstance(sketch, dict) else None
            if not isinstance(hubs, list) or not all(
                _are_numbers(hub, 2) and _is_position(hub[0]) for hub in hubs
            ):
                raise TraceError("top_hubs of a layer must be pairs of a position and a share")
        return
    heads = entry.get("heads", {})
    if not isinstance(heads, dict):
        raise TraceError("heads must be an object")
    for one in (entry, *heads.values()):
        positions = one.get("token_positions") if isinstance(one, dict) else None
        if not isinstance(positions, list) or not all(map(_is_position, positions)):
            raise TraceError("token_positions must be whole numbers from 0")
        if not _are_numbers(one.get("topk_logits"), len(positions)):
            raise TraceError("topk_logits must be as many numbers as token_positions")
        if not _are_numbers([one.get("logsumexp_candidates")], 1):
            raise TraceError("logsumexp_candidates must be a number")


def _check_fingerprint(given: Any) -> None:
    vector = given.get("fingerprint") if isinstance(given, dict) else given
    if given is not None and not _are_numbers(vector, DIMENSIONS):
        raise TraceError(f"fingerprint must be {DIMENSIONS} numbers, or an entry that holds them")


def _are_numbers(values: Any, count: int) -> bool:
    is_list = isinstance(values, list) and len(values) == count
    return is_list and all(isinstance(v, int | float) and type(v) is not bool for v in values)


def _is_position(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_place(kind: str, line: Line, begun: bool, seen: set[int]) -> None:
    if (kind == "header") is begun:
        raise TraceError("a second header" if begun else "a trace begins with its header")
    if kind == "token":
        if line["index"] in seen:
            raise TraceError(f"token {line['index']} stands twice")
        seen.add(line["index"])


def write_trace(path: str | Path, trace: Trace | Iterable[tuple[str, Line]]) -> int:
    """Write a trace, line by line; returns how many there are. The file appears when it is whole.

    Args:
        trace: or its lines, each with its kind, as `read_lines` gives them: the header first.

    Raises:
        TraceError: a line that `read_trace` would refuse; nothing is written.
        WriteError: the file cannot be written.
    """
    lines = trace.lines() if isinstance(trace, Trace) else trace
    count = 0

    def write(file: IO[bytes]) -> None:
        nonlocal count
        seen: set[int] = set()
        for kind, line in lines:
            count += 1
            try:
                raw = _encoded(kind, line)
                _check_place(kind, line, count > 1, seen)
            except TraceError as error:
                raise TraceError(f"line {count} of the trace: {error}") from None
            file.write(raw + b"\n")
        if not count:
            raise TraceError("a trace begins with its header")

    write_atomically(Path(path), write)
    return count


def _encoded(kind: str, line: Line) -> bytes:
    if kind not in FIELDS:
        raise TraceError(f"record_type must be one of {', '.join(FIELDS)}")
    try:
        raw = msgspec.json.encode({"record_type": kind, **line})
        # As it will be read: not every value of Python survives JSON.
        if _parsed(raw) != (kind, line):
            raise TraceError("it has values that JSON does not keep: NaN, infinity, or other types")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(f"it cannot be JSON ({error})") from None
    return raw
