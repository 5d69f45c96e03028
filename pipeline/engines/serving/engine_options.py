"""Our options on an engine's own command line, on their way to its processes, and in its log."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from capture_kernels.errors import AttnError

from .options import TABLE, ServeOptions
from .request import ModelFacts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `TABLE`, none of which has a value yet."""
    group = parser.add_argument_group("attention capture (attn)")
    for option in TABLE:
        given: dict[str, Any] = {"help": option.help, "dest": option.parameter, "default": None}
        if option.field == "api_key":
            group.add_argument(*option.names, action=_ToVariable, **given)
        elif option.kind is bool:
            group.add_argument(*option.names, action="store_true", **given)
        elif option.kind is tuple:
            group.add_argument(*option.names, nargs="+", **given)
        else:
            group.add_argument(*option.names, **given)


class _ToVariable(argparse.Action):
    """Keeps a secret out of the arguments, which engines log."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option: str | None = None,
    ) -> None:  # fmt: skip
        os.environ |= {one.variable: values for one in TABLE if option in one.names}


def pass_options_on(arguments: argparse.Namespace) -> ServeOptions:
    """Make what was given ATTN_CAPTURE_* variables, which all of the engine's processes inherit. A
    value that cannot be used ends the program with 2."""
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
    return options


def say_what_is_captured(options: ServeOptions, facts: ModelFacts) -> None:
    if options.turned_off:
        print("attn: capture is off: --attention-disable-in-production", file=sys.stderr)
        return
    layers = ",".join(map(str, facts.layers))
    parts = ["/".join(options.modes) + " entries"] if options.modes else []
    if facts.score_layers:
        parts.append(f"full scores of layers {','.join(map(str, facts.score_layers))}")
    if options.logit_lens and "logit_lens" not in facts.reasons:
        parts.append("logit lens")
    if options.records:
        parts.append(f"records to {options.sidecar_url or options.store}")
    print(
        f"attn: capturing layers {layers} of {facts.num_layers}, {facts.heads} heads: "
        f"{', '.join(parts)} (capture {facts.capture_id})",
        file=sys.stderr, flush=True,
    )  # fmt: skip
