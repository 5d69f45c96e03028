"""Plots of runs and fingerprints, in the colours of report.html and the page.

Each returns a Figure that is not kept by pyplot, so that a notebook shows it once: as the value of
its cell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, wraps
from importlib.resources import files
from itertools import pairwise
from typing import Any, ParamSpec

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS, Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.schema import NOISE
from discovery.describe.ranges import Bins, token_range
from pipeline.record import PHASES

from .runs import on_host

STYLE: Any = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#868b90",
    "axes.labelcolor": "#59616a",
    "xtick.color": "#59616a",
    "ytick.color": "#59616a",
    "legend.frameon": False,
    "image.cmap": "Blues",
}
LABEL_CHARACTERS = 44
P = ParamSpec("P")


def styled(plot: Callable[P, Figure]) -> Callable[P, Figure]:
    """A plot in the style of this module. Its figure is forgotten by pyplot."""

    @wraps(plot)
    def draw(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            made = plot(*args, **kwargs)
        plt.close(made)
        return made

    return draw


@cache
def palette() -> dict[str, Any]:
    """The colours of report.html, as #rrggbb: `slots` (64 of clusters), `noise`, and by name those
    of zones and phases."""
    source = (files("discovery") / "report" / "colors.js").read_text(encoding="utf-8")
    light = source[source.index("const LIGHT") : source.index("const DARK")]
    slots = [f"#{hex_}" for part in re.findall(r'"([0-9a-f]+)"', light) for hex_ in sixes(part)]
    noise = re.search(r'NOISE_COLOR = \{ light: "(\w+)"', source)
    of_zones, of_phases = (
        [int(n) for n in found[1].split(",")]
        if (found := re.search(rf"{name} = colorsOf\(\w+, \[([\d, ]+)\]", source)) else []
        for name in ("zoneColor", "phaseColor")
    )  # fmt: skip
    assert noise and of_zones and of_phases, "colors.js has another form"
    return {
        "slots": slots,
        "noise": f"#{noise[1]}",
        **{zone: slots[slot] for zone, slot in zip(ZONES, of_zones, strict=True)},
        **{phase: slots[slot] for phase, slot in zip(PHASES, of_phases, strict=True)},
    }


def sixes(text: str) -> list[str]:
    return [text[i : i + 6] for i in range(0, len(text), 6)]


def color_of(name: Any) -> str:
    """The colour of a cluster by its id, or of a zone or phase by its name."""
    colors = palette()
    if isinstance(name, str):
        return str(colors.get(name, colors["noise"]))
    return str(colors["slots"][int(name) % 64] if int(name) >= 0 else colors["noise"])


def figure(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """A figure in inches with its axes."""
    return plt.subplots(figsize=(width, height), layout="constrained", **grid)


def bin_names(bins: int = HIST_BINS) -> list[str]:
    """The distances of histogram bins in tokens, short: 0-1, 2-3, ..., 512-1023, 1k, ..., 32k+."""
    names = [token_range(Bins(b, b)).replace(",", "") for b in range(bins)]
    return [name if b < 10 else f"{2 ** (b - 10)}k" + "+" * (b == HIST_BINS - 1)
            for b, name in enumerate(names)]  # fmt: skip


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def short(label: str) -> str:
    return label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"


@styled
def plot_map(
    rows: Any, by: str = "cluster_id", *, labels: Mapping[Any, str] | None = None, size: float = 3
) -> Figure:
    """The map with its rows coloured, and a legend of the commonest ten values.

    Args:
        rows: a frame with x, y and `by`, of pandas or cuDF.
        by: cluster_id, zone, phase, or another column of a few values.
        labels: names of values for the legend.
    """
    host = on_host(rows[["x", "y", by]])
    made, axes = figure(9, 5)
    counts = host[by].value_counts()
    values = [value for value in counts.index if value != NOISE]
    if NOISE in counts.index:
        own = host[host[by] == NOISE]
        axes.scatter(own["x"], own["y"], s=size / 2, c=palette()["noise"], alpha=0.35, linewidths=0)
    known = {*ZONES, *PHASES}
    for number, value in enumerate(values):
        own = host[host[by] == value]
        # What has no colour elsewhere gets the next one.
        has_color = not isinstance(value, str) or value in known
        color = color_of(value if has_color else number)
        name = short((labels or {}).get(value, str(value).replace("_", " ")))
        axes.scatter(
            own["x"], own["y"], s=size, c=color, linewidths=0, alpha=0.8,
            label=f"{name} ({percent(counts[value] / len(host))})" if number < 10 else None,
        )  # fmt: skip
    title = f"{len(host):,} rows by {by.removesuffix('_id').replace('_', ' ')}"
    more = f", the ten largest of {len(values)} named" if len(values) > 10 else ""
    axes.set(title=title + more, xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=4, handletextpad=0.2)
    return made


@styled
def plot_fingerprints(
    vectors: ArrayLike, names: Sequence[str], *, title: str = "", layout: Layout = Layout.LOG16
) -> Figure:
    """Histograms of distances as a picture, a line a row, with the entropy beside them.

    Args:
        vectors: float[n, 20], log16; names: of the n rows.
    """
    rows = np.asarray(vectors, np.float32)
    bins = layout is Layout.LOG16
    shown = rows[:, 4 : 4 + (HIST_BINS if bins else 8)]
    # Bins that nothing reaches would only make the others narrow.
    reach = int(np.flatnonzero(shown.any(axis=0)).max(initial=0)) + 1
    shown = shown[:, :reach]
    made, (left, right) = figure(
        8.2, 0.9 + 0.2 * len(rows), ncols=2, gridspec_kw={"width_ratios": [5, 1]}, sharey=True
    )
    picture = left.imshow(np.sqrt(shown), aspect="auto", vmin=0, vmax=1)
    ticks = bin_names()[:reach] if bins else [f"{i + 1}/8" for i in range(reach)]
    left.set_xticks(range(reach), ticks, rotation=45, ha="right")
    left.set_yticks(range(len(rows)), [short(name) for name in names])
    left.set(title=title or "Where each row looks", xlabel="tokens back" if bins else "place")
    left.tick_params(length=0)
    left.spines[:].set_visible(False)
    bar = made.colorbar(picture, ax=left, fraction=0.04, pad=0.01, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0%", "25%", "100%"])
    bar.outline.set_visible(False)
    right.barh(range(len(rows)), rows[:, 3], color="#9aa0a6", height=0.7)
    right.set(title="Entropy", xlim=(0, 1), xticks=[0, 0.5, 1])
    right.tick_params(axis="y", length=0)
    return made


@styled
def plot_histograms(sides: Mapping[str, ArrayLike], *, title: str = "") -> Figure:
    """Mean shares by distance of several groups, beside one another.

    Args:
        sides: by name float[16], the shares of the bins.
    """
    made, axes = figure(8.2, 2.6)
    values = {name: np.asarray(shares, float) for name, shares in sides.items()}
    reach = max(int(np.flatnonzero(v > 1e-4).max(initial=0)) for v in values.values()) + 1
    width = 0.8 / len(values)
    for number, (name, shares) in enumerate(values.items()):
        at = np.arange(reach) + width * (number - (len(values) - 1) / 2)
        axes.bar(at, shares[:reach], width * 0.92, label=name, color=color_of(number))
    axes.set_xticks(range(reach), bin_names()[:reach])
    axes.set(title=title or "Attention by distance", xlabel="tokens back", ylabel="share")
    axes.legend()
    return made


@styled
def plot_shares(table: pd.DataFrame, *, title: str = "") -> Figure:
    """Shares as stacked bars, a bar for each row of the table.

    Args:
        table: shares in [0, 1]. Columns that are zones, phases or cluster ids have their colours,
            others the next ones; `other` is grey.
    """
    if {*table.columns} <= {*ZONES}:
        table = table[[zone for zone in ZONES if zone in table.columns]]
    made, axes = figure(8.2, 0.8 + 0.32 * len(table))
    left = np.zeros(len(table))
    for number, column in enumerate(table.columns):
        values = table[column].to_numpy(float)
        known = not isinstance(column, str) or column in palette() or column == "other"
        axes.barh(
            range(len(table)), values, left=left, color=color_of(column if known else number),
            height=0.74,
            label=str(column).replace("_", " "), edgecolor="white", linewidth=0.6,
        )  # fmt: skip
        for row, (start, share) in enumerate(zip(left, values, strict=True)):
            if share >= 0.07:
                axes.text(
                    start + share / 2, row, f"{share:.0%}", ha="center", va="center", color="white",
                    fontsize=8,
                )  # fmt: skip
        left += values
    axes.set_yticks(range(len(table)), [str(name) for name in table.index])
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, 1), xticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=min(6, len(table.columns)),
        handlelength=1, columnspacing=1.2,
    )  # fmt: skip
    return made


@styled
def plot_lineage(shares: pd.DataFrame, events: pd.DataFrame, *, most: int = 14) -> Figure:
    """Clusters from run to run: bands as wide as their shares, joined where an id lives on.

    Args:
        shares, events: of `runs.lineage`.
        most: how many clusters get their name beside the last run that has them.
    """
    runs = list(dict.fromkeys(shares["run_id"]))
    own = shares[shares["cluster_id"] != NOISE]
    order = own.groupby("cluster_id")["share"].sum().sort_values(ascending=False)
    made, axes = figure(9, 5.4)
    gap, half = 0.006, 0.07
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for run in runs:
        here, top = own[own["run_id"] == run].set_index("cluster_id")["share"], 0.0
        for cluster in sorted(here.index, key=list(order.index).index):
            spans[run, cluster] = (top, top + float(here[cluster]))
            top += float(here[cluster]) + gap
    for (run, cluster), (top, bottom) in spans.items():
        x = runs.index(run)
        axes.fill_between([x - half, x + half], top, bottom, color=color_of(cluster), linewidth=0)
    flows = [(a, b, c, c) for a, b in pairwise(runs) for c in order.index]
    for event in events.itertuples():
        at = runs.index(event.run_id)
        if at and event.event in ("split", "merged"):
            flows += [(runs[at - 1], event.run_id, p, event.cluster_id) for p in event.parents]
        elif at and event.event == "absorbed":
            flows += [(runs[at - 1], event.run_id, event.cluster_id, c) for c in event.children]
    for first, second, origin, cluster in dict.fromkeys(flows):
        if (first, origin) in spans and (second, cluster) in spans:
            _flow(axes, runs.index(first), spans[first, origin], runs.index(second),
                  spans[second, cluster], half, color_of(origin))  # fmt: skip
    names = own[own["run_id"] == runs[-1]].set_index("cluster_id")["label"]
    floor = -np.inf
    for cluster in [one for run, one in spans if run == runs[-1]][:most]:
        top, bottom = spans[runs[-1], cluster]
        # Names of thin bands do not overlap.
        floor = max((top + bottom) / 2, floor + 0.034)
        text = f"{cluster}  {short(names[cluster])}"
        axes.text(len(runs) - 1 + half + 0.03, floor, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xticks(range(len(runs)), runs)
    axes.set(title="Clusters from night to night: height is share of the rows", yticks=[],
             xlim=(-0.2, len(runs) - 1 + 1.25))  # fmt: skip
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return made


def _flow(
    axes: Axes, x0: int, span0: tuple[float, float], x1: int, span1: tuple[float, float],
    half: float, color: str,
) -> None:  # fmt: skip
    """A band from one run to the next, whose ends are as high as the cluster there."""
    t = np.linspace(0, 1, 40)
    ease = t * t * (3 - 2 * t)
    x = (x0 + half) + t * (x1 - x0 - 2 * half)
    upper, lower = (a + (b - a) * ease for a, b in zip(span0, span1, strict=True))
    axes.fill_between(x, upper, lower, color=color, alpha=0.28, linewidth=0)


@styled
def plot_evidence(rules: ZoneRules) -> Figure:
    """Evidence for each zone over its signal, with the strong value marked."""
    made, axes = figure(8.2, 2.9)
    values = np.linspace(0, 1, 201)
    vectors = np.zeros((len(values), DIMENSIONS), np.float32)
    vectors[:, 3] = values
    for zone, (signal, strong) in zip(ZONES, asdict(rules).items(), strict=True):
        # The form is the same for all signals, and entropy is one that a vector can be given.
        evidence = ZoneRules(entropy=strong).evidence(vectors, Layout.LOG16)[:, -1]
        label = f"{zone.replace('_', ' ')}: {signal.replace('_', ' ')}, strong from {strong:g}"
        axes.plot(values, evidence, color=color_of(zone), label=label)
        axes.plot([strong], [0.5], "o", color=color_of(zone), markersize=5)
    axes.set(
        title="Evidence by signal", xlabel="signal", ylabel="evidence", xlim=(0, 1), ylim=(0, 1)
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return made


@styled
def plot_axis(
    groups: Mapping[str, ArrayLike], *, title: str, xlabel: str, mark: float | None = None
) -> Figure:
    """Distributions of a number in several groups: median, quartiles, and 5% to 95%.

    Args:
        groups: by name float[n].
        mark: a value to draw a line at.
    """
    made, axes = figure(8.2, 0.9 + 0.26 * len(groups))
    for row, (name, values) in enumerate(groups.items()):
        low, first, middle, third, high = np.quantile(
            np.asarray(values, float), [0.05, 0.25, 0.5, 0.75, 0.95]
        )
        color = color_of(name if name in ZONES else 0)
        axes.plot([low, high], [row, row], color=color, linewidth=1)
        axes.plot([first, third], [row, row], color=color, linewidth=6, solid_capstyle="butt")
        axes.plot([middle], [row], "|", color="white", markersize=7, markeredgewidth=1.5)
    if mark is not None:
        axes.axvline(mark, color="#a8230f", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(groups)), [name.replace("_", " ") for name in groups])
    axes.invert_yaxis()
    axes.set(title=title, xlabel=xlabel)
    axes.tick_params(axis="y", length=0)
    return made


@styled
def plot_seconds(seconds: Mapping[str, pd.Series[float]], *, title: str) -> Figure:
    """Seconds by number of rows, both axes logarithmic, a line for each machine.

    Args:
        seconds: by machine, a series of seconds whose index is the number of rows.
    """
    made, axes = figure(8.2, 3.2)
    for number, (name, series) in enumerate(seconds.items()):
        ordered = series.sort_index()
        axes.plot(ordered.index, ordered.to_numpy(), "o-", color=color_of(number), label=name,
                  markersize=4)  # fmt: skip
    axes.set(title=title, xscale="log", yscale="log", xlabel="rows", ylabel="seconds")
    axes.grid(True, which="major", color="#e2e2dd", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return made
