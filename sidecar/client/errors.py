"""What can go wrong between a client and a sidecar; each has one cause."""

from __future__ import annotations

from capture_kernels.errors import AttnError


class SidecarError(AttnError):
    """A call to a sidecar that has no result."""


class UnreachableError(SidecarError):
    """No connection, or none that lasted until the answer."""


class SidecarBusyError(SidecarError):
    """The sidecar (429, 503) or a proxy before it (502, 504) asked to come again later, for longer
    than the caller wants to wait."""


class RefusedError(SidecarError):
    """The sidecar refuses the call as it is: another 4xx or 5xx status, with its reason.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class UnauthorizedError(RefusedError):
    """The key is missing or wrong (401, 403)."""


class NotFoundError(RefusedError):
    """There is no such run, session or request (404)."""


class WrongAnswerError(SidecarError):
    """An answer that is not a sidecar's, or that of another version."""
