"""Names that tests of several folders use; fixtures are in conftest.py."""

from __future__ import annotations

import datetime as dt
import os
import socket
import subprocess
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REPO = Path(__file__).parent.parent
# Planted rows are stamped one second apart from here.
START = dt.datetime(2026, 1, 9, 6, 0, tzinfo=dt.UTC)
NOW = dt.datetime(2026, 1, 10, 4, 2, 11, tzinfo=dt.UTC)

# The system gives ports of its own choice from 32,768 (net.ipv4.ip_local_port_range). Those below
# are in parts, one for each process of pytest-xdist (gw0, gw1, ...).
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = cycle(range(20_000 + _WORKER % 12 * 1_000, 21_000 + _WORKER % 12 * 1_000))

AttnCommand = Callable[..., subprocess.CompletedProcess[str]]


def free_port() -> int:
    """A port of 127.0.0.1 for a server that is started later.

    No connection, and no server that asks for any port, is given it in the meantime.
    """
    while True:
        with socket.socket() as probe:
            # As servers do: a connection that was closed does not keep them from a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port := next(_PORTS)))
            except OSError:
                continue
            return port


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
