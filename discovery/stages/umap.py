"""umap: the map of the fit rows, from their kept neighbours and the parent's map.

Where there is a parent, every row starts where the parent's map has the landmarks nearest to it,
and the finished map is turned back onto those places: tomorrow's map is today's, moved a little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from discovery.artifacts.classifier import Codebook
from discovery.engines.protocol import Engine
from discovery.runs.parent import Parent

from .neighbors import fit_neighbors
from .rows import VectorsOfPart

if TYPE_CHECKING:
    from discovery.job import Job

# umap-learn spreads its own initial layouts over this range.
INIT_SPREAD = 10.0
# Landmarks of the parent that a row starts between.
STARTING_LANDMARKS = 3


def parameters(job: Job) -> dict[str, Any]:
    init = f"landmarks of {job.parent.run_id}" if job.parent else "pca"
    return {"min_dist": job.options.umap_min_dist, "seed": job.options.seed, "init": init}


def run(job: Job) -> tuple[dict[str, Any], str]:
    fit = job.stage_parts("neighbors").read_arrays("fit.npz")
    projected = fit["projected"]
    before = places_of_parent(job, job.parent, fit["rows"]) if job.parent else None
    # The first two components: they keep the large picture, need no eigensolver of the neighbour
    # graph (which fails where the graph falls apart), and do not jump from one run to the next.
    init = projected[:, :2] if before is None else before
    widest = float(np.abs(init).max())
    init = init * np.float32(INIT_SPREAD / widest) if widest else init
    # umap-learn divides by each axis' range, which is 0 where all rows are alike.
    alike = np.ptp(init, axis=0) == 0
    spread = np.random.default_rng(job.options.seed).uniform(-INIT_SPREAD, INIT_SPREAD, init.shape)
    init = np.where(alike, spread, init).astype(np.float32)
    points = job.engine.layout(
        projected, fit_neighbors(job), init, job.options.umap_min_dist, job.options.seed,
        job.part_done,
    )  # fmt: skip
    says = f"{len(points):,} rows laid out"
    summary: dict[str, Any] = {"rows": len(points), "moved": None}
    if before is not None:
        points = turned_onto(points, before)
        # Of the map's own width, so that it can be compared between nights.
        width = float(np.linalg.norm(points.std(axis=0)))
        moved = float(np.median(np.linalg.norm(points - before, axis=1)))
        summary["moved"] = round(moved / width, 6) if width else 0.0
        says += f" from the map of {job.parent.run_id}" if job.parent else ""
    job.parts.write_arrays("map.npz", points=points)
    return summary, says


def places_of_parent(job: Job, parent: Parent, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Where the parent's map has the nearest landmarks of the fit rows: float32[n, 2]."""
    chunks = (
        (job.rows.reference(index), own)
        for index in range(len(job.rows.offsets))
        if len(own := job.rows.among(index, rows))
    )
    shared = (job.engine, parent.codebook, parent.place)
    return np.concatenate(list(job.executor.run(starting_places, chunks, shared)))


def starting_places(
    engine: Engine,
    codebook: Codebook,
    place: NDArray[np.float32],
    chunk: tuple[VectorsOfPart, NDArray[np.int64]],
) -> NDArray[np.float32]:
    """Where rows of a part, by their numbers in it, start: float32[m, 2], between the places
    float32[l, 2] of the landmarks nearest to each."""
    part, rows = chunk
    projected = codebook.projection(part.load(engine, rows), codebook.layout)
    count = min(STARTING_LANDMARKS, len(place))
    near, distance = engine.neighbors(codebook.points, engine.host(projected), count)
    weight = 1.0 / (distance + distance[:, :1] + 1e-6)
    weight /= weight.sum(axis=1, keepdims=True)
    return np.einsum("nk,nkc->nc", weight, place[near]).astype(np.float32)


def turned_onto(points: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
    """The map turned (or mirrored) and shifted, not scaled, to lie on `before` as well as it can:
    orthogonal Procrustes (Schoenemann 1966). float32[n, 2].

    No scale: a fitted one is below 1 wherever rows moved, and would shrink the map every night.
    """
    from scipy.linalg import orthogonal_procrustes

    centre, target = points.mean(axis=0), before.mean(axis=0)
    rotation, _ = orthogonal_procrustes(points - centre, before - target)
    return np.asarray((points - centre) @ rotation + target, np.float32)
