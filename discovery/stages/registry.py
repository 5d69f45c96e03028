"""The stages in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from discovery.events.schema import StageName

from . import cluster, extract, lineage, neighbors, project, publish, quality, umap, zones
from .context import RunContext
from .stage_events import StageEvent, cluster_events, map_events, zone_events


class Stage(NamedTuple):
    """A stage of a run.

    parameters: what its result depends on, besides the stages before it. run: does its work;
    returns the summary for the manifest and a line for a person. events: what a client sees of its
    result once it is finished.
    """

    name: StageName
    parameters: Callable[[RunContext], dict[str, Any]]
    run: Callable[[RunContext], tuple[dict[str, Any], str]]
    events: Callable[[RunContext], Iterator[StageEvent]] | None = None


STAGES = (
    Stage("extract", extract.parameters, extract.run),
    Stage("standardize", project.standardize_parameters, project.standardize),
    Stage("pca", project.pca_parameters, project.pca),
    Stage("neighbors", neighbors.parameters, neighbors.run),
    Stage("umap", umap.parameters, umap.run, map_events),
    Stage("cluster", cluster.parameters, cluster.run),
    Stage("zones", zones.parameters, zones.run, zone_events),
    Stage("lineage", lineage.parameters, lineage.run, cluster_events),
    Stage("quality", quality.parameters, quality.run),
    Stage("publish", publish.parameters, publish.run),
)
