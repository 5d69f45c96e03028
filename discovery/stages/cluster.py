"""cluster: HDBSCAN on the map, the other rows placed by vote, and the landmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from discovery.algorithms.prototypes import Prototypes, train_prototypes
from discovery.algorithms.voting import Votes, vote
from discovery.artifacts.classifier import NOISE, nearest_of_run
from discovery.engines.protocol import Clustering, Engine
from pipeline.record import vectors as batch_vectors

from .neighbors import fit_distances, rest_part
from .rows import ArraysOfPart

if TYPE_CHECKING:
    from discovery.job import Job

# Below this many rows a group is chance, however small a share of the window was fitted.
LEAST_CLUSTER = 5
# What --min-cluster-size is when it is not given.
DEFAULT_LEAST, DEFAULT_SHARE = 20, 0.01
# A cluster with more of the map than this is looked at more closely: attention is a continuum, and
# HDBSCAN's most persistent answer to one is a single cluster that says nothing.
LARGEST_CLUSTER = 0.5
# A row whose neighbours in the space lie this many times as far as the median row's is noise. UMAP
# evens out density: rows of nothing in particular become an island, or the rim of a behaviour. On
# planted nights it finds 87% to 98% of the noise (0% to 85% without), and costs the widest
# behaviour 6% of its rows and the others 0.5% (limits of 3.5 and 2.5: 23% to 94%; 29% of its rows).
SPARSE = 3.0
# Share of the fit rows that the landmarks never see, to measure the classifier on.
HELD_OUT = 0.2
# Distances to the nearest landmark that the artifacts keep; the last is the classifier's reach.
QUANTILES = (0.5, 0.9, 0.99, 0.999)


def parameters(job: Job) -> dict[str, Any]:
    o = job.options
    return {
        "min_cluster_size": o.min_cluster_size,
        "min_samples": o.min_samples,
        "largest": LARGEST_CLUSTER,
        "sparse": SPARSE,
        "seed": o.seed,
    }


def run(job: Job) -> tuple[dict[str, Any], str]:
    fit = job.stage_parts("neighbors").read_arrays("fit.npz")
    points = job.stage_parts("umap").read_arrays("map.npz")["points"]
    fraction = len(points) / job.rows.count
    size = smallest_cluster(job.options.min_cluster_size, len(points), fraction)
    largest = max(size, int(LARGEST_CLUSTER * len(points)))
    if not job.parts.has("fit.npz"):
        found = dense_clusters(job, points, size, largest)
        job.parts.write_arrays("fit.npz", **found._asdict())
    found_arrays = job.parts.read_arrays("fit.npz")
    labels, probabilities = found_arrays["labels"], found_arrays["probabilities"]

    noise_rows = 0
    todo = [i for i in range(len(job.rows.offsets)) if not job.parts.has(rows_part(i))]
    votes = votes_of_rest(job, todo, points, labels, probabilities)
    for index in range(len(job.rows.offsets)):
        if index in todo:
            found_rows = rows_of_part(job, index, fit["rows"], points, found_arrays, next(votes))
            job.parts.write_arrays(rows_part(index), **found_rows)
            label = found_rows["label"]
        else:
            label = job.parts.read_arrays(rows_part(index))["label"]
        noise_rows += int(np.count_nonzero(label < 0))
        job.part_done(index + 1, len(job.rows.offsets))

    landmarks = keep_landmarks(job, fit, points, labels, probabilities)
    clusters = len(found_arrays["persistence"])
    noise = noise_rows / job.rows.count
    summary = {"clusters": clusters, "noise_share": noise, "min_cluster_size_fitted": size,
               "landmarks": landmarks}  # fmt: skip
    return summary, f"{clusters} clusters, {noise:.1%} noise"


def dense_clusters(job: Job, points: NDArray[np.float32], size: int, largest: int) -> Clustering:
    """HDBSCAN of the map points float32[n, 2] of all rows but the sparse ones, which are noise."""
    least = job.options.min_samples
    apart = fit_distances(job, least)
    # Rows with that many exact duplicates, as a shared prompt makes them, say nothing of how far
    # neighbours lie.
    alone = apart[apart > 0]
    dense = apart <= SPARSE * (np.median(alone) if len(alone) else 0.0)
    found = job.engine.cluster(points[dense], size, least, largest)
    labels = np.full(len(points), NOISE, np.int32)
    probabilities = np.zeros(len(points), np.float32)
    labels[dense], probabilities[dense] = found.labels, found.probabilities
    return Clustering(labels, probabilities, found.persistence)


def votes_of_rest(
    job: Job,
    indices: list[int],
    points: NDArray[np.float32],
    labels: NDArray[np.int32],
    probabilities: NDArray[np.float32],
) -> Iterator[Votes | None]:
    """For each of these parts the votes on its rows that are not fit rows; None where all are."""
    if len(points) == job.rows.count:
        return iter([None] * len(indices))
    parts, shares_disk = job.stage_parts("neighbors"), job.executor.shares_disk
    chunks = (ArraysOfPart.of(parts, rest_part(index), shares_disk) for index in indices)
    return job.executor.run(votes_of_part, chunks, (job.engine, points, labels, probabilities))


def votes_of_part(
    engine: Engine,
    points: NDArray[np.float32],
    labels: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    neighbors: ArraysOfPart,
) -> Votes:
    """The votes of these neighbours among the fit rows; a share is that of the winner, and no more
    than the surest voter's probability."""
    saved = neighbors.load()
    near = engine.array(saved["indices"])
    votes = vote(
        engine.array(saved["distances"]), engine.array(labels)[near], engine.array(points)[near]
    )
    # As sure as the voters agree, and no surer than they are of themselves.
    sure = votes.share * engine.array(probabilities)[near].max(axis=1)
    return Votes(engine.host(votes.cluster), engine.host(sure), engine.host(votes.place))


