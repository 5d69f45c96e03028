"""Requests of the OpenAI API as this server takes them: two structs, and what is refused."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pipeline.engines.serving.request import RequestError

# Alternatives that a request may ask the logprobs of.
MOST_LOGPROBS = 20
MOST_STOPS = 16


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class _Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and plain completions share."""

    model: str = "default"
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool = False
    custom_params: dict[str, Any] | None = None
    # What this server does not do; a value that asks for it is refused.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; None for as many as the context holds."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to name beside each token; None for no logprobs."""
        return None


class ChatRequest(_Sampled, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        both = self.max_completion_tokens, self.max_tokens
        return both[1] if both[0] is None else both[0]

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Sampled, frozen=True, kw_only=True):
    prompt: str | list[str | int]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def numbers(self) -> list[int]:
        """The prompt as tokens."""
        return [token for token in self.prompt if isinstance(token, int)]

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # as OpenAI's own


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """A request's body.

    Raises:
        RequestError: not JSON, a field of another type, or one that asks for what this server does
            not do.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise RequestError("the body is nested too deeply", None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not a request: {error}", None) from None
    _check(request)
    if isinstance(request, ChatRequest):
        if not request.messages:
            raise RequestError("messages must not be empty", "messages")
        if request.tools:
            raise RequestError("tools are not supported by this server", "tools")
        if (request.response_format or {}).get("type", "text") != "text":
            raise RequestError("response_format must be text", "response_format")
    else:
        for name in ("echo", "suffix"):
            if getattr(request, name):
                raise RequestError(f"{name} is not supported by this server", name)
        if request.best_of not in (None, 1):
            raise RequestError("best_of must be 1", "best_of")
        texts = sum(isinstance(part, str) for part in request.prompt)
        if isinstance(request.prompt, list) and texts and len(request.prompt) != 1:
            raise RequestError("give one prompt in a request", "prompt")
    return request


def _check(request: ChatRequest | CompletionRequest) -> None:
    if request.n not in (None, 1):
        raise RequestError("n must be 1", "n")
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(request, name):
            raise RequestError(f"{name} is not supported by this server", name)
    if request.limit is not None and request.limit < 1:
        raise RequestError(f"max_tokens must be 1 or more, got {request.limit}", "max_tokens")
    if not 0 <= (request.temperature or 0) <= 2:
        raise RequestError(
            f"temperature must lie in 0..2, got {request.temperature}", "temperature"
        )
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise RequestError(f"top_p must lie above 0 and up to 1, got {request.top_p}", "top_p")
    if len(request.stops) > MOST_STOPS or not all(request.stops):
        raise RequestError(f"stop must be up to {MOST_STOPS} texts, none empty", "stop")
    if not 0 <= (request.alternatives or 0) <= MOST_LOGPROBS:
        raise RequestError(f"logprobs name up to {MOST_LOGPROBS} tokens", "top_logprobs")
