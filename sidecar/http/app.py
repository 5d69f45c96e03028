"""The application: routes, hot routes and limits in one ASGI app, documented as one."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from sidecar.service import Service

from . import status
from .hot import HotRoutes
from .hot_docs import HOT_PATHS


def create_app(service: Service) -> Any:
    """The ASGI app of a service."""
    app = FastAPI(
        title="attn sidecar",
        description="Live classification of attention fingerprints (docs/guide.md).",
        version=service.version,
    )
    app.state.service = service
    app.include_router(status.router)
    document_hot_routes(app)
    return HotRoutes(app, service)


def document_hot_routes(app: FastAPI) -> None:
    """Put the hot routes, which FastAPI does not serve, into its OpenAPI document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document["paths"].update(HOT_PATHS)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
