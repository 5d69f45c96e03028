"""Plots of runs and fingerprints.

Each returns a Figure that is not kept by pyplot, so that a notebook shows it once: as the value of
its cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from numpy.typing import ArrayLike

from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS, Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.schema import NOISE
from pipeline.record import PHASES

from .runs import on_host
from .style import bin_names, color_of, figure, palette, percent, styled, wrapped


@styled
def plot_map(
    rows: Any,
    by: str = "cluster_id",
    *,
    labels: Mapping[Any, str] | None = None,
    around: Any = None,
    size: float = 3,
) -> Figure:
    """The map with its rows coloured, and a legend of the commonest ten values.

    Args:
        rows: a frame with x, y and `by`, of pandas or cuDF.
        by: cluster_id, zone, phase, or another column of a few values.
        labels: names of values for the legend.
        around: another map, whose rows would fit in the picture as well.
        size: of a point, in square points.
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
        name = (labels or {}).get(value, str(value).replace("_", " "))
        label = wrapped(f"{name} ({percent(counts[value] / len(host))})") if number < 10 else None
        axes.scatter(own["x"], own["y"], s=size, c=color, linewidths=0, alpha=0.8, label=label)
    title = f"{len(host):,} rows by {by.removesuffix('_id').replace('_', ' ')}"
    more = f", the ten largest of {len(values)} named" if len(values) > 10 else ""
    axes.set(title=title + more, xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    if around is not None:
        axes.update_datalim(on_host(around[["x", "y"]]).to_numpy())
        axes.autoscale_view()
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
    labels = [wrapped(name) for name in names]
    line = 0.2 if max(label.count("\n") for label in labels) == 0 else 0.32
    made, (left, right) = figure(
        9, 0.9 + line * len(rows), ncols=2, gridspec_kw={"width_ratios": [5, 1]}, sharey=True
    )
    picture = left.imshow(np.sqrt(shown), aspect="auto", vmin=0, vmax=1)
    ticks = bin_names()[:reach] if bins else [f"{i + 1}/8" for i in range(reach)]
    left.set_xticks(range(reach), ticks, rotation=45, ha="right")
    left.set_yticks(range(len(rows)), labels)
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
def plot_evidence(rules: ZoneRules) -> Figure:
    """Evidence for each zone over its signal, with the strong value marked."""
    made, axes = figure(8.2, 2.9)
    values = np.linspace(0, 1, 201)
    vectors = np.zeros((len(values), DIMENSIONS), np.float32)
    vectors[:, 3] = values
    drawn: set[float] = set()
    for zone, (signal, strong) in zip(ZONES, asdict(rules).items(), strict=True):
        # The form is the same for all signals, and entropy is one that a vector can be given.
        evidence = ZoneRules(entropy=strong).evidence(vectors, Layout.LOG16)[:, -1]
        label = f"{zone.replace('_', ' ')}: {signal.replace('_', ' ')}, strong from {strong:g}"
        # Two zones may have the same strong value: the second one is drawn over the first.
        dashes = (4, 4) if strong in drawn else (1, 0)
        drawn.add(strong)
        axes.plot(values, evidence, color=color_of(zone), label=label, linewidth=2, dashes=dashes)
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
    axes.set(title=title, xlabel=xlabel, ylim=(len(groups) - 0.5, -0.5))
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
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#e2e2dd", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return made
