"""Names that tests of several folders use; fixtures are in conftest.py."""

from __future__ import annotations

import datetime as dt
import subprocess
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).parent.parent
# Planted rows are stamped one second apart from here.
START = dt.datetime(2026, 1, 9, 6, 0, tzinfo=dt.UTC)
NOW = dt.datetime(2026, 1, 10, 4, 2, 11, tzinfo=dt.UTC)

AttnCommand = Callable[..., subprocess.CompletedProcess[str]]
