"""cluster: clusters of the map, the other rows by a vote of their neighbours, and prototypes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask
from discovery.algorithms.consensus.clusters import settings
from discovery.algorithms.map_clusters import (
    LARGEST_CLUSTER,
    NEIGHBORS,
    SAMPLE_ROWS,
    SAMPLED_LEAST,
    SPARSE,
    SPARSE_NEIGHBOR,
    VOTERS,
)
from discovery.algorithms.metrics import effective_rows
from discovery.algorithms.prototypes import (
    BORDER_PENALTY,
    BORDER_ROWS,
    train_borders,
    train_prototypes,
)
from discovery.algorithms.sampling import held_out
from discovery.algorithms.voting import Votes, vote
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.prototypes import Borders, Codebook, nearest_with_noise
from discovery.artifacts.schema import NOISE
from discovery.engines.protocol import Engine
from discovery.runs.checkpoint import Arrays, load_arrays
from discovery.runs.chunks import chunk_file
from pipeline.hashing import Hashes
from pipeline.record import vectors as batch_vectors

from .context import RunContext
from .fit_clusters import clusters_of_fit, fit_size, requests_of
from .project import saved_projection

# Share of the fit rows that prototypes are not trained on, to measure the classifier on: whole
# requests, because a row's nearest neighbours are often rows of the same request.
HELD_OUT = 0.2
# Borders are tried where prototypes have fewer of the held-out rows right.
BORDERS_BELOW = 0.95
# Of the clusters found, what is kept as an array of one number.
SINGLE = ("min_samples", "halves_agree", "regions", "by_requests")
# Quantiles of the distance to the nearest prototype; the last is the rejection distance.
QUANTILES = (0.5, 0.9, 0.99, 0.999)


def parameters(context: RunContext) -> dict[str, Any]:
    given = context.options.some("clustering", "min_cluster_size", "min_samples", "seed")
    limits = {
        "largest": LARGEST_CLUSTER, "sparse": (SPARSE, SPARSE_NEIGHBOR), "voters": VOTERS,
        "sample": (SAMPLE_ROWS, SAMPLED_LEAST), "neighbors": NEIGHBORS,
        "consensus": settings(), "borders": (BORDERS_BELOW, BORDER_ROWS, BORDER_PENALTY),
    }  # fmt: skip
    return {**given, **limits}


class Fitted(NamedTuple):
    """The n rows that the map was fitted on.

    rows: int64[n], their numbers in the run; projected: float32[n, d]; points: float32[n, 2] of the
    map; members: of clusters by their numbers.
    """

    rows: Ints
    projected: Floats
    points: Floats
    members: Memberships


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    fit, points = context.saved("neighbors", "fit.npz"), context.saved("umap", "map.npz")["points"]
    if not context.checkpoint.has("fit.npz"):
        found = clusters_of_fit(context, fit, points)
        single = {name: np.array(getattr(found, name)) for name in SINGLE}
        arrays = found._asdict() | single
        context.checkpoint.write_arrays("fit.npz", **arrays.pop("members")._asdict(), **arrays)
    saved = context.checkpoint.read_arrays("fit.npz")
    members = saved_members(saved)
    clusters = len(saved["stability"])
    fitted = Fitted(fit["rows"], fit["projected"], points, members)

    files = [chunk_file("rows", index) for index in range(context.rows.chunks)]
    context.compute_missing(
        files,
        lambda todo: (
            rows_of_chunk(context, index, fitted, votes)
            for index, votes in zip(todo, votes_of_rest(context, todo, fitted), strict=True)
        ),
    )
    counted = [noise_and_between(context.checkpoint.read_arrays(file)) for file in files]
    noise, between = (sum(column) / context.rows.count for column in zip(*counted, strict=True))
    requests, size = requests_of(context, fit["rows"]), fit_size(context, fit["rows"])
    prototypes, has_borders = save_prototypes(context, fitted, requests)
    summary = {"clusters": clusters, "noise_share": noise, "between_share": between,
               "min_cluster_size_fitted": size, "min_samples": int(saved["min_samples"]),
               "landmarks": prototypes, "borders": has_borders}  # fmt: skip
    says = f"{clusters} clusters, {noise:.1%} noise, {between:.1%} between two clusters"
    if clusters and context.options.clustering == "consensus":
        stability, went_on = saved["stability"].mean(), int((saved["heir_of"] >= 0).sum())
        agree = float(saved["halves_agree"])
        summary |= {"families": int(saved["family"].max()) + 1, "stability": float(stability),
                    "went_on": went_on, "halves_agree": agree,
                    "regions": bool(saved["regions"]),
                    "by_requests": bool(saved["by_requests"])}  # fmt: skip
        says += f", {summary['families']} families; "
        if summary["regions"]:
            says += f"regions of a continuum, as trees of halves agree by {agree:.2f} only; "
        if summary["by_requests"]:
            says += "families are what the same requests do; "
        if context.parent:
            says += f"{went_on} go on from the run before; "
        says += f"half of the requests find them again by {stability:.0%}"
    return summary, says


def votes_of_rest(
    context: RunContext, indices: list[int], fitted: Fitted
) -> Iterator[Votes | None]:
    """For each of these chunks the votes on its rows that are not fit rows; None if all are."""
    if len(fitted.rows) == context.rows.count:
        return iter([None] * len(indices))
    saved, shares_disk = context.checkpoint_of("neighbors"), context.executor.shares_disk
    chunks = (saved.arrays_for_worker(chunk_file("rest", index), shares_disk) for index in indices)
    return context.compute(votes_of_chunk, chunks, *fitted[2:])


def votes_of_chunk(
    engine: Engine, points: Floats, members: Memberships, neighbors: Path | Arrays
) -> Votes:
    """The votes of these neighbours among the fit rows, on the host."""
    saved = load_arrays(neighbors)
    near = engine.array(saved["indices"])
    voters = Memberships(*map(engine.array, members)).at(near)
    votes = vote(engine.array(saved["distances"]), voters, engine.array(points)[near])
    return Votes(Memberships(*map(engine.host, votes.members)), engine.host(votes.coordinates))


def rows_of_chunk(context: RunContext, index: int, fitted: Fitted, votes: Votes | None) -> Arrays:
    """Memberships and coordinates float32[n, 2] of the n rows of one chunk: its fit rows' own, the
    others' by the vote of their neighbours among the fit rows."""
    own = context.rows.among(index, fitted.rows)
    first = int(np.searchsorted(fitted.rows, context.rows.offsets[index]))
    fit = slice(first, first + len(own))
    count = context.rows.size(index)
    members, coordinates = Memberships.none(count), np.empty((count, 2), np.float32)
    members.put(own, fitted.members.at(fit))
    coordinates[own] = fitted.points[fit]
    if votes is not None:
        rest = context.rows.outside(index, fitted.rows)
        members.put(rest, votes.members)
        coordinates[rest] = votes.coordinates
    return {**members._asdict(), "coordinates": coordinates}


