"""standardize and pca: one streamed float64 covariance, and the projection it gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.algorithms.pca import EXPLAINED, MAX_COMPONENTS, Moments, fit_projection
from discovery.artifacts.projection import Projection
from discovery.describe.axes import axes_in_words
from discovery.engines.protocol import Engine
from discovery.runs.chunks import ChunkVectors

from .context import RunContext


def standardize_parameters(context: RunContext) -> dict[str, Any]:
    return {"transform": "sqrt", "centred": "by context octave", "scale": "none"}


def standardize(context: RunContext) -> tuple[dict[str, Any], str]:
    moments = Moments.of(np.empty((0, DIMENSIONS), np.float32), context.layout)
    found = context.compute(moments_of_chunk, context.rows.references(), context.layout)
    for done, own in enumerate(found, start=1):
        moments = moments + own
        context.chunk_done(done, context.rows.chunks)
    context.checkpoint.write_arrays(
        "moments.npz",
        mean=moments.means,
        # Shares have one unit: dividing by each bin's deviation would inflate rare bins.
        scale=np.ones(DIMENSIONS),
        covariance=moments.covariance,
    )
    octaves = np.flatnonzero(moments.counts)
    summary = {"transform": "sqrt", "rows": moments.rows, "octaves": octaves.tolist()}
    return summary, f"square roots, centred in each of {len(octaves)} context octaves"


def moments_of_chunk(engine: Engine, layout: Layout, vectors: ChunkVectors) -> Moments:
    return Moments.of(vectors.load(engine), layout)


def pca_parameters(context: RunContext) -> dict[str, Any]:
    return {"explained": EXPLAINED, "most": MAX_COMPONENTS}


def pca(context: RunContext) -> tuple[dict[str, Any], str]:
    projection = fit_projection(**context.saved("standardize", "moments.npz"))
    context.checkpoint.write_arrays("projection.npz", **vars(projection))
    count, held = len(projection.explained), float(projection.explained.sum())
    summary = {
        "components": count,
        "explained": projection.explained.tolist(),
        "axes": axes_in_words(projection.components, projection.explained, context.layout),
    }
    return summary, f"{count} components hold {held:.1%} of the variance"


def saved_projection(context: RunContext) -> Projection:
    return Projection(**context.saved("pca", "projection.npz"))
