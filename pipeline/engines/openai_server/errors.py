"""Errors of this server, and how the OpenAI API says them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from capture_kernels.errors import AttnError
from pipeline.engines.serving.request import RequestError


class BusyError(AttnError):
    """Too many requests wait already."""


class BodyTooLargeError(AttnError):
    """A body of more bytes than the server takes."""


class FailedError(Exception):
    """The model failed: a fault of the server, which its log has."""


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error: {"error": {"message", "type", "param", "code"}}."""
    status, param, code = 400, None, None
    if isinstance(error, RequestError):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, BusyError):
        status, code = 503, "server_busy"
    elif isinstance(error, BodyTooLargeError):
        status, code = 413, "body_too_large"
    elif isinstance(error, FailedError):
        status = 500
    elif isinstance(error, HTTPException):  # no such route, or not with this method
        return error.status_code, _body(error.detail, "invalid_request_error", None, None)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, _body(str(error), kind, param, code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception, headers: dict[str, str] | None = None) -> Response:
    """The response that says an error."""
    status, body = error_body(error)
    if isinstance(error, BusyError):
        headers = {"Retry-After": "1"}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
