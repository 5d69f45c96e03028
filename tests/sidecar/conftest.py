"""A served run, and a sidecar that serves it, made once for each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Sidecar, running
from served_runs import publish


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder of one run, which no test changes."""
    output = tmp_path_factory.mktemp("runs")
    publish(output)
    return output


@pytest.fixture(scope="module")
def sidecar(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that several tests use; its store is theirs together."""
    with running(tmp_path_factory.mktemp("sidecar"), "--max-batch", "2000", runs=runs) as found:
        yield found
