"""Small data for the notebooks, made once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from made_once import made_once
from shared import REPO

from discovery.notebook import NotebookData, prepare

if TYPE_CHECKING:
    from playwright.sync_api import Browser

for folder in ("page", "sidecar"):
    sys.path.insert(0, str(REPO / "tests" / folder))

# Of each of the nine tasks of the sample.
REQUESTS = 9


@pytest.fixture(scope="session")
def notebook_data(tmp_path_factory: pytest.TempPathFactory) -> NotebookData:
    """Stores and runs as `make notebooks` makes them, of fewer requests."""

    def make(folder: Path) -> None:
        for name in ("benchmarks", "examples"):
            (folder / name).symlink_to(REPO / name)
        prepare(folder / "build" / "notebooks", requests_per_task=REQUESTS)

    return NotebookData(made_once(tmp_path_factory, "checkout", make) / "build" / "notebooks")


@pytest.fixture
def notebooks_folder(notebook_data: NotebookData) -> Path:
    """Where a notebook is executed: beside it are build/, benchmarks/ and examples/."""
    folder = notebook_data.folder.parent.parent / "notebooks"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for all: a machine with a GPU may have no browser.
    from browsing import chromium

    with chromium() as found:
        yield found
