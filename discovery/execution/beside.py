"""A process that runs functions beside this one, where this one's threads would wait.

cuML holds Python's lock while it lays out a map, which takes seconds for a million rows: threads of
this process that need the lock between two compiled loops wait for it. `multiprocessing` would
import the program's `__main__` again in such a process.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, TypeVar

from capture_kernels.errors import AttnError
from pipeline.child_process import child_environment, how_ended

T = TypeVar("T")
# Seconds between two looks whether an answer is still wanted, and until a process has ended by
# itself that has closed its output.
CHECK_EVERY, ENDS_WITHIN = 0.05, 1.0


class Ended(AttnError):
    """The process ended before it answered."""


class Beside:
    """The process, started now. Close it.

    Args:
        load: what it calls first, so that what that imports is there by the first `call`: a
            function of a module.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, load: Callable[[], None]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=child_environment() | {"CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
        )  # fmt: skip
        self._calling = threading.Lock()
        with suppress(OSError):  # it has ended, as the first call will find
            self._send(load)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, check: Callable[[], None], function: Callable[..., T], *given: Any) -> T:
        """What a function returned in the process; raises what it raised.

        Args:
            check: called often while the answer is waited for; may raise. Close the process then.
            function, given: pickle takes them, and what the function returns. An error that pickle
                does not take is raised as a RuntimeError of the same text.

        Raises:
            Ended: the process has ended, or was closed.
        """
        with self._calling:
            try:
                self._send((function, given))
                while not select.select([self._output], [], [], CHECK_EVERY)[0]:
                    check()
                is_error, answer = pickle.load(self._output)
            except (OSError, ValueError, EOFError, pickle.UnpicklingError):
                raise Ended(f"the process {self._how_it_ended()}") from None
        if is_error:
            raise answer
        found: T = answer
        return found

    def close(self) -> None:
        """End the process, whatever it does, and wait for that. A call in another thread ends."""
        self._process.kill()
        self._process.wait()
        with self._calling, suppress(BrokenPipeError):  # what was not written any more
            self._output.close()
            self._input.close()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _send(self, asked: Any) -> None:
        self._input.write(pickle.dumps(asked, pickle.HIGHEST_PROTOCOL))
        self._input.flush()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return how_ended(code)


def main() -> None:
    """The process: answers until its input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Its parent gets them as well, and decides whether to close it.
        signal.signal(number, signal.SIG_IGN)
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # An answer stands alone, whatever a library prints.
    os.dup2(2, 1)
    pickle.load(asked)()
    while True:
        try:
            function, given = pickle.load(asked)
        except EOFError:
            return
        with suppress(BrokenPipeError):  # the parent has ended
            answers.write(answered(function, given))
            answers.flush()


def answered(function: Callable[..., Any], given: tuple[Any, ...]) -> bytes:
    """Whether the function raised an error, and which, or what it returned, pickled."""
    try:
        return pickle.dumps((False, function(*given)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  # the caller handles it
        try:
            found = pickle.dumps((True, error))
            pickle.loads(found)
        except Exception:  # noqa: BLE001  # errors have whatever arguments they like
            found = pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
        return found


if __name__ == "__main__":
    main()
