"""What became of a cluster since the parent run, as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def event_in_words(
    event: Mapping[str, Any], labels: Mapping[int, str], parent_labels: Mapping[int, str]
) -> str:
    """One sentence on an event of `discovery.algorithms.lineage.events`.

    Args:
        labels: the labels of this run's clusters, by id.
        parent_labels: those of the parent's.
    """

    def now(cluster: int) -> str:
        return f"{cluster} ({labels[cluster]})"

    def before(cluster: int) -> str:
        return f"{cluster} ({parent_labels[cluster]})"

    cluster, parents, children = event["cluster_id"], event["parents"], event["children"]
    match event["event"]:
        case "kept":
            return f"{now(cluster)} went on"
        case "merged":
            return f"{now(cluster)} took in {' and '.join(map(before, parents[1:]))}"
        case "split":
            return f"{now(cluster)} came off {before(parents[0])}"
        case "born":
            return f"{now(cluster)} is new"
        case "absorbed":
            return f"{before(cluster)} is now part of {now(children[0])}"
        case _:
            return f"{before(cluster)} is gone"
