"""The modules of other folders' tests that these use."""

from __future__ import annotations

import sys

from shared import REPO

for folder in ("discovery", "sidecar"):
    sys.path.insert(0, str(REPO / "tests" / folder))
