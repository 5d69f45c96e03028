"""The scripts of examples import each other by plain names, as they do when run."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
for folder in ("demo_model", "recipes"):
    sys.path.insert(0, str(EXAMPLES / folder))
