"""The HTTP application: the OpenAI API's routes over a `ModelLoop`, behind `CaptureGate`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from capture_kernels.errors import AttnError
from pipeline.engines.serving.request import CaptureRequest, RequestError
from pipeline.engines.serving.sinks import RecordSink
from pipeline.engines.serving.token_names import Named, named_prompt

from .answers import Answer, Body
from .errors import BodyTooLargeError, ClientGoneError, FailedError, error_body, error_response
from .loop import ModelLoop
from .model import ServedModel
from .protocol import ChatRequest, CompletionRequest, parse
from .running import Running
from .sequence import Step, Work, token_limit

R = TypeVar("R", ChatRequest, CompletionRequest)


def create_app(
    model: ServedModel, loop: ModelLoop, sink: RecordSink | None, most_body_bytes: int
) -> FastAPI:
    """The application, without the gate in front of it.

    Args:
        loop: of the model, running.
        sink: whose counts /health shows; None without one.
        most_body_bytes: of a request.
    """
    app = FastAPI(title="attn", docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(model, loop, most_body_bytes)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        return error_response(error, dict(error.headers or {}))

    @app.get("/health")
    async def health() -> Response:
        """Whether the server runs, and what it is at."""
        body: Body = {"status": "ok", "requests": loop.counts}
        if sink is not None:
            body["records"] = sink.counts._asdict()
        return _json(body)

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        found = {"id": model.name, "object": "model", "created": 0, "owned_by": "attn",
                 "max_model_len": model.context}  # fmt: skip
        return _json({"object": "list", "data": [found]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """A chat completion of the OpenAI API."""
        return await server.answer(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """A completion of the OpenAI API."""
        return await server.answer(request, CompletionRequest)

    return app


class _Server:
    """Answers requests of both kinds."""

    def __init__(self, model: ServedModel, loop: ModelLoop, most_body_bytes: int) -> None:
        self._model, self._loop, self._most_body_bytes = model, loop, most_body_bytes

    async def answer(self, http: Request, kind: type[R]) -> Response:
        try:
            body = await self._body(http)
            # Prompts take a tokenizer's time: not in the event loop.
            request, work, named = await asyncio.to_thread(self._read, body, kind)
            running = Running(self._loop, work)
            answer = Answer(self._model, request, work, named)
            if request.stream:
                # The first step comes before the status, so that what fails has one.
                first = await running.unless_gone(http, running.next())
                return _EventStream(self._stream(running, answer, first), running)
            return await self._whole(http, running, answer)
        except ClientGoneError:
            return Response(status_code=499)  # as nginx has it; nobody reads it
        except (RequestError, AttnError, FailedError) as error:
            return error_response(error)

    async def _body(self, http: Request) -> bytes:
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > self._most_body_bytes:
                raise BodyTooLargeError(
                    f"the body has more than {self._most_body_bytes:,} bytes, the most taken here"
                )
        return bytes(body)

    def _read(self, body: bytes, kind: type[R]) -> tuple[R, Work, list[Named] | None]:
        request, model = parse(body, kind), self._model
        secret = model.options.secret
        capture = CaptureRequest.from_custom_params(request.custom_params, secret)
        if isinstance(request, ChatRequest):
            arguments = request.chat_template_kwargs or {}
            tokens = model.chat_tokens(request.messages, arguments)
            if capture is not None and capture.mask_system:
                hidden = model.system_tokens(request.messages, tokens, arguments)
                mask = max(capture.mask_prefix, hidden)
                capture = msgspec.structs.replace(capture, mask_prefix=mask)
        else:
            prompt = request.prompt
            one = prompt[0] if isinstance(prompt, list) and prompt else prompt
            tokens = model.prompt_tokens(one if isinstance(one, str) else request.numbers)
        token_limit(model, len(tokens), request.limit)
        prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
        work = Work(
            id=f"{prefix}-{uuid.uuid4().hex}",
            tokens=tokens,
            limit=request.limit,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed,
            stops=request.stops,
            ignore_eos=request.ignore_eos,
            alternatives=request.alternatives,
            capture=capture,
        )
        named = None
        if capture is not None and capture.name_tokens:
            roles = None
            if isinstance(request, ChatRequest):
                roles = model.roles(request.messages, tokens, request.chat_template_kwargs or {})
            named = named_prompt(model.tokenizer, tokens, capture.mask_prefix, roles)
        return request, work, named

    async def _whole(self, http: Request, running: Running, answer: Answer) -> Response:
        async def collect() -> Body:
            while True:
                step = await running.next()
                answer.add(step)
                if step.finish_reason is not None:
                    # Scores are compressed: not in the event loop.
                    return await asyncio.to_thread(answer.whole)

        return _json(await running.unless_gone(http, collect()))

    async def _stream(self, running: Running, answer: Answer, first: Step) -> AsyncIterator[bytes]:
        try:
            if (chunk := answer.first_chunk()) is not None:
                yield _event(chunk)
            step = first
            while True:
                if (chunk := answer.chunk(step)) is not None:
                    yield _event(chunk)
                if step.finish_reason is not None:
                    break
                step = await running.next()
            if (chunk := answer.last_chunk()) is not None:
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except (RequestError, AttnError, FailedError) as error:
            yield _event(error_body(error)[1])


class _EventStream(StreamingResponse):
    """Server-sent events. When the client goes, Starlette ends the response, be it before the first
    event: then the request ends, too."""

    def __init__(self, events: AsyncIterator[bytes], running: Running) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


def _json(body: Body) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
