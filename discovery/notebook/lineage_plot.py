"""The lineage of clusters as a picture: bands that flow from run to run."""

from __future__ import annotations

import textwrap
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from discovery.artifacts.schema import NOISE

from .style import color_of, figure, styled

Span = tuple[float, float]
# Between bands; half the width of a band; between names; in shares of a run, and of the way from
# one run to the next.
GAP, HALF, LINE = 0.006, 0.07, 0.034
NAME_CHARACTERS = 62


@styled
def plot_lineage(shares: pd.DataFrame, events: pd.DataFrame, *, most: int = 14) -> Figure:
    """Clusters from run to run: bands as high as their shares, joined where an id lives on, and
    where a cluster was split, merged or absorbed.

    Args:
        shares, events: of `runs.lineage`.
        most: how many clusters of the last run get their name.
    """
    runs = list(dict.fromkeys(shares["run_id"]))
    own = shares[shares["cluster_id"] != NOISE]
    order = list(own.groupby("cluster_id")["share"].sum().sort_values(ascending=False).index)
    made, axes = figure(9.6, 5.4)
    spans: dict[str, dict[int, Span]] = {}
    for at, run in enumerate(runs):
        here = own[own["run_id"] == run].set_index("cluster_id")["share"]
        spans[run] = _stacked({one: float(here[one]) for one in order if one in here.index})
        for cluster, (top, bottom) in spans[run].items():
            axes.fill_between([at - HALF, at + HALF], top, bottom, color=color_of(cluster), lw=0)
    for at, (first, second) in enumerate(pairwise(runs)):
        pairs = _pairs(events[events["run_id"] == second], spans[first], spans[second])
        ends = _slices(spans[second], spans[first], [(new, old) for old, new in pairs])
        starts = _slices(spans[first], spans[second], pairs)
        for old, new in pairs:
            _flow(axes, at, starts[old, new], ends[new, old], color_of(old))
    names = own[own["run_id"] == runs[-1]].set_index("cluster_id")["label"]
    floor = -np.inf
    for cluster, (top, bottom) in list(spans[runs[-1]].items())[:most]:
        # Names of thin bands do not overlap.
        floor = max((top + bottom) / 2, floor + LINE)
        text = textwrap.shorten(f"{cluster}: {names[cluster]}", NAME_CHARACTERS, placeholder="…")
        axes.text(len(runs) - 1 + HALF + 0.03, floor, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xticks(range(len(runs)), runs)
    axes.set(title="Clusters from night to night: height is share of the rows", yticks=[],
             xlim=(-0.2, len(runs) - 1 + 1.6))  # fmt: skip
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return made


def _stacked(shares: dict[int, float]) -> dict[int, Span]:
    """Top and bottom of the bands of a run, from 0 downwards."""
    spans, top = {}, 0.0
    for cluster, share in shares.items():
        spans[cluster] = (top, top + share)
        top += share + GAP
    return spans


def _pairs(
    events: pd.DataFrame, before: dict[int, Span], after: dict[int, Span]
) -> list[tuple[int, int]]:
    """What was before and what it became: each of one run and of the next, by the next one's
    events."""
    found = [(cluster, cluster) for cluster in before]
    for event in events.itertuples():
        if event.event in ("split", "merged"):
            found += [(parent, event.cluster_id) for parent in event.parents]
        elif event.event == "absorbed":
            found += [(event.cluster_id, child) for child in event.children]
    return [(old, new) for old, new in dict.fromkeys(found) if old in before and new in after]


def _slices(
    spans: dict[int, Span], others: dict[int, Span], pairs: list[tuple[int, int]]
) -> dict[tuple[int, int], Span]:
    """Each pair's part of the span of its first: in the order, and as high in proportion, as the
    spans of the second ones."""
    found: dict[tuple[int, int], Span] = {}
    for one in {first for first, _ in pairs}:
        joined = sorted((other for first, other in pairs if first == one), key=others.__getitem__)
        heights = np.array([bottom - top for top, bottom in map(others.__getitem__, joined)])
        top, bottom = spans[one]
        edges = top + (bottom - top) * np.concatenate([[0.0], heights.cumsum() / heights.sum()])
        for other, part in zip(joined, pairwise(edges.tolist()), strict=True):
            found[one, other] = part
    return found


def _flow(axes: Axes, at: int, start: Span, end: Span, color: str) -> None:
    """A band from run `at` to the next one."""
    t = np.linspace(0, 1, 40)
    ease = t * t * (3 - 2 * t)
    x = (at + HALF) + t * (1 - 2 * HALF)
    upper, lower = (a + (b - a) * ease for a, b in zip(start, end, strict=True))
    axes.fill_between(x, upper, lower, color=color, alpha=0.28, lw=0)
