"""Which calls are tried again, and when."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from math import inf, isfinite
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from .errors import (
    NotFoundError,
    RefusedError,
    SidecarBusyError,
    UnauthorizedError,
    UnreachableError,
    WrongAnswerError,
)

# Statuses that ask to come again later: of the sidecar, and of a proxy before it.
LATER = {429, 502, 503, 504}
T = TypeVar("T")
Outcome = httpx.Response | httpx.RequestError


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP call.

    Args:
        decode: what the answer means. Its errors (msgspec's, ValueError) are a wrong answer.
        safe: doing it twice does no harm, so that it may be tried again.
        also: statuses that are no success and may be an answer all the same.
    """

    method: str
    path: str
    decode: Callable[[httpx.Response], T]
    safe: bool = True
    params: dict[str, Any] = field(default_factory=dict)
    content: bytes | None = None
    content_type: str = "application/json"
    also: frozenset[int] = frozenset()

    def is_answered(self, answer: httpx.Response) -> bool:
        """Whether an answer is what was asked for, and not an error."""
        if answer.is_success or answer.status_code not in self.also:
            return bool(answer.is_success)
        try:
            self.decode(answer)
        except (msgspec.DecodeError, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Retries:
    """How long a call that may be tried again is tried.

    Args:
        deadline_s: since the call began; after it no new attempt begins, and no attempt waits for
            the network. 0: one attempt, with the client's own timeout.
        first_s, most_s: the pause before the second attempt; it is doubled each time up to most_s.
            Each is multiplied by a random number of 0.5 to 1, so that clients do not come back
            together. A Retry-After of the sidecar is a lower bound.
    """

    deadline_s: float = 30.0
    first_s: float = 0.1
    most_s: float = 5.0


class Attempts:
    """The attempts of one call."""

    def __init__(
        self,
        call: Call[Any],
        retries: Retries,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._call, self._retries, self._timeout_s = call, retries, timeout_s
        self._clock, self._chance = clock, chance
        self._safe = call.safe and retries.deadline_s > 0
        self._ends = clock() + retries.deadline_s
        self._count = 0

    def arguments(self) -> dict[str, Any]:
        """The next attempt, as httpx takes it."""
        call, timeout_s = self._call, self._timeout_s
        if self._safe:
            timeout_s = max(0.001, min(timeout_s, self._ends - self._clock()))
        has_body = call.content is not None
        return {
            "method": call.method,
            "url": call.path,
            "params": call.params,
            "content": call.content,
            "headers": {"Content-Type": call.content_type} if has_body else {},
            "timeout": timeout_s,
        }

    def pause(self, outcome: Outcome) -> float | None:
        """Seconds until the next attempt; None if there is none, and `outcome` is the result."""
        least = 0.0
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in LATER or self._call.is_answered(outcome):
                return None
            least = retry_after(outcome)
        elif not isinstance(outcome, httpx.TransportError):
            return None
        if not self._safe:
            return None
        pause = min(self._retries.most_s, self._retries.first_s * 2**self._count)
        pause = max(least, pause * (0.5 + 0.5 * self._chance()))
        self._count += 1
        return pause if self._clock() + pause < self._ends else None


def retry_after(answer: httpx.Response, now: Callable[[], float] = time.time) -> float:
    """Seconds of the Retry-After header, or until its date; 0 without a valid one."""
    value = answer.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return max(0.0, seconds) if isfinite(seconds) else (inf if seconds == inf else 0.0)


def result(call: Call[T], outcome: Outcome, url: str) -> T:
    """What a call gives.

    Raises:
        SidecarError: of the kind that the outcome is.
    """
    if isinstance(outcome, httpx.TransportError):
        raise UnreachableError(
            f"no answer from {url} ({reason_of(outcome)}): is the sidecar running there?"
        ) from outcome
    if isinstance(outcome, httpx.RequestError):
        raise WrongAnswerError(f"{url}{call.path} is not a sidecar's ({reason_of(outcome)})")
    if not call.is_answered(outcome):
        raise error_of(outcome, url)
    try:
        return call.decode(outcome)
    except (msgspec.DecodeError, ValueError) as error:
        raise WrongAnswerError(
            f"{url}{call.path} answered what this version of attn does not understand ({error})"
        ) from None


def reason_of(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__


def error_of(answer: httpx.Response, url: str) -> RefusedError | SidecarBusyError:
    """The error of an answer that is not a success, with the sidecar's own reason."""
    reason = f"{answer.status_code} {answer.reason_phrase}"
    try:
        body = msgspec.json.decode(answer.content)
        reason = str(body["error"] if "error" in body else body.get("detail", reason))
    except (msgspec.DecodeError, AttributeError, TypeError):
        pass  # not a sidecar's answer: the status is all that is known
    if answer.status_code in LATER:
        return SidecarBusyError(f"{url} is busy: {reason}")
    kind = {401: UnauthorizedError, 403: UnauthorizedError, 404: NotFoundError}
    return kind.get(answer.status_code, RefusedError)(answer.status_code, reason)
