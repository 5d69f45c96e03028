"""The engine behind the page: which of its routes are relayed, and how it is asked."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from capture_kernels.errors import OptionError
from pipeline.api_keys import first_key

# What is relayed: of each path the methods that are.
ROUTES = {
    "v1/chat/completions": ("POST",),
    "v1/completions": ("POST",),
    "v1/tokenize": ("POST",),
    "v1/models": ("GET",),
    "v1/attention/capabilities": ("GET",),
}
# A long prompt takes its time before the first token, and so do tokens of a busy engine.
CONNECT_S, ANSWER_S = 5.0, 300.0
# What the page begins with is asked for within this time, and kept for that.
FACTS_S, KEEP_S = 3.0, 5.0
MOST_FACTS_BYTES = 1 << 20


class EngineError(Exception):
    """The engine cannot be asked, or did not answer as one does: why, in one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Engine:
    """The engine at a base URL; used in one event loop.

    Args:
        url: as `checked_url` gives it.
        key_file: holds the key that the engine wants; None if it wants none.

    Raises:
        OptionError: the key file cannot be used.
    """

    def __init__(self, url: str, key_file: Path | None = None) -> None:
        self.url = url
        self._headers = {"accept-encoding": "identity", "user-agent": "attn-sidecar"}
        if key_file is not None:
            key = first_key(key_file, "--engine-key-file")
            # The engine's own key, and that of its attention.
            self._headers |= {"authorization": f"Bearer {key}", "x-attention-api-key": key}
        self._client: httpx.AsyncClient | None = None
        self._facts: tuple[float, dict[str, Any] | None, str | None] | None = None
        self._asking = asyncio.Lock()

    @property
    def client(self) -> httpx.AsyncClient:
        """The connections to the engine; no proxy of the environment, no redirects."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self.url, headers=self._headers, trust_env=False,
                # Certificates take half a second to load; without TLS there are none.
                verify=self.url.startswith("https"),
                timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
            )  # fmt: skip
        return self._client

    async def facts(self) -> tuple[dict[str, Any] | None, str | None]:
        """What the page begins with: {"model", "capabilities"}, or None and why, in one line."""
        async with self._asking:
            if self._facts is None or time.monotonic() - self._facts[0] > KEEP_S:
                try:
                    found, problem = await self._ask(), None
                except EngineError as error:
                    found, problem = None, error.reason
                self._facts = time.monotonic(), found, problem
            return self._facts[1], self._facts[2]

    async def _ask(self) -> dict[str, Any]:
        _, models = await self._json("v1/models")
        named = models.get("data") if isinstance(models, dict) else None
        first = named[0] if isinstance(named, list) and named else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise EngineError(502, f"{self.url}/v1/models names no model: is this an engine?")
        status, capabilities = await self._json("v1/attention/capabilities", may_miss=True)
        known = isinstance(capabilities, dict) and status == 200
        return {"model": first["id"], "capabilities": capabilities if known else None}

    async def _json(self, path: str, may_miss: bool = False) -> tuple[int, Any]:
        """Status and JSON of a GET. EngineError: there is none."""
        try:
            async with (
                asyncio.timeout(FACTS_S),
                self.client.stream("GET", path) as answer,
            ):
                if answer.status_code != 200:
                    if may_miss:
                        return answer.status_code, None
                    hint = ": see --engine-key-file" if answer.status_code in (401, 403) else ""
                    raise EngineError(502, f"{self.url}/{path} answers {answer.status_code}{hint}")
                content = b""
                async for part in answer.aiter_raw():
                    content += part
                    if len(content) > MOST_FACTS_BYTES:
                        raise EngineError(502, f"{self.url}/{path} answers with too many bytes")
                return 200, msgspec.json.decode(content)
        except (TimeoutError, httpx.TimeoutException):
            why = f"the engine at {self.url} does not answer within {FACTS_S:g} seconds"
            raise EngineError(504, why) from None
        except httpx.HTTPError as error:
            raise EngineError(502, unreachable(self.url, error)) from None
        except msgspec.DecodeError:
            raise EngineError(502, f"{self.url}/{path} answers with what is no JSON") from None


def unreachable(url: str, error: httpx.HTTPError) -> str:
    """Why the engine cannot be asked, and what to do."""
    why = str(error) or type(error).__name__
    return f"the engine at {url} cannot be reached ({why}): start it, or see --engine-url"


def checked_url(given: str) -> str:
    """An engine's address without a slash at its end, and without /v1. OptionError: it is none."""
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise OptionError(f"--engine-url {given!r} is no address: use http://HOST:PORT")
    if parts.username or parts.query or parts.fragment:
        raise OptionError(
            "--engine-url is an address alone, without user, query or #: a key stands in "
            "--engine-key-file"
        )
    return given.rstrip("/").removesuffix("/v1").rstrip("/")