def saved_members(arrays: Arrays) -> Memberships:
    """The memberships that a file of this stage holds."""
    return Memberships(*(arrays[name] for name in Memberships._fields))


def noise_and_between(rows: Arrays) -> tuple[int, int]:
    """How many rows of a chunk are noise, and how many are between two clusters."""
    noise = np.count_nonzero(rows["label"] == NOISE)
    return int(noise), int(np.count_nonzero(saved_members(rows).between()))


class LabelledRows(NamedTuple):
    """The n rows of one chunk, the first of which is row `offset` of the run.

    batch: its columns, memory-mapped; vectors: float32[n, 20] of them; members: of clusters by
    the numbers of the cluster stage; coordinates: float32[n, 2].
    """

    offset: int
    batch: pa.RecordBatch
    vectors: Floats
    members: Memberships
    coordinates: Floats


def labelled_rows(context: RunContext) -> Iterator[LabelledRows]:
    """All rows of the run with their labels, chunk by chunk."""
    for index, offset in enumerate(context.rows.offsets):
        batch = context.rows.batch(index)
        found = context.saved("cluster", chunk_file("rows", index))
        yield LabelledRows(
            offset, batch, batch_vectors(batch), saved_members(found), found["coordinates"]
        )


def save_prototypes(context: RunContext, fitted: Fitted, requests: Hashes) -> tuple[int, bool]:
    """Train the prototypes, measure the classifier on held-out rows; returns how many there are,
    and whether borders decide the cluster.

    Args:
        requests: uint64[n], hashes of the rows' requests.
    """
    engine, seed = context.engine, context.options.seed
    _, projected, points, members = fitted
    labels = members.label
    held = held_out(requests, HELD_OUT, seed)
    found = train_prototypes(engine, projected[~held], labels[~held], seed)
    inside, noise = held & (labels != NOISE), held & (labels == NOISE)

    def answered(borders: Borders | None) -> Answered:
        near = nearest_with_noise(
            engine.array(projected), found.points, found.labels, found.noise_factor, borders
        )
        distance, row = engine.host(near.distance), engine.host(near.row)
        quantiles = np.quantile(distance[~held], QUANTILES)
        answer = np.where(distance > quantiles[-1], NOISE, found.labels[row])
        return Answered(row, quantiles, answer == labels)

    nearest_of, quantiles, right = answered(None)
    borders = None
    if inside.any() and right[inside].mean() < BORDERS_BELOW:
        linear = train_borders(projected[~held], labels[~held], found.labels, seed)
        by_borders = answered(linear) if linear else None
        if by_borders and by_borders.right[inside].mean() > right[inside].mean():
            borders, (nearest_of, quantiles, right) = linear, by_borders
    context.checkpoint.write_arrays(
        "agreement.npz",
        agreement=np.array(right[inside].mean() if inside.any() else np.nan),
        rows=np.array(inside.sum()),
        effective_rows=np.array(effective_rows(right[inside], requests[inside])),
        noise_recognised=np.array(right[noise].mean() if noise.any() else np.nan),
        noise_rows=np.array(noise.sum()),
    )
    # A trained prototype is not a row: it gets the coordinates of the nearest row of its label.
    nearest = np.empty(len(found.labels), np.int64)
    for label in np.unique(found.labels):
        own, rows = found.labels == label, np.flatnonzero(labels == label)
        index, _ = engine.neighbors(projected[rows], found.points[own], 1)
        nearest[own] = rows[index[:, 0]]
    context.checkpoint.write_arrays(
        "landmarks.npz",
        projected=found.points,
        coordinates=points[nearest],
        **memberships_of(found.labels, nearest_of[~held], members.at(~held))._asdict(),
        quantiles=quantiles,
        noise_factor=np.array(found.noise_factor),
        **saved_borders(borders),
    )
    return len(found.labels), borders is not None


