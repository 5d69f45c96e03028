"""Attention into the answers of an OpenAI-compatible app.

What runs requests notes in a `Heard` what it hears of one's attention, and `AnswerWriter` puts it
into what is sent for it: into the next chunk of a stream, or into the whole answer. The two meet in
a context variable, which a request's own tasks share with no other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeline.asgi import App, Message, Receive, Scope, Send, path_of

from .http.asgi import error_content
from .request import RequestError
from .token_names import Named, NamedOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DATA, DONE = b"data: ", b"[DONE]"
# Names of fields of an answer, and of SGLang's `meta_info`.
ENTRIES, SCORES = "attention_tokens", "attn_capture_data"


@dataclass
class Heard:
    """What is known of one HTTP request's attention. entries, names: not sent yet; scores: all of
    its `attn_capture_data`; refused: why the app answers with an error.

    Args:
        secret: that requests are signed with.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    scores: list[dict[str, Any]] | None = None
    refused: RequestError | None = None
    wants_entries: bool = True
    taken: int = 0  # entries, sent or not
    secret: str = ""
    names: dict[str, list[Named]] = field(default_factory=dict)
    output: NamedOutput | None = None
    roles: list[str | None] | None = None  # of the prompt's tokens, once they are known

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


class AnswerWriter:
    """An ASGI app around the engine's: adds attention to the answers of the OpenAI routes.

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
        if scope["type"] != "http" or path_of(scope) not in (CHAT, COMPLETIONS):
            await self._app(scope, receive, send)
            return
        current = Heard(secret=self._secret)
        token = CURRENT.set(current)
        try:
            await self._app(scope, receive, Writing(current, path_of(scope) == CHAT, send))
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
            except ValueError:  # not JSON: an error of the app's own, which stays what it is
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
        """The events of a chunk, which engines send whole, with what is new of attention."""
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
