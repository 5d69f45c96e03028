"""What a store says where it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capture_kernels.errors import StoreError


def check_parent(path: Path) -> None:
    """StoreError if the folder that a store is to be in does not exist."""
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist: make it, or give another path")


def rows_gone(path: Path) -> StoreError:
    return StoreError(f"rows were deleted from {path} while they were read: read them again")


def store_gone(path: Path) -> StoreError:
    return StoreError(
        f"{path} was deleted or replaced while it was open, and its rows are gone: see what is "
        "there now, and open it again"
    )


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses at `path` into a StoreError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise StoreError(
            f"cannot use {path} ({reason}): check that it is there, its permissions and its disk"
        ) from None


def locked_error(path: Path) -> StoreError:
    return StoreError(f"{path} is locked by another process: wait until it is done, or stop it")
