"""The page's files: small, licensed, and without an address of another machine."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from collected import commands
from shared import REPO

STATIC, REPORT = REPO / "sidecar" / "static", REPO / "discovery" / "report"
VENDOR = STATIC / "vendor"
MOST_BYTES = 150_000
VIEWS = ("live", "chat", "inspect", "manifold", "router", "compare", "overhead")
IMPORT = re.compile(
    r"""^(?:import|export)\b[^;"']*\bfrom "([^"]+)"|^import "([^"]+)"|\bimport\("([^"]+)"\)""",
    re.MULTILINE,
)


def loaded(view: str | None = None) -> set[Path]:
    """What a browser gets of the page when one view is opened, or all are: index.html names it, or
    a module that imports it."""
    index = STATIC / "index.html"
    names = re.findall(r'(?:href|src)="/static/([^"]+)"', index.read_text())
    found, left = {index}, {served(index, f"/static/{name}") for name in names}
    while left:
        path = left.pop()
        if path in found:
            continue
        assert path.is_file(), f"{path.relative_to(REPO)} is imported, and does not exist"
        found.add(path)
        if path.suffix == ".js" and path.parent != VENDOR:
            for names in IMPORT.findall(path.read_text(encoding="utf-8")):
                other = served(path, "".join(names))
                # Views are loaded when they are opened.
                if view is None or other.parent.name != "views" or other.stem == view:
                    left.add(other)
    return found


def size(paths: Iterable[Path]) -> int:
    """As they are sent."""
    return sum(len(gzip.compress(path.read_bytes(), 6)) for path in paths)


def served(importer: Path, name: str) -> Path:
    """The file that an import leads to."""
    assert name.startswith((".", "/static/")), f"{importer.name} imports {name}: no such module"
    if name.startswith("/static/report/"):
        return REPORT / name.removeprefix("/static/report/")
    if name.startswith("/static/"):
        return STATIC / name.removeprefix("/static/")
    # A module of the report imports its neighbours.
    path = (importer.parent / name).resolve()
    if path.is_relative_to(STATIC / "report"):
        return REPORT / path.relative_to(STATIC / "report")
    return path


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_loads_less_than_150_kb(view: str):
    assert size(loaded(view)) < MOST_BYTES


def test_the_vendored_libraries_are_under_150_kb():
    assert size(VENDOR.iterdir()) < MOST_BYTES


def test_every_file_is_used():
    extra = {path for path in STATIC.rglob("*") if path.is_file()} - loaded()
    assert {path.name for path in extra} <= {"LICENSES.txt", "VERSIONS.json"}


@pytest.mark.parametrize("folder", [STATIC, REPORT])
def test_no_file_names_another_machine(folder):
    """Addresses of namespaces are names, and nobody asks for them."""
    for path in folder.rglob("*.[jhc]*s*"):
        if path.parent == VENDOR or not path.is_file():
            continue
        found = re.findall(r"https?://[^\s\"'`)<]+", path.read_text(encoding="utf-8"))
        assert {one for one in found if "www.w3.org/" not in one} == set(), path


def test_commands_that_the_page_names_exist():
    files = [path for path in (STATIC / "app").rglob("*.js") if path.is_file()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = {code.strip() for code in re.findall(r"<code>(attn [a-z ]+)", text)}
    assert {"attn discover", "attn send", "attn sidecar"} <= named
    assert named <= set(commands())


def test_vendored_libraries_have_licences_and_the_versions_of_the_lock_file():
    versions = json.loads((VENDOR / "VERSIONS.json").read_text())
    lock = json.loads((REPO / "tools" / "vendor" / "package-lock.json").read_text())
    licences = (VENDOR / "LICENSES.txt").read_text()
    assert versions["packages"]
    for name, about in versions["packages"].items():
        assert lock["packages"][f"node_modules/{name}"]["version"] == about["version"]
        assert f"{name} {about['version']} ({about['license']})" in licences
    assert not any("resolved" in entry for entry in lock["packages"].values())
    for name, about in versions["modules"].items():
        assert (VENDOR / name).stat().st_size == about["bytes"]
