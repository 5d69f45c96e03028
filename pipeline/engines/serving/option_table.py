"""How an option of a server is written: on a command line, as a variable, and in what range.

A field of `ServeOptions` holds an `Option` as metadata. Command line, variables, checks and the
tests of the guide read that and nothing else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout

PREFIX = "ATTN_CAPTURE_"
NONE = "none"
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        names: as typed, `--attention-tokens-top-k`; the first is the main one.
        help: what it does, in a line.
        kind: bool (a flag), int, float, str, Path, Layout, or tuple (repeatable, or separated by
            commas; none for none).
        low, high: range of a number, ends included; None for no end.
    """

    names: tuple[str, ...]
    help: str
    kind: type
    default: Any
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameter(self) -> str:
        """The name of the command's parameter: `attention_tokens_top_k`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def field(self) -> str:
        """The field of `ServeOptions`, without what all names have: `tokens_top_k`."""
        return re.sub(r"^(attention_)?(capture_)?", "", self.parameter)

    @property
    def variable(self) -> str:
        """The environment variable: `ATTN_CAPTURE_TOKENS_TOP_K`."""
        return PREFIX + self.field.upper()

    def parse(self, text: str) -> Any:
        """The value of a variable's text. OptionError: it has none."""
        text = text.strip()
        try:
            return _PARSERS[self.kind](text)
        except ValueError:
            what = {bool: "1 or 0", int: "a whole number", float: "a number"}[self.kind]
            raise OptionError(f"{self.variable}={text[:60]!r}: it must be {what}") from None

    def text(self, value: Any) -> str:
        """What `parse` makes `value` of."""
        if self.kind is bool:
            return "1" if value else "0"
        if self.kind is tuple:
            return ",".join(value) or NONE
        return value.label if isinstance(value, Layout) else str(value)

    def check(self, value: Any) -> None:
        """OptionError if a number is out of range."""
        if value is None or self.kind not in (int, float):
            return
        low, high = self.low, self.high
        # `not <=` refuses NaN as well.
        if (low is not None and not low <= value) or (high is not None and not value <= high):
            span = f"at least {low:g}" if high is None else f"between {low:g} and {high:,.12g}"
            raise OptionError(f"{self.name} must be {span}, got {value}")


def option(
    names: str, help: str, kind: type, default: Any = None, *,
    low: float | None = None, high: float | None = None,
) -> Any:  # fmt: skip
    """A dataclass field with an `Option`; `names` are separated by spaces."""
    made = Option(tuple(names.split()), help, kind, default, low, high)
    return dataclasses.field(default=default, metadata={"option": made})


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    return field.metadata.get("option")


def _flag(text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError
    return text.lower() in _YES


def _several(text: str) -> tuple[str, ...]:
    if text.lower() == NONE:
        return ()
    return tuple(part for part in map(str.strip, text.split(",")) if part)


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: _flag, int: int, float: float, str: str, Path: Path, tuple: _several,
    Layout: Layout.parse,
}  # fmt: skip
