"""A process that runs functions beside this one, where this one's threads would wait.

cuML holds Python's lock while it lays out a map, which takes seconds for a million rows: threads of
this process that need the lock between two compiled loops wait for it. It is no worker of
`multiprocessing`, which would import the program's `__main__` again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import IO, Any, TypeVar

from capture_kernels.errors import AttnError
from pipeline.child_process import child_environment, how_ended

T = TypeVar("T")
# Seconds between two looks whether an answer is still wanted.
CHECK_EVERY = 0.05


class Ended(AttnError):
    """The process ended before it answered."""


class Beside:
    """The process, started now. Close it.

    Args:
        load: what it calls first, so that what that imports is there by the first `call`; pickle
            takes it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, load: Callable[[], None]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=child_environment() | {"CUDA_VISIBLE_DEVICES": ""},
            # A terminal's Ctrl+C is for this process, which closes that one.
            start_new_session=True,
        )  # fmt: skip
        # It writes and reads, as neither ends before the other process gets that far.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="attn-beside")
        self._pool.submit(self._answer, load)

    def call(self, check: Callable[[], None], function: Callable[..., T], *given: Any) -> T:
        """What a function returned in the process; raises what it raised. One call at a time.

        Args:
            check: called often while the answer is waited for; what it raises ends the process.
            function, given: pickle takes them, and what the function returns or raises.

        Raises:
            Ended: the process has ended.
        """
        asked = self._pool.submit(self._answer, function, *given)
        try:
            while not wait([asked], CHECK_EVERY).done:
                check()
        except BaseException:
            self.close()
            raise
        is_error, answer = asked.result()
        if is_error:
            raise answer
        found: T = answer
        return found

    def _answer(self, function: Callable[..., Any], *given: Any) -> tuple[bool, Any]:
        """Whether it raised an error, and which, or what it returned."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _write((function, given), self._process.stdin)
            answer: tuple[bool, Any] = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._process.kill()
            raise Ended(f"the process {how_ended(self._process.wait())}") from None
        return answer

    def close(self) -> None:
        """End the process, whatever it does, and wait for that."""
        self._process.kill()
        self._process.wait()
        self._pool.shutdown()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written any more
                pipe.close()


def _write(said: Any, pipe: IO[bytes]) -> None:
    pickle.dump(said, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def main() -> None:
    """The process: answers until its input ends."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What a library prints is no answer.
    os.dup2(2, 1)
    while True:
        try:
            function, given = pickle.load(asked)
        except EOFError:
            return
        try:
            answer = False, function(*given)
        except Exception as error:  # noqa: BLE001  # the caller handles it
            answer = True, error
        with suppress(BrokenPipeError):  # it has gone
            _write(answer, answers)


if __name__ == "__main__":
    main()