def rows_of_part(
    job: Job,
    index: int,
    fit_rows: NDArray[np.int64],
    points: NDArray[np.float32],
    found: dict[str, NDArray[Any]],
    votes: Votes | None,
) -> dict[str, NDArray[Any]]:
    """label int32[n], place float32[n, 2] and probability float32[n] of one part of extract: its
    fit rows' own, the others' by the vote of their neighbours among the fit rows."""
    labels, probabilities = found["labels"], found["probabilities"]
    own = job.rows.among(index, fit_rows)
    first = int(np.searchsorted(fit_rows, job.rows.offsets[index]))
    fitted = slice(first, first + len(own))
    if votes is None:
        label, place = labels[fitted], points[fitted]
        probability = probabilities[fitted].copy()
    else:
        rest = job.rows.outside(index, fit_rows)
        label = np.empty(len(rest), np.int32)
        place = np.empty((len(rest), 2), np.float32)
        probability = np.empty(len(rest), np.float32)
        label[own], place[own] = labels[fitted], points[fitted]
        probability[own] = probabilities[fitted]
        label[rest], place[rest], probability[rest] = votes.cluster, votes.place, votes.share
    probability[label < 0] = 0.0
    return {"label": label, "place": place, "probability": probability}


def rows_part(index: int) -> str:
    return f"rows-{index:05d}.npz"


class LabelledRows(NamedTuple):
    """The n rows of one part of extract, the first of which is row `offset` of the run.

    batch: its columns, memory-mapped; vectors: float32[n, 20] of them; label: int32[n], numbers of
    the cluster stage (-1: noise); place: float32[n, 2]; probability: float32[n].
    """

    offset: int
    batch: pa.RecordBatch
    vectors: NDArray[np.float32]
    label: NDArray[np.int32]
    place: NDArray[np.float32]
    probability: NDArray[np.float32]


def labelled_rows(job: Job) -> Iterator[LabelledRows]:
    """All rows of the run with what the cluster stage found of them, one part after another."""
    parts = job.stage_parts("cluster")
    for index, offset in enumerate(job.rows.offsets):
        batch = job.rows.batch(index)
        found = parts.read_arrays(rows_part(index))
        yield LabelledRows(offset, batch, batch_vectors(batch), **found)


def smallest_cluster(asked: int | None, fit_rows: int, fraction: float) -> int:
    """Rows of the smallest cluster on the map: as asked, scaled to the share of the window that was
    fitted; or where nothing was asked 1% of the map, 20 at least."""
    if asked is None:
        return max(DEFAULT_LEAST, round(DEFAULT_SHARE * fit_rows))
    return max(LEAST_CLUSTER, round(asked * fraction))


def keep_landmarks(
    job: Job,
    fit: dict[str, NDArray[Any]],
    points: NDArray[np.float32],
    labels: NDArray[np.int32],
    probabilities: NDArray[np.float32],
) -> int:
    """Choose the landmarks, and measure the classifier that they make on rows they never saw."""
    projected, rows = fit["projected"], fit["rows"]
    held = np.random.default_rng(job.options.seed).random(len(rows)) < HELD_OUT
    seen = np.flatnonzero(~held)
    engine = job.engine
    found = train_prototypes(engine, projected[seen], labels[seen], job.options.seed)
    near = nearest_of_run(engine.array(projected), found.points, found.labels, found.noise_factor)
    distance = engine.host(near.distance)
    quantiles = np.quantile(distance[seen], QUANTILES)
    answer = np.where(distance > quantiles[-1], NOISE, found.labels[engine.host(near.row)])
    inside, noise = held & (labels != NOISE), held & (labels == NOISE)
    right = answer == labels
    job.parts.write_arrays(
        "agreement.npz",
        agreement=np.array(right[inside].mean() if inside.any() else np.nan),
        rows=np.array(inside.sum()),
        noise_recognised=np.array(right[noise].mean() if noise.any() else np.nan),
        noise_rows=np.array(noise.sum()),
    )
    # A trained landmark is no row of its own: it stands where the rows near it stand.
    place, probability = stand_ins(job, fit, points, labels, probabilities, found)
    job.parts.write_arrays(
        "landmarks.npz",
        projected=found.points,
        place=place,
        label=found.labels,
        probability=probability,
        quantiles=quantiles,
        noise_factor=np.array(found.noise_factor),
    )
    return len(found.labels)


def stand_ins(
    job: Job,
    fit: dict[str, NDArray[Any]],
    points: NDArray[np.float32],
    labels: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    found: Prototypes,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Map place float32[l, 2] and probability float32[l] of each landmark, from the fit row of its
    own label that is nearest to it."""
    place = np.empty((len(found.labels), 2), np.float32)
    probability = np.zeros(len(found.labels), np.float32)
    for label in np.unique(found.labels):
        own, rows = found.labels == label, np.flatnonzero(labels == label)
        nearest, _ = job.engine.neighbors(fit["projected"][rows], found.points[own], 1)
        place[own] = points[rows[nearest[:, 0]]]
        probability[own] = probabilities[rows[nearest[:, 0]]]
    return place, probability
