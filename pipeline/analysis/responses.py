"""Responses of an OpenAI-compatible server as dictionaries, and the attention entries in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from capture_kernels.errors import AttnError

T = TypeVar("T")


class ResponseError(AttnError):
    """A response whose attention data is damaged, or not in the format of DESIGN.md, section 7."""


def as_dict(response: Any) -> dict[str, Any]:
    """A response or a streaming chunk as a dictionary: one itself, or an object of the OpenAI
    client, which keeps fields that it does not know.

    Raises:
        ResponseError: it is neither.
    """
    if isinstance(response, Mapping):
        return dict(response)
    dump = getattr(response, "model_dump", None)
    dumped = dump() if callable(dump) else None
    if not isinstance(dumped, dict):
        raise ResponseError(
            f"expected a response as a dictionary or an object of the OpenAI client, got "
            f"{type(response).__name__}: parse JSON text first, and await what is asynchronous"
        )
    return dumped


def convert(value: Any, kind: type[T], what: str) -> T:
    """`value` as a msgspec type, or a ResponseError that says what of it is wrong."""
    try:
        # Keys of JSON objects are texts, those of layers and heads numbers.
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ResponseError(f"{what} cannot be read: {error}") from None


def collect_entries(source: Any, choice: int = 0) -> list[dict[str, Any]]:
    """The attention entries of one choice, in the order of its tokens; empty if there are none.

    Args:
        source: a response (chat or completion), one chunk of a stream, or an iterable of chunks
            such as the OpenAI client's `Stream` or a list; each a dictionary or an object of that
            client.
        choice: index of the choice.

    Raises:
        ResponseError: something in it is not a response, or `attention_tokens` is not a list of
            objects.
    """
    return [entry for part in parts(source) for entry in _of_one(part, choice)]


def parts(source: Any) -> Iterator[dict[str, Any]]:
    """The responses or chunks of a source of `collect_entries`, as dictionaries.

    Raises:
        ResponseError: one of them is neither.
    """
    whole = isinstance(source, Mapping) or hasattr(source, "model_dump")
    if whole or isinstance(source, str | bytes) or not isinstance(source, Iterable):
        source = [source]
    return map(as_dict, source)


def _of_one(response: dict[str, Any], wanted: int) -> list[dict[str, Any]]:
    choices = convert(response.get("choices") or [], list[dict[str, Any]], "choices")
    found: list[dict[str, Any]] = []
    for place, choice in enumerate(choices):
        if choice.get("index", place) != wanted:
            continue
        # A chat answer has the same list twice: in its message and beside it.
        holders = (choice.get("delta"), choice.get("message"), choice)
        lists = (holder.get("attention_tokens") for holder in holders if isinstance(holder, dict))
        entries = next((entries for entries in lists if entries is not None), None)
        if entries is not None:
            found += convert(entries, list[dict[str, Any]], "attention_tokens")
    return found


def first_choice(response: Mapping[str, Any]) -> dict[str, Any]:
    """The first choice of a response; empty if there is none."""
    choices = convert(response.get("choices") or [], list[dict[str, Any]], "choices")
    return choices[0] if choices else {}
