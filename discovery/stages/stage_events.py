"""What a finished stage has found, as events for those who watch a run (live.py lists them).

Read from the stage's kept parts, so a resumed run tells it again from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from discovery.algorithms.lineage import GONE

if TYPE_CHECKING:
    from discovery.job import Job

# An event's name and its fields.
Told = tuple[str, dict[str, Any]]
# Most points of an embedding_sample: enough to draw a map from, in a message of some 30 KB.
SAMPLE_POINTS = 1_000


def map_found(job: Job) -> Iterator[Told]:
    """After umap: where some rows lie on the map."""
    yield "embedding_sample", {**sample(job), "cluster_ids": None}


def zones_found(job: Job) -> Iterator[Told]:
    """After zones: the share of rows in each."""
    yield "zone_stats", {"shares": job.summaries["zones"]["shares"]}


def clusters_named(job: Job) -> Iterator[Told]:
    """After lineage: the clusters by the ids that they keep, and the sampled rows again with the
    id of their cluster. Not before, so that no client sees a number that changes."""
    points = fitted_points(job)
    labels = job.stage_parts("cluster").read_arrays("fit.npz")["labels"]
    ids = job.stage_parts("lineage").read_arrays("ids.npz")["ids"]
    events = job.summaries["lineage"]["events"]
    by_id = {event["cluster_id"]: event for event in events if event["event"] not in GONE}
    sizes = np.bincount(labels[labels >= 0], minlength=len(ids))
    clusters = []
    for index, cluster_id in enumerate(ids.tolist()):
        x, y = np.median(points[labels == index], axis=0).tolist()
        event = by_id[cluster_id]
        clusters.append(
            {
                "cluster_id": cluster_id,
                "size": int(sizes[index]),
                "share": float(sizes[index] / len(labels)),
                "x": round(x, 4),
                "y": round(y, 4),
                "event": event["event"],
                "parents": event["parents"],
            }
        )
    gone = [
        {name: event[name] for name in ("cluster_id", "event", "children")}
        for event in events
        if event["event"] in GONE
    ]
    yield "cluster_update", {"of": len(labels), "clusters": clusters, "gone": gone}
    # Noise is label -1, which picks the last element.
    lookup = np.append(ids, np.int32(-1))
    chosen = even_choice(len(labels))
    yield "embedding_sample", {**sample(job), "cluster_ids": lookup[labels[chosen]].tolist()}


def sample(job: Job) -> dict[str, Any]:
    """Evenly chosen fitted rows: their row numbers in the run, and their places on the map."""
    points = fitted_points(job)
    rows = job.stage_parts("neighbors").read_arrays("fit.npz")["rows"]
    chosen = even_choice(len(points))
    places = [[round(x, 4), round(y, 4)] for x, y in points[chosen].tolist()]
    return {"of": len(points), "rows": rows[chosen].tolist(), "points": places}


def fitted_points(job: Job) -> NDArray[np.float32]:
    """float32[n, 2] of the fitted rows."""
    return job.stage_parts("umap").read_arrays("map.npz")["points"]


def even_choice(count: int) -> NDArray[np.int64]:
    """At most SAMPLE_POINTS of `count` indices, in even steps from the first to the last."""
    return np.linspace(0, count - 1, min(count, SAMPLE_POINTS)).round().astype(np.int64)
