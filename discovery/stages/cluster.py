"""cluster: HDBSCAN on the map, the other rows placed by vote, and the landmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..classifier import NOISE, nearest_landmark
from ..landmarks import choose_landmarks
from ..voting import vote
from .neighbors import rest_part

if TYPE_CHECKING:
    from ..job import Job

# Below this many rows a group is chance, however small a share of the window was fitted.
LEAST_CLUSTER = 5
# Share of the fit rows that the landmarks never see, to measure the classifier on.
HELD_OUT = 0.2
# Distances to the nearest landmark that the artifacts keep; the last is the classifier's reach.
QUANTILES = (0.5, 0.9, 0.99, 0.999)


def parameters(job: Job) -> dict[str, Any]:
    o = job.options
    return {"min_cluster_size": o.min_cluster_size, "min_samples": o.min_samples, "seed": o.seed}


def run(job: Job) -> tuple[dict[str, Any], str]:
    fit = job.stage_parts("neighbors").read_arrays("fit.npz")
    points = job.stage_parts("umap").read_arrays("map.npz")["points"]
    fraction = len(points) / job.rows.count
    size = max(LEAST_CLUSTER, round(job.options.min_cluster_size * fraction))
    if not job.parts.has("fit.npz"):
        found = job.engine.cluster(points, size, job.options.min_samples)
        job.parts.write_arrays("fit.npz", **found._asdict())
    found_arrays = job.parts.read_arrays("fit.npz")
    labels, probabilities = found_arrays["labels"], found_arrays["probabilities"]

    place = np.empty((job.rows.count, 2), np.float32)
    label = np.empty(job.rows.count, np.int32)
    probability = np.empty(job.rows.count, np.float32)
    place[fit["rows"]], label[fit["rows"]] = points, labels
    probability[fit["rows"]] = probabilities
    if len(points) < job.rows.count:
        for index, offset in enumerate(job.rows.offsets):
            saved = job.stage_parts("neighbors").read_arrays(rest_part(index))
            rows = offset + np.flatnonzero(job.rows.outside(index, fit["rows"]))
            near = saved["indices"]
            votes = vote(saved["distances"], labels[near], points[near])
            label[rows], place[rows] = votes.cluster, votes.place
            # As sure as the voters agree, and no surer than they are of themselves.
            probability[rows] = votes.share * probabilities[near].max(axis=1)
            job.part_done(index + 1, len(job.rows.offsets))
    probability[label < 0] = 0.0
    job.parts.write_arrays("rows.npz", label=label, place=place, probability=probability)

    landmarks = keep_landmarks(job, fit, points, labels, probabilities)
    clusters = len(found_arrays["persistence"])
    noise = float((label < 0).mean())
    summary = {"clusters": clusters, "noise_share": noise, "min_cluster_size_fitted": size,
               "landmarks": landmarks}  # fmt: skip
    return summary, f"{clusters} clusters, {noise:.1%} noise"


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
    chosen = seen[choose_landmarks(projected[seen], labels[seen], job.options.seed)]
    near = nearest_landmark(projected, projected[chosen])
    quantiles = np.quantile(near.distance[held], QUANTILES) if held.any() else np.zeros(4)
    answer = np.where(near.distance > quantiles[-1], NOISE, labels[chosen][near.row])
    counted = held & (labels != NOISE)
    agreement = float((answer == labels)[counted].mean()) if counted.any() else 0.0
    job.parts.write_arrays(
        "landmarks.npz",
        projected=projected[chosen],
        place=points[chosen],
        label=labels[chosen],
        probability=probabilities[chosen],
        quantiles=quantiles,
    )
    job.parts.write_arrays(
        "agreement.npz", agreement=np.array(agreement), rows=np.array(counted.sum())
    )
    return len(chosen)
