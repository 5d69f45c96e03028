"""Names that tests of several folders use; fixtures are in conftest.py."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REPO = Path(__file__).parent.parent
# Planted rows are stamped one second apart from here.
START = dt.datetime(2026, 1, 9, 6, 0, tzinfo=dt.UTC)
NOW = dt.datetime(2026, 1, 10, 4, 2, 11, tzinfo=dt.UTC)

AttnCommand = Callable[..., subprocess.CompletedProcess[str]]


def possible_vectors(layouts: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.float32]:
    """Random vectors that keep the invariants of each row's layout: float32[n, 20]."""
    hist = rng.dirichlet(np.ones(16), len(layouts))
    bands = np.add.reduceat(hist, [0, 3, 8], axis=1)
    entropy = rng.random((len(layouts), 1))
    log16 = np.concatenate([bands, entropy, hist], axis=1)
    places = np.add.reduceat(hist, range(0, 16, 2), axis=1)
    layered = np.concatenate([bands, entropy, places, rng.random((len(layouts), 8))], axis=1)
    return np.where(layouts[:, None] == 1, log16, layered).astype(np.float32)


def without_pandas(folder: Path) -> dict[str, str]:
    """Environment of a Python that finds no pandas, which PyArrow imports wherever it is installed.

    What such a process has loaded is what this project's code asked for.
    """
    (folder / "pandas.py").write_text("raise ImportError('not for this test')\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPO)])}
