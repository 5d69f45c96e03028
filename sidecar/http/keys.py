"""The API keys of a file that may change while they are used."""

from __future__ import annotations

import logging
from pathlib import Path

from capture_kernels.errors import OptionError
from pipeline.api_keys import ApiKeys, read_keys
from sidecar.repeating import Repeating

LOG = logging.getLogger("attn.sidecar")

# Between two looks at the file.
LOOK_EVERY_S = 1.0


class KeyFile(ApiKeys):
    """The keys of a file, which may be changed while they are used.

    A file that cannot be used any more (gone, empty, open to others) changes nothing, and the log
    says so once.

    Raises:
        OptionError: as of `read_keys`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, _mark(path)
        self._hashes = read_keys(path)._hashes
        self._repeating = Repeating("keys", self.look, LOOK_EVERY_S, rest=0.0)

    def start(self) -> None:
        """Look at the file every second, in a thread."""
        self._repeating.start()

    def look(self) -> None:
        """Read the file again if it is another one, or was written."""
        if (mark := _mark(self._path)) == self._seen:
            return
        self._seen = mark
        try:
            self._hashes = read_keys(self._path)._hashes
        except OptionError as error:
            LOG.warning("the keys are those of before", extra={"reason": str(error)})
        else:
            LOG.info("keys read again", extra={"keys": len(self)})


def _mark(path: Path) -> tuple[int, ...] | None:
    """Changes when the file is replaced, written, or open to others."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
