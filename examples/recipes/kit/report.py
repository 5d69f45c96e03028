"""What a recipe found, as JSON, as a table in the terminal, and as a table of its page."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from .measure import Figure

# What a row of the table looks at. `mean head`: keys by the mean of the heads. `run`: zones and
# clusters as the sidecar names them.
Kind = Literal["20 numbers", "per head", "mean head", "run", "baseline"]


@dataclass(frozen=True)
class Row:
    """A way to do it: its measure on held-out requests and, where something was fitted, on tasks
    that were left out of the fit (mean over tasks)."""

    name: str
    kind: Kind
    held_out: Figure
    left_out: Figure | None = None


@dataclass
class Report:
    """What a recipe found.

    Attributes:
        recipe: name of the program, without .py.
        measure: what the rows are measured by, as "AUROC".
        larger_is_better: of the measure.
        anchor: the published figure, with its source.
        rows: ways to do it. The first row of a kind is the one that the table of all recipes
            quotes: it is chosen by its place in the program, not by its figure. Of baselines that
            table quotes the best one, which favours them.
        facts: further figures that the page quotes, by what they are.
        requests: that the engine answered.
    """

    recipe: str
    measure: str
    anchor: str
    larger_is_better: bool = True
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    requests: int = 0


def shown(figure: Figure | dict[str, Any] | None) -> str:
    """A figure as text: `0.91 (0.86 to 0.95)`."""
    if figure is None:
        return "-"
    of = asdict(figure) if isinstance(figure, Figure) else figure
    if of["low"] is None:
        return f"{of['value']:.2f}"
    return f"{of['value']:.2f} ({of['low']:.2f} to {of['high']:.2f})"


def as_json(report: Report, command: str, seed: int, quick: bool, seconds: float) -> dict[str, Any]:
    """The report with the command, date and machine beside it. No host names and no paths."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": next(named, platform.machine()), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "scikit-learn")},
        },
        "seed": seed,
        "quick": quick,
        "seconds": round(seconds),
        **asdict(report),
    }


def write_json(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def markdown(found: dict[str, Any]) -> str:
    """The table of a recipe's page, from its JSON."""
    has_tasks = any(row["left_out"] for row in found["rows"])
    head = ["looks at", "what", f"{found['measure']}, held-out requests"]
    head += ["left-out tasks"] if has_tasks else []
    lines = [head, ["---"] * len(head)]
    for row in found["rows"]:
        cells = [row["kind"], row["name"], shown(row["held_out"])]
        lines.append(cells + ([shown(row["left_out"])] if has_tasks else []))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def fact_lines(found: dict[str, Any]) -> list[str]:
    """The further figures, a line each, as the page quotes them."""
    return [f"- {name}: {_fact(value)}" for name, value in found["facts"].items()]


def _fact(value: Any) -> str:
    if isinstance(value, dict) and {"value", "low", "high"} <= set(value):
        return shown(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def overview_row(found: dict[str, Any], title: str, verdict: str) -> str:
    """A recipe's row in the table of all recipes, from its JSON; see `Report.rows`."""
    cells = [f"[{title}]({found['recipe']}.md)", found["measure"]]
    for kind in ("20 numbers", "per head"):
        rows = [row["held_out"] for row in found["rows"] if row["kind"] == kind]
        cells.append(shown(rows[0] if rows else None))
    sign = 1 if found["larger_is_better"] else -1
    baselines = [row["held_out"] for row in found["rows"] if row["kind"] == "baseline"]
    cells.append(shown(max(baselines, key=lambda of: sign * of["value"], default=None)))
    return "| " + " | ".join([*cells, found["anchor"], verdict]) + " |"
