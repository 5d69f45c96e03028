"""Bytes of a step of attention, as a client receives them over its socket.

    python benchmarks/answer_bytes.py [--engine transformers] [--tokens 128] [--json PATH]

`attn serve` with the demo model answers one prompt of about 1,000 tokens in each mode (raw with the
top 16, sketches with 32, fingerprints), as a stream and as a whole, to a client that takes gzip and
to one that does not. What is counted is all that follows the head of the answer: text, names,
framing and attention, over the rows. What was decoded must be the same each time, and as many bytes
of JSON as the server says that it sent. With --engine sglang the server is SGLang on a CPU.

The peer is the way of published servers: the same fields as lists of float32 numbers in JSON,
without compression.

Exits 1 if an answer differs, or if a step of a compressed stream takes more than MOST bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import REPO, WrongAnswerError
from benchmarks.sglang_process import SGLangProcess, python_on_cpu
from capture_kernels.errors import OptionError

DEMO = REPO / "examples" / "demo_model"
MODES: dict[str, dict[str, Any]] = {
    "raw": {"top_k_attention": 16},
    "sketch": {"attention_sketch_mode": True},
    "fingerprint": {"attention_fingerprint_mode": True},
}
# Bytes of a step in a compressed stream, all that is sent.
MOST = {"raw": 200, "sketch": 500, "fingerprint": 100}
PATIENCE_S = 120.0
LIBRARIES = ("numpy", "msgspec", "starlette", "uvicorn", "torch", "transformers")


class Received(NamedTuple):
    """An answer. wire: bytes that followed its head; content: what they say."""

    wire: int
    content: bytes
    is_packed: bool


def post(port: int, body: dict[str, Any], *, gzip: bool) -> Received:
    """Ask on a socket of its own, and read until the server closes it."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n"
        + ("Accept-Encoding: gzip\r\n" if gzip else "")
        + "\r\n"
    )
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        client.sendall(head.encode() + content)
        while part := client.recv(65_536):
            received += part
    said, _, rest = bytes(received).partition(b"\r\n\r\n")
    if not said.startswith(b"HTTP/1.1 200"):
        raise WrongAnswerError(f"{said.splitlines()[0].decode()}: {rest[:200]!r}")
    head_lines = said.lower()
    decoded = _dechunked(rest) if b"transfer-encoding: chunked" in head_lines else rest
    is_packed = b"content-encoding: gzip" in head_lines
    return Received(len(rest), zlib.decompress(decoded, 31) if is_packed else decoded, is_packed)


def _dechunked(body: bytes) -> bytes:
    found: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(found)
        found.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


class Decoded(NamedTuple):
    entries: list[dict[str, Any]]
    usage: dict[str, Any]


def decoded(content: bytes, stream: bool) -> Decoded:
    """The entries of an answer, and what the server says of them."""
    if not stream:
        answer = json.loads(content)
        return Decoded(answer["choices"][0]["attention_tokens"], answer["usage"]["attention"])
    entries: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    for line in content.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        for choice in event["choices"]:
            entries += choice.get("attention_tokens") or []
        usage = (event.get("usage") or {}).get("attention") or usage
    return Decoded(entries, usage)


def as_published(entry: dict[str, Any]) -> bytes:
    """An entry with its numbers as float32 tensors list them, in Python's own JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return float(np.float32(value))
        if isinstance(value, list):
            return [plain(each) for each in value]
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    return json.dumps(plain(entry)).encode()


def measure_mode(port: int, prompt: str, tokens: int, mode: str) -> dict[str, Any]:
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_attention_tokens": True, **MODES[mode],
    }  # fmt: skip
    # Prompts in a prefix cache are computed by other sums than new ones.
    post(port, body, gzip=False)
    found: dict[str, Any] = {}
    kept: Decoded | None = None
    for stream in (True, False):
        for gzip in (False, True):
            options = {"include_usage": True}
            asked = body | ({"stream": True, "stream_options": options} if stream else {})
            received = post(port, asked, gzip=gzip)
            if received.is_packed != gzip:
                raise WrongAnswerError(f"{mode}: compressed is {received.is_packed}, not {gzip}")
            got = decoded(received.content, stream)
            if len(got.entries) != tokens - 1:
                raise WrongAnswerError(f"{mode}: {len(got.entries)} of {tokens - 1} rows")
            sent = sum(len(msgspec.json.encode(entry)) for entry in got.entries)
            if sent != got.usage["bytes"]:
                raise WrongAnswerError(f"{mode}: {sent} bytes of {got.usage['bytes']} were decoded")
            if kept and got.entries != kept.entries:
                raise WrongAnswerError(f"{mode}: the same prompt has other entries in each answer")
            kept = got
            name = ("stream" if stream else "whole") + (", gzip" if gzip else "")
            found[name] = received.wire / len(got.entries)
    assert kept is not None
    rows = len(kept.entries)
    found["entries as JSON"] = kept.usage["bytes"] / rows
    found["entries as published"] = sum(map(len, map(as_published, kept.entries))) / rows
    found["times the compressed stream"] = found["entries as published"] / found["stream, gzip"]
    return found


@contextmanager
def serving(engine: str, folder: Path) -> Iterator[int]:
    """The port of a server while the block lasts."""
    if engine == "sglang":
        python = python_on_cpu()
        if python is None:
            raise OptionError("SGLang is not set up: run `make sglang`")
        options = ("--return-attention-tokens", "--max-total-tokens", "16384")
        server = SGLangProcess(DEMO, folder / "log", *options, device="cpu", python=python)
        with server:
            server.wait()
            yield int(server.url.rpartition(":")[2])
        return
    command = [sys.executable, "-m", "cli", "serve", str(DEMO), "--engine", "transformers",
               "--device", "cpu", "--port", "0", "--return-attention-tokens"]  # fmt: skip
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=REPO, stderr=log)
        try:
            until = time.monotonic() + PATIENCE_S
            while not (at := re.search(r"http://[\w.]+:(\d+)", (folder / "log").read_text())):
                if process.poll() is not None or time.monotonic() > until:
                    raise WrongAnswerError(f"no server: {(folder / 'log').read_text()[-500:]}")
                time.sleep(0.1)
            yield int(at[1])
        finally:
            process.terminate()
            process.wait(30)


def prompt_of(characters: int) -> str:
    """Prose and tables of the demo model's own kind."""
    lines = [f"entry{n}: {n * 37 % 1000} and {n * 91 % 1000} of the list" for n in range(2_000)]
    return "\n".join(lines)[:characters]


def run(asked: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory() as folder, serving(asked.engine, Path(folder)) as port
    ):  # fmt: skip
        prompt = prompt_of(asked.characters)
        modes = {mode: measure_mode(port, prompt, asked.tokens, mode) for mode in MODES}
    names = list(next(iter(modes.values())))
    print(f"{'bytes a step':<30}" + "".join(f"{mode:>13}" for mode in modes))
    for name in names:
        print(f"{name:<30}" + "".join(f"{modes[mode][name]:>13.1f}" for mode in modes))
    if asked.json:
        figures = {"engine": asked.engine, "tokens": asked.tokens, "bytes_a_step": modes}
        common.write_figures(asked.json, {**common.about(LIBRARIES), **figures})
    for mode, found in modes.items():
        if found["stream, gzip"] > MOST[mode]:
            raise WrongAnswerError(f"{mode}: {found['stream, gzip']:.0f} bytes, not {MOST[mode]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--engine", choices=("transformers", "sglang"), default="transformers")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--characters", type=int, default=3_000, help="of the prompt")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sys.exit(common.exit_code(lambda: run(asked)))


if __name__ == "__main__":
    main()
