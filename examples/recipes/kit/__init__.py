"""What the recipes share.

`services` starts the engine and the sidecar and asks, `answers` reads what came back, `features`
makes numbers of it, `measure` says what they are worth on requests that no detector saw, `report`
prints and writes it, and `command` is the command line. `data` draws from the demo model's task
generators, which are modules in its folder.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "demo_model"))
