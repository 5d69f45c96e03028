"""Which clusters the fit rows are in: by trees, which need no map and are made beside it, or by
HDBSCAN of the map."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats, Ints
from discovery.algorithms.consensus.clusters import Clusters, load
from discovery.algorithms.consensus.continued import ParentClusters
from discovery.algorithms.consensus.valleys import length_steps
from discovery.algorithms.map_clusters import (
    SPARSE_NEIGHBOR,
    ClusteredRows,
    FoundClusters,
    clusters_of_map,
    clusters_of_rows,
    rows_to_cluster,
)
from discovery.algorithms.threads import usable_cpus
from discovery.artifacts.projection import context_octave
from discovery.execution.ahead import Ahead
from discovery.execution.beside import Beside, Ended
from discovery.runs.checkpoint import Arrays
from pipeline.hashing import Hashes, request_hashes
from pipeline.record import vectors as batch_vectors

from .context import RunContext
from .neighbors import fit_distances
from .project import saved_projection

LOG = logging.getLogger("attn.discovery")
# Below this many rows a group is chance, however small a share of the window was fitted.
LEAST_CLUSTER = 5
# What --min-cluster-size is when it is not given.
DEFAULT_LEAST, DEFAULT_SHARE = 20, 0.01


def begin_search_process(context: RunContext) -> None:
    """Start the process that will search for the clusters, if the run has one. It takes seconds to
    be ready."""
    if not context.memory.searches_apart:
        return
    try:
        context.search_process = Beside(load)
    except OSError as error:
        LOG.warning("clusters are searched for in this process, which takes longer: %s", error)


def begin_search(context: RunContext, fit: Arrays, busy: int = 0) -> None:
    """Begin to find the clusters of the fit rows by trees, on the host's cores, while a GPU (or one
    core) lays out the map. Not with HDBSCAN, whose clusters are of the map.

    Args:
        fit: as neighbors saved it; busy: cores that have something else to do.
    """
    if context.options.clustering == "hdbscan":
        return
    rows = fit["rows"]
    octaves = octaves_of(context, rows)
    lengths = length_steps(positions_of(context, rows), octaves)
    chosen = rows_to_cluster(
        context.engine, fit["projected"], fit_distances(context, SPARSE_NEIGHBOR),
        requests_of(context, rows), fit_size(context, rows), context.options.seed,
        clusters_of_parent(context, rows), octaves, lengths,
    )  # fmt: skip
    threads, process = max(1, usable_cpus() - busy), context.search_process
    if process is None:
        load()

    def found(check: Callable[[], None]) -> tuple[ClusteredRows, Clusters | None]:
        if process is None:
            return chosen, chosen.clusters(check, threads)
        # It is closed where nobody waits for it any more: there it need not check.
        return chosen, process.call(check, partial(chosen.clusters, threads=threads))

    context.ahead = Ahead(found, context.stop)


def clusters_of_fit(context: RunContext, fit: Arrays, points: Floats) -> FoundClusters:
    """Clusters of the fit rows, as --clustering says.

    Args:
        fit: as neighbors saved it; points: float32[n, 2], their map.
    """
    engine, projected, options = context.engine, fit["projected"], context.options
    if options.clustering == "hdbscan":
        return clusters_of_map(
            engine, projected, points, fit_distances(context, SPARSE_NEIGHBOR),
            fit_size(context, fit["rows"]), options.min_samples, options.seed,
        )  # fmt: skip
    if context.ahead is None:  # the map was there already
        begin_search(context, fit)
    assert context.ahead is not None
    try:
        chosen, found = context.ahead.result()
    except Ended as ended:
        # Whoever stops a run may have ended all of its processes.
        context.stop_if_asked()
        LOG.warning("clusters are searched for again, in this process: %s", ended)
        context.close_search_process()
        begin_search(context, fit)
        chosen, found = context.ahead.result()
    context.close_search_process()
    return clusters_of_rows(engine, projected, chosen, found)


def fit_size(context: RunContext, rows: Ints) -> int:
    """Fewest rows of a cluster among the fit rows int64[n]."""
    fraction = len(rows) / context.rows.count
    return smallest_cluster(context.options.min_cluster_size, len(rows), fraction)


def smallest_cluster(asked: int | None, fit_rows: int, fraction: float) -> int:
    """Fewest rows of a cluster on the map: --min-cluster-size scaled to the share of the window
    that was fitted; by default 1% of the map, at least 20."""
    if asked is None:
        return max(DEFAULT_LEAST, round(DEFAULT_SHARE * fit_rows))
    return max(LEAST_CLUSTER, round(asked * fraction))


def clusters_of_parent(context: RunContext, rows: Ints) -> ParentClusters | None:
    """The parent's clusters, and which of them each of the sorted row numbers `rows` is in."""
    parent = context.parent
    if parent is None:
        return None
    vectors = np.concatenate(list(vectors_of(context, rows)))
    labels = parent.codebook.nearest_member(context.engine.array(vectors))
    references = saved_projection(context)(parent.references, context.layout)
    return ParentClusters(
        context.engine.host(labels), references, parent.reference_cluster, parent.share
    )


def octaves_of(context: RunContext, rows: Ints) -> Ints:
    """The octave of context of the sorted row numbers `rows`: int64[n]."""
    found = [context_octave(own, context.layout) for own in vectors_of(context, rows)]
    return np.concatenate(found)


def positions_of(context: RunContext, rows: Ints) -> Ints:
    """The positions of the sorted row numbers `rows`: int64[n]."""
    positions = []
    for index in range(context.rows.chunks):
        column = context.rows.batch(index)["position"]
        positions.append(column.to_numpy()[context.rows.among(index, rows)])
    return np.concatenate(positions).astype(np.int64)


def vectors_of(context: RunContext, rows: Ints) -> Iterator[Floats]:
    """The vectors of the sorted row numbers `rows`, chunk by chunk: float32[m, 20] each."""
    for index in range(context.rows.chunks):
        if len(own := context.rows.among(index, rows)):
            yield batch_vectors(context.rows.batch(index))[own]


def requests_of(context: RunContext, rows: Ints) -> Hashes:
    """Hashes of the requests of the sorted row numbers `rows`: uint64[n]."""
    found = []
    for index in range(context.rows.chunks):
        if not len(own := context.rows.among(index, rows)):
            continue
        # Of all columns together a million rows take seconds to be copied.
        ids = context.rows.batch(index).select(["request_id"])
        found.append(request_hashes(ids if len(own) == len(ids) else ids.take(pa.array(own))))
    return np.concatenate(found)
