"""In the process that answers: attention, which came as `meta_info`, into OpenAI responses.

`heard` listens to what the model's process says of a request, and `AnswerWriter` puts it into what
is sent for it: into the next chunk of a stream, or into the whole answer. The two meet in a context
variable, which a request's own tasks share with no other.

Full scores need every row of the prompt, and rows whose keys are in the prefix cache do not pass
through the model: a request for them has a `cache_salt` of its own, SGLang's way to keep the caches
of requests apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeline.asgi import App, Message, Receive, Scope, Send
from pipeline.engines.serving.full_scores import TOO_LARGE, check_room
from pipeline.engines.serving.http.asgi import error_content
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CUSTOM_PARAM, CaptureRequest, RequestError
from pipeline.engines.serving.responses import decoded
from pipeline.engines.serving.system_prompt import count_system_tokens
from pipeline.engines.serving.token_names import Named, NamedOutput, named_prompt, roles_of

from .facts_file import LiveFacts
from .recorder_keys import ENTRIES, SCORES, USAGE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DATA, DONE = b"data: ", b"[DONE]"
# Of a chat's `GenerateReqInput` whose tokens are to be named: their roles.
ROLES = "_attn_roles"


@dataclass
class Heard:
    """What is known of one HTTP request's attention. entries, names: not sent yet; scores: all of
    its `attn_capture_data`; refused: why SGLang answers with an error.

    Args:
        secret: that requests are signed with.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    scores: list[dict[str, Any]] | None = None
    refused: RequestError | None = None
    wants_entries: bool = True
    taken: int = 0  # entries of the list that SGLang adds to
    secret: str = ""
    names: dict[str, list[Named]] = field(default_factory=dict)
    output: NamedOutput | None = None

    @property
    def is_any(self) -> bool:
        said = (self.usage, self.scores, self.output)
        return bool(self.taken) or any(each is not None for each in said)

    def take_names(self) -> dict[str, list[Named]]:
        taken, self.names = self.names, {}
        return taken

    def take(self) -> list[dict[str, Any]]:
        taken, self.entries = self.entries, []
        return taken


CURRENT: ContextVar[Heard | None] = ContextVar("attn_heard", default=None)


async def heard(
    original: Callable[..., AsyncIterator[Any]], self: Any, obj: Any, *given: Any, **named: Any
) -> AsyncIterator[Any]:
    """Around `TokenizerManager.generate_request`: note what comes of attention."""
    current, wanted = CURRENT.get(), wanted_of(obj)
    if wanted is not None and wanted.scores is not None:
        obj.cache_salt = salted(obj.cache_salt)
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


def salted(salt: str | list[str] | None) -> str | list[str]:
    """A client's `cache_salt`, made unlike all others."""
    if isinstance(salt, list):
        return [str(salted(one)) for one in salt]
    return (salt or "") + secrets.token_hex(16)


def check_scores(self: Any, obj: Any, input_ids: list[int] | None, *_: Any) -> None:
    """Before `TokenizerManager._validate_one_request`: whether the full scores of a prompt are too
    large, before any work.

    Raises:
        ValueError: they are; SGLang answers 400.
    """
    wanted = wanted_of(obj)
    if wanted is None or wanted.scores is None:
        return
    heads = len(wanted.heads) if wanted.heads is not None else LiveFacts()().heads
    try:
        check_room(len(input_ids or ()), heads * len(wanted.scores))
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


class AnswerWriter:
    """An ASGI app around SGLang's: adds attention to the answers of the OpenAI routes.

    Args:
        secret: that requests are signed with.
        at_end: awaited when the server has answered its last request.
    """

    def __init__(
        self, app: App, at_end: Callable[[], Awaitable[None]] | None = None, secret: str = ""
    ) -> None:
        self._app, self._at_end, self._secret = app, at_end, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and self._at_end is not None:
            await self._app(scope, receive, partial(self._ending, send, self._at_end))
            return
        if scope["type"] != "http" or scope["path"] not in (CHAT, COMPLETIONS):
            await self._app(scope, receive, send)
            return
        current = Heard(secret=self._secret)
        token = CURRENT.set(current)
        try:
            await self._app(scope, receive, Writing(current, scope["path"] == CHAT, send))
        finally:
            CURRENT.reset(token)

    @staticmethod
    async def _ending(send: Send, at_end: Callable[[], Awaitable[None]], message: Message) -> None:
        if message["type"].startswith("lifespan.shutdown."):
            await at_end()
        await send(message)


class Writing:
    """One answer on its way. A body of JSON is held until it is whole; a stream's events are not.

    Args:
        chat: whether it is one of /v1/chat/completions.
    """

    def __init__(self, current: Heard, chat: bool, send: Send) -> None:
        self._current, self._chat, self._send = current, chat, send
        self._start: Message | None = None
        self._body = bytearray()
        self._is_stream = False
        self._last: dict[str, Any] = {}  # the stream's last event

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_stream:
                await self._send(message)
            else:
                self._start = message
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        if self._is_stream:
            body = self._events(message.get("body", b"")) if self._current.is_any else None
            await self._send(message if body is None else {**message, "body": body})
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._send_whole()

    async def _send_whole(self) -> None:
        body, start = bytes(self._body), self._start
        if self._current.refused is not None:
            body = error_content(self._current.refused)
        elif self._current.is_any:
            try:
                if self._current.scores is None:
                    body = self._answer(body)
                else:  # which may be large
                    body = await asyncio.to_thread(self._answer, body)
            except ValueError:  # not JSON: an error of SGLang's own, which stays what it is
                body = bytes(self._body)
        if start is not None and body == self._body:
            await self._send(start)
        elif start is not None:
            headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _answer(self, body: bytes) -> bytes:
        answer = json.loads(body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices:
            return body
        entries = self._current.take()
        if self._current.wants_entries:
            choices[0][ENTRIES] = entries
            if self._chat and isinstance(choices[0].get("message"), dict):
                choices[0]["message"][ENTRIES] = entries
        self._add_usage(answer)
        if self._current.scores is not None:
            answer[SCORES] = self._current.scores
        return _json({**answer, **self._current.take_names()})

    def _events(self, body: bytes) -> bytes:
        """The events of a chunk, which SGLang sends whole, with what is new of attention."""
        return b"".join(map(self._event, body.splitlines(keepends=True)))

    def _event(self, line: bytes) -> bytes:
        if not line.startswith(DATA):
            return line
        content = line[len(DATA) :].strip()
        if content == DONE:
            # What came after the last text.
            left = self._current.entries or any(self._current.names.values())
            rest = self._chunk(dict(self._last)) if left else b""
            return rest + line
        try:
            event = json.loads(content)
        except ValueError:
            return line
        if not isinstance(event, dict):
            return line
        end = line[len(line.rstrip()) :]
        if event.get("choices"):
            self._last = {key: event[key] for key in event if key not in ("choices", "usage")}
            if self._current.entries:
                self._put(event["choices"][0])
            event |= self._current.take_names()
        self._add_usage(event)
        return DATA + _json(event) + end

    def _chunk(self, event: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if not self._chat:
            choice["text"] = ""
        if self._current.entries:
            self._put(choice)
        event |= {"choices": [choice], **self._current.take_names()}
        return DATA + _json(event) + b"\n\n"

    def _put(self, choice: dict[str, Any]) -> None:
        place = choice.setdefault("delta", {}) if self._chat else choice
        place[ENTRIES] = self._current.take()

    def _add_usage(self, answer: dict[str, Any]) -> None:
        if self._current.usage is not None and isinstance(answer.get("usage"), dict):
            answer["usage"]["attention"] = self._current.usage


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


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
