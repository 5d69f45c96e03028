"""Where two sides lie on the axes of a run's PCA, in words."""

from __future__ import annotations

from typing import Any

from discovery.describe.axes import axes_in_words

from .means import DIGITS, compared_means
from .sides import Run, Side

# Differences of means in standard deviations of the rows (Cohen 1988), and what they are called.
SIZES = ((0.8, "strongly"), (0.5, "clearly"), (0.2, "slightly"), (0.0, "barely"))
NO_SHIFT = "no shift beyond chance"
NOT_KNOWN = "whether they lie apart is not known"


def axes(a: Side, b: Side, run: Run | None) -> list[dict[str, Any]] | None:
    """Mean coordinates on the run's axes with their evidence, in words; None if a side is not in
    them."""
    if run is None or a.axes is None or b.axes is None:
        return None
    kinds = [side.about["kind"] == "run" for side in (a, b)]
    others = [
        one for one, is_run in zip((a, b), kinds, strict=True)
        if is_run and one.about["id"] != run.artifacts.run_id
    ]  # fmt: skip
    if others:  # each run has axes of its own
        return None
    projection = run.classifier.codebook.projection
    ends = axes_in_words(projection.components, projection.explained, run.classifier.layout)
    rows = compared_means(a.axes, b.axes, runs=(kinds[0], kinds[1]))
    return [
        {
            "axis": axis["name"], "explained": round(float(axis["explained"]), DIGITS),
            "low": axis["low"], "high": axis["high"],
            "words": leaning(row["differs"], row.pop("size"), axis["low"], axis["high"]), **row,
        }
        for axis, row in zip(ends, rows, strict=True)
    ]  # fmt: skip


def leaning(differs: bool | None, size: float, low: str, high: str) -> str:
    """Where B lies from A on an axis, `size` standard deviations of the rows further to `high`."""
    if differs is None:
        return NOT_KNOWN
    if not differs:
        return NO_SHIFT
    how = next(word for least, word in SIZES if abs(size) >= least)
    return f"B lies {how} further to: {high if size > 0 else low}"


def largest(rows: list[dict[str, Any]] | None, most: int) -> list[str]:
    """Sentences of the axes that differ, by how much of the variance is theirs."""
    return [f"{row['axis']}: {row['words']}." for row in rows or [] if row["differs"]][:most]
