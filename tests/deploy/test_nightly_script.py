"""deploy/attn-nightly: one line that every scheduler may run, stop and run again."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from collected import commands
from deploy_files import DEPLOY, executable, settings

NIGHTLY = DEPLOY / "attn-nightly"
# Says what it was called with, and ends with $CODE or, in retention, $KEPT. With $HOLD it waits for
# TERM, which takes it a while, as a checkpoint does.
STAND_IN = r"""#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in
    discover) ;;
    *) exit "${KEPT:-0}" ;;
esac
if [ -n "${HOLD:-}" ]; then
    trap 'sleep 0.3; echo stopped >> "$CALLS"; exit 143' TERM
    echo ready
    while :; do sleep 0.05; done
fi
exit "${CODE:-0}"
"""


class Night:
    """An environment in which `attn` is a stand-in."""

    def __init__(self, folder: Path, **more: str) -> None:
        executable(folder / "bin" / "attn", STAND_IN)
        self._calls = folder / "calls"
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(self._calls),
            "ATTN_DB": "/data/my store.db", "ATTN_OUTPUT": "/data/out", **more,
        }  # fmt: skip

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [NIGHTLY], env=self.environment, capture_output=True, text=True, timeout=30
        )

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


def test_a_night_finishes_or_begins_a_run_and_deletes_what_is_old(tmp_path):
    night = Night(tmp_path, ATTN_OPTIONS="--hours 24 --long-running", ATTN_KEEP_DAYS="90",
                  ATTN_METRICS_FILE="/metrics/attn.prom")  # fmt: skip
    assert night.run().returncode == 0
    assert night.calls() == [
        "discover --db /data/my store.db --output /data/out --resume auto --metrics-file "
        "/metrics/attn.prom --hours 24 --long-running",
        "runs gc --output /data/out --keep-last 14 --unfinished",
        "db prune --db /data/my store.db --older-than-days 90 --yes",
    ]


@pytest.mark.parametrize(
    ("code", "retention"),
    [(0, True), (3, True), *((code, False) for code in (2, 4, 5, 137, 143))],
)
def test_it_ends_as_discovery_did_and_deletes_only_after_a_finished_run(tmp_path, code, retention):
    night = Night(tmp_path, CODE=str(code), ATTN_KEEP_DAYS="0")
    assert night.run().returncode == code
    assert [call.split()[0] for call in night.calls()] == ["discover"] + ["runs"] * retention


def test_a_retention_that_fails_is_no_success(tmp_path):
    done = Night(tmp_path, KEPT="5").run()
    assert done.returncode == 2
    assert done.stderr == "error: the run is published, but the retention failed (exit code 5)\n"
    # A failed gate is the greater news.
    assert Night(tmp_path, KEPT="2", CODE="3").run().returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("times", [1, 3])
def test_a_stop_is_passed_on_and_waited_for(tmp_path, number, times):
    night = Night(tmp_path, HOLD="1")
    with subprocess.Popen(
        [NIGHTLY], env=night.environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for _ in range(times):
            process.send_signal(number)
        assert process.wait(30) == 143
    assert night.calls()[-1] == "stopped" and "runs" not in " ".join(night.calls())


@pytest.mark.parametrize("name", ["ATTN_DB", "ATTN_OUTPUT"])
def test_a_setting_that_is_missing_is_named(tmp_path, name):
    night = Night(tmp_path)
    del night.environment[name]
    done = night.run()
    assert (done.returncode, night.calls()) == (2, [])
    assert done.stderr == f"error: {name} is not set: see deploy/attn.env\n"


@pytest.mark.parametrize("path", ["attn.env", "kubernetes/base/attn.env"])
def test_the_settings_that_ship_are_ones_that_the_commands_understand(tmp_path, path):
    shipped = settings(DEPLOY / path)
    assert Night(tmp_path, **shipped).run().returncode == 0
    for call in Night(tmp_path).calls():
        words = call.split()
        name = "attn discover" if words[0] == "discover" else f"attn {words[0]} {words[1]}"
        commands()[name].make_context(name, words[name.count(" ") :])
    read = NIGHTLY.read_text()
    assert all(name in read for name in shipped)
