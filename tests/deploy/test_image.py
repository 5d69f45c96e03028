"""deploy/Dockerfile: its steps, done in a clean folder, make an `attn` that works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from deploy_files import DEPLOY
from shared import REPO

DOCKERFILE = DEPLOY / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in lines]  # type: ignore[misc]


def test_everything_that_is_copied_is_in_the_context_and_all_packages_are():
    copied = {
        word
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    }
    allowed = {
        line.removeprefix("!")
        for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == allowed
    assert all((REPO / name).exists() for name in copied)
    found = re.search(r"include = \[(.*)\]", (REPO / "pyproject.toml").read_text())
    assert found and {name.strip('" *') for name in found[1].split(",")} <= copied


def test_the_image_runs_as_the_user_of_the_manifests_and_not_as_root():
    (user,) = (rest for name, rest in instructions() if name == "USER")
    assert user == "10001:10001"
    written = (DEPLOY / "kubernetes/base/nightly.yaml").read_text()
    assert "runAsUser: 10001" in written and "fsGroup: 10001" in written


@pytest.mark.slow
def test_the_steps_make_an_attn_that_runs_a_night(tmp_path):
    """Both stages in one folder. Needs come from this Python's own packages: resolving and loading
    them is pip's, and gigabytes on a GPU."""
    root = tmp_path / "image"
    (root / "opt").mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip
    workdir = root
    arguments: dict[str, str] = {}

    def inside(text: str) -> str:
        """Absolute paths of the image, in the folder."""
        for name, value in arguments.items():
            text = text.replace(f"${{{name}}}", value)
        return re.sub(r"(?<![\w./])/(opt/attn|src|data|var/cache/attn)\b", rf"{root}/\1", text)

    for name, rest in instructions():
        if name == "ARG":
            arguments.update([rest.split("=", 1)])
        elif name == "ENV":
            key, value = rest.split("=", 1)
            environment[key] = inside(value)
        elif name == "WORKDIR":
            workdir = Path(inside(rest))
            workdir.mkdir(parents=True, exist_ok=True)
        elif name == "COPY" and "--from" not in rest:
            *sources, target = rest.split()
            there = workdir / inside(target)
            for source in sources:
                to = there / source if target.endswith("/") else there
                to.parent.mkdir(parents=True, exist_ok=True)
                if (REPO / source).is_dir():
                    shutil.copytree(REPO / source, to, symlinks=True,
                                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
                else:
                    shutil.copy(REPO / source, to)
        elif name == "RUN":
            # Who runs the tests may not be root.
            command = re.sub(r"chown \S+", "true", inside(rest))
            done = subprocess.run(["sh", "-c", command], env=environment, cwd=workdir,
                                  capture_output=True, text=True, timeout=170)  # fmt: skip
            assert done.returncode == 0, f"{rest}\n{done.stdout}{done.stderr}"
            if "-m venv" in command:
                lend_packages(root / "opt/attn/venv")
    assert shlex.split(dict(instructions())["ENTRYPOINT"].strip("[]")) == ["attn"]
    shutil.rmtree(root / "src")
    environment |= {"ATTN_DB": "data.db", "ATTN_OUTPUT": "out", "ATTN_OPTIONS": "--hours 0"}
    sample = str(REPO / "examples/sample/fingerprints.parquet")
    for words in (
        ["attn", "db", "import", sample, "--db", "data.db"],
        # One that a scheduler's time limit stops at once: the image's night works.
        ["env", "ATTN_OPTIONS=--hours 0 --max-hours 0.0000001",
         str(root / "opt/attn/deploy/attn-nightly")],
    ):  # fmt: skip
        done = subprocess.run(words, env=environment, cwd=workdir, capture_output=True, text=True,
                              timeout=170)  # fmt: skip
        assert done.returncode == (0 if words[0] == "attn" else 4), done.stderr
    assert "--resume 20" in done.stderr


def lend_packages(venv: Path) -> None:
    """Let a virtual environment see the packages of the one that runs the tests."""
    (site,) = venv.glob("lib/python*/site-packages")
    # Some Pythons put one here that is older than the project builds with.
    for old in (*site.glob("setuptools*"), *site.glob("pkg_resources"), *site.glob("_distutils*")):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    (site / "distutils-precedence.pth").unlink(missing_ok=True)
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
