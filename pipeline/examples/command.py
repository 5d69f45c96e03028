"""`attn examples needle` and `attn examples codename`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capture_kernels.errors import MissingExtraError, OptionError

from .prompts import CODENAME, NEEDLE, Example, Style

if TYPE_CHECKING:
    from .printout import Reading

examples_app = typer.Typer(
    no_args_is_help=True,
    help="Ask a server for what stands in the prompt, and see which heads look it up.",
)

BaseUrl = Annotated[str, typer.Option(help="Address of the server's OpenAI-compatible API.")]
Layers = Annotated[
    str | None, typer.Option(help="Layers, as 2,18,27. Default: those that the server offers.")
]
ApiKey = Annotated[str | None, typer.Option(help="Key that the server wants.")]
Model = Annotated[str | None, typer.Option(help="Model to ask. Default: the first it serves.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or hub name of its tokenizer. Default: the model's name.")
]
PromptStyle = Annotated[
    Style, typer.Option(help="chat, plain (a text to go on with), or auto: plain if not chat.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of the answer at most.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the server.")]

_URL = "http://127.0.0.1:30000/v1"


@examples_app.command()
def needle(
    layers: Layers = None, base_url: BaseUrl = _URL, api_key: ApiKey = None, model: Model = None,
    tokenizer: Tokenizer = None, prompt_style: PromptStyle = "auto", max_tokens: MaxTokens = 32,
    timeout: Timeout = 120.0,
) -> None:  # fmt: skip
    """Find a number in a list by its key, and show which heads read it."""
    _run(NEEDLE, layers, base_url, api_key, model, tokenizer, prompt_style, max_tokens, timeout)


@examples_app.command()
def codename(
    layers: Layers = None, base_url: BaseUrl = _URL, api_key: ApiKey = None, model: Model = None,
    tokenizer: Tokenizer = None, prompt_style: PromptStyle = "auto", max_tokens: MaxTokens = 32,
    timeout: Timeout = 120.0,
) -> None:  # fmt: skip
    """Find an agent's codename in a log, and show which heads read it."""
    _run(CODENAME, layers, base_url, api_key, model, tokenizer, prompt_style, max_tokens, timeout)


def _run(
    example: Example, layers: str | None, base_url: str, api_key: str | None, model: str | None,
    tokenizer: str | None, style: Style, max_tokens: int, timeout: float,
) -> None:  # fmt: skip
    from pipeline.analysis import extract_attention_from_response

    from .server import ExampleServer, ServerError

    with ExampleServer(base_url, api_key, timeout) as server:
        model = model or server.model()
        offered = None if layers else server.layers()
        wanted = layers or (",".join(map(str, offered)) if offered else None)
        response = server.ask(
            example.prompt, style, model=model, layers=wanted, max_tokens=max_tokens
        )
    scores = extract_attention_from_response(response)
    if scores is None:
        raise ServerError(
            f"{base_url} answered without attention: start it with attention capture on"
        )
    reading, note = _read(example, response, scores, model, tokenizer)
    right = _print_answer(example, response, model, list(scores))
    shown = _print_layers(reading)
    if note:
        print(f"note: {note}", file=sys.stderr)
    elif reading.line and not shown:
        numbers = ", ".join(map(str, sorted(scores)))
        print(
            f"error: no head of layer {numbers} shows the line: a model may look it up in another "
            "one; see --layers, and the server's --attention-instrumentation-layers",
            file=sys.stderr,
        )
    if not right:
        print(f"error: the answer is not {example.answer!r}", file=sys.stderr)
    raise typer.Exit(int(not (right and shown)))


def _read(
    example: Example, response: dict[str, Any], scores: dict[int, dict[str, Any]], model: str,
    tokenizer: str | None,
) -> tuple[Reading, str]:  # fmt: skip
    """The answer, and why its line cannot be marked; a tokenizer that was named must work."""
    from pipeline.analysis import build_token_map

    from .printout import read

    note = ""
    try:
        texts, prompt_len = build_token_map(tokenizer or model, example.prompt, response)
    except (OptionError, MissingExtraError) as error:
        if tokenizer:
            raise
        note = f"{error}: the line cannot be marked without its tokens; see --tokenizer"
        texts, prompt_len = build_token_map(None, example.prompt, response)
    reading = read(example, response, scores, texts, prompt_len)
    if not note and not reading.line:
        note = f"the line {example.line!r} is not among the tokens that the server shows"
    return reading, note


def _print_answer(
    example: Example, response: dict[str, Any], model: str, layers: list[int]
) -> bool:
    """Prints the question and the answer; True if it is right."""
    from pipeline.analysis.responses import first_choice

    choice = first_choice(response)
    message = choice.get("message")
    said = message.get("content") if isinstance(message, dict) else choice.get("text")
    answer = said.strip() if isinstance(said, str) else ""
    right = example.answer.casefold() in answer.casefold()
    print(f"{example.name} | model={model} layers={','.join(map(str, sorted(layers)))}")
    print(f"Prompt:\n{example.prompt}\nExpected: {example.answer!r}")
    print(f"Output: {answer!r} {'✓' if right else '✗'}")
    return right


def _print_layers(reading: Reading) -> bool:
    """Prints the layers; True if a head shows the example's line."""
    from .printout import layer_lines, strongest

    shown = False
    for line, shows in layer_lines(reading):
        print(line)
        shown = shown or shows
    if reading.line:
        print(f"\n{strongest(reading)}")
    return shown
