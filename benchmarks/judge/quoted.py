"""The figures of `behaviours.json`, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def of_behaviours(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    methods = found.get("methods", [])
    for name, one in found.get("data", {}).items():
        cells = [one["methods"][method] for method in methods]
        if "ceiling" in one["facts"]:
            yield (
                f"{name}: ARI of {', '.join(methods)} (ceiling)",
                f"{_each(cells, 'ari')} ({one['facts']['ceiling']:.3f})",
            )
        elif "tied" in one["facts"]:
            for way in ("tied", "mixed"):
                yield (
                    f"{name}: AMI with task, {way}", _each([c[way] for c in cells], "ami_task")
                )  # fmt: skip
        else:
            for way in ("seeds", "halves"):
                yield f"{name}: ARI between {way}", _each([c[way] for c in cells], "ari")
            for figure in ("ami_task", "log2_position", "noise_share"):
                yield f"{name}: {figure.replace('_', ' ')}", _each(cells, figure)
    for name in ("job", "plain_recipe"):
        if name not in found:
            continue
        one, said = found[name], name.replace("_", " ")
        yield f"{said}: clusters, noise", f"{one['clusters']}, {one['noise_share']:.1%}"
        yield f"{said}: of log2(position)", f"{one['log2_position']['eta_squared']:.1%}"
        for word, cells in one["mutual_information"].items():
            yield (
                f"{said}: AMI with {word} in octaves (chance)",
                f"{cells['within']:.3f} ({cells['within_by_chance']:.3f})",
            )


def _each(cells: list[dict[str, Any]], name: str) -> str:
    return ", ".join(f"{cell[name]:.3f}" for cell in cells)
