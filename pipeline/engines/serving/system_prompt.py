"""How many tokens a request's system prompt has, for a mask that hides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .request import RequestError

Message = dict[str, Any]
_ROLES = ("system", "developer")


def count_system_tokens(
    messages: Sequence[Message],
    tokens: Sequence[int],
    tokenize: Callable[[list[Message]], Sequence[int]],
) -> int:
    """The tokens that the chat template makes of the system messages a conversation begins with;
    without any, all that the template puts before the text of the first message, where it may have
    a system prompt of its own.

    Args:
        messages: of the request.
        tokens: what the template makes of all of them.
        tokenize: what it makes of some messages alone, without asking for an answer.

    Raises:
        RequestError: these tokens are not how the conversation's begin, so that it is not known
            what to hide.
    """
    count = next((i for i, m in enumerate(messages) if m.get("role") not in _ROLES), len(messages))
    if any(message.get("role") in _ROLES for message in messages[count:]):
        raise RequestError(
            "a system message after the others cannot be hidden: put it first", "messages"
        )
    if not count:
        return _before_first(messages, tokens, tokenize)
    cannot = "the model's chat template does not allow the system prompt to be hidden"
    remedy = "use attention_mask_prefix with a number of tokens"
    try:
        own = list(tokenize(list(messages[:count])))
    # Templates are programs of their own, and raise what they like.
    except Exception as error:
        raise RequestError(f"{cannot} ({error}): {remedy}", "messages") from error
    if list(tokens[: len(own)]) != own:
        raise RequestError(f"{cannot}: {remedy}", "messages")
    return len(own)


def _before_first(
    messages: Sequence[Message],
    tokens: Sequence[int],
    tokenize: Callable[[list[Message]], Sequence[int]],
) -> int:
    """The tokens before the text of the first message: those that another text leaves as they
    are."""
    text = str(messages[0].get("content", ""))
    other = tokenize([{**messages[0], "content": "b" if text[:1] == "a" else "a"}, *messages[1:]])
    pairs = zip(tokens, other, strict=False)
    return next((i for i, (one, two) in enumerate(pairs) if one != two), len(tokens))
