"""In the process that answers: requests for attention on their way to vLLM's engine, and what was
captured on its way into responses.

`AnswerWriter` puts into a response what `heard` notes of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import cache
from typing import Any, NoReturn

from pipeline.engines.serving.answer_writer import CURRENT, Heard
from pipeline.engines.serving.full_scores import FullScores, check_room, salted
from pipeline.engines.serving.request import CUSTOM_PARAM, CaptureRequest, RequestError
from pipeline.engines.serving.system_prompt import count_system_tokens
from pipeline.engines.serving.token_names import NamedOutput, named_prompt, roles_of

from .replies import Replies, Reply


@cache
def replies() -> Replies:
    """Those of this process, from the first request on."""
    return Replies()


async def rendered_chat(
    original: Callable[..., Any], self: Any, request: Any, *given: Any, **named: Any
) -> Any:
    """Around `OnlineRenderer.render_chat`: where the system prompt is to be hidden, how many tokens
    it has, and where tokens are to be named, whose each is: only the chat template says it. The
    server's own renderer is asked, with the request's tools and arguments.

    Raises:
        VLLMValidationError: it is not known; vLLM answers 400.
    """
    found = await original(self, request, *given, **named)
    current, extra = CURRENT.get(), request.vllm_xargs
    wanted = None if current is None else CaptureRequest.from_custom_params(extra, current.secret)
    if current is None or wanted is None or not (wanted.mask_system or wanted.name_tokens):
        return found
    if not isinstance(found, tuple) or "prompt_token_ids" not in found[1][0]:
        return found  # an error of vLLM's own; or embeddings, of which nothing is captured
    messages, loop = list(map(as_dictionary, request.messages)), asyncio.get_running_loop()

    def tokenize(some: list[dict[str, Any]]) -> list[int]:
        alone = request.model_copy(
            update={
                "messages": some, "add_generation_prompt": False, "continue_final_message": False,
            }
        )  # fmt: skip
        asked = asyncio.run_coroutine_threadsafe(original(self, alone, skip_mm_cache=True), loop)
        try:
            return list(asked.result()[1][0]["prompt_token_ids"])
        # Templates are programs of their own, and raise what they like.
        except Exception as error:
            raise RequestError(f"the chat template refuses messages: {error}", None) from error

    tokens = list(found[1][0]["prompt_token_ids"])
    if wanted.name_tokens:
        current.roles = await asyncio.to_thread(roles_of, messages, tokens, tokenize)
    if not wanted.mask_system:
        return found
    try:
        count = await asyncio.to_thread(count_system_tokens, messages, tokens, tokenize)
    except RequestError as error:
        if not wanted.stream_entries:  # nobody asked: it is answered, and not recorded
            del extra[CUSTOM_PARAM]
            return found
        refuse(current, error)
    hidden = max(wanted.mask_prefix, count)
    extra[CUSTOM_PARAM] = wanted.with_mask(hidden).signed(current.secret)
    return found


async def heard(
    original: Callable[..., AsyncIterator[Any]], self: Any, prompt: Any, sampling_params: Any,
    request_id: str, *given: Any, **named: Any,
) -> AsyncIterator[Any]:  # fmt: skip
    """Around `AsyncLLM.generate`: say where reports of what is captured go, and note them."""
    current = CURRENT.get()
    extra = dict(getattr(sampling_params, "extra_args", None) or {})
    wanted = None if current is None else CaptureRequest.from_custom_params(extra, current.secret)
    reply, count, fed, has_ended = None, 0, 0, False
    if current is not None and wanted is not None:
        tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        # What only records are made of is reported to nobody; of embeddings there are none.
        if (wanted.stream_entries or wanted.scores is not None) and tokens is not None:
            fed = len(tokens)
            if wanted.scores is not None:
                prompt = {**prompt, "cache_salt": salted(prompt.get("cache_salt"))}
            reply = replies().expect(scores_of(current, wanted, prompt))
            current.wants_entries = wanted.stream_entries
            await name_prompt(current, wanted, list(tokens), self)
        to = None if reply is None else reply.to
        wanted = wanted.answered(response_id_of(request_id), to)
        extra[CUSTOM_PARAM] = wanted.signed(current.secret)
        sampling_params.extra_args = extra
    try:
        outputs = original(self, prompt, sampling_params, request_id, *given, **named)
        if reply is not None and reply.scores is not None:
            outputs = until_refused(outputs, reply)  # type: ignore[arg-type]
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                has_ended |= output.finished
                if current is not None and reply is not None:
                    if output.finished and not is_aborted(output):
                        await reply.end()
                    new = tokens_of(output, sampling_params, count)
                    count += len(new)
                    note(current, reply, count)
                    if output.finished and not is_aborted(output):
                        await put_scores(current, reply, fed, fed + count - 1)
                    if current.output is not None:
                        named_tokens = current.output.push(new)
                        current.names.setdefault("output_tokens", []).extend(named_tokens)
                yield output
        if current is not None and reply is not None and reply.no_scores and not has_ended:
            refuse(current, RequestError(reply.no_scores, "attn_capture"))
    finally:
        if reply is not None:
            reply.close()


def scores_of(current: Heard, wanted: CaptureRequest, prompt: dict[str, Any]) -> FullScores | None:
    """What takes the full scores of a request; None if it asks for none.

    Raises:
        VLLMValidationError: those of its prompt are too large; vLLM answers 400.
    """
    if wanted.scores is None:
        return None
    try:
        check_room(len(prompt["prompt_token_ids"]), wanted.score_heads)
    except RequestError as error:
        refuse(current, error)
    vision: list[tuple[int, int]] = []
    audio: list[tuple[int, int]] = []
    for modality, places in (prompt.get("mm_placeholders") or {}).items():
        ranges = [(place.offset, place.offset + place.length) for place in places]
        (audio if modality == "audio" else vision).extend(ranges)
    return FullScores(
        wanted.scores, heads=wanted.score_heads, hidden=wanted.mask_prefix,
        vision=sorted(vision), audio=sorted(audio),
    )  # fmt: skip


async def until_refused(outputs: AsyncGenerator[Any], reply: Reply) -> AsyncGenerator[Any]:
    """A request's outputs; once its scores have become too large it is ended, as nobody can use
    what it would go on to say."""
    refused = asyncio.create_task(reply.refused.wait())
    coming: asyncio.Future[Any] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(outputs))
            await asyncio.wait({coming, refused}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            try:
                output = coming.result()
            except StopAsyncIteration:
                return
            yield output
    finally:
        refused.cancel()
        # With this vLLM aborts the request, also where nobody waits for its answer any more.
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
        await outputs.aclose()


async def put_scores(current: Heard, reply: Reply, prompt: int, tokens: int) -> None:
    """Note the full scores of a request that has ended.

    Args:
        prompt: how many tokens it had; tokens: how many were fed to the model.

    Raises:
        VLLMValidationError: they became too large; vLLM answers 400.
    """
    if reply.scores is None:
        return
    try:
        reply.scores.reserve(tokens)
    except RequestError as error:
        refuse(current, error)
    reply.scores.end_at(tokens)
    missing = sum(end - begin for begin, end in reply.scores.missing(tokens))
    if missing and current.usage is not None:
        current.usage = {**current.usage, "missing_score_rows": missing}
    # Compressed in a thread, so that other requests go on.
    current.scores = await asyncio.to_thread(reply.scores.entries, tokens, prompt)


def refuse(current: Heard, error: RequestError) -> NoReturn:
    """Have vLLM answer 400, with what our gate says of errors."""
    from vllm.exceptions import VLLMValidationError

    current.refused = error
    raise VLLMValidationError(str(error)) from None


async def name_prompt(
    current: Heard, wanted: CaptureRequest, tokens: list[int], engine: Any
) -> None:
    """Name the visible tokens of a request's prompt, if it asked for that."""
    if not wanted.name_tokens:
        return
    tokenizer, hidden = engine.get_tokenizer(), wanted.mask_prefix
    # Long prompts take a while: not in the event loop.
    named = await asyncio.to_thread(named_prompt, tokenizer, tokens, hidden, current.roles)
    current.names = {"prompt_tokens": named, "output_tokens": []}
    current.output = NamedOutput(tokenizer, len(tokens), hidden)


def response_id_of(request: str) -> str:
    """The `id` of a request's response: the name of a completion's ends with the number of its
    prompt."""
    return request.rpartition("-")[0] if request.startswith("cmpl-") else request


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


def is_aborted(output: Any) -> bool:
    """Whether the engine dropped the request, which may never have run."""
    return bool(output.outputs) and output.outputs[0].finish_reason == "abort"


def tokens_of(output: Any, sampling_params: Any, count: int) -> list[int]:
    """The tokens of an output that are new: all of them, or of all so far those after `count`."""
    tokens = list(output.outputs[0].token_ids) if output.outputs else []
    return tokens if sampling_params.output_kind.name == "DELTA" else tokens[count:]
