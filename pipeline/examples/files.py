"""The demo model and the sample of its fingerprints, which are installed with the package.

In a checkout `shipped/` holds links to examples/; a wheel holds the files.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from capture_kernels.errors import OptionError

# What the sample's records call the model: those of a server must call it the same.
DEMO_NAME = "examples/demo_model"


def demo_model() -> Path:
    """The folder of the demo model. OptionError: it is not installed."""
    return _found("demo_model/model.safetensors").parent


def sample() -> Path:
    """The sample's Parquet file. OptionError: it is not installed."""
    return _found("sample/fingerprints.parquet")


def _found(name: str) -> Path:
    path = Path(str(files("pipeline.examples") / "shipped" / name))
    if not path.is_file():
        raise OptionError(f"{path} is missing: install attn again")
    return path
