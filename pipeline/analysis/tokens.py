"""Which text each token of a response has: the prompt's from the tokenizer, the answer's from the
response's logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from capture_kernels.errors import MissingExtraError, OptionError

from .responses import ResponseError, as_dict, convert, first_choice

Messages = Sequence[Mapping[str, Any]]
_Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class _Counts(msgspec.Struct):
    prompt_len: _Count | None = None
    prompt_tokens: _Count | None = None


def build_token_map(
    model: Any, prompt: str | Messages, response: Any
) -> tuple[dict[int, str], int]:
    """The texts of the tokens of a request, by the index that attention data gives them.

    A server that hides a prefix of the prompt counts from its end, and so do the indices.

    Args:
        model: folder or hub name of the model's tokenizer, or a tokenizer of `transformers`; None
            for no texts of the prompt.
        prompt: a text, or messages. In a chat, a text is the one message of the user.
        response: a chat or text completion, asked with `logprobs`.

    Returns:
        The texts by index, as decoded, and the number of tokens of the prompt that are not hidden.
        Texts that nobody knows are left out.

    Raises:
        MissingExtraError: `model` is a name and transformers is not installed.
        OptionError: the tokenizer cannot be loaded, or makes another number of tokens than the
            server counted.
        ResponseError: logprobs or counts cannot be read, or nothing says how long the prompt is.
    """
    response = as_dict(response)
    counted, shown = _prompt_lengths(response)
    texts: list[str] = []
    if model is not None:
        tokenizer = load_tokenizer(model) if isinstance(model, str) else model
        texts = _prompt_texts(tokenizer, prompt, chat="message" in first_choice(response))
        if counted is not None and counted != len(texts):
            raise OptionError(
                f"this tokenizer makes {len(texts)} tokens of the prompt, the server counted "
                f"{counted}: give the tokenizer and the prompt of the server"
            )
    elif shown is None:
        raise ResponseError("the response does not say how many tokens the prompt has")
    prompt_len = len(texts) if shown is None else shown
    texts_by_index = dict(enumerate(texts[max(0, len(texts) - prompt_len) :]))
    texts_by_index.update(enumerate(generated_tokens(response), prompt_len))
    return texts_by_index, prompt_len


def generated_tokens(response: Any) -> list[str]:
    """The texts of the generated tokens from the logprobs of a chat or text completion; empty
    without logprobs.

    Raises:
        ResponseError: the logprobs cannot be read.
    """
    logprobs = first_choice(as_dict(response)).get("logprobs")
    if logprobs is None:
        return []
    logprobs = convert(logprobs, dict[str, Any], "logprobs")
    if "content" in logprobs:
        content = convert(logprobs["content"] or [], list[dict[str, Any]], "logprobs")
        return convert([token.get("token") for token in content], list[str], "logprobs")
    return convert(logprobs.get("tokens") or [], list[str], "logprobs")


def find_tokens(texts: Mapping[int, str], wanted: str, start: int, end: int) -> list[int]:
    """The tokens that hold the first occurrence of `wanted`, blanks and line breaks aside.

    Args:
        texts: texts by index.
        wanted: what is looked for.
        start, end: the tokens that are searched, `end` excluded.

    Returns:
        Their indices; empty if it does not occur, or if a text before its end is not known.
    """
    joined, owners = "", []
    for index in range(start, end):
        # A tokenizer may keep, drop or rewrite the blanks around a token.
        letters = "".join(texts.get(index, "\0").split())
        joined += letters
        owners += [index] * len(letters)
    letters = "".join(wanted.split())
    at = joined.find(letters) if letters else -1
    return [] if at < 0 else sorted(set(owners[at : at + len(letters)]))


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model by its folder or hub name.

    Raises:
        MissingExtraError: transformers is not installed.
        OptionError: there is none that can be read.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError(
            "texts of the prompt need transformers: pip install 'attn[capture]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        line = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise OptionError(f"cannot load the tokenizer of {name!r}: {line.strip()}") from None


def _prompt_texts(tokenizer: Any, prompt: str | Messages, chat: bool) -> list[str]:
    messages: list[Mapping[str, Any]] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    )
    if chat and getattr(tokenizer, "chat_template", None):
        ids = tokenizer.encode(_rendered(tokenizer, messages), add_special_tokens=False)
    elif len(messages) == 1 and isinstance(text := messages[0].get("content"), str):
        # A server without a chat template, too, may send the text as it is. Counts show it.
        ids = tokenizer.encode(text)
    else:
        raise OptionError("this tokenizer has no chat template for several messages")
    return [tokenizer.decode([id_]) for id_ in ids]


def _rendered(tokenizer: Any, messages: list[Mapping[str, Any]]) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise OptionError(f"the chat template refuses the messages: {error}") from None


def _prompt_lengths(response: dict[str, Any]) -> tuple[int | None, int | None]:
    """The tokens of the whole prompt that the server counted, and those that attention data has;
    None if it does not say it."""
    layers = convert(response.get("attn_capture_data") or [], list[dict[str, Any]], "layers")
    meta = layers[0].get("token_meta") if layers else None
    shown = convert(meta or {}, _Counts, "token_meta").prompt_len
    counted = convert(response.get("usage") or {}, _Counts, "usage").prompt_tokens
    return shown if counted is None else counted, counted if shown is None else shown
