"""The OpenAPI document, with the hot routes that FastAPI does not serve, and the page of it.

The page's scripts and styles are those of a package. FastAPI's own page loads them from another
host, which a machine without a network cannot reach.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from capture_kernels.fingerprint.vector import DIMENSIONS
from capture_kernels.fingerprint.zones import ZONES
from pipeline.record import PHASES, SCHEMA

from .hot.bodies import ARROW

DOCS, ASSETS = "/docs", "/docs/assets"
# Addresses without a leading slash also hold behind a proxy that adds a path.
_SCRIPT = (
    'SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true, '
    'layout: "BaseLayout", validatorUrl: null})'
)
_PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>attn sidecar</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/assets/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="docs/assets/swagger-ui-bundle.js"></script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
_SCRIPT_HASH = b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; script-src 'self' 'sha256-{_SCRIPT_HASH}'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'; "
    "base-uri 'none'"
)

_NUMBERS = {"type": "array", "items": {"type": "number"}}
_VECTOR = {**_NUMBERS, "minItems": DIMENSIONS, "maxItems": DIMENSIONS}
_ONE = {
    "type": "object",
    "required": ["vector"],
    "properties": {
        "vector": _VECTOR,
        "position": {"type": "integer", "minimum": 0},
        "layout": {"enum": ["log16", "layered", 1, 2]},
        "capture_id": {"type": "string"},
    },
}
_RECORD = {
    "type": "object",
    "required": ["request_id", "vector"],
    "description": "Fields of a record (docs/formats.md). step may stand for position. model, "
    "capture_id and layout are by default those of the served run, captured_at is now.",
    "properties": {
        **{name: {} for name in SCHEMA.names},
        "request_id": {"type": "string"},
        "vector": _VECTOR,
        "step": {"type": "integer", "minimum": 1},
        "phase": {"enum": list(PHASES)},
    },
}
_MANIFOLD = {
    "type": "object",
    "properties": {
        "zone": {"enum": list(ZONES)},
        "confidence": {"type": "number"},
        "cluster_id": {"type": "integer", "description": "-1: in no cluster"},
        "cluster_label": {"type": ["string", "null"]},
        "probability": {"type": "number"},
        "second": {
            "type": ["object", "null"],
            "description": "of a row between two clusters: the other one",
            "properties": {
                "cluster_id": {"type": "integer"},
                "cluster_label": {"type": ["string", "null"]},
                "probability": {"type": "number"},
            },
        },
    },
}
_HEAD = {"schema_version": {"type": "integer"}, "run_id": {"type": ["string", "null"]}}
_CLASSIFIED = {
    "oneOf": [
        {"type": "object", "properties": {"manifold": _MANIFOLD, **_HEAD}},
        {
            "type": "object",
            "properties": {
                "results": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"manifold": _MANIFOLD, "error": {"type": "string"}},
                    },
                },
                **_HEAD,
            },
        },
    ]
}
_LIVE = {
    "type": "object",
    "properties": {
        "cluster_id": {"type": "integer"},
        "distance": {"type": "number"},
        "traits": {"type": "array", "items": {"type": "string"}},
        "sampling_hint": {"type": ["object", "null"]},
    },
}
_ACCEPTED = {
    "type": "object",
    "properties": {
        "queued": {"type": "integer", "description": "rows, with 202"},
        "committed": {"type": "integer", "description": "rows that are in the store, with 200"},
        "rejected": {"type": "object", "additionalProperties": {"type": "integer"}},
        "manifold": _MANIFOLD,
        **_HEAD,
    },
}
_WAIT = {
    "name": "wait",
    "in": "query",
    "schema": {"enum": [0, 1], "default": 0},
    "description": "1: answer 200 once the rows are in the store, instead of 202.",
}


def _batch_of(one: dict[str, Any], name: str = "records") -> dict[str, Any]:
    return {
        "type": "object",
        "required": [name],
        "properties": {name: {"type": "array", "items": one}},
    }


def _route(
    summary: str, body: Any, answer: Any, statuses: dict[str, str], *, arrow: bool, wait: bool
) -> dict[str, Any]:
    content = {"application/json": {"schema": body}}
    if arrow:
        content[ARROW] = {"schema": {"type": "string", "format": "binary"}}
    said = {"description": "done", "content": {"application/json": {"schema": answer}}}
    error = {"type": "object", "properties": {"error": {"type": "string"}}}
    responses = {"200": said} | ({"202": said} if wait else {})
    for status, why in statuses.items():
        responses[status] = {
            "description": why, "content": {"application/json": {"schema": error}},
        }  # fmt: skip
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "parameters": [_WAIT] if wait else [],
            "responses": responses,
        }
    }


_BAD = {"400": "not what this route takes", "413": "too many rows or bytes"}
_FULL = _BAD | {"503": "the queue is full, or (?wait=1) the store took nothing yet"}
HOT_PATHS: dict[str, Any] = {
    "/classify": _route(
        "Zone and cluster of a fingerprint, or of a batch, by the served run",
        {"oneOf": [_ONE, _batch_of(_ONE)]}, _CLASSIFIED,
        _BAD | {"503": "no run is served"}, arrow=True, wait=False,
    ),
    "/predict": _route(
        "Live cluster of a fingerprint, or of a batch",
        {"oneOf": [_ONE, _batch_of(_ONE)]},
        {"oneOf": [_LIVE, _batch_of(_LIVE, "results")]},
        _BAD | {"503": "there are no live clusters yet"}, arrow=True, wait=False,
    ),
    "/fingerprint": _route(
        "Classify and store one fingerprint", _RECORD, _ACCEPTED, _FULL, arrow=False, wait=True
    ),
    "/fingerprints": _route(
        "Classify and store a batch of fingerprints",
        {"oneOf": [_batch_of(_RECORD), {"type": "array", "items": _RECORD}]},
        _ACCEPTED, _FULL, arrow=True, wait=True,
    ),
}  # fmt: skip


def document(app: FastAPI) -> None:
    """Put the hot routes into an app's OpenAPI document, and serve a page of it at `DOCS`."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document["paths"].update(HOT_PATHS)
        return document

    def page() -> HTMLResponse:
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY})

    app.openapi = openapi  # type: ignore[method-assign]
    app.get(DOCS, include_in_schema=False)(page)
    app.mount(ASSETS, StaticFiles(packages=[("fastapi_offline", "static")]))
