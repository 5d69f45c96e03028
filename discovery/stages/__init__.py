"""The ten stages of a run. A stage reads what earlier ones kept and keeps its own parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import cluster, extract, lineage, neighbors, project, publish, quality, umap, zones

if TYPE_CHECKING:
    from ..job import Job


class Stage(NamedTuple):
    """A stage's name, the parameters that its result depends on, and its work, which returns the
    summary that the manifest keeps and the line that a person reads."""

    name: str
    parameters: Callable[[Job], dict[str, Any]]
    run: Callable[[Job], tuple[dict[str, Any], str]]


STAGES = (
    Stage("extract", extract.parameters, extract.run),
    Stage("standardize", project.standardize_parameters, project.standardize),
    Stage("pca", project.pca_parameters, project.pca),
    Stage("neighbors", neighbors.parameters, neighbors.run),
    Stage("umap", umap.parameters, umap.run),
    Stage("cluster", cluster.parameters, cluster.run),
    Stage("zones", zones.parameters, zones.run),
    Stage("lineage", lineage.parameters, lineage.run),
    Stage("quality", quality.parameters, quality.run),
    Stage("publish", publish.parameters, publish.run),
)
