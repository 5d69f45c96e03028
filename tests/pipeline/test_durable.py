"""Files that are on the disk when their writer says so."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from capture_kernels.errors import WriteError
from pipeline.durable import append, sync, write_atomically

# Its number on macOS. Here it is only a mark: the calls are looked at, not the disk.
F_FULLFSYNC = 51


@pytest.fixture
def flushed(monkeypatch) -> list[tuple[str, str]]:
    """Which names were flushed and by what, as on a macOS whose disk takes F_FULLFSYNC. There is no
    such disk here, so the system's calls are replaced."""
    calls: list[tuple[str, str]] = []

    def name(handle: int) -> str:
        return Path(f"/proc/self/fd/{handle}").readlink().name.split(".")[0]

    def call(handle: int, command: int, *rest: object) -> int:
        assert command == F_FULLFSYNC
        calls.append((name(handle), "full"))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", call)
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append((name(handle), "fsync")))
    return calls


def write_all(folder: Path) -> None:
    write_atomically(folder / "whole", lambda file: file.write(b"whole"))
    append(folder / "lines", b"line\n")
    sync(folder)


def test_the_cache_of_the_disk_is_flushed_where_fsync_does_not_do_that(flushed, tmp_path):
    write_all(tmp_path)
    # A file that has no name yet begins with a dot.
    assert flushed == [("", "full"), (tmp_path.name, "full"), ("lines", "full"),
                       (tmp_path.name, "full")]  # fmt: skip


def test_a_file_system_that_refuses_that_gets_an_fsync(flushed, tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write_all(tmp_path)
    assert {how for _, how in flushed} == {"fsync"} and len(flushed) == 4


def test_a_disk_that_fails_is_an_error_all_the_same(flushed, tmp_path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    monkeypatch.setattr(os, "fsync", fail)
    for write in (lambda path: write_atomically(path, lambda file: file.write(b"x")),
                  lambda path: append(path, b"x")):  # fmt: skip
        with pytest.raises(WriteError, match="Input/output error"):
            write(tmp_path / "file")
