"""The ten stages of a run. A stage reads what earlier ones kept and keeps its own parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from . import cluster, extract, lineage, neighbors, project, publish, quality, umap, zones
from .stage_events import Told, clusters_named, map_found, zones_found

if TYPE_CHECKING:
    from discovery.job import Job


class Stage(NamedTuple):
    """A stage's name, the parameters that its result depends on, its work, which returns the
    summary that the manifest keeps and the line that a person reads, and the events that tell what
    it found, once it is finished."""

    name: str
    parameters: Callable[[Job], dict[str, Any]]
    run: Callable[[Job], tuple[dict[str, Any], str]]
    tells: Callable[[Job], Iterator[Told]] | None = None


STAGES = (
    Stage("extract", extract.parameters, extract.run),
    Stage("standardize", project.standardize_parameters, project.standardize),
    Stage("pca", project.pca_parameters, project.pca),
    Stage("neighbors", neighbors.parameters, neighbors.run),
    Stage("umap", umap.parameters, umap.run, map_found),
    Stage("cluster", cluster.parameters, cluster.run),
    Stage("zones", zones.parameters, zones.run, zones_found),
    Stage("lineage", lineage.parameters, lineage.run, clusters_named),
    Stage("quality", quality.parameters, quality.run),
    Stage("publish", publish.parameters, publish.run),
)
