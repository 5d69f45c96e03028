"""What is installed from a wheel is all there: the page, the demo model and the sample."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shared import REPO

sys.path.insert(0, str(REPO / "tests" / "sidecar"))

from exploring import Explore
from served_runs import publish

pytestmark = pytest.mark.slow
BUILT_FROM = ("capture_kernels", "pipeline", "discovery", "sidecar", "examples")
FILES = ("cli.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a wheel of this checkout was installed into, without its needs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy: what an earlier build left in build/ would get into the wheel.
    for name in BUILT_FROM:
        shutil.copytree(
            REPO / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in FILES:
        shutil.copy(REPO / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    for words in (
        ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder),
         str(source)),
        ("install", "--no-deps", "--no-index", "--target", str(folder / "site"), "--find-links",
         str(folder), "attn"),
    ):  # fmt: skip
        done = subprocess.run([*pip, "-q", *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    return folder / "site"


def test_an_installed_wheel_serves_the_page_and_the_demo_model(installed, tmp_path):
    publish(tmp_path / "data" / "discovery_outputs")
    environment = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    command = (sys.executable, str(installed / "bin" / "attn"))
    with Explore(tmp_path / "data", command=command, environment=environment) as explore:
        index = explore.get("/", accept="text/html")
        assert index.status_code == 200
        named = re.findall(r'(?:src|href)="(/static/[^"]+)"', index.text)
        assert named and all(explore.get(name).status_code == 200 for name in named)
        assert explore.get("/static/report/map.js").status_code == 200
        # All files of the checkout's page, and not only those that index.html names.
        static = REPO / "sidecar" / "static"
        own = [path for path in static.rglob("*") if path.is_file() and path.name[0] != "."]
        for path in own:
            found = explore.get(f"/static/{path.relative_to(static).as_posix()}")
            assert found.content == path.read_bytes(), path
        config = explore.get("/page/config").json()
        assert config["version"] and config["examples"]
        # It is the installed one that runs, and its own model.
        for child in explore.children:
            maps = Path(f"/proc/{child.pid}/environ").read_bytes().decode()
            assert f"PYTHONPATH={installed}" in maps
        if not config["notes"]:
            assert explore.engine()["model"] == "examples/demo_model"
        assert explore.end() == 0


def test_the_installed_sample_and_model_are_those_of_the_checkout(installed):
    script = (
        "from pipeline.examples.files import demo_model, sample; import sidecar; "
        "print(demo_model()); print(sample()); print(sidecar.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    model, sample, module = map(Path, done.stdout.split())
    assert all(path.is_relative_to(installed) for path in (model, sample, module))
    ours = REPO / "examples"
    assert sample.read_bytes() == (ours / "sample" / "fingerprints.parquet").read_bytes()
    for path in model.iterdir():
        assert not path.is_symlink()
        assert path.read_bytes() == (ours / "demo_model" / path.name).read_bytes()
