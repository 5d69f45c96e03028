"""Our options on SGLang's own command line: `python -m sglang.launch_server --attention-...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pipeline.engines.serving import engine_options


def add_options(result: Any, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`."""
    engine_options.add_options(parser)


def read_options(original: Callable[..., Any], cls: type, arguments: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`."""
    engine_options.pass_options_on(arguments)
    return original(cls, arguments)
