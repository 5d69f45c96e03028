"""`attn explore`: everything on one machine, and its end."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from exploring import Explore, running_of
from running import until
from served_runs import publish, run_id_of

pytest.importorskip("torch")

HTML = {"accept": "text/html"}
NEEDLE = "alpha: 1729\nbeta: 2048\ngamma: 3141\nalpha:"


def prepared(folder: Path) -> Path:
    """A data folder with a published run, so that no discovery run begins."""
    publish(folder / "discovery_outputs")
    return folder


@pytest.fixture(scope="module")
def explore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explore]:
    with Explore(prepared(tmp_path_factory.mktemp("explore") / "data")) as found:
        yield found


def test_one_command_serves_page_run_and_engine(explore):
    assert explore.get("/", **HTML).status_code == 200
    engine = explore.engine()
    assert engine["model"] == "examples/demo_model"
    assert engine["capabilities"]["supported"] and "raw" in engine["capabilities"]["modes"]
    assert explore.get("/discovery/status").json()["serving"]["run_id"] == run_id_of(0)
    config = explore.get("/page/config").json()
    assert config["notes"] == [] and all(one["style"] == "plain" for one in config["examples"])
    assert explore.said.count("\n") == 1 and "Ctrl+C" in explore.said


def test_what_the_page_asks_is_answered_recorded_and_found(explore):
    explore.engine()
    answer = explore.client.post(
        "/engine/v1/completions",
        json={
            "model": "demo", "prompt": NEEDLE, "max_tokens": 6, "temperature": 0,
            "return_attention_tokens": True, "return_prompt_tokens": True,
        },
        headers={"X-Session-Id": "mine"},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["choices"][0]["text"].startswith(" 1729")
    assert "".join(one["text"] for one in found["prompt_tokens"]).endswith(NEEDLE)
    session = until(
        lambda: explore.get("/sessions/mine").json().get("requests"), "nothing was recorded"
    )
    assert session[0]["request_id"] == found["id"] and session[0]["rows"] == 5


def test_a_folder_has_one_explore(explore, tmp_path, attn):
    folder = Path(explore.process.args[explore.process.args.index("--data-dir") + 1])
    done = attn("explore", "--no-browser", "--port", "0", "--data-dir", folder)
    assert done.returncode == 2 and "choose another --data-dir" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_said_in_a_line(tmp_path, attn):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = attn("explore", "--no-browser", "--port", port, "--data-dir", tmp_path / "data")
    assert done.returncode == 2 and done.stderr.startswith(
        f"error: cannot serve on 127.0.0.1:{port}"
    )
    assert done.stderr.count("\n") == 1 and not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "options",
    [("--port", "70000"), ("--engine-url", "nowhere"), ("--engine-key-file", "keys"),
     ("--data-dir", "/dev/null/data")],
)  # fmt: skip
def test_options_that_cannot_be_used_are_refused_in_a_line(attn, options):
    done = attn("explore", "--no-browser", *options)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_of_it(tmp_path, number):
    with Explore(prepared(tmp_path / "data")) as explore:
        assert len(explore.children) == 2
        assert explore.end(number) == 0
        assert "Traceback" not in explore.said
    log = (tmp_path / "data" / "sidecar.log").read_text()
    assert "stopped; 0 fingerprints received, 0 stored" in log


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_a_second_signal_ends_all_of_it_at_once(tmp_path, at_once):
    """Also one that comes before the first was noticed."""
    with Explore(prepared(tmp_path / "data")) as explore:
        engine = next(one for one in explore.children if one.cmdline()[4] == "engine")
        # It cannot end in order, and the sidecar waits for it.
        engine.suspend()
        explore.process.send_signal(signal.SIGINT)
        if not at_once:
            until(lambda: asked_to_end(engine), "the engine is not asked to end")
            assert explore.process.poll() is None and len(running_of(explore.children)) == 2
        # A second SIGINT could be one with the first while that is not yet handled.
        assert explore.end(signal.SIGTERM if at_once else signal.SIGINT) == 1
        assert "Traceback" not in explore.said and "sidecar ended" not in explore.said
        assert explore.said.count("\n") == 2 and "killed" in explore.said
    # The sidecar was killed, and had not been asked to end.
    assert "stopped" not in (tmp_path / "data" / "sidecar.log").read_text()
    # Nothing of it is left behind: the folder is free again.
    with Explore(tmp_path / "data") as explore:
        assert explore.get("/health").status_code == 200
        assert explore.end() == 0


def asked_to_end(process: psutil.Process) -> bool:
    """Whether SIGTERM waits for a process that is stopped."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    pending = re.search(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)
    return bool(pending and int(pending[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_kill_9_leaves_nothing_behind(tmp_path):
    with Explore(prepared(tmp_path / "data")) as explore:
        assert len(explore.children) == 2
        explore.process.kill()
        until(lambda: not running_of(explore.children), "processes go on without their parent")
    # And the folder is free again.
    with Explore(tmp_path / "data") as explore:
        assert explore.get("/health").status_code == 200


@pytest.mark.slow
def test_the_browser_is_opened_at_the_page(tmp_path):
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\nprintf '%s' \"$1\" > {tmp_path}/address\n")
    browser.chmod(0o755)
    data = prepared(tmp_path / "data")
    with Explore(data, environment={"BROWSER": str(browser)}, browser=True) as explore:
        until((tmp_path / "address").exists, "no browser was opened")
        until(lambda: (tmp_path / "address").read_text() == explore.url, "another address")
        assert explore.end() == 0


def test_without_torch_the_page_opens_and_says_what_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    from shared import REPO

    environment = {"PYTHONPATH": f"{tmp_path}:{REPO}"}
    with Explore(prepared(tmp_path / "data"), environment=environment) as explore:
        assert "pip install 'attn[capture]'" in explore.said
        config = explore.get("/page/config").json()
        assert config["engine"] is None and "torch" in config["notes"][0]
        assert explore.get("/discovery/status").json()["serving"]["run_id"] == run_id_of(0)
        assert explore.end() == 0


@pytest.mark.slow
def test_an_engine_elsewhere_is_asked_in_the_place_of_the_demo_model(tmp_path, explore):
    with Explore(prepared(tmp_path / "data"), "--engine-url", explore.url + "/engine") as other:
        assert other.engine()["model"] == "examples/demo_model"
        assert [child.cmdline()[4] for child in other.children] == ["sidecar"]
        assert "fingerprints to tcp://127.0.0.1:" in other.said
        assert any(one["style"] == "chat" for one in other.get("/page/config").json()["examples"])
        assert other.end() == 0


@pytest.mark.slow
def test_the_first_start_finds_the_behaviours_of_the_sample_once(tmp_path):
    data = tmp_path / "data"
    with Explore(data) as explore:
        until(lambda: explore.get("/discovery/status").json()["running"], "no run begins", 120)
        # Broken off, it is finished by the next start.
        assert explore.end() == 0
    with Explore(data) as explore:
        serving = until(
            lambda: explore.get("/discovery/status").json()["serving"], "no run is served", 500
        )
        assert serving["rows"] > 19_000 and serving["clusters"] >= 8
        assert serving["model"] == "examples/demo_model"
        # By consensus, so that the page can group them by family.
        found = explore.get(f"/discovery/runs/{serving['run_id']}/clusters").json()["clusters"]
        families = {one["family"] for one in found}
        assert None not in families and 1 < len(families) < len(found)
        # What the demo model is asked is compared with it.
        assert explore.engine()["capabilities"]["capture_id"] == serving["capture_id"]
        explore.end()
    with Explore(data) as explore:
        assert "finding the behaviours" not in explore.said
        assert explore.get("/discovery/status").json()["serving"]["run_id"] == serving["run_id"]
        assert len(list((data / "discovery_outputs").glob("2*"))) == 1
        explore.end()
