"""The application: routes, hot routes and limits in one ASGI app, documented as one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI

from pipeline.api_keys import ApiKeys
from pipeline.asgi import App, Message, Receive, Scope, Send
from sidecar.service import Service

from . import live, requests, sessions, status
from .compare import routes as compare
from .discovery import place, routes, rows, runs
from .errors import add_error_handlers
from .hot.routes import HotRoutes
from .limits import Limits, allowed_hosts, protected
from .live import Broadcast
from .openapi import document


@dataclass(frozen=True)
class Additions:
    """What is served beside the sidecar's own routes.

    Args:
        routers: of further routes.
        state: what these find in `app.state`.
        in_front: makes the app that sees requests first, of the one that answers the others.
        keyless: whether a request needs no key.
    """

    routers: tuple[APIRouter, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    in_front: Callable[[App, Service], App] = lambda app, service: app
    keyless: Callable[[Scope], bool] = lambda scope: False


def create_app(
    service: Service, broadcast: Broadcast, keys: ApiKeys | None = None,
    additions: Additions | None = None,
) -> App:  # fmt: skip
    """The ASGI app of a service."""
    more = additions or Additions()
    options = service.options
    app = FastAPI(
        title="attn sidecar",
        description="Live classification of attention fingerprints (docs/guide.md).",
        version=service.version,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.broadcast = broadcast
    app.state.summaries = requests.Summaries()
    service.observe("live", broadcast)
    service.metrics.sources.sse_clients = lambda: broadcast.streams.clients
    for module in (status, routes, runs, rows, place, sessions, requests, live, compare):
        app.include_router(module.router)
    for router in more.routers:
        app.include_router(router)
    for name, value in more.state.items():
        setattr(app.state, name, value)
    add_error_handlers(app)
    document(app)
    limits = Limits(
        most_body_bytes=options.max_body_bytes, hosts=allowed_hosts(options.host),
        origins=options.cors_origins,
    )  # fmt: skip
    routes_of_all = more.in_front(HotRoutes(Counted(app, service), service), service)
    return protected(routes_of_all, limits, keys, service.metrics.refused, more.keyless)


class Counted:
    """Counts the requests of a FastAPI app by its routes."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._app, self._metrics = app, service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            # Paths that do not exist are one series.
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - began
            self._metrics.answered(scope["method"], route, status, seconds)
