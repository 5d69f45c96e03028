"""Our options on SGLang's own command line: `python -m sglang.launch_server --attention-...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from capture_kernels.errors import AttnError
from pipeline.engines.serving.options import TABLE, ServeOptions


def add_options(result: Any, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: the options of `TABLE`, none of which has a value yet."""
    group = parser.add_argument_group("attention capture (attn)")
    for option in TABLE:
        given: dict[str, Any] = {"help": option.help, "dest": option.parameter, "default": None}
        if option.kind is bool:
            group.add_argument(*option.names, action="store_true", **given)
        elif option.kind is tuple:
            group.add_argument(*option.names, nargs="+", **given)
        else:
            group.add_argument(*option.names, **given)


def read_options(original: Callable[..., Any], cls: type, arguments: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`: what was given becomes ATTN_CAPTURE_* variables, which all
    of SGLang's processes inherit. A value that cannot be used ends the program with 2."""
    chosen: dict[str, str] = {}
    for option in TABLE:
        given = getattr(arguments, option.parameter, None)
        if given is not None:
            text = given if isinstance(given, str) else option.text(
                tuple(given) if isinstance(given, list) else given)  # fmt: skip
            chosen[option.variable] = text
    try:
        options = ServeOptions.from_environment({**os.environ, **chosen})
        options.check_files()
    except AttnError as error:
        print(f"attn: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.environ |= options.environment()
    return original(cls, arguments)
