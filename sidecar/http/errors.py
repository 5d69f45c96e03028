"""Answers in JSON. Every error is one line of it, {"error": "..."}: no page, no traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from capture_kernels.errors import AttnError

# What OpenAPI says of the errors that any route may answer with.
ERROR_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "string", "description": "what is wrong, in one line"}},
    "required": ["error"],
}


class Json(Response):
    """JSON values; NaN becomes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_body(message: str) -> bytes:
    """The JSON object of an error, its message on one line."""
    return msgspec.json.encode({"error": " ".join(message.split())})


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as a response."""
    head = dict(headers) if headers else None
    return Response(error_body(message), status, head, media_type="application/json")


def documented(*answers: tuple[int, str]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: the errors that it answers with, and what they mean."""
    content = {"application/json": {"schema": ERROR_SCHEMA}}
    return {status: {"description": meaning, "content": content} for status, meaning in answers}


def add_error_handlers(app: FastAPI) -> None:
    """Have all errors of an application answered as `error_response`."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(AttnError, _refused)
    app.add_exception_handler(Exception, _bug)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404 and message == "Not Found":
        message = f"there is no {request.url.path}: see /docs"
    elif error.status_code == 405 and message == "Method Not Allowed":
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}: use {allowed}"
    return error_response(error.status_code, message, error.headers)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first, *others = error.errors()
    where = ".".join(map(str, first["loc"]))
    more = f" (and {len(others)} more)" if others else ""
    return error_response(422, f"{where}: {first['msg']}{more}")


async def _refused(_request: Request, error: Exception) -> Response:
    return error_response(400, str(error))


async def _bug(_request: Request, _error: Exception) -> Response:
    # Starlette raises it again, so that the log has its traceback.
    return error_response(500, "an unexpected error: the log of the service has it")
