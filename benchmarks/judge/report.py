"""The judge's tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .datasets import TIED
from .measures import Figures

WIDTH = 15


def print_report(figures: Figures) -> None:
    """Print every table that the figures have rows for."""
    methods, data = figures["methods"], figures["data"]
    if figures["half"] == "held_out":
        print("held out: these figures are only reported; no method may be chosen or changed by")
        print("them. Use --half develop for that.")
    planted = {name: one for name, one in data.items() if "ceiling" in one["facts"]}
    tied = {name: one for name, one in data.items() if name.endswith(TIED)}
    real = {n: one for n, one in data.items() if n not in planted and n not in tied}
    if planted:
        print_planted(planted, methods)
    for name, one in real.items():
        print_real(name, one, methods)
    for name, one in tied.items():
        print_tied(name, one, methods)


def _line(name: str, facts: str, cells: list[str]) -> None:
    print(f"  {name:<24}{facts:>22} " + "".join(f"{cell:>{WIDTH}}" for cell in cells))


def _heading(text: str, facts: str, methods: list[str]) -> None:
    print(text)
    _line("", facts, [name.rpartition(":")[2] for name in methods])


def print_planted(data: dict[str, Figures], methods: list[str]) -> None:
    _heading("planted rows: ARI with the truth (clusters found)", "behavs noise ceiling", methods)
    for name, one in data.items():
        facts = one["facts"]
        cells = [one["methods"][m] for m in methods]
        _line(
            name,
            f"{facts['behaviours']} {facts['noise_share']:>6.0%}   {facts['ceiling']:.3f}",
            [f"{cell['ari']:.3f} ({cell['clusters']})" for cell in cells],
        )
    for what, cell_of in SUMMARIES:
        cells = [cell_of([one["methods"][m] for one in data.values()]) for m in methods]
        _line(what, "", cells)


def _mean(name: str, form: str) -> Callable[[list[Figures]], str]:
    def mean(figures: list[Figures]) -> str:
        values = [one[name] for one in figures if one[name] is not None]
        return format(sum(values) / len(values), form) if values else "-"

    return mean


SUMMARIES: tuple[tuple[str, Callable[[list[Figures]], str]], ...] = (
    ("mean ARI", _mean("ari", ".3f")),
    ("least ARI", lambda figures: f"{min(one['ari'] for one in figures):.3f}"),
    ("true noise called noise", _mean("noise_called_noise", ".0%")),
    ("others called noise", _mean("real_called_noise", ".1%")),
    ("AUC of probability", _mean("probability_auc", ".2f")),
    ("CPU seconds, mean", _mean("cpu_seconds", ".1f")),
)


def _row(name: str, one: Figures, methods: list[str], path: str, form: str) -> None:
    """A line of one figure of each method, found by its names with dots between them."""
    _line(name, "", [_cell(one["methods"][method], path, form) for method in methods])


def _cell(figures: Any, path: str, form: str) -> str:
    for name in path.split("."):
        if name not in figures:
            return "-"
        figures = figures[name]
    return format(figures, form)


def print_real(name: str, one: Figures, methods: list[str]) -> None:
    facts = one["facts"]
    _heading(f"{name}: {facts['rows']:,} rows of {facts['requests']} requests", "", methods)
    for title, way in (("ARI between seeds", "seeds"), ("ARI between halves", "halves")):
        _row(title, one, methods, f"{way}.ari", ".3f")
        _row("  of rows in clusters", one, methods, f"{way}.in_clusters", ".3f")
    if any("families" in cells["halves"] for cells in one["methods"].values()):
        _row("  of families", one, methods, "halves.families.ari", ".3f")
    _row("AMI with the task", one, methods, "ami_task", ".3f")
    _row("  of rows in clusters", one, methods, "ami_task_in_clusters", ".3f")
    print(f"    (a classifier that is shown other requests' tasks: {facts['task_ceiling']:.3f})")
    _row("of log2(position)", one, methods, "log2_position", ".1%")
    print(f"    (the tasks explain {facts['tasks_log2_position']:.1%} of it)")
    _row("clusters", one, methods, "clusters", ".0f")
    _row("noise", one, methods, "noise_share", ".1%")
    _row("CPU seconds", one, methods, "cpu_seconds", ".1f")


def print_tied(name: str, one: Figures, methods: list[str]) -> None:
    facts = one["facts"]
    _heading(f"{name}: {facts['tied']['rows']:,.0f} rows of five tasks", "", methods)
    for way in ("tied", "mixed"):
        _row(f"AMI with task, {way}", one, methods, f"{way}.ami_task", ".3f")
        _row("  of rows in clusters", one, methods, f"{way}.ami_task_in_clusters", ".3f")
        _row(f"of log2(position), {way}", one, methods, f"{way}.log2_position", ".1%")
        print(f"    (the tasks explain {facts[way]['tasks_log2_position']:.1%} of it)")
        _row(f"clusters, {way}", one, methods, f"{way}.clusters", ".0f")
        _row(f"noise, {way}", one, methods, f"{way}.noise_share", ".1%")
