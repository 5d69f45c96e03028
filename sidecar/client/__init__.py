"""A typed client of the sidecar, for scripts and services: `SidecarClient`, `AsyncSidecarClient`.

Imports nothing else of the sidecar.
"""

from .clients import AsyncSidecarClient, SidecarClient
from .errors import (
    NotFoundError,
    RefusedError,
    SidecarBusyError,
    SidecarError,
    UnauthorizedError,
    UnreachableError,
    WrongAnswerError,
)
from .retries import Retries

__all__ = [
    "AsyncSidecarClient",
    "NotFoundError",
    "RefusedError",
    "Retries",
    "SidecarBusyError",
    "SidecarClient",
    "SidecarError",
    "UnauthorizedError",
    "UnreachableError",
    "WrongAnswerError",
]
