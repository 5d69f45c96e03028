"""The differences of two sides in sentences."""

from __future__ import annotations

from typing import Any

import numpy as np

from discovery.describe.ranges import Bins, runs, tokens_back

from .figures import as_one, by_size, compared_shares
from .sides import Side

# Sentences at most, and of each kind.
MOST, MOST_OF_KIND = 8, 3
# Without a test (one request on a side), only what is this large is said.
LEAST = 0.05
# A range of distances is said to differ if its share does by this much.
LEAST_OF_RANGE = 0.02


def differences(
    a: Side, b: Side, zones: list[dict[str, Any]], clusters: list[dict[str, Any]] | None,
    shifts: list[str],
) -> list[str]:  # fmt: skip
    """What differs, the largest first within each kind; one sentence if nothing does.

    Args:
        shifts: along PCA axes. They say the same as distances and entropy, less plainly, and are
            left out where these say something.
    """
    said = [*_distances(a, b), *_entropy(a, b)]
    said += [f"{row['zone']}: {_shares(row)}" for row in _largest(zones)]
    for row in _largest(clusters or []):
        label = row["label"] or f"cluster {row['cluster_id']}"
        if row["cluster_id"] < 0:
            label = "in no cluster"
        said.append(f"{label}: {_shares(row)}")
    if said or shifts:
        return (said or shifts)[:MOST]
    if a.is_one_request or b.is_one_request:
        return [f"No share differs by {LEAST:.0%} or more."]
    sizes = f"{a.zones.requests:,} requests against {b.zones.requests:,}"
    return [f"No difference beyond chance, of {sizes}."]


def _largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = [rows[i] for i in by_size(rows)]
    return [row for row in ordered if _counts(row, LEAST)][:MOST_OF_KIND]


def _counts(row: dict[str, Any], least: float) -> bool:
    if row["differs"] is None:
        return bool(abs(row["b"] - row["a"]) >= least)
    return bool(row["differs"])


def _shares(row: dict[str, Any]) -> str:
    """ "12% of A's rows (8-17%), 40% of B's (31-49%)"."""
    return f"{_share(row, 'a')} of A's rows, {_share(row, 'b')} of B's."


def _share(row: dict[str, Any], side: str) -> str:
    low, high = row[f"{side}_low"], row[f"{side}_high"]
    shown = f"{row[side]:.0%}"
    return shown if low is None else f"{shown} ({100 * low:.0f}-{high:.0%})"


def _distances(a: Side, b: Side) -> list[str]:
    """The ranges of distance that B looks at more, and less."""
    if a.histogram is None or b.histogram is None:
        return []
    change = b.histogram.shares - a.histogram.shares
    said: list[tuple[float, str]] = []
    for sign, word in ((1.0, "more"), (-1.0, "less")):
        inside = sign * change > LEAST_OF_RANGE / 4
        for bins in runs(inside):
            row = _range(a, b, bins)
            size = abs(row["b"] - row["a"])
            if size >= LEAST_OF_RANGE and _counts(row, LEAST):
                where = tokens_back([bins])
                text = (
                    f"B looks {word} at {where}: {row['b']:.0%} of its attention, A {row['a']:.0%}."
                )
                said.append((size, text))
    said.sort(key=lambda one: -one[0])
    return [text for _, text in said[:MOST_OF_KIND]]


def _range(a: Side, b: Side, bins: Bins) -> dict[str, Any]:
    assert a.histogram is not None and b.histogram is not None
    inside = slice(bins.low, bins.high + 1)
    ours, theirs = as_one(a.histogram, inside), as_one(b.histogram, inside)
    return compared_shares(a, b, ours, theirs)[0]


def _entropy(a: Side, b: Side) -> list[str]:
    row = compared_shares(a, b, a.entropy, b.entropy)[0]
    if not _counts(row, LEAST) or abs(row["b"] - row["a"]) < LEAST_OF_RANGE:
        return []
    word = "wider" if row["b"] > row["a"] else "more narrowly"
    return [f"B looks {word}: mean entropy {row['b']:.2f}, A {row['a']:.2f}."]


def notes(a: Side, b: Side) -> list[str]:
    """What limits the comparison."""
    found = list(dict.fromkeys([*a.notes, *b.notes]))
    ours, theirs = a.about, b.about
    if ours["model"] != theirs["model"]:
        found.append(f"other models: {ours['model']} and {theirs['model']}")
    elif ours["capture_id"] != theirs["capture_id"]:
        found.append(
            f"other captures of one model ({ours['capture_id']} and {theirs['capture_id']}): "
            "layers, heads, mask or window differ, and so may the numbers"
        )
    alone = [name for name, side in (("A", a), ("B", b)) if side.is_one_request]
    if alone:
        who = " and ".join(alone)
        verb = "is" if len(alone) == 1 else "are each"
        found.append(
            f"{who} {verb} one request: shares are of its rows alone, without intervals or tests"
        )
    if not np.isclose(a.zones.shares.sum(), 1.0) or not np.isclose(b.zones.shares.sum(), 1.0):
        found.append("a side has no rows that count")
    return found
