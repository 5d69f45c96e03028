"""A server in the test's process, on a socket of its own, and what its clients say to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from pipeline.engines.openai_server.app import create_app
from pipeline.engines.openai_server.loop import ModelLoop
from pipeline.engines.openai_server.model import ServedModel
from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.sinks import RecordSink

NEEDLE = "alpha: 1729\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha:"


class LiveServer:
    """A running server: its parts, and its answers."""

    def __init__(self, model: ServedModel, loop: ModelLoop, url: str) -> None:
        self.model, self.loop, self.url = model, loop, url
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/v1/{route}", json={"temperature": 0, "max_tokens": 6} | body)

    def complete(self, prompt: Any = NEEDLE, **body: Any) -> dict[str, Any]:
        """The body of a plain completion, as it answered."""
        response = self.post("completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: str = NEEDLE, **body: Any) -> dict[str, Any]:
        response = self.post(
            "chat/completions", **{"messages": [{"role": "user", "content": content}]} | body
        )
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, which must end with [DONE]."""
        body = {"temperature": 0, "max_tokens": 6, "stream": True} | body
        with self.client.stream("POST", f"/v1/{route}", json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def refused(self, route: str = "completions", **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that is refused."""
        response = self.post(route, **body)
        assert response.status_code >= 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        return response.status_code, error


def entries_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body["choices"][0]["attention_tokens"]


def tokens_of(server: LiveServer, body: dict[str, Any], prompt: str) -> list[int]:
    """Prompt and answer as tokens, of a completion with logprobs=0: greedy, so they are unique."""
    texts = body["choices"][0]["logprobs"]["tokens"]
    vocabulary = {server.model.text([i]): i for i in range(len(server.model.tokenizer))}
    return [*server.model.prompt_tokens(prompt), *(vocabulary[text] for text in texts)]


@contextmanager
def running(
    folder: Path, options: ServeOptions, *, sink: RecordSink | None = None,
    reasoning_parser: str | None = None, **limits: int,
) -> Iterator[LiveServer]:  # fmt: skip
    """A server of a model's folder while the block lasts."""
    model = ServedModel(
        str(folder), options, device="cpu", reasoning_parser=reasoning_parser, served_name="demo"
    )
    records = None if sink is None else sink.put
    with ModelLoop(model, records=records, **limits) as loop, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = create_app(model, loop, sink, options.max_body_mb << 20)
        gate = CaptureGate(app, options, lambda: model.facts(off=loop.budget.exceeded))
        config = uvicorn.Config(gate, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield LiveServer(model, loop, f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    """Wait for something that happens soon; fails if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
