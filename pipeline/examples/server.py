"""The calls that an example makes to an OpenAI-compatible server."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx

from capture_kernels.errors import AttnError

from .prompts import Style


class ServerError(AttnError):
    """A server that cannot be reached, refuses the request, or gives an answer that is none."""


class ExampleServer:
    """A client of one server; a context manager.

    Args:
        base_url: address of its API, as `http://127.0.0.1:30000/v1`; without a path, /v1.
        api_key: sent as a bearer token.
        timeout: seconds for each wait for the network.

    Raises:
        ServerError: the address is not a URL.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float) -> None:
        self._url = base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            url = httpx.URL(self._url)
            self._http = httpx.Client(headers=headers, timeout=timeout)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ServerError(f"cannot use {base_url!r} or the key: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ServerError(f"{base_url!r} is not an address: give one as http://HOST:PORT/v1")
        if url.path == "/":
            self._url += "/v1"

    def __enter__(self) -> ExampleServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._http.close()

    def model(self) -> str:
        """The name of the first model that it serves."""
        answer = self._call("GET", "/models")
        models = answer.get("data")
        first = models[0] if isinstance(models, list) and models else None
        name = first.get("id") if isinstance(first, dict) else None
        if not isinstance(name, str):
            raise ServerError(f"{self._url}/models names no model: give --model")
        return name

    def layers(self) -> list[int] | None:
        """The layers whose full scores it offers by its capabilities; None if it does not say."""
        try:
            answer = self._call("GET", "/attention/capabilities")
        except _StatusError as error:
            if error.status != 404:
                raise
            return None
        offered = answer.get("score_layers", answer.get("layers"))
        if not isinstance(offered, list) or not all(type(n) is int for n in offered):
            return None
        return offered or None

    def ask(
        self, prompt: str, style: Style, *, model: str, layers: str | None, max_tokens: int
    ) -> dict[str, Any]:
        """The answer to a prompt, greedy, with logprobs and full attention scores.

        Args:
            prompt: text.
            style: `chat` sends it as the message of a user, `plain` as a text to go on with, up to
                the end of the line. `auto` is `chat`, and `plain` where the server refuses a chat.
            model: name.
            layers: as `2,18,27`; None for the server's own.
            max_tokens: of the answer.

        Raises:
            ServerError: there is no answer; one line says why.
        """
        body: dict[str, Any] = {
            "model": model, "temperature": 0, "max_tokens": max_tokens, "attn_capture": 1,
        }  # fmt: skip
        if layers is not None:
            body["attn_capture_layers"] = layers
        messages = [{"role": "user", "content": prompt}]
        chat = {**body, "messages": messages, "logprobs": True}
        plain = {**body, "prompt": prompt, "logprobs": 1, "stop": ["\n"]}
        if style == "plain":
            return self._call("POST", "/completions", plain)
        try:
            return self._call("POST", "/chat/completions", chat)
        except _StatusError as refused:
            # A model without a chat template; a server that knows no chats.
            if style == "chat" or refused.status not in (400, 404, 405, 422, 501):
                raise
            try:
                return self._call("POST", "/completions", plain)
            except _StatusError:
                raise refused from None

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        where = self._url + path
        try:
            response = self._http.request(method, where, json=body)
        except httpx.TimeoutException:
            raise ServerError(f"{where} did not answer in time: raise --timeout") from None
        except httpx.HTTPError as error:
            raise ServerError(
                f"cannot reach {where}: {error}: start the server, or give its --base-url"
            ) from None
        if not response.is_success:
            raise _StatusError(where, response.status_code, _reason(response))
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerError(f"{where} does not answer with a JSON object: check --base-url")
        return answer


class _StatusError(ServerError):
    """An answer with a status that means no."""

    def __init__(self, where: str, status: int, reason: str) -> None:
        advice = ": give the right --api-key" if status in (401, 403) else ""
        super().__init__(f"{where} answers {status}: {reason}{advice}")
        self.status = status


def _reason(response: httpx.Response) -> str:
    """Why a server refused, in one line: the message of its error object, else its text."""
    try:
        said = response.json()
    except ValueError:
        said = None
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    text = said if isinstance(said, str) else response.text
    return " ".join(text.split())[:300] or response.reason_phrase
