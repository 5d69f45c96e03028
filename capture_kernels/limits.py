"""Tables of limits that a TOML file overrides: the zones' thresholds, the gate's limits."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

from .errors import OptionError


def read_limits(path: Path, known: Collection[str], what: str) -> dict[str, float]:
    """The numbers of a TOML file, by name.

    Args:
        known: the names that it may hold.
        what: what one of them is called, for the error.

    Raises:
        OptionError: the file cannot be read or is not TOML, a name is unknown, or a value is not a
            number.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise OptionError(f"{path} is not a TOML file: {error}") from None
    if unknown := sorted(set(table) - set(known)):
        raise OptionError(f"{path}: unknown {what} {unknown[0]!r}: use {', '.join(sorted(known))}")
    for name, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, int) and abs(value) > sys.float_info.max):
            raise OptionError(f"{path}: {name} must be a number, got {value!r:.40}")
    return {name: float(value) for name, value in table.items()}
