"""The gate in front of an OpenAI-compatible app: requests for attention, and who may make them.

Pure ASGI. A request that asks for nothing costs a search of its bytes; it is passed on as it came.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from starlette.middleware.gzip import GZipMiddleware

from pipeline.asgi import App, Headers, Message, Receive, Scope, Send, path_of

from .body import RequestError, asked_fields, asks, read_body, without_fields
from .capabilities import capabilities, refusals
from .http.asgi import (
    ClientGoneError,
    accepts_gzip,
    answer,
    header,
    refuse,
    replayed,
    whole_body,
    with_early_start,
    with_length,
)
from .http.cors import Origins
from .options import ServeOptions
from .request import (
    CUSTOM_PARAM,
    CaptureRequest,
    ModelFacts,
    parse_request,
    sampled_request,
)

CAPABILITIES = "/v1/attention/capabilities"
GENERATE = "/generate"
ROUTES = {
    "/v1/chat/completions": ("POST",),
    "/v1/completions": ("POST",),
    GENERATE: ("POST", "PUT"),
}
# Larger bodies are read in a thread, so that other requests go on.
THREAD_BYTES = 256 << 10
# Smaller answers are sent as they are. A higher level gained 2% and took up to twice as long.
GZIP_LEAST_BYTES, GZIP_LEVEL = 500, 5
# All our fields hold one of the first three; the last may spell them.
_MARKS = (b"attention", b"attn", b"return_prompt_tokens", b"\\u")


class CaptureGate:
    """An ASGI app around another one.

    Args:
        app: answers /v1/chat/completions, /v1/completions and /generate; takes what is wanted from
            the object `place` of a body (of its `sampling_params` for /generate) by
            `CaptureRequest.from_custom_params`.
        facts: of the served model, as it is now.
        draw: numbers in [0, 1) that decide which other requests are recorded.

    Raises:
        OptionError: the key file cannot be used.
    """

    def __init__(
        self, app: App, options: ServeOptions, facts: Callable[[], ModelFacts], *,
        draw: Callable[[], float] | None = None, place: str = "custom_params",
    ) -> None:  # fmt: skip
        self._app, self._options, self._facts = app, options, facts
        # Events are compressed as well; each leaves at once.
        self._compressing: App = GZipMiddleware(
            with_early_start(app), GZIP_LEAST_BYTES, GZIP_LEVEL, exclude_content_types=()
        )
        self._keys = options.keys()
        self._origins = Origins(options.cors_origins)
        self._draw, self._place = draw or random.Random(0).random, place
        self._rate = options.sample_rate if options.records and options.is_on else 0.0
        self._most_bytes = options.max_body_mb << 20
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = path_of(scope)
        methods = ROUTES.get(path, ())
        if path == CAPABILITIES:
            await self._answer_capabilities(scope, send)
        elif methods and (headers := self._origins.preflight(scope)) is not None:
            await _answer_empty(send, headers)
        elif scope["method"] in methods:
            await self._answer_request(path, scope, receive, self._origins.sending(scope, send))
        else:
            await self._app(scope, receive, send)

    async def _answer_capabilities(self, scope: Scope, send: Send) -> None:
        headers = self._origins.headers(scope)
        if (preflight := self._origins.preflight(scope)) is not None:
            await _answer_empty(send, preflight)
        elif scope["method"] in ("GET", "HEAD"):
            headers.append((b"cache-control", b"no-store"))
            await answer(send, 200, capabilities(self._options, self._facts()), headers)
        else:
            error = {"message": "use GET", "type": "invalid_request_error", "param": None,
                     "code": None}  # fmt: skip
            await answer(send, 405, {"error": error}, [*headers, (b"allow", b"GET, HEAD")])

    async def _answer_request(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        sampled = self._rate > 0 and self._draw() < self._rate
        try:
            raw = await whole_body(scope, receive, self._most_bytes)
            work = partial(self._prepared, path, scope, raw, sampled)
            if len(raw) > THREAD_BYTES:
                prepared = await asyncio.to_thread(work)
            else:
                prepared = work()
            slot = self._slot() if prepared is not None and prepared.is_asked else None
        except ClientGoneError:
            return
        except RequestError as error:
            await refuse(send, receive, error)
            return
        if prepared is None:
            await self._app(scope, replayed(raw, receive), send)
            return
        scope = with_length(scope, len(prepared.body))
        if slot is None:
            await self._app(scope, replayed(prepared.body, receive), send)
        else:
            app = self._compressing if accepts_gzip(scope) else self._app
            await slot.answer(app, scope, prepared.body, receive, send)

    def _prepared(self, path: str, scope: Scope, raw: bytes, sampled: bool) -> Prepared | None:
        """The body for the app if anything of this request is captured. RequestError: it asks for
        what it may not have, or in a way that cannot be understood."""
        marked = any(mark in raw for mark in _MARKS)
        if not marked and not sampled:
            return None
        try:
            body = read_body(raw)
            fields = asked_fields(body) if isinstance(body, dict) else {}
        except RequestError:
            if marked:
                raise
            return None
        if asks(fields):
            self._check_client(scope, next(iter(fields)))
            request = parse_request(body, _texts(scope), self._options, self._facts())
            assert request is not None, "it asks"
            if path == GENERATE and request.name_tokens:
                raise RequestError(
                    f"{GENERATE} does not name tokens: use /v1/completions",
                    "return_prompt_tokens",
                )
            return Prepared(self._body(path, body, request), is_asked=True)
        if not isinstance(body, dict):
            return None
        request = None
        if sampled:
            request = sampled_request(body, _texts(scope), self._options, self._facts())
        if request is None:
            return self._without_signed(path, body)
        try:
            return Prepared(self._body(path, body, request), is_asked=False)
        except RequestError:  # no place for it in this body, which the app may refuse
            return None

    def _without_signed(self, path: str, body: dict[str, Any]) -> Prepared | None:
        """The body without a signed request that came with it, as one that was read in a log."""
        place = body.get("sampling_params") if path == GENERATE else body
        params = place.get(self._place) if isinstance(place, dict) else None
        if not isinstance(params, dict) or CUSTOM_PARAM not in params:
            return None
        del params[CUSTOM_PARAM]
        return Prepared(json.dumps(body, separators=(",", ":")).encode(), is_asked=False)

    def _check_client(self, scope: Scope, param: str) -> None:
        """RequestError if this client may not ask for attention."""
        if self._options.turned_off:
            reason = refusals(self._options, self._facts())["capture"]
            raise RequestError(
                f"attention is not available: {reason}", param, status=403, code="disabled"
            )
        if not self._origins.allow(scope):
            origin = header(scope, b"origin")[:100].decode("latin-1")
            raise RequestError(
                f"pages of {origin} may not ask for attention: see --attention-cors-origins",
                param, status=403, code="origin_not_allowed",
            )  # fmt: skip
        if self._keys is None:
            return
        given = _keys_in(scope)
        if any(key in self._keys for key in given):
            return
        reason = "that key is not valid for attention" if given else "attention needs a key"
        raise RequestError(
            f"{reason}: send X-Attention-Api-Key: KEY, X-API-Key: KEY or Authorization: Bearer KEY",
            param, status=401, code="invalid_api_key",
        )  # fmt: skip

    def _body(self, path: str, body: dict[str, Any], request: CaptureRequest) -> bytes:
        """The body with the signed request in the place of our fields."""
        kept = without_fields(body)
        place, where = kept, ""
        if path == GENERATE:
            place, where = _object(kept, "sampling_params", ""), "sampling_params."
        params = _object(place, self._place, where)
        params[CUSTOM_PARAM] = request.signed(self._options.secret)
        try:
            return json.dumps(kept, separators=(",", ":")).encode()
        except RecursionError:
            raise RequestError("the body is nested too deeply", None) from None

    def _slot(self) -> Slot:
        """Take one of --attention-max-concurrent-capture. RequestError: all are taken."""
        most = self._options.max_concurrent_capture
        if most and self.active >= most:
            raise RequestError(
                f"{most} requests with attention are being answered: try again in a second",
                None, status=429, code="too_many_captures",
            )  # fmt: skip
        return Slot(self)


class Prepared(NamedTuple):
    """A body for the app, and whether the client asked for attention."""

    body: bytes
    is_asked: bool


class Slot:
    """A place among the requests with attention, taken until the answer ended, the app raised, or
    the client went away, whichever is first."""

    def __init__(self, gate: CaptureGate) -> None:
        self._gate, self._taken = gate, True
        gate.active += 1

    def release(self) -> None:
        if self._taken:
            self._taken = False
            self._gate.active -= 1

    async def answer(
        self, app: App, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:  # fmt: skip
        """Have `app` answer. The client is watched, even if the app does not ask about it."""
        left = asyncio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.release()
            left.set()

        async def disconnected() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def sending(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.release()

        watcher = asyncio.create_task(watch())
        try:
            await app(scope, replayed(body, disconnected), sending)
        finally:
            watcher.cancel()
            self.release()


def _object(place: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """A copy of the object `name` of `place`, put in its place; a new one if there is none."""
    found = place.get(name)
    if found is not None and not isinstance(found, dict):
        raise RequestError(f"{where}{name} must be an object", where + name)
    place[name] = dict(found or {})
    return place[name]


def _texts(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _keys_in(scope: Scope) -> list[bytes]:
    """What a request has for keys. The engine may have keys of its own as Authorization."""
    given = [header(scope, b"x-attention-api-key"), header(scope, b"x-api-key")]
    scheme, _, bearer = header(scope, b"authorization").partition(b" ")
    if scheme.lower() == b"bearer":
        given.append(bearer)
    return [key.strip() for key in given if key.strip()]


async def _answer_empty(send: Send, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
