"""Layouts of few rows in fewer epochs, where LAYOUT_EPOCHS is set, as by `make test`: they are half
of the time of a small run. The default clusters are found without the map, those of --clustering
hdbscan in it.

Imported by conftest.py, and by the server of processes.py before its forks.
"""

from __future__ import annotations

import os

from discovery.engines import cpu

FEW_ROWS = range(1, 5_001)
every_epoch = cpu.epochs_for


def epochs_for(rows: int) -> int:
    return int(os.environ["LAYOUT_EPOCHS"]) if rows in FEW_ROWS else every_epoch(rows)


if "LAYOUT_EPOCHS" in os.environ:
    cpu.epochs_for = epochs_for
