"""The lock of an output folder: two jobs never write to one folder, and others see which one does.

`<output>/.lock` is one line of JSON about the process that holds it: pid, and for a run also run_id
and, if the run takes commands, client_file (see `discovery.events.websocket`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from capture_kernels.errors import BusyError, RunError

LOCK = ".lock"
# `lock_holder` holds the lock for some microseconds to see whether another process does: one who
# wants it tries this often, at such intervals.
TRIES, BETWEEN_TRIES_S = 25, 0.02
# A line is some 200 bytes.
MOST_LINE_BYTES = 8_192


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who holds the lock.

    pid: None if it is not known. run_id: of the run that it computes; None if that has not begun,
    or if it is not a run. client_file: where the run says how to send it commands, if it takes any.
    """

    pid: int | None = None
    run_id: str | None = None
    client_file: str | None = None


@contextmanager
def output_lock(output: Path) -> Iterator[Callable[[str, Path | None], None]]:
    """Keep two jobs apart. The system drops the lock with the process, however it ends.

    Yields:
        A function that adds run_id and client_file to what `lock_holder` gives.

    Raises:
        BusyError: another job holds it.
        RunError: the folder cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"cannot write to {output}: {error.strerror}; choose --output") from None
    try:
        if not _locked(handle):
            holder = _read(handle).pid or "unknown"
            raise BusyError(
                f"another discovery job (process {holder}) is writing to {output}: "
                "wait for it, or choose another --output"
            )
        _write(handle, Holder(os.getpid()))
        yield lambda run_id, client_file: _write(
            handle, Holder(os.getpid(), run_id, str(client_file) if client_file else None)
        )
    finally:
        os.close(handle)


def lock_holder(output: Path) -> Holder | None:
    """Who writes to an output folder now; None if nobody does.

    Raises:
        RunError: the lock cannot be read.
    """
    try:
        handle = os.open(output / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"cannot read {output / LOCK}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(handle)
    finally:
        os.close(handle)  # with the lock
    return None


def _locked(handle: int) -> bool:
    for attempt in range(TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < TRIES:
                time.sleep(BETWEEN_TRIES_S)
        else:
            return True
    return False


def _write(handle: int, holder: Holder) -> None:
    line = msgspec.json.encode(holder) + b"\n"
    # The file is never empty, and what is left of a longer line is not in the first one.
    os.pwrite(handle, line, 0)
    os.ftruncate(handle, len(line))


def _read(handle: int) -> Holder:
    line = os.pread(handle, MOST_LINE_BYTES, 0).partition(b"\n")[0]
    try:
        return msgspec.json.decode(line, type=Holder)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Holder()
