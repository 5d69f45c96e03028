"""Areas in a run's lineage: its own, on its references, and those of its parent that are gone."""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Doubles, Ints, Mask
from discovery.algorithms.consensus.areas import core_requests
from discovery.algorithms.known_areas import VOTERS, InAreas, KnownAreas, weights_of
from discovery.artifacts.schema import NOISE
from discovery.runs.parent import Parent

from .context import RunContext
from .fit_clusters import requests_of
from .project import saved_projection


def own_areas(context: RunContext, found: InAreas, shares: Doubles) -> KnownAreas:
    """This run's areas, on its references; areas.npz has them.

    Args:
        found: of the fit rows; shares: float64[c + 1], of the clusters and of noise.
    """
    kept = context.checkpoint.read_arrays("references.npz")
    known = np.flatnonzero(found.area != NOISE)
    rows, requests = InAreas.none(len(kept["label"])), np.empty(0)
    if len(known) and len(kept["label"]):
        fit = context.saved("neighbors", "fit.npz")
        in_areas = InAreas(found.area[known], found.share[known])
        requests = core_requests(in_areas, requests_of(context, fit["rows"][known]))
        # A reference is a fit row, or like the nearest.
        points = saved_projection(context)(kept["vectors"], context.layout)
        near, _ = context.engine.neighbors(fit["projected"][known], points, 1)
        same = context.engine.host(near)[:, 0]
        rows = InAreas(in_areas.area[same], in_areas.share[same])
    context.checkpoint.write_arrays("areas.npz", **rows._asdict())
    return KnownAreas(rows, weights_of(kept["label"], shares[:-1]), requests)


def gone_areas(context: RunContext, parent: Parent, shares: Doubles) -> Mask:
    """Which areas of the parent have hardly any of this run's rows: bool[q].

    Args:
        shares: float64[c + 1], of this run's clusters and of noise.
    """
    kept, areas = context.checkpoint.read_arrays("references.npz"), parent.areas
    known = np.flatnonzero(areas.rows.area != NOISE)
    if not (len(known) and len(kept["label"])):
        return np.zeros(len(areas.requests), bool)
    points, there = (
        parent.codebook.projection(vectors, parent.codebook.layout)
        for vectors in (kept["vectors"], parent.references[known])
    )
    near, _ = context.engine.neighbors(there, points, min(VOTERS, len(known)))
    here = InAreas.by_vote(areas.rows.area[known], context.engine.host(near))
    return areas.gone(here, weights_of(kept["label"], shares[:-1]))


def parts_lost(parent: Parent, gone: Mask, heir_of: Ints) -> Doubles:
    """How much of each of the parent's clusters was in areas that are gone, float64[p]: for each
    area only of the cluster that had most of it, and only if that goes on; its end says it already.

    Args:
        gone: bool[q]; heir_of: int64[c], as of `Match`.
    """
    areas, cluster = parent.areas, parent.reference_cluster
    lost = np.zeros(len(parent.ids))
    for area in np.flatnonzero(gone):
        inside = areas.rows.area == area
        rows = np.bincount(cluster[inside], areas.weight[inside], len(lost))
        most = int(rows.argmax())
        if most in heir_of:
            lost[most] += rows[most] / parent.share[most]
    return lost
