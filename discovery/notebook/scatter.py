"""Linked scatter plots of the same rows (jupyter-scatter), for millions of points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jscatter
import pandas as pd

from .runs import on_host
from .style import color_of


def linked_maps(
    rows: Any,
    views: Mapping[str, tuple[str, str]],
    *,
    by: str = "cluster_id",
    tooltip: tuple[str, ...] = (),
    height: int = 420,
) -> tuple[Any, list[Any]]:
    """Views of the same rows beside one another: what is selected or hovered in one is in all.

    Args:
        rows: a frame, of pandas or cuDF.
        views: by title the columns of the two axes.
        by: the column of the colours: cluster_id, zone or phase.
        tooltip: columns shown for the row under the pointer.
        height: pixels.

    Returns:
        The widget to show, and its `jscatter.Scatter` objects: `selection()` gives the selected
        rows, and `selection(rows)` selects some.
    """
    host = on_host(rows)
    # Values of a few kinds, so that each has a colour and not a shade.
    host = host.assign(**{by: pd.Categorical(host[by].astype(str))})
    names = list(host[by].cat.categories)
    colors = {name: color_of(int(name) if by == "cluster_id" else name) for name in names}
    scatters = []
    for x, y in views.values():
        one = jscatter.Scatter(data=host, x=x, y=y, height=height)
        one.color(by=by, map=colors)
        one.size(default=3)
        # As it is: by default the opacity falls with the density, and thin clusters vanish.
        one.opacity(default=0.8, unselected=0.5, by=None, map=[0.8, 0.8])
        one.axes(False)
        if tooltip:
            one.tooltip(True, properties=list(tooltip))
        scatters.append(one)
    widget = jscatter.compose(
        list(zip(scatters, views, strict=True)), sync_selection=True, sync_hover=True,
        row_height=height,
    )  # fmt: skip
    return widget, scatters
