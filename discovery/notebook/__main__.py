"""`python -m discovery.notebook FOLDER`: make the data of the notebooks where it is absent."""

from __future__ import annotations

import sys
from pathlib import Path

from capture_kernels.errors import AttnError

from .data import prepare

if __name__ == "__main__":
    try:
        prepare(Path(sys.argv[1]), say=print)
    except AttnError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
