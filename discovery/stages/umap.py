"""umap: the map of the fit rows, from their saved neighbours and the parent's map.

If there is a parent, every row starts at the coordinates of the parent's nearest prototypes, and
the finished map is rotated back onto these: each run's map is the one before, moved a little.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from capture_kernels.arrays import Floats
from discovery.algorithms.threads import one_thread
from discovery.artifacts.prototypes import Codebook
from discovery.engines.protocol import Engine
from discovery.runs.chunks import ChunkVectors

from .context import RunContext
from .fit_clusters import begin_search
from .neighbors import fit_neighbors, joined

# umap-learn spreads its own initial layouts over this range.
INIT_SPREAD = 10.0
# Prototypes of the parent that a row starts between.
STARTING_PROTOTYPES = 3


def parameters(context: RunContext) -> dict[str, Any]:
    init = f"landmarks of {context.parent.run_id}" if context.parent else "pca"
    return {"min_dist": context.options.umap_min_dist, "seed": context.options.seed, "init": init}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    fit = context.saved("neighbors", "fit.npz")
    projected, parent = fit["projected"], context.parent
    seed, min_dist = context.options.seed, context.options.umap_min_dist
    before = None
    if parent:
        chosen, shared = context.rows.chosen(fit["rows"]), (parent.codebook, parent.coordinates)
        before = joined(context.compute(starting_points, chosen, *shared))
    # The first two components keep the global structure, are stable from run to run, and need no
    # eigensolver of the neighbour graph, which fails if the graph is not connected.
    init = projected[:, :2] if before is None else before
    widest = float(np.abs(init).max())
    init = init * np.float32(INIT_SPREAD / widest) if widest else init
    # umap-learn divides by each axis' range, which is 0 if all rows are alike.
    spread = np.random.default_rng(seed).uniform(-INIT_SPREAD, INIT_SPREAD, init.shape)
    init = np.where(np.ptp(init, axis=0) == 0, spread, init).astype(np.float32)
    # A layout on a CPU takes one core, and is what is waited for.
    begin_search(context, fit, busy=0 if context.engine.gpus else 1)
    near = fit_neighbors(context)
    points = context.engine.layout(projected, near, init, min_dist, seed, context.chunk_done)
    says = f"{len(points):,} rows laid out"
    summary: dict[str, Any] = {"rows": len(points), "moved": None}
    if parent and before is not None:
        points = rotated_onto(points, before)
        # Relative to the width of the map, so that runs can be compared.
        width = float(np.linalg.norm(points.std(axis=0)))
        moved = float(np.median(np.linalg.norm(points - before, axis=1)))
        summary["moved"] = round(moved / width, 6) if width else 0.0
        says += f" from the map of {parent.run_id}"
    context.checkpoint.write_arrays("map.npz", points=points)
    return summary, says


def starting_points(
    engine: Engine, codebook: Codebook, coordinates: Floats, vectors: ChunkVectors
) -> Floats:
    """Where rows of a chunk start: float32[m, 2], the mean of the coordinates float32[p, 2] of the
    nearest prototypes, weighted by inverse distance."""
    projected = codebook.projection(vectors.load(engine), codebook.layout)
    count = min(STARTING_PROTOTYPES, len(coordinates))
    near, distance = engine.neighbors(codebook.prototypes, engine.host(projected), count)
    weight = 1.0 / (distance + distance[:, :1] + 1e-6)
    weight /= weight.sum(axis=1, keepdims=True)
    return np.einsum("nk,nkc->nc", weight, coordinates[near]).astype(np.float32)


# The search for clusters, in another thread, may hold BLAS to one thread, or may not.
@one_thread()
def rotated_onto(points: Floats, before: Floats) -> Floats:
    """The map rotated (or mirrored) and shifted, not scaled, to fit `before` best: orthogonal
    Procrustes (Schoenemann 1966). float32[n, 2].

    No scale: a fitted one is below 1 if rows moved, and would shrink the map with every run.
    """
    from scipy.linalg import orthogonal_procrustes

    centre, target = points.mean(axis=0), before.mean(axis=0)
    rotation, _ = orthogonal_procrustes(points - centre, before - target)
    return np.asarray((points - centre) @ rotation + target, np.float32)
