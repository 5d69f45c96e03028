"""The demo model's scripts import each other by plain names, as they do when run."""

import sys
from pathlib import Path

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
sys.path.insert(0, str(DEMO_MODEL))