class Answered(NamedTuple):
    """row: int64[n], the prototype that each row is answered by; quantiles: of their distances;
    right: bool[n], whether the answer is the row's label."""

    row: Ints
    quantiles: Doubles
    right: Mask


def saved_borders(borders: Borders | None) -> Arrays:
    """The borders as arrays of a checkpoint; none without them."""
    fields = {} if borders is None else borders._asdict()
    return {f"border_{name}": array for name, array in fields.items()}


def memberships_of(labels: Int32s, nearest: Ints, members: Memberships) -> Memberships:
    """How far the rows that a prototype is nearest to belong to its cluster, and to the likeliest
    other, on average. A prototype that is nearest to no row is wholly in its cluster.

    Args:
        labels: int32[p], the cluster of each prototype, -1 for noise.
        nearest: int64[n], the prototype of each row; members: of the rows.
    """
    count = len(labels)
    # A cluster may have all of its rows, or none of its prototypes, elsewhere.
    named = (labels, members.label, members.second)
    clusters = max(int(of.max(initial=NOISE)) for of in named) + 1
    # The last column is of no cluster.
    belongs = np.zeros((count, clusters + 1))
    np.add.at(belongs, (nearest, members.label), members.probability)
    np.add.at(belongs, (nearest, members.second), members.second_probability)
    rows = np.bincount(nearest[members.label != NOISE], minlength=count)
    belongs /= np.maximum(rows, 1)[:, None]
    alone = (rows == 0) & (labels != NOISE)
    belongs[alone, labels[alone]] = 1.0
    return Memberships.of_shares(labels, belongs[:, :-1])


def run_codebook(context: RunContext) -> Codebook:
    """This run's prototypes; their labels are the numbers of the cluster stage."""
    saved = context.saved("cluster", "landmarks.npz")
    borders = None
    if "border_labels" in saved:
        borders = Borders(*(saved[f"border_{name}"] for name in Borders._fields))
    return Codebook(
        saved_projection(context),
        context.layout,
        saved["projected"],
        saved["label"],
        float(saved["noise_factor"]),
        float(saved["quantiles"][-1]),
        borders,
    )
