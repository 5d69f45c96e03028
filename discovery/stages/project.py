"""standardize and pca: one streamed float64 covariance, and the projection it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.artifacts.projection import EXPLAINED, MAX_COMPONENTS, Moments, Projection
from discovery.describe.axes import axes_in_words
from discovery.engines.protocol import Engine

from .rows import VectorsOfPart

if TYPE_CHECKING:
    from discovery.job import Job


def standardize_parameters(job: Job) -> dict[str, Any]:
    return {"transform": "sqrt", "centred": "by context octave", "scale": "none"}


def standardize(job: Job) -> tuple[dict[str, Any], str]:
    moments = Moments.empty()
    found = job.executor.run(moments_of_part, job.rows.references(), (job.engine, job.layout))
    for done, own in enumerate(found, start=1):
        moments = moments + own
        job.part_done(done, len(job.rows.names))
    job.parts.write_arrays(
        "moments.npz",
        mean=moments.means,
        # Shares have one unit already: dividing by each bin's deviation would blow up rare bins.
        scale=np.ones(DIMENSIONS),
        covariance=moments.covariance,
    )
    octaves = np.flatnonzero(moments.counts)
    summary = {"transform": "sqrt", "rows": moments.rows, "octaves": octaves.tolist()}
    return summary, f"square roots, centred in each of {len(octaves)} context octaves"


def moments_of_part(engine: Engine, layout: Layout, vectors: VectorsOfPart) -> Moments:
    return Moments.of(vectors.load(engine), layout)


def pca_parameters(job: Job) -> dict[str, Any]:
    return {"explained": EXPLAINED, "most": MAX_COMPONENTS}


def pca(job: Job) -> tuple[dict[str, Any], str]:
    projection = Projection.fit(**job.stage_parts("standardize").read_arrays("moments.npz"))
    job.parts.write_arrays(
        "projection.npz",
        mean=projection.mean,
        scale=projection.scale,
        components=projection.components,
        explained=projection.explained,
    )
    count, held = len(projection.explained), float(projection.explained.sum())
    summary = {
        "components": count,
        "explained": [float(x) for x in projection.explained],
        "axes": axes_in_words(projection.components, projection.explained, job.layout),
    }
    return summary, f"{count} components hold {held:.1%} of the variance"


def saved_projection(job: Job) -> Projection:
    return Projection(**job.stage_parts("pca").read_arrays("projection.npz"))
