"""The command line that all recipes share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from capture_kernels.errors import AttnError

from .report import Report, as_json, fact_lines, markdown, write_json
from .services import Services, open_services

DATA = Path(__file__).parents[3] / "build" / "recipes"


@dataclass(frozen=True)
class Settings:
    """What a recipe is run with.

    Attributes:
        seed: of its data, splits and intervals.
        quick: a few requests, to see that it runs; its figures say nothing.
    """

    seed: int
    quick: bool

    def count(self, whole: int, quick: int) -> int:
        """How many of something: all, or a few in a quick run."""
        return quick if self.quick else whole


def say(line: str) -> None:
    """A line about a step that begins or has ended."""
    print(line, flush=True)


def main(
    name: str,
    about: str,
    recipe: Callable[[Services, Settings], Report],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a recipe from its command line, print what it found, and write it.

    Returns:
        0, or 2 where something of the user's keeps it from running.
    """
    parser = argparse.ArgumentParser(prog=f"{name}.py", description=about)
    parser.add_argument("--json", type=Path, help="JSON to write what was found to")
    parser.add_argument("--seed", type=int, default=11, help="of data, splits and intervals")
    parser.add_argument("--quick", action="store_true", help="a few requests, to see that it runs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the sidecar's run")
    given = parser.parse_args(arguments)
    command = f"python examples/recipes/{name}.py --json benchmarks/results/recipes/{name}.json"
    try:
        with open_services(given.data, f"{name}.db") as services:
            start = time.monotonic()
            report = recipe(services, Settings(given.seed, given.quick))
            seconds = time.monotonic() - start
    except AttnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = as_json(report, command, given.seed, given.quick, seconds)
    print("\n".join(["", markdown(found), "", *fact_lines(found)]))
    if given.json:
        write_json(given.json, found)
    return 0
