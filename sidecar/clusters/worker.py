"""The re-clustering process: `python -m sidecar.clusters.worker SOCKET_NUMBER`.

It clusters as a discovery run does, less the map: PCA space, clusters that half of the requests
would give as well, and prototypes trained on what was found. After a round, its clusters go on
where the traffic is the same. Nothing is kept between rounds but compiled code: what the next one
needs to know goes back with the answer.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from functools import cache

import msgspec
import numpy as np

from capture_kernels.arrays import Floats, Int32s, Mask
from capture_kernels.errors import AttnError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.algorithms.consensus.continued import ParentClusters
from discovery.algorithms.lineage import cluster_ids, match
from discovery.algorithms.map_clusters import (
    SPARSE_NEIGHBOR,
    FoundClusters,
    clusters_of_rows,
    rows_to_cluster,
)
from discovery.algorithms.pca import Moments
from discovery.algorithms.prototypes import train_borders, train_prototypes
from discovery.artifacts.projection import Projection
from discovery.artifacts.prototypes import Codebook, nearest_with_noise
from discovery.artifacts.schema import NOISE
from discovery.engines.open import open_engine
from discovery.engines.protocol import Engine
from discovery.stages.cluster import QUANTILES
from discovery.stages.fit_clusters import smallest_cluster
from discovery.stages.neighbors import self_first
from pipeline.hashing import Hashes

from .rounds import Array, Failure, Found, Result, Rule, Task, floats, receive, send

# Rows that are clustered; the others of a larger buffer go to the nearest prototype.
MOST_FITTED = 10_000
# Below every process that answers.
NICENESS = 19


@cache
def engine_called(name: str) -> Engine:
    return open_engine(name)


def run(task: Task) -> Result:
    """One round."""
    began = time.perf_counter()
    engine = engine_called(task.engine)
    vectors, layout = floats(task.vectors), Layout(task.layout)
    projection = task.space.projection() if task.space else fitted_projection(task)
    step = -(-len(vectors) // MOST_FITTED)
    projected = projection(vectors[::step], layout)
    requests = task.requests.array()[::step]
    previous = task.previous
    clusters = cluster(
        engine, projected, requests, task.min_cluster_size, 1 / step, task.seed,
        parent_of(engine, projection, layout, vectors[::step], previous) if previous else None,
    )  # fmt: skip
    labels = clusters.labels
    if not (labels != NOISE).any():
        nothing = Array.of(np.empty((0, DIMENSIONS), np.float32))
        seconds = time.perf_counter() - began
        return Result(None, [], [], nothing, task.next_id, seconds, engine.name)
    codebook = trained(engine, projection, layout, projected, clusters, task.seed)
    found = codebook.label(vectors)
    numbers, sizes = np.unique(found[found != NOISE], return_counts=True)
    ids = ids_of(
        numbers, found, previous.rule.codebook().label(vectors) if previous else None, task.next_id,
        heirs_of(clusters, previous)[numbers], clusters.new[numbers],
    )  # fmt: skip
    order = np.argsort(-sizes, kind="stable")
    centroids = [vectors[found == number].mean(axis=0) for number in numbers[order]]
    # Prototypes of a cluster that has none of the rows are left out with it.
    kept = np.isin(codebook.labels, [NOISE, *numbers])
    id_of = np.full(len(clusters.stability) + 1, NOISE, np.int32)  # the last one is noise's
    id_of[numbers] = ids
    rule = codebook._replace(
        prototypes=codebook.prototypes[kept],
        labels=codebook.labels[kept],
        borders=codebook.borders and codebook.borders.only(numbers),
    ).renamed(lambda label: id_of[label])
    inside = found[::step] != NOISE
    return Result(
        Found(
            Rule.of(rule),
            Array.of(vectors[::step][inside]),
            Array.of(id_of[found[::step][inside]]),
            len(inside),
        ),
        ids[order].tolist(),
        sizes[order].tolist(),
        Array.of(np.array(centroids, np.float32).reshape(-1, DIMENSIONS)),
        max(task.next_id, int(ids.max(initial=-1)) + 1),
        time.perf_counter() - began,
        engine.name,
    )


def fitted_projection(task: Task) -> Projection:
    """PCA of these rows, as a run without a parent fits it."""
    _, requests = np.unique(task.requests.array(), return_inverse=True)
    return Moments.of(floats(task.vectors), Layout(task.layout), requests).projection()


def cluster(
    engine: Engine,
    projected: Floats,
    requests: Hashes,
    asked: int | None,
    fraction: float,
    seed: int,
    parent: ParentClusters | None,
) -> FoundClusters:
    """Clusters of rows float32[n, d] in PCA space.

    Args:
        requests: uint64[n], hashes of their requests; parent: the clusters of the round before.
    """
    size = smallest_cluster(asked, len(projected), fraction)
    k = min(SPARSE_NEIGHBOR + 1, len(projected) - 1)
    _, distances = self_first(*engine.neighbors(projected, projected, k), 0)
    _, numbers = np.unique(requests, return_inverse=True)
    chosen = rows_to_cluster(engine, projected, distances[:, -1], numbers, size, seed, parent)
    return clusters_of_rows(engine, projected, chosen, chosen.clusters())


def parent_of(
    engine: Engine, projection: Projection, layout: Layout, vectors: Floats, previous: Found
) -> ParentClusters:
    """The clusters of the round before, numbered in the order of their ids, as these rows
    float32[n, 20] have them."""
    known, number = np.unique(previous.ids.array(), return_inverse=True)
    labels = previous.rule.codebook().nearest_member(vectors)
    # A prototype may be of an id that had no row left.
    here = np.where(np.isin(labels, known), np.searchsorted(known, labels), NOISE)
    return ParentClusters(
        here.astype(np.int32),
        projection(floats(previous.vectors), layout),
        number.astype(np.int64),
        np.bincount(number) / previous.rows,
    )


def heirs_of(clusters: FoundClusters, previous: Found | None) -> Int32s:
    """The id of the cluster of the round before that each is, -1 for new ones: int32[c]."""
    if previous is None:
        return np.full(len(clusters.heir_of), NOISE, np.int32)
    known = np.append(np.unique(previous.ids.array()), NOISE)
    return known[clusters.heir_of].astype(np.int32)


def trained(
    engine: Engine, projection: Projection, layout: Layout, projected: Floats,
    clusters: FoundClusters, seed: int,
) -> Codebook:  # fmt: skip
    """Prototypes of these clusters, borders between regions, and the distance beyond which a row is
    in none."""
    found = train_prototypes(engine, projected, clusters.labels, seed)
    # Regions of a continuum touch everywhere, and prototypes learn the rows that they saw.
    borders = None
    if clusters.regions:
        borders = train_borders(projected, clusters.labels, found.labels, seed)
    near = nearest_with_noise(projected, found.points, found.labels, found.noise_factor, borders)
    reach = float(np.quantile(near.distance, QUANTILES[-1]))
    return Codebook(
        projection, layout, found.points, found.labels, found.noise_factor, reach, borders
    )


def ids_of(
    numbers: Int32s,
    found: Int32s,
    before: Int32s | None,
    next_id: int,
    heirs: Int32s,
    new: Mask,
) -> Int32s:
    """Ids of the clusters with these numbers: of those that go on, or that share rows with one of
    the round before, its id, by the rules of lineage.

    Args:
        found: int32[n], the rows' numbers; before: int32[n], the same rows' ids by the prototypes
            of the round before.
        heirs, new: int32[c] and bool[c], for each number the id that goes on in it, -1 for none,
            and whether the round before had hardly any rows there.
    """
    known = before[before != NOISE] if before is not None else np.empty(0, np.int32)
    old = np.union1d(known, heirs[heirs != NOISE])
    overlap, shares, old_shares = (
        np.zeros((len(numbers), len(old))), np.zeros(len(numbers)), np.zeros(len(old)),
    )  # fmt: skip
    for i, number in enumerate(numbers):
        shares[i] = (found == number).mean()
        for j, cluster_id in enumerate(old):
            overlap[i, j] = ((found == number) & (before == cluster_id)).mean()
    for j, cluster_id in enumerate(old):
        old_shares[j] = (before == cluster_id).mean()
    goes_on = np.where(heirs != NOISE, np.searchsorted(old, heirs), NOISE)
    # Both rounds label the same rows, so what one sees the other does.
    matched = match(overlap, overlap, shares, old_shares, goes_on.astype(np.int32), new)
    return cluster_ids(matched, old.astype(np.int32), next_id)


def main(descriptor: int) -> None:
    os.nice(NICENESS)
    if hasattr(os, "SCHED_BATCH"):  # Linux: never takes the place of a process that wakes up
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with socket.socket(fileno=descriptor) as connection:
        while True:
            try:
                task = msgspec.msgpack.decode(receive(connection), type=Task)
            except EOFError:
                return  # the answering process is gone
            try:
                send(connection, run(task))
            except (AttnError, MemoryError, ValueError, RuntimeError) as error:
                line = str(error).partition("\n")[0] or type(error).__name__
                send(connection, Failure(line))


if __name__ == "__main__":
    main(int(sys.argv[1]))
