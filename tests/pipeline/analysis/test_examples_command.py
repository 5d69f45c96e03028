"""`attn examples` against a server of the demo model over HTTP."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from shared import REPO
from typer.testing import CliRunner

import cli
from pipeline.analysis import (
    collect_entries,
    extract_attention_from_response,
    read_raw,
)
from pipeline.examples.prompts import CODENAME, NEEDLE, Example

sys.path.insert(0, str(REPO / "tests" / "sidecar"))
from http_server import Server, serving

pytest.importorskip("torch")
from demo_server import FOLDER, DemoModel, make_app
from fastapi import FastAPI
from rich.cells import cell_len

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return DemoModel()


@pytest.fixture(scope="module")
def plain(demo: DemoModel) -> Iterator[Server]:
    """A server of a model without a chat template."""
    with serving(make_app(demo, chat=False)) as server:
        yield server


@pytest.fixture(scope="module")
def chat(demo: DemoModel) -> Iterator[Server]:
    with serving(make_app(demo, chat=True)) as server:
        yield server


@pytest.fixture(scope="module")
def examples() -> Run:
    """Run an example in this process, which has imported transformers: that takes seconds."""

    def run(name: str, server: Server, *options: str) -> CompletedProcess[str]:
        arguments = ["examples", name, "--base-url", f"{server.url}/v1", *options]
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        return CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.mark.parametrize(
    "example", [NEEDLE, pytest.param(CODENAME, marks=pytest.mark.slow)], ids=lambda e: e.name
)
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "chat"])
def test_the_answer_is_right_and_the_line_is_marked(
    example: Example, kind: str, attn: Run, request: pytest.FixtureRequest, demo: DemoModel
) -> None:
    server: Server = request.getfixturevalue(kind)
    done = attn("examples", example.name, "--base-url", server.url)  # its path is /v1
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Expected: {example.answer!r}\n" in done.stdout
    assert re.search(rf"^Output: .*{example.answer}.* ✓$", done.stdout, flags=re.MULTILINE)
    # What is printed is what the model's own attention says.
    ids, out, attention = demo.answer(example.prompt, 32)
    heads = re.findall(r"^── L(\d) \(T=(\d+) H=(\d) prompt=(\d+) row=.*\) ──$", done.stdout, re.M)
    shape = str(len(ids) + len(out)), "4", str(len(ids))
    assert heads == [(str(layer), *shape) for layer in range(4)]
    answer_row = int(re.search(r"row=.*\((\d+)\)\)", done.stdout)[1])  # type: ignore[index]
    assert demo.tokenizer.decode([(ids + out)[answer_row + 1]]).strip() in ("1", "Ph", "P")
    printed = [
        (float(share), bool(mark))
        for line in done.stdout.splitlines()
        if re.match(r"  h\d ", line)
        for share, mark in re.findall(r"\(\d+\)=(\d\.\d\d)(◀?)", line)
    ]
    largest = np.sort(attention[:, answer_row].astype(np.float16).astype(np.float32))[..., :-4:-1]
    assert [share for share, _ in printed] == pytest.approx(largest.ravel(), abs=0.0051)
    assert any(mark and share > 0.9 for share, mark in printed)
    assert max(map(cell_len, done.stdout.splitlines())) <= 120


def test_marked_tokens_are_those_of_the_line(examples: Run, plain: Server) -> None:
    done = examples("needle", plain, "--layers", "2")
    marked = {int(index) for index in re.findall(r"\((\d+)\)=[\d.]+◀", done.stdout)}
    assert marked and marked <= set(range(1, 7))  # alpha : 1 7 2 9
    assert re.findall(r"── L(\d)", done.stdout) == ["2"]
    assert re.search(r"^L2 h3 has 0\.9\d of its attention on 'alpha: 1729'", done.stdout, re.M)


def test_a_layer_that_does_not_look_at_the_line_ends_with_1(examples: Run, plain: Server) -> None:
    done = examples("needle", plain, "--layers", "0")
    assert done.returncode == 1 and "✓" in done.stdout
    assert "◀" not in done.stdout.split("── L0")[1].split("h0")[1]


def test_a_wrong_answer_ends_with_1(examples: Run, plain: Server) -> None:
    done = examples("needle", plain, "--max-tokens", "1")
    assert done.returncode == 1 and "Output: '1' ✗" in done.stdout


def test_without_the_right_tokenizer_indices_are_printed_and_why(
    examples: Run, plain: Server, tmp_path: Path
) -> None:
    served = "--model", str(tmp_path)  # a folder without a tokenizer
    done = examples("needle", plain, *served)
    assert done.returncode == 1 and "✓" in done.stdout and "?(3)=0.95" in done.stdout
    assert done.stderr.startswith("note: ") and done.stderr.count("\n") == 1
    assert examples("needle", plain, *served, "--tokenizer", str(FOLDER)).returncode == 0
    wrong = examples("needle", plain, "--tokenizer", str(tmp_path))
    assert wrong.returncode == 2 and "cannot load the tokenizer" in wrong.stderr


def test_why_an_example_failed_is_said(examples: Run, chat: Server) -> None:
    """The demo model looks the number up in its third layer."""
    done = examples("needle", chat, "--layers", "0,1")
    assert done.returncode == 1 and "✓" in done.stdout
    assert done.stderr.startswith("error: no head of layer 0, 1 shows the line")
    assert "--attention-instrumentation-layers" in done.stderr
    short = examples("needle", chat, "--layers", "2", "--max-tokens", "1")
    assert (short.returncode, short.stderr) == (1, f"error: the answer is not {NEEDLE.answer!r}\n")


def test_a_key_is_sent(demo: DemoModel, examples: Run) -> None:
    with serving(make_app(demo, chat=True, key="secret")) as server:
        assert examples("needle", server, "--api-key", "secret", "--layers", "2").returncode == 0
        refused = examples("needle", server)
    assert refused.returncode == 2
    assert "401: the key is wrong: give the right --api-key" in refused.stderr


def test_a_hidden_prefix_shifts_the_indices_and_hides_its_lines(
    demo: DemoModel, examples: Run
) -> None:
    with serving(make_app(demo, chat=False, hidden=10)) as server:
        codename, needle = (examples(n, server, "--layers", "2") for n in ("codename", "needle"))
    assert codename.returncode == 0 and "P(76)=0.97◀" in codename.stdout
    assert needle.returncode == 1 and "'alpha: 1729' is not among the tokens" in needle.stderr
    with serving(make_app(demo, chat=False, hidden=108)) as server:
        nothing = examples("needle", server, "--layers", "2")
    assert nothing.returncode == 2 and "hides the whole prompt" in nothing.stderr


def answering(answer: Any, status: int = 200) -> FastAPI:
    """A server that always says the same."""
    from fastapi.responses import JSONResponse

    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    def say(path: str) -> JSONResponse:
        if path.endswith("models"):
            return JSONResponse({"data": [{"id": "m"}]})
        return JSONResponse(answer, status)

    return app


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        ({"choices": [{"index": 0, "message": {"content": "1729"}}]}, 200, "without attention"),
        ({"attn_capture_data": [{}]}, 200, "attn_capture_data[0] cannot be read"),
        (["a"], 200, "JSON object"),
        ({"error": {"message": "no\nsuch layer"}}, 400, "400: no such layer"),
        ({}, 500, "500"),
    ],
)
def test_an_answer_that_cannot_be_used_is_one_line(
    answer: Any, status: int, says: str, examples: Run
) -> None:
    with serving(answering(answer, status)) as server:
        done = examples("needle", server, "--layers", "2")
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ftp://host/v1", "http://", "http://[::1"])
def test_an_address_that_is_none_is_one_line(address: str, attn: Run) -> None:
    done = attn("examples", "needle", "--base-url", address)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_server_that_is_not_there_or_does_not_answer_is_one_line(attn: Run) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        gone = attn("examples", "codename", "--base-url", url)
        listener.listen()
        silent = attn("examples", "codename", "--base-url", url, "--timeout", "0.3")
    for done, says in ((gone, "cannot reach"), (silent, "--timeout")):
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


# The library, through the client that users have --------------------------------------------------


def test_attention_comes_through_the_openai_client(demo: DemoModel, chat: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{chat.url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": NEEDLE.prompt}],
        "max_tokens": 16,
    }
    extra = {"return_attention_tokens": True, "top_k_attention": 8, "attn_capture_layers": "1,2"}
    answer = client.chat.completions.create(**ask, extra_body={**extra, "attn_capture": 1})
    stream = client.chat.completions.create(**ask, extra_body=extra, stream=True)
    whole, streamed = read_raw(collect_entries(answer)), read_raw(collect_entries(stream))
    ids, out, attention = demo.answer(NEEDLE.prompt, 16)
    assert len(whole) == len(streamed) == 2 * len(out)
    for row, same in zip(whole, streamed, strict=True):
        true = attention[row.layer, row.position].mean(0)
        np.testing.assert_allclose(row.probabilities, true[row.token_positions], rtol=1e-5)
        np.testing.assert_array_equal(row.probabilities, same.probabilities)
        assert row.position == same.position == len(ids) - 1 + row.step
    layers = extract_attention_from_response(answer)
    assert layers is not None and list(layers) == [1, 2]
    for number, layer in layers.items():
        np.testing.assert_allclose(layer["scores"], attention[number], atol=5e-4)


def test_the_text_completion_client_gives_the_same(plain: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model="demo", prompt=NEEDLE.prompt, extra_body={"return_attention_tokens": True}
    )
    rows = read_raw(collect_entries(answer))
    assert [row.step for row in rows] == [0, 1, 2, 3]
