"""API keys: a file with one a line, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from pathlib import Path

from capture_kernels.errors import OptionError
from sidecar.repeating import Repeating

LOG = logging.getLogger("attn.sidecar")

# A key that can be guessed is refused when it is read.
LEAST_BYTES, MOST_BYTES = 16, 1_024
MOST_FILE_BYTES = 1 << 20
# Between two looks at the file.
LOOK_EVERY_S = 1.0
# Permissions that a key file must not have. A group may read it, as it may a mounted secret.
OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP


class ApiKeys:
    """The keys that a request may have.

    Only their hashes are kept, which have one length: how long a comparison takes says nothing of
    any key.

    Args:
        keys: at least one.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._hashes = [hashlib.sha256(key).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, given: bytes) -> bool:
        found = False
        digest = hashlib.sha256(given).digest()
        for known in self._hashes:  # all of them, whichever fits
            found |= hmac.compare_digest(digest, known)
        return found


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


def read_keys(path: Path) -> ApiKeys:
    """The keys of a file: one a line; empty lines and those that begin with # are left out.

    Raises:
        OptionError: it cannot be read, other users can read it, or a line cannot be a key.
    """
    try:
        # Without waiting, if somebody made a pipe of it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise OptionError(f"cannot read --api-key-file {path}: {error.strerror}") from None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OptionError(f"--api-key-file {path} is not a file")
        if facts.st_mode & OPEN_TO_OTHERS:
            raise OptionError(f"--api-key-file {path} is open to other users: chmod 600 {path}")
        lines = os.read(handle, MOST_FILE_BYTES).splitlines()
    finally:
        os.close(handle)
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not LEAST_BYTES <= len(key) <= MOST_BYTES or not all(33 <= byte < 127 for byte in key):
            raise OptionError(
                f"line {number} of --api-key-file {path} is not a key: use {LEAST_BYTES} to "
                f"{MOST_BYTES:,} letters, digits and signs without spaces (openssl rand -hex 32)"
            )
        keys.append(key)
    if not keys:
        raise OptionError(f"--api-key-file {path} holds no key: openssl rand -hex 32 makes one")
    return ApiKeys(keys)
