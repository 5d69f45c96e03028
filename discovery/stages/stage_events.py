"""What a finished stage found, as events for those who watch a run.

They are read from the stage's checkpoint, so a resumed run sends them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from discovery.algorithms.lineage import GONE
from discovery.events.schema import (
    SAMPLE_POINTS,
    ClusterFound,
    ClusterGone,
    ClusterUpdate,
    EmbeddingSample,
    Event,
    ZoneStats,
)

from .context import RunContext

# An event's kind and its fields.
StageEvent = tuple[type[Event], dict[str, Any]]


def map_events(context: RunContext) -> Iterator[StageEvent]:
    """After umap: the coordinates of some rows."""
    yield EmbeddingSample, {**sample(context), "cluster_ids": None}


def zone_events(context: RunContext) -> Iterator[StageEvent]:
    """After zones: the share of rows in each."""
    yield ZoneStats, {"shares": context.summaries["zones"]["shares"]}


def cluster_events(context: RunContext) -> Iterator[StageEvent]:
    """After lineage: the clusters by the ids that they keep, and the sample with its clusters. Not
    before, so that no client sees an id that changes."""
    points = fitted_points(context)
    labels = context.checkpoint_of("cluster").read_arrays("fit.npz")["labels"]
    ids = context.checkpoint_of("lineage").read_arrays("ids.npz")["ids"]
    events = context.summaries["lineage"]["events"]
    by_id = {event["cluster_id"]: event for event in events if event["event"] not in GONE}
    sizes = np.bincount(labels[labels >= 0], minlength=len(ids))
    clusters = []
    for index, cluster_id in enumerate(ids.tolist()):
        x, y = np.median(points[labels == index], axis=0).tolist()
        event = by_id[cluster_id]
        clusters.append(
            ClusterFound(
                cluster_id=cluster_id,
                size=int(sizes[index]),
                share=float(sizes[index] / len(labels)),
                x=round(x, 4),
                y=round(y, 4),
                event=event["event"],
                parents=event["parents"],
            )
        )
    gone = [
        ClusterGone(**{name: event[name] for name in ClusterGone.__struct_fields__})
        for event in events
        if event["event"] in GONE
    ]
    yield ClusterUpdate, {"of": len(labels), "clusters": clusters, "gone": gone}
    # Noise is label -1, which picks the last element.
    lookup = np.append(ids, np.int32(-1))
    chosen = evenly_chosen(len(labels))
    cluster_ids = lookup[labels[chosen]].tolist()
    yield EmbeddingSample, {**sample(context), "cluster_ids": cluster_ids}


def sample(context: RunContext) -> dict[str, Any]:
    """Evenly chosen fitted rows: their row numbers in the run, and their coordinates."""
    points = fitted_points(context)
    rows = context.checkpoint_of("neighbors").read_arrays("fit.npz")["rows"]
    chosen = evenly_chosen(len(points))
    rounded = [[round(x, 4), round(y, 4)] for x, y in points[chosen].tolist()]
    return {"of": len(points), "rows": rows[chosen].tolist(), "points": rounded}


def fitted_points(context: RunContext) -> NDArray[np.float32]:
    """float32[n, 2] of the fitted rows."""
    return context.checkpoint_of("umap").read_arrays("map.npz")["points"]


def evenly_chosen(count: int) -> NDArray[np.int64]:
    """At most SAMPLE_POINTS of `count` indices, in even steps from the first to the last."""
    return np.linspace(0, count - 1, min(count, SAMPLE_POINTS)).round().astype(np.int64)
