"""A sidecar, and a model's server, as processes that end with the notebook."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import httpx

from capture_kernels.errors import AttnError
from capture_kernels.fingerprint.vector import Layout
from pipeline.examples.files import DEMO_NAME, demo_model
from sidecar.client import SidecarClient
from sidecar.explore.supervisor import END_S, HOST, POLL_S, READY_S, Child

# Seconds that an answer may take.
ANSWER_S = 120.0


class LocalError(AttnError):
    """A process of the notebook did not start, or did not answer; the message says why."""


class _Process:
    """A process of `sidecar.explore.child` that serves HTTP on a free port of this machine."""

    def __init__(self, kind: str, given: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"attn-{kind}-"))
        listening = socket.create_server((HOST, 0), backlog=128)
        self.url = f"http://{HOST}:{listening.getsockname()[1]}"
        given = {**given, "fd": listening.fileno()}
        self._child = Child(kind, self.folder / f"{kind}.log", given, listening)
        until = time.monotonic() + READY_S
        while not self._is_up():
            if self._child.code is not None or time.monotonic() > until:
                said = self._child.last_said()
                self.close()
                raise LocalError(f"the {kind} does not answer:\n{said}")
            time.sleep(POLL_S)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=1.0, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """End it, and wait for that. It ends with the notebook's kernel, too."""
        self._child.end()
        self._child.wait(time.monotonic() + END_S, lambda: False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalSidecar(_Process):
    """`attn sidecar` as a process.

    Args:
        store: its --db.
        runs: its --discovery-dir.

    Attributes:
        client: a `SidecarClient` of it. stream: where it receives fingerprints. url: of its HTTP.

    Raises:
        LocalError: it does not start, with the reason.
    """

    def __init__(self, store: str | Path, runs: str | Path) -> None:
        self.stream = f"ipc://{tempfile.mkdtemp(prefix='attn-')}/stream"
        places = {"db": str(Path(store).absolute()), "discovery_dir": str(Path(runs).absolute())}
        options = {**places, "zmq_bind": self.stream}
        page: dict[str, Any] = {"engine_url": None, "engine_key_file": None, "notes": []}
        super().__init__("sidecar", {"options": options, "page": page, "prompts": []})
        self.client = SidecarClient(self.url)

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        super().close()


class LocalEngine(_Process):
    """A model behind the attention API, as a process: `attn serve --engine transformers` on a CPU.

    Args:
        sidecar: gets the fingerprints.
        model: a folder; by default the demo model's.
        name: what the records call it; by default the demo model's name, as in the sample.
        layout: of the fingerprints.

    Raises:
        LocalError: it does not start, with the reason.
    """

    def __init__(
        self,
        sidecar: LocalSidecar,
        model: str | Path | None = None,
        name: str = DEMO_NAME,
        layout: Layout = Layout.LOG16,
    ) -> None:
        given = {
            "model": str(model or demo_model()), "name": name, "sidecar_url": sidecar.stream,
            "layout": layout.value,
        }  # fmt: skip
        super().__init__("engine", given)

    def ask(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """The response to a text that the model goes on with, as a dictionary.

        It names its tokens, and has the links of each generated row in every captured layer, unless
        a field says otherwise.

        Args:
            prompt: a text.
            fields: of the request (docs/guide.md), such as max_tokens.

        Raises:
            LocalError: it refuses the request, or does not answer.
        """
        asked = {
            "prompt": prompt, "temperature": 0, "max_tokens": 16, "logprobs": 3,
            "return_attention_tokens": True, "return_prompt_tokens": True,
            "include_prompt_attention": 1, "top_k_attention": 16, **fields,
        }  # fmt: skip
        try:
            answer = httpx.post(
                f"{self.url}/v1/completions", json=asked, timeout=ANSWER_S, trust_env=False
            )
        except httpx.TransportError as error:
            raise LocalError(f"no answer from {self.url}: {error}") from None
        if not answer.is_success:
            raise LocalError(f"the engine refuses the request: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found
