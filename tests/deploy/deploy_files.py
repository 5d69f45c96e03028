"""deploy/ as the tests read it, and the tools that verify it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from shared import REPO

DEPLOY = REPO / "deploy"
# What .ci/run installs: a machine that checks every change must not leave it out unseen.
IN_CI = {"systemd-analyze", "promtool", "prometheus"}


def tool(name: str, package: str) -> str:
    """The path of a tool; the test is skipped where there is none, and fails where CI is set and
    installs it."""
    found = shutil.which(name)
    if not found:
        says = f"no {name}: install one (apt-get install {package})"
        pytest.fail(says) if os.environ.get("CI") and name in IN_CI else pytest.skip(says)
    return found


def settings(path: Path) -> dict[str, str]:
    """An environment file, as systemd, Docker and Kustomize read it."""
    lines = (line for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


def attn_on_path(folder: Path) -> dict[str, str]:
    """The environment of a process whose `attn` is this checkout's."""
    executable(folder / "attn", f'#!/bin/sh\nexec {sys.executable} "{REPO / "cli.py"}" "$@"\n')
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
