"""Which pages may ask for attention, by their origin (the CORS protocol of the Fetch standard)."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.asgi import Headers, Message, Scope, Send

from .asgi import header

_METHODS = b"GET, POST, PUT, OPTIONS"
_EXPOSED = b"Retry-After"
_MAX_AGE = b"600"
_OWN = (b"access-control-allow-origin", b"access-control-allow-credentials")


class Origins:
    """The origins of --attention-cors-origins.

    Args:
        origins: as `https://example.org`, or `*` for any.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._known = {origin.lower().encode() for origin in origins}
        self._any = b"*" in self._known

    def allow(self, scope: Scope) -> bool:
        """Whether the request is from no page, a page of this server, or one of these origins."""
        origin = header(scope, b"origin").lower()
        own = origin.partition(b"://")[2] == header(scope, b"host").lower()
        return not origin or self._any or own or origin in self._known

    def headers(self, scope: Scope) -> Headers:
        """The headers with which an allowed page may read an answer; none if it is not one."""
        origin = header(scope, b"origin")
        if not origin or not self.allow(scope):
            return []
        exposed = (b"access-control-expose-headers", _EXPOSED)
        if self._any:
            return [(_OWN[0], b"*"), exposed]
        return [(_OWN[0], origin), exposed, (b"vary", b"Origin")]

    def preflight(self, scope: Scope) -> Headers | None:
        """The headers that answer a browser's question before a request; None if this is not
        one, or not of an allowed page."""
        asked = header(scope, b"access-control-request-method")
        headers = self.headers(scope)
        if scope["method"] != "OPTIONS" or not asked or not headers:
            return None
        wanted = header(scope, b"access-control-request-headers")
        headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE),
        ]
        if wanted:
            headers.append((b"access-control-allow-headers", wanted))
        return headers

    def sending(self, scope: Scope, send: Send) -> Send:
        """`send` of a request whose answer an allowed page may read, whatever the app's own CORS
        says of other pages."""
        headers = self.headers(scope)
        if not headers:
            return send

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in _OWN]
                message = {**message, "headers": [*kept, *headers]}
            await send(message)

        return sending
