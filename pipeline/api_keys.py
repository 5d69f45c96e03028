"""API keys of a service: a file with one a line, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from capture_kernels.errors import OptionError

# A key that can be guessed is refused when it is read.
LEAST_BYTES, MOST_BYTES = 16, 1_024
MOST_FILE_BYTES = 1 << 20
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


def read_keys(path: Path, option: str = "--api-key-file") -> ApiKeys:
    """The keys of a file: one a line; empty lines and those that begin with # are left out.

    Args:
        option: that named the file, for messages.

    Raises:
        OptionError: it cannot be read, other users can read it, or a line cannot be a key.
    """
    return ApiKeys(_keys_of(path, option))


def first_key(path: Path, option: str) -> str:
    """The first key of a file, for a client that sends it. Raises as `read_keys` does."""
    return _keys_of(path, option)[0].decode("ascii")


def _keys_of(path: Path, option: str) -> list[bytes]:
    try:
        # Without waiting, if somebody made a pipe of it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise OptionError(f"cannot read {option} {path}: {error.strerror}") from None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OptionError(f"{option} {path} is not a file")
        if facts.st_mode & OPEN_TO_OTHERS:
            raise OptionError(f"{option} {path} is open to other users: chmod 600 {path}")
        lines = os.read(handle, MOST_FILE_BYTES).splitlines()
    finally:
        os.close(handle)
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        check_key(key, f"line {number} of {option} {path}")
        keys.append(key)
    if not keys:
        raise OptionError(f"{option} {path} holds no key: openssl rand -hex 32 makes one")
    return keys


def check_key(key: bytes, what: str) -> None:
    """OptionError if `key` cannot be one; `what` says where it came from."""
    if not LEAST_BYTES <= len(key) <= MOST_BYTES or not all(33 <= byte < 127 for byte in key):
        raise OptionError(
            f"{what} is not a key: use {LEAST_BYTES} to {MOST_BYTES:,} letters, digits and signs "
            "without spaces (openssl rand -hex 32)"
        )
