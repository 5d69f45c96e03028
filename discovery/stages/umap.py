"""umap: the map of the fit rows, from their kept neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .neighbors import fit_neighbors

if TYPE_CHECKING:
    from ..job import Job

# umap-learn spreads its own initial layouts over this range.
INIT_SPREAD = 10.0


def parameters(job: Job) -> dict[str, Any]:
    return {"min_dist": job.options.umap_min_dist, "seed": job.options.seed, "init": "pca"}


def run(job: Job) -> tuple[dict[str, Any], str]:
    projected = job.stage_parts("neighbors").read_arrays("fit.npz")["projected"]
    # The first two components: they keep the large picture, need no eigensolver of the neighbour
    # graph (which fails where the graph falls apart), and do not jump from one run to the next.
    init = projected[:, :2]
    widest = float(np.abs(init).max())
    init = init * np.float32(INIT_SPREAD / widest) if widest else init
    # umap-learn divides by each axis' range, which is 0 where all rows are alike.
    alike = np.ptp(init, axis=0) == 0
    spread = np.random.default_rng(job.options.seed).uniform(-INIT_SPREAD, INIT_SPREAD, init.shape)
    init = np.where(alike, spread, init).astype(np.float32)
    points = job.engine.layout(
        projected, fit_neighbors(job), init, job.options.umap_min_dist, job.options.seed
    )
    job.parts.write_arrays("map.npz", points=points)
    return {"rows": len(points)}, f"{len(points):,} rows laid out"
