"""deploy/systemd: units that systemd takes, as closed as a GPU lets them be."""

from __future__ import annotations

import subprocess
from configparser import ConfigParser
from functools import partial
from pathlib import Path

import pytest
from deploy_files import DEPLOY, attn_on_path, executable, tool
from shared import REPO
from stopping import kill_the_command, started, terminate

UNITS = DEPLOY / "systemd"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units on a machine that has what they name: systemd looks whether commands exist."""
    root = tmp_path_factory.mktemp("units")
    for command in ("deploy/attn-nightly", "venv/bin/attn"):
        executable(root / "opt" / command, "#!/bin/sh\n")
    for unit in UNITS.iterdir():
        (root / unit.name).write_text(unit.read_text().replace("/opt/attn", str(root / "opt")))
    return root


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("systemd-analyze", "systemd"), *words], capture_output=True, text=True, timeout=60
    )


def test_systemd_accepts_the_units(installed):
    done = analyze("verify", "--man=no", *sorted(installed.glob("attn-*")))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_would_refuse_a_unit_that_is_wrong(installed, tmp_path):
    wrong = tmp_path / "attn-nightly.service"
    text = (installed / "attn-nightly.service").read_text()
    wrong.write_text(text.replace("Type=exec", "Type=oneshot"))
    done = analyze("verify", "--man=no", wrong)
    assert done.returncode != 0 and "RestartForceExitStatus" in done.stderr


@pytest.mark.parametrize(("unit", "most"), [("attn-nightly.service", 30),
                                            ("attn-sidecar.service", 30)])  # fmt: skip
def test_the_services_are_exposed_little(installed, unit, most):
    """systemd's own measure, in tenths of 10; a unit without settings has 96."""
    done = analyze("security", "--offline=true", f"--threshold={most}", installed / unit)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr


def service() -> dict[str, str]:
    """The settings of the nightly service. Of a name with several lines, the last one."""
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNITS / "attn-nightly.service")
    return dict(unit["Service"])


def test_the_job_still_reaches_its_gpus():
    found = service()
    assert "PrivateDevices" not in found and "MemoryDenyWriteExecute" not in found
    assert found["DevicePolicy"] == "closed" and found["DeviceAllow"] == "char-nvidia* rw"


def test_the_timer_is_of_every_night():
    timer = (UNITS / "attn-nightly.timer").read_text()
    (when,) = (line.split("=")[1] for line in timer.splitlines() if line.startswith("OnCalendar"))
    done = analyze("calendar", "--iterations=2", when)
    assert done.returncode == 0 and "02:00:00" in done.stdout, done.stderr
    assert "Persistent=true" in timer


@pytest.mark.slow
def test_a_night_that_systemd_stops_and_starts_again_ends_in_the_same_artifacts(
    whole_night, tmp_path
):
    unit = service()
    command = unit["ExecStart"].replace("/opt/attn", str(REPO))
    environment = {**attn_on_path(tmp_path / "bin"), **whole_night.settings(tmp_path)}
    night = partial(started, [command], environment, tmp_path, tmp_path / "log")
    # systemctl stop, or RuntimeMaxSec: TERM to the script alone. Not a failure: the next night.
    assert unit["KillMode"] == "mixed" and "KillSignal" not in unit
    assert str(night("pca", terminate)) in unit["SuccessExitStatus"].split()
    # Memory runs out. The service is started again.
    assert str(night("umap", kill_the_command)) in unit["RestartForceExitStatus"].split()
    assert night() == 0
    whole_night.assert_same(tmp_path, tmp_path / "log", resumed=2)
