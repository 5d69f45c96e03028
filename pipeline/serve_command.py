"""`attn serve`: a model behind an OpenAI-compatible API whose responses can hold attention."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer

from capture_kernels.errors import MissingExtraError, OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.option_table import Option
from pipeline.engines.serving.options import TABLE, ServeOptions
from pipeline.stream.curve import is_loopback

# What is so like an option of ours is a slip. No option of SGLang 0.5.23 or vLLM 0.33.0 is: 0.79 at
# most.
ALIKE = 0.85
# What MODEL, --host and --port are to engines.
TAKEN = ("--model-path", "--model")
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


class ServingEngine(StrEnum):
    """What runs the model. The first two have servers of their own."""

    SGLANG = "sglang"
    VLLM = "vllm"
    TRANSFORMERS = "transformers"


def serve_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in the place of its `**given`, the options of the table."""
    parameters = [
        p for p in inspect.signature(command, eval_str=True).parameters.values()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]  # fmt: skip
    for option in TABLE:
        parameters.append(
            inspect.Parameter(
                option.parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=_shown(option),
                annotation=Annotated[_type(option), typer.Option(*option.names, help=option.help)],
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _type(option: Option) -> Any:
    if option.kind is tuple:
        return list[str] | None
    kind = str if option.kind is Layout else option.kind
    return kind | None if option.default is None else kind


def _shown(option: Option) -> Any:
    if option.kind is tuple:
        return None  # the help says what that is
    return option.default.label if isinstance(option.default, Layout) else option.default


@serve_options
def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Model folder, or name on the Hugging Face hub.")],
    engine: Annotated[
        ServingEngine,
        typer.Option(help="What runs the model: sglang, vllm, or transformers (any machine)."),
    ] = ServingEngine.SGLANG,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port.")] = 30000,
    device: Annotated[
        str | None, typer.Option(help="Device of the engine: cpu, cuda; by default its own choice.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="Whose tags begin and end thinking: qwen3, deepseek-r1, ...")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; by default, MODEL.")
    ] = None,
    **given: Any,
) -> None:
    """Serve a model with attention in its API.

    Everything that is not an option below is passed to the engine's command line as it is. Without
    --return-attention-tokens, a mode, a sidecar, a store or instrumentation nothing is captured.
    Variables ATTN_CAPTURE_* hold what is not given here.
    """
    options = ServeOptions.from_environment(os.environ, **_chosen(ctx, given))
    if model.startswith("-"):
        raise OptionError(f"the model comes first: attn serve MODEL {model} ...")
    if not 0 <= port <= 65535:
        raise OptionError(f"--port must be between 0 and 65535, got {port}")
    _check_rest(engine, ctx.args)
    if engine is ServingEngine.VLLM and device is not None:
        raise OptionError(
            "--device is not an option of --engine vllm: it takes the GPU that it sees"
        )
    if engine is not ServingEngine.VLLM and options.fused_decode:
        raise OptionError(
            f"--attention-fused-decode is of --engine vllm, not {engine}: leave it out"
        )
    if engine is not ServingEngine.TRANSFORMERS and not is_installed(engine):
        raise MissingExtraError(
            f"--engine {engine} needs {NAMES[engine]}: pip install 'attn[{engine}]', or use "
            "--engine transformers"
        )
    options.check_files()
    _announce(options, host)
    named = {
        "device": device, "reasoning-parser": reasoning_parser,
        "served-model-name": served_model_name,
    }  # fmt: skip
    if engine is not ServingEngine.TRANSFORMERS:
        own = [word for name, value in named.items() if value for word in (f"--{name}", value)]
        _become(engine, model, options, ["--host", host, "--port", str(port), *own, *ctx.args])
    transformers_server().serve(
        model, options, host=host, port=port, device=device or "auto",
        reasoning_parser=reasoning_parser, served_name=served_model_name,
    )  # fmt: skip


def _chosen(ctx: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ServeOptions` that stood on the command line."""
    chosen = {}
    for option in TABLE:
        source = ctx.get_parameter_source(option.parameter)
        if source is not None and source.name == "COMMANDLINE":
            value = given[option.parameter]
            # Written as in a variable.
            if option.kind is tuple:
                value = option.parse(",".join(value))
            elif option.kind is Layout:
                value = option.parse(value)
            chosen[option.field] = value
    return chosen


def _check_rest(engine: ServingEngine, rest: list[str]) -> None:
    """OptionError for arguments that the engine does not have."""
    names = [word.partition("=")[0] for word in rest if word.startswith("--")]
    ours = [name for option in TABLE for name in option.names]
    for name in names:
        if close := get_close_matches(name, ours, 1, ALIKE):
            raise OptionError(f"there is no option {name}: did you mean {close[0]}?")
        if name in TAKEN:
            raise OptionError(f"{name} is the first argument here: attn serve MODEL")
    if engine is ServingEngine.TRANSFORMERS and rest:
        raise OptionError(f"{rest[0]} is not an option of --engine transformers")


def _announce(options: ServeOptions, host: str) -> None:
    """Say on stderr what is captured, and what is missing."""
    if options.turned_off:
        say("capture is off: --attention-disable-in-production, and neither ATTN_ENV nor ENV says "
            "development")  # fmt: skip
    elif not options.is_on:
        say("capture is off: give --return-attention-tokens, a mode, a sidecar or a store")
    else:
        say(f"capture is on: layers {options.layers}, " + _captured(options))
        if not options.has_keys and not is_loopback(host):
            say(f"warning: {host} can be reached from other machines, and there is no "
                "--attention-api-key-file: whoever reaches it can read attention")  # fmt: skip


def _captured(options: ServeOptions) -> str:
    parts = [f"{'/'.join(options.modes)} entries"] if options.modes else []
    if options.records:
        parts.append(
            f"records to {options.sidecar_url or options.store} "
            f"({options.sample_rate:.0%} of requests that ask for nothing)"
        )
    if options.enable_attention_instrumentation:
        parts.append(f"full scores of layers {options.instrumentation_layers}")
    return ", ".join(parts)


def transformers_server() -> Any:
    """The module that serves from `transformers`. MissingExtraError: it cannot be imported."""
    try:
        return importlib.import_module("pipeline.engines.openai_server.server")
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformers"):
            raise
        raise MissingExtraError(
            "--engine transformers needs torch and transformers: pip install 'attn[capture]'"
        ) from None


NAMES = {ServingEngine.SGLANG: "SGLang", ServingEngine.VLLM: "vLLM"}
SERVERS = {
    ServingEngine.SGLANG: ("sglang.launch_server", "--model-path"),
    ServingEngine.VLLM: ("vllm.entrypoints.cli.main", "serve"),
}


def _become(
    engine: ServingEngine, model: str, options: ServeOptions, arguments: list[str]
) -> NoReturn:
    """Replace this process by the engine's server, whose plug-in reads the variables."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", *SERVERS[engine], model, *arguments]
    os.execve(sys.executable, command, {**os.environ, **options.environment()})


def is_installed(engine: str) -> bool:
    """Whether an engine is installed. A folder of its name is not it."""
    found = importlib.util.find_spec(engine)
    return found is not None and found.origin is not None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
