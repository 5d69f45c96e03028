"""The standard streams of a command: closed ones, full ones, and ones that nobody reads."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

STDOUT, STDERR = 1, 2


class OutputLostError(Exception):
    """Standard output cannot be written. `exit_code`, for a command that did well, is 0 if its
    reader went away, as `head` does when it has what it wanted."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror}")
        self.exit_code = 0 if error.errno == errno.EPIPE else 2


class StandardStream(io.FileIO):
    """Standard output or standard error. What follows a write that failed is dropped, so that
    neither the next line nor the end of the interpreter fails on it again.

    Raises (`write`):
        OutputLostError: standard output cannot be written. Standard error is never a reason to
            fail: there is nobody to tell.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._lost = False

    def write(self, data: Any, /) -> int:
        if not self._lost:
            try:
                return super().write(data)
            except OSError as error:
                self._lost = True
                if self.fileno() == STDOUT:
                    raise OutputLostError(error) from None
        return len(data)


def open_standard_streams() -> None:
    """Make `sys.stdout` and `sys.stderr` a `StandardStream` each, and give closed descriptors to
    the null device: a store that is opened must not become standard error."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
    sys.stdout = _text(STDOUT, sys.stdout)
    sys.stderr = _text(STDERR, sys.stderr)


def _text(number: int, before: TextIO | None) -> TextIO:
    encoding, errors = (before.encoding, before.errors) if before else (None, None)
    by_line = number == STDERR or os.isatty(number)
    binary = io.BufferedWriter(StandardStream(number))
    return io.TextIOWrapper(binary, encoding, errors, line_buffering=by_line)
