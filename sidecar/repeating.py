"""Work that is done again and again in a thread, so that nobody who asks for its result waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

# By default a call is followed by at least this many times its own length without one.
REST = 20.0
logger = logging.getLogger(__name__)


class Repeating:
    """Calls `work` every `every_s` seconds in a daemon thread, less often if it takes long.

    An error of `work` is logged, once until a call succeeds again, and ends nothing.
    """

    def __init__(
        self, name: str, work: Callable[[], object], every_s: float, rest: float = REST
    ) -> None:
        self._work, self._every_s, self._rest = work, every_s, rest
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, after the call that is in progress."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        failing = False
        while not self._end.is_set():
            began = time.monotonic()
            try:
                self._work()
                failing = False
            except Exception:  # a thread that ended would be silent for good
                if not failing:
                    logger.exception("%s failed; it is tried again", self._thread.name)
                failing = True
            self._end.wait(max(self._every_s, self._rest * (time.monotonic() - began)))
