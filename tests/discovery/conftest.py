"""Runs that several test files look at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from made_once import made_once, own_copy
from planted import planted, planted_batch
from processes import start_server
from shared import START, AttnCommand
from uninterrupted import AT_NOW, OPTIONS

from pipeline.store.open import open_store


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Tests that call compiled functions in their own process find what one process compiled for
    all. A process that is alone has nobody to share with."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        start_server()


@pytest.fixture(scope="session")
def uninterrupted(attn: AttnCommand, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store, and the output folder of a run of it that nothing stopped."""

    def make(folder: Path) -> None:
        db = folder / "fingerprints.db"
        with open_store(str(db), create=True) as store:
            store.append(planted_batch(planted(1_501, 0)[0], START))
        done = attn("discover", "--db", db, "--output", folder / "left_alone", *AT_NOW, *OPTIONS)
        assert done.returncode == 0, done.stderr

    folder = made_once(tmp_path_factory, "uninterrupted", make)
    return own_copy(tmp_path_factory, folder / "fingerprints.db"), folder / "left_alone"
