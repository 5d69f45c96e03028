"""standardize and pca: one streamed float64 covariance, and the projection it gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from capture_kernels.arrays import Int32s
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.algorithms.octaves import MOST_CONTRASTS, SHRINK_ROWS
from discovery.algorithms.pca import EXPLAINED, MAX_COMPONENTS, Moments, fit_projection
from discovery.artifacts.projection import POWER, Projection
from discovery.describe.axes import axes_in_words
from discovery.engines.protocol import Engine
from discovery.runs.chunks import ChunkVectors

from .context import RunContext


def standardize_parameters(context: RunContext) -> dict[str, Any]:
    limits = {"most": MOST_CONTRASTS, "shrink": SHRINK_ROWS}
    return {"transform": "power", "power": POWER, "octaves": "of rows that show theirs", **limits}


def standardize(context: RunContext) -> tuple[dict[str, Any], str]:
    def chunk(index: int) -> tuple[ChunkVectors, Int32s, Int32s]:
        batch = context.rows.batch(index)
        request = batch.column("request_id").dictionary_encode().indices
        positions = batch.column("position").to_numpy()
        return context.rows.reference(index), request.to_numpy(), positions

    most = -(-MOST_CONTRASTS // context.rows.chunks)
    moments = Moments.of(np.empty((0, DIMENSIONS), np.float32), context.layout)
    found = context.compute(
        moments_of_chunk, map(chunk, range(context.rows.chunks)), context.layout, most
    )
    for done, own in enumerate(found, start=1):
        moments = moments + own
        context.chunk_done(done, context.rows.chunks)
    centre = moments.centre
    context.checkpoint.write_arrays(
        "moments.npz",
        mean=centre,
        # Shares have one unit: dividing by each bin's deviation would inflate rare bins.
        scale=np.ones(DIMENSIONS),
        covariance=moments.covariance(centre),
    )
    octaves = np.flatnonzero(moments.counts)
    contrasts = moments.contrasts
    summary = {
        "transform": f"power {POWER}", "rows": moments.rows, "octaves": octaves.tolist(),
        "contrasts": len(contrasts.octave),
    }  # fmt: skip
    says = f"shares to the power {POWER}, {len(octaves)} context octaves"
    if len(contrasts.octave):
        says += f", their effect by {len(contrasts.octave):,} contrasts within requests"
    return summary, says


def moments_of_chunk(
    engine: Engine, layout: Layout, most: int, chunk: tuple[ChunkVectors, Int32s, Int32s]
) -> Moments:
    vectors, requests, positions = chunk
    return Moments.of(
        vectors.load(engine), layout, engine.array(requests), most, engine.array(positions)
    )


def pca_parameters(context: RunContext) -> dict[str, Any]:
    return {"explained": EXPLAINED, "most": MAX_COMPONENTS}


def pca(context: RunContext) -> tuple[dict[str, Any], str]:
    saved = context.saved("standardize", "moments.npz")
    projection = fit_projection(saved["mean"], saved["scale"], saved["covariance"])
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
