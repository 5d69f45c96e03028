"""In the process that answers: attention, which came as `meta_info`, for `AnswerWriter`.

`heard` listens to what the model's process says of a request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from pipeline.engines.serving.answer_writer import CURRENT, ENTRIES, SCORES, Heard
from pipeline.engines.serving.full_scores import TOO_LARGE, check_room, salted
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CUSTOM_PARAM, CaptureRequest, RequestError
from pipeline.engines.serving.responses import decoded
from pipeline.engines.serving.system_prompt import count_system_tokens
from pipeline.engines.serving.token_names import NamedOutput, named_prompt, roles_of

from .recorder_keys import USAGE

# Of a chat's `GenerateReqInput` whose tokens are to be named: their roles.
ROLES = "_attn_roles"


async def heard(
    original: Callable[..., AsyncIterator[Any]], self: Any, obj: Any, *given: Any, **named: Any
) -> AsyncIterator[Any]:
    """Around `TokenizerManager.generate_request`: note what comes of attention."""
    current, wanted = CURRENT.get(), wanted_of(obj)
    if wanted is not None and wanted.scores is not None:
        salt: Any = obj.cache_salt
        several = isinstance(salt, list)
        obj.cache_salt = list(map(salted, salt)) if several else salted(salt)
    if wanted is not None and current is not None:
        current.wants_entries = wanted.stream_entries
    if current is not None:
        await name_prompt(current, obj, self)
    try:
        async with aclosing(original(self, obj, *given, **named)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                for one in output if isinstance(output, list) else [output]:
                    if not isinstance(one, dict):
                        continue
                    await put_scores(current, one)
                    decode_entries(one.get("meta_info") or {})
                    if current is not None:
                        meta_info = one.get("meta_info") or {}
                        note(current, meta_info, self.incremental_streaming_output)
                        name_output(current, one, self.incremental_streaming_output)
                    drop_empty(one)
                yield output
    except ValueError as error:  # SGLang answers 400
        if current is not None and str(error).startswith(TOO_LARGE):
            current.refused = RequestError(str(error), "attn_capture")
        raise


def wanted_of(obj: Any) -> CaptureRequest | None:
    """What a `GenerateReqInput` wants captured."""
    sampling = getattr(obj, "sampling_params", None)
    params = sampling.get("custom_params") if isinstance(sampling, dict) else None
    if not isinstance(params, dict) or CUSTOM_PARAM not in params:
        return None
    secret = ServeOptions.from_environment(os.environ).secret
    return CaptureRequest.from_custom_params(params, secret)


def check_scores(self: Any, obj: Any, input_ids: list[int] | None, *_: Any) -> None:
    """Before `TokenizerManager._validate_one_request`: whether the full scores of a prompt are too
    large, before any work.

    Raises:
        ValueError: they are; SGLang answers 400.
    """
    wanted = wanted_of(obj)
    if wanted is None or wanted.scores is None:
        return
    try:
        check_room(len(input_ids or ()), wanted.score_heads)
    except RequestError as error:
        raise ValueError(error.message) from None


async def put_scores(current: Heard | None, output: dict[str, Any]) -> None:
    """Take the full scores out of an output's `meta_info`: for `AnswerWriter`, or in a `/generate`
    to the top of the answer."""
    taken = (output.get("meta_info") or {}).pop(SCORES, None)
    if not taken:
        return
    scores, tokens, prompt_len = taken[-1]
    # Compressed in a thread, so that other requests go on.
    entries = await asyncio.to_thread(scores.entries, tokens, prompt_len)
    if current is None:
        output[SCORES] = entries
    else:
        current.scores = entries


def decode_entries(meta_info: dict[str, Any]) -> None:
    """Decode the entries that are new, in the list itself: SGLang goes on adding to it."""
    entries = meta_info.get(ENTRIES) or []
    new = len(entries)
    while new and isinstance(entries[new - 1], bytes):
        new -= 1
    entries[new:] = decoded(entries[new:])


def drop_empty(output: dict[str, Any]) -> None:
    """Leave out of an output's `meta_info` what is said of those who did not ask: nothing. SGLang
    has a key in all outputs of a step, or in none."""
    meta_info = output.get("meta_info")
    for key in (ENTRIES, USAGE):
        if meta_info and not meta_info.get(key, True):
            del meta_info[key]


def note(current: Heard, meta_info: dict[str, Any], incremental: bool) -> None:
    """Add what a request's `meta_info` says that is new: of lists that SGLang adds to, the end; of
    --incremental-streaming-output all."""
    entries = meta_info.get(ENTRIES) or []
    new = entries if incremental else entries[current.taken :]
    current.entries += new
    current.taken += len(new)
    if usage := meta_info.get(USAGE):
        current.usage = usage[-1]


async def name_prompt(current: Heard, obj: Any, manager: Any) -> None:
    """Name the visible tokens of a request's prompt, if it asked for that.

    Args:
        obj: SGLang's `GenerateReqInput`, with text or tokens; manager: its `TokenizerManager`.
    """
    params = getattr(obj, "sampling_params", None)
    params = params.get("custom_params") if isinstance(params, dict) else None
    wanted = CaptureRequest.from_custom_params(params, current.secret)
    if wanted is None or not wanted.name_tokens:
        return
    tokenizer, hidden = manager.tokenizer, wanted.mask_prefix
    tokens = obj.input_ids or tokenizer.encode(obj.text)
    if isinstance(tokens[0], list):
        tokens = tokens[0]
    # Long prompts take a while: not in the event loop.
    roles = getattr(obj, ROLES, None)
    named = await asyncio.to_thread(named_prompt, tokenizer, tokens, hidden, roles)
    current.names = {"prompt_tokens": named, "output_tokens": []}
    current.output = NamedOutput(tokenizer, len(tokens), hidden)


def name_output(current: Heard, output: dict[str, Any], incremental: bool) -> None:
    """Name what an output generated that is new, as `note` takes what is new of entries."""
    if current.output is not None:
        tokens = output.get("output_ids") or []
        new = tokens if incremental else tokens[current.output.steps :]
        current.names.setdefault("output_tokens", []).extend(current.output.push(new))


def hide_system_prompt(
    result: tuple[Any, Any], self: Any, request: Any, *_: Any, secret: str
) -> None:
    """After `OpenAIServingChat._convert_to_internal_request`: where the system prompt is to be
    hidden, how many tokens it has, and where tokens are to be named, whose each is: only the chat
    template says it.

    Raises:
        ValueError: it is not known; SGLang answers 400.
    """
    params = result[0].sampling_params.get("custom_params")
    wanted = CaptureRequest.from_custom_params(params, secret)
    if wanted is None or not (wanted.mask_system or wanted.name_tokens):
        return
    tokenizer = self.tokenizer_manager.tokenizer
    tokens = result[0].input_ids
    if tokens is None:
        tokens = tokenizer.encode(result[0].text)
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    arguments = request.chat_template_kwargs or {}

    def tokenize(some: list[dict[str, Any]]) -> list[int]:
        try:
            found: list[int] = tokenizer.apply_chat_template(
                some, tokenize=True, add_generation_prompt=False, return_dict=False, **arguments
            )
        # Templates are programs of their own, and raise what they like.
        except Exception as error:
            raise RequestError(f"the chat template refuses messages: {error}", None) from error
        return found

    if wanted.name_tokens:
        # SGLang may run this in a thread, which does not have the context of the request.
        setattr(result[0], ROLES, roles_of(messages, tokens, tokenize))
    if not wanted.mask_system:
        return
    try:
        count = count_system_tokens(messages, tokens, tokenize)
    except RequestError as error:
        raise ValueError(str(error)) from None
    hidden = max(wanted.mask_prefix, count)
    params[CUSTOM_PARAM] = wanted.with_mask(hidden).signed(secret)
