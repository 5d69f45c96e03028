"""The modules of other folders' tests that these use, and a night that nothing stopped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from shared import REPO, AttnCommand

if TYPE_CHECKING:
    from whole_night import WholeNight

for folder in ("discovery", "sidecar"):
    sys.path.insert(0, str(REPO / "tests" / folder))


@pytest.fixture(scope="session")
def whole_night(attn: AttnCommand, tmp_path_factory: pytest.TempPathFactory) -> WholeNight:
    from whole_night import WholeNight

    return WholeNight.of(attn, tmp_path_factory.mktemp("whole"))
