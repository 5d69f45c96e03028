"""In the process that answers: requests for attention on their way to vLLM's engine, and what was
captured on its way into responses.

`AnswerWriter` puts into a response what `heard` notes of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import cache
from typing import Any

from pipeline.engines.serving.answer_writer import CURRENT, Heard
from pipeline.engines.serving.request import CUSTOM_PARAM, CaptureRequest, RequestError
from pipeline.engines.serving.system_prompt import count_system_tokens
from pipeline.engines.serving.token_names import NamedOutput, named_prompt, roles_of

from .replies import Replies, Reply


@cache
def replies() -> Replies:
    """Those of this process, from the first request on."""
    return Replies()


async def noted_chat(
    original: Callable[..., Any], self: Any, request: Any, *given: Any, **named: Any
) -> Any:
    """Around `OnlineRenderer.render_chat`: only its messages say whose a token is."""
    if (current := CURRENT.get()) is not None:
        current.chat = request
    return await original(self, request, *given, **named)


async def heard(
    original: Callable[..., AsyncIterator[Any]], self: Any, prompt: Any, sampling_params: Any,
    request_id: str, *given: Any, **named: Any,
) -> AsyncIterator[Any]:  # fmt: skip
    """Around `AsyncLLM.generate`: say where what is captured goes, and note it."""
    current = CURRENT.get()
    extra = getattr(sampling_params, "extra_args", None)
    wanted = None if current is None else CaptureRequest.from_custom_params(extra, current.secret)
    reply, count = None, 0
    if current is not None and wanted is not None:
        wanted = await prepared(current, wanted, prompt, self.get_tokenizer())
        if wanted.stream_entries:  # what only records are made of has nothing to hear
            reply = replies().expect()
            wanted = wanted.replying(reply.to)
        sampling_params.extra_args = {**(extra or {}), CUSTOM_PARAM: wanted.signed(current.secret)}
    try:
        outputs = original(self, prompt, sampling_params, request_id, *given, **named)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                if current is not None and reply is not None:
                    if output.finished:
                        await reply.end()
                    new = tokens_of(output, sampling_params, count)
                    count += len(new)
                    note(current, reply, count)
                    if current.output is not None:
                        named_output = current.output.push(new)
                        current.names.setdefault("output_tokens", []).extend(named_output)
                yield output
    finally:
        if reply is not None:
            reply.close()


async def prepared(
    current: Heard, wanted: CaptureRequest, prompt: Any, tokenizer: Any
) -> CaptureRequest:
    """What is wanted once it is known which tokens the system prompt has; the tokens of the prompt
    are named, if the request asks for it.

    Raises:
        VLLMValidationError: it is not known; vLLM answers 400.
    """
    current.wants_entries = wanted.stream_entries
    if not (wanted.mask_system or wanted.name_tokens):
        return wanted
    tokens = list(prompt["prompt_token_ids"])
    chat = current.chat
    messages = [] if chat is None else list(map(as_dictionary, chat.messages))
    arguments = {} if chat is None else chat.chat_template_kwargs or {}

    def tokenize(some: list[dict[str, Any]]) -> list[int]:
        try:
            found: list[int] = tokenizer.apply_chat_template(
                some, tokenize=True, add_generation_prompt=False, return_dict=False, **arguments
            )
        # Templates are programs of their own, and raise what they like.
        except Exception as error:
            raise RequestError(f"the chat template refuses messages: {error}", None) from error
        return found

    hidden = wanted.mask_prefix
    if wanted.mask_system:
        try:
            hidden = max(hidden, count_system_tokens(messages, tokens, tokenize))
        except RequestError as error:
            from vllm.exceptions import VLLMValidationError

            current.refused = error
            raise VLLMValidationError(str(error)) from None
        wanted = wanted.with_mask(hidden)
    if wanted.name_tokens:
        roles = roles_of(messages, tokens, tokenize) if messages else None
        # Long prompts take a while: not in the event loop.
        named = await asyncio.to_thread(named_prompt, tokenizer, tokens, hidden, roles)
        current.names = {"prompt_tokens": named, "output_tokens": []}
        current.output = NamedOutput(tokenizer, len(tokens), hidden)
    return wanted


def as_dictionary(message: Any) -> dict[str, Any]:
    """A message of a chat, which is a dictionary or a model of pydantic's."""
    found: dict[str, Any] = (
        dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)
    )
    return found


def note(current: Heard, reply: Reply, tokens: int) -> None:
    """Add what has come that is new, of rows that led to one of so many generated tokens: the
    engine may go on past what ends an answer, as a stop string does."""
    entries = reply.take(tokens)
    current.entries += entries
    current.taken += len(entries)
    current.usage = reply.usage


def tokens_of(output: Any, sampling_params: Any, count: int) -> list[int]:
    """The tokens of an output that are new: all of them, or of all so far those after `count`."""
    tokens = list(output.outputs[0].token_ids) if output.outputs else []
    return tokens if sampling_params.output_kind.name == "DELTA" else tokens[count:]
