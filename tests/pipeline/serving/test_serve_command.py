"""`attn serve`: what it refuses before anything is loaded, and what SGLang is started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import REPO

from pipeline.engines.serving.options import SECRET_VARIABLE, ServeOptions
from pipeline.serve_command import is_installed

KEY = "0123456789abcdef"
HERE = ("m", "--engine", "transformers")
# Stands in for the package, which this environment has not: shows what the process was given.
LAUNCHER = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getpid(), dict(os.environ)]))
sys.exit(7)
"""


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """A folder with a package `sglang`."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCHER)
    return package.parent


def run(*arguments: str | Path, folder: Path | None = None, **variables: str):
    """Run `attn serve`; gives the finished process and its id."""
    paths = [str(REPO), *([str(folder)] if folder else [])]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATTN_", "ENV"))}
    process = subprocess.Popen(
        [sys.executable, str(REPO / "cli.py"), "serve", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**kept, "PYTHONPATH": os.pathsep.join(paths), **variables},
    )  # fmt: skip
    out, error = process.communicate(timeout=60)
    return process, out, error


def test_sglang_is_started_with_its_own_arguments_and_the_variables(sglang):
    process, out, error = run(
        "some/model", "--return-attention-tokens", "--tp", "2", "--attention-backend", "triton",
        "--port", "31000", "--attention-capture-layers", "1,3", "--json-model-override-args={}",
        "--cuda-graph-bs", "1", "2", "--device", "cpu", "--reasoning-parser", "qwen3",
        "--attention-cors-origins", "https://a.b",
        "--attention-cors-origins", "http://c", "--attention-api-key", KEY, "-x", "--", "--odd",
        folder=sglang, ATTN_CAPTURE_TOKENS_TOP_K="5", ATTN_CAPTURE_LAYERS="squid",
    )  # fmt: skip
    arguments, pid, variables = json.loads(out)
    # The process itself became the server: signals and exit codes are the server's.
    assert pid == process.pid and process.returncode == 7
    assert arguments == [
        "--model-path", "some/model", "--host", "127.0.0.1", "--port", "31000", "--device", "cpu",
        "--reasoning-parser", "qwen3",
        "--tp", "2", "--attention-backend", "triton", "--json-model-override-args={}",
        "--cuda-graph-bs", "1", "2", "-x", "--odd",
    ]  # fmt: skip
    assert ServeOptions.from_environment(variables) == ServeOptions(
        return_attention_tokens=True, tokens_top_k=5, layers="1,3", api_key=KEY,
        cors_origins=("https://a.b", "http://c"),
    )  # fmt: skip
    assert len(variables[SECRET_VARIABLE]) >= 32
    assert error.startswith("capture is on: layers 1,3") and KEY not in error


def test_without_an_option_that_asks_nothing_is_captured_and_it_says_so(sglang):
    _, out, error = run("m", "--attention-tokens-top-k", "5", folder=sglang)
    assert not ServeOptions.from_environment(json.loads(out)[2]).is_on
    assert "capture is off" in error and "--return-attention-tokens" in error
    _, _, error = run(
        "m", "--return-attention-tokens", "--attention-disable-in-production", folder=sglang
    )
    assert "capture is off" in error and "ATTN_ENV" in error
    _, _, error = run(
        "m", "--return-attention-tokens", "--attention-disable-in-production", folder=sglang,
        ATTN_ENV="development",
    )  # fmt: skip
    assert "capture is on" in error


def test_a_server_for_other_machines_without_a_key_is_warned_about(sglang):
    given = ("m", "--return-attention-tokens", "--host", "0.0.0.0")
    assert "warning: 0.0.0.0" in run(*given, folder=sglang)[2]
    assert "warning" not in run(*given, "--attention-api-key", KEY, folder=sglang)[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m", "--attention-tokens-top-k", "65"], "--attention-tokens-top-k"),
        (["m", "--attention-tokens-top-k", "five"], "--attention-tokens-top-k"),
        (["m", "--attention-layout", "spiral"], "spiral"),
        (["m", "--attention-token-top-k", "5"], "did you mean --attention-tokens-top-k?"),
        (["m", "--return-attention-token"], "did you mean --return-attention-tokens?"),
        (["m", "--model-path", "other"], "attn serve MODEL"),
        (["--tp", "2", "m"], "the model comes first"),
        (["m", "--port", "65536"], "--port"),
        (["m", "--engine", "vllm"], "--engine"),
        (["m", "--attention-fused-decode"], "--attention-fused-decode is of --engine vllm"),
        ([*HERE, "--attention-fused-decode"], "--attention-fused-decode is of --engine vllm"),
        ([*HERE, "--tp", "2"], "--tp"),
        ([*HERE, "--attention-api-key-file", "does-not-exist"], "--attention-api-key-file"),
        ([*HERE, "--attention-store", "s3://bucket/x"], "object storage"),
        ([*HERE, "--attention-sidecar-url", "tcp://127.0.0.1:9", "--attention-curve-keys", "no"],
         "attn stream keys"),
        ([], "Missing argument"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_exit_code_2(attn, arguments, said):
    done = attn("serve", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.skipif(is_installed("sglang"), reason="SGLang is installed")
def test_what_is_missing_is_said_with_the_line_that_installs_it():
    process, _, error = run("m", "--return-attention-tokens")
    assert process.returncode == 2
    assert error.splitlines() == [
        "error: --engine sglang needs SGLang: pip install 'attn[sglang]', or use --engine "
        "transformers"
    ]


def test_a_bad_option_loads_neither_torch_nor_sglang(sglang):
    program = (
        "import sys, cli\n"
        "try: cli.main(['serve', 'm', '--attention-tokens-top-k', '65'])\n"
        "except SystemExit as end: print(end.code, {'torch', 'sglang', 'transformers',"
        " 'pipeline.engines.transformers'} & set(sys.modules))"
    )
    paths = f"{REPO}{os.pathsep}{sglang}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.strip() == "2 set()"
