"""How plots and tables of notebooks look: the colours of report.html and the page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib.resources import files
from typing import Any, ParamSpec

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from capture_kernels.fingerprint.vector import HIST_BINS
from capture_kernels.fingerprint.zones import ZONES
from discovery.describe.ranges import Bins, token_range
from pipeline.record import PHASES

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
# Of a line of a label.
LABEL_CHARACTERS = 46
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


def wrapped(label: str) -> str:
    """A label in lines that fit beside a plot."""
    return textwrap.fill(label, LABEL_CHARACTERS)


def shown(table: pd.DataFrame, forms: Mapping[str, str] | None = None) -> Styler:
    """A table to show, without its index: text to the left, numbers in their form.

    Args:
        forms: by column the format of its values.
    """
    text = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    left: Any = {name: [{"selector": "td, th", "props": [("text-align", "left")]}] for name in text}
    return (
        table.style.format(dict(forms or {}), na_rep="-").set_table_styles(left).hide(axis="index")
    )
