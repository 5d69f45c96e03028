"""What keeps a sidecar from starting is one line and exit code 2."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import running

from pipeline.store.open import open_store


def start(attn, folder: Path, *options: str | Path):
    done = attn(
        "sidecar", "--port", "0", "--db", folder / "rows.db", "--zmq-bind", "none",
        "--discovery-dir", folder / "runs", *options, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if " WARNING run refused " not in line]
    assert "serving on" not in done.stderr
    (line,) = lines
    return line


@contextmanager
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("option", ["--port", "--zmq-bind", "--hints-bind"])
def test_an_address_that_is_taken(attn, tmp_path, option):
    with taken() as port:
        value = str(port) if option == "--port" else f"tcp://127.0.0.1:{port}"
        line = start(attn, tmp_path, option, value)
    assert str(port) in line and "choose another" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--zmq-bind", "tcp://0.0.0.0:9"), "give --curve-keys"),
        (("--zmq-bind", "localhost:9"), "is no address"),
        (("--port", "70000"), "--port must be between 0 and 65535"),
        (("--max-batch", "0"), "--max-batch must be at least 1"),
        (("--queue-rows", "5"), "--queue-rows must hold a batch"),
        (("--auto-reload-interval", "0"), "--auto-reload-interval must be greater than 0"),
        (("--auto-reload-interval", "nan"), "--auto-reload-interval must be greater than 0"),
        (("--host", "256.1.1.1"), "cannot serve on 256.1.1.1"),
        (("--host", ""), "--host must be an address"),
        (("--curve-keys", "nowhere", "--zmq-bind", "tcp://127.0.0.1:*"), "nowhere"),
    ],
)
def test_an_option_that_cannot_be_used(attn, tmp_path, options, said):
    assert said in start(attn, tmp_path, *options)


def test_a_store_that_cannot_be_used(attn, tmp_path):
    (tmp_path / "text.db").write_text("no database, and long enough to be looked at" * 100)
    assert "text.db" in start(attn, tmp_path, "--db", tmp_path / "text.db")
    missing = tmp_path / "missing" / "rows.db"
    assert f"the folder {missing.parent} does not exist" in start(attn, tmp_path, "--db", missing)


def test_with_no_run_and_no_store_it_starts_and_makes_one(tmp_path):
    with running(tmp_path, "--zmq-bind", "none") as sidecar:
        assert "no run: " in sidecar.said and "receiving" not in sidecar.said
        assert sidecar.client.get("/health").status_code == 200
    with open_store(sidecar.db, read_only=True) as store:
        assert store.counts().rows == 0
