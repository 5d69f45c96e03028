"""What a finished stage found, as events for those who watch a run.

They are read from the stage's checkpoint, so a resumed run sends them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from capture_kernels.arrays import Ints
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
    points = context.saved("umap", "map.npz")["points"]
    labels = context.saved("cluster", "fit.npz")["label"]
    ids = context.saved("lineage", "ids.npz")["ids"]
    events = context.summaries["lineage"]["events"]
    sizes = np.bincount(labels[labels >= 0], minlength=len(ids)).tolist()
    clusters = []
    # The events of this run's clusters come first, in their order.
    for index, (event, size) in enumerate(zip(events, sizes, strict=False)):
        x, y = np.median(points[labels == index], axis=0).tolist()
        named = {name: event[name] for name in ("cluster_id", "event", "parents")}
        place = {"x": round(x, 4), "y": round(y, 4)}
        clusters.append(ClusterFound(size=size, share=size / len(labels), **place, **named))
    gone = [
        ClusterGone(**{name: event[name] for name in ClusterGone.__struct_fields__})
        for event in events[len(ids) :]
    ]
    yield ClusterUpdate, {"of": len(labels), "clusters": clusters, "gone": gone}
    # Noise is label -1, which picks the last element.
    lookup = np.append(ids, np.int32(-1))
    cluster_ids = lookup[labels[evenly_chosen(len(labels))]].tolist()
    yield EmbeddingSample, {**sample(context), "cluster_ids": cluster_ids}


def sample(context: RunContext) -> dict[str, Any]:
    """Evenly chosen fitted rows: their row numbers in the run, and their coordinates."""
    points = context.saved("umap", "map.npz")["points"]
    rows = context.saved("neighbors", "fit.npz")["rows"]
    chosen = evenly_chosen(len(points))
    rounded = [[round(x, 4), round(y, 4)] for x, y in points[chosen].tolist()]
    return {"of": len(points), "rows": rows[chosen].tolist(), "points": rounded}


def evenly_chosen(count: int) -> Ints:
    """At most SAMPLE_POINTS of `count` indices, in even steps from the first to the last."""
    return np.linspace(0, count - 1, min(count, SAMPLE_POINTS)).round().astype(np.int64)
