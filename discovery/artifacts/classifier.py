"""The classifier: a fingerprint's cluster by its nearest landmark, from arrays on any CPU."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import ThreadpoolController

from capture_kernels.arrays import array_module, block_rows, dots
from capture_kernels.errors import ArtifactError, RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules

from .projection import Projection
from .read import Artifacts, load_artifacts

NOISE = -1
# 1,024 landmarks times this many rows of float32 stay in a core's second-level cache.
BLOCK_ROWS = 256
# Distances that a device computes at a time: 0.5 GB of float32.
DEVICE_SCORES = 1 << 27


class Nearest(NamedTuple):
    """Of m rows: the nearest landmark's index int64[m] and its distance float32[m]; where the rows
    are, on the host or on a device."""

    row: NDArray[np.int64]
    distance: NDArray[np.float32]


def nearest_landmark(projected: NDArray[np.float32], landmarks: NDArray[np.float32]) -> Nearest:
    """Exact nearest landmark of each row by Euclidean distance.

    Args:
        projected: float32[m, d], on any device.
        landmarks: float32[l, d], there or on the host.
    """
    xp = array_module(projected)
    landmarks = xp.asarray(landmarks)
    index = xp.empty(len(projected), np.int64)
    distance = xp.empty(len(projected), np.float32)
    # |p - l|^2 = |p|^2 + (|l|^2 - 2 p.l): the bracket decides which is nearest, and one matrix
    # product gives it when a constant 1 is appended to every row.
    norms = dots(landmarks, landmarks)
    folded = xp.concatenate([-2.0 * landmarks.T, norms[None]]).astype(np.float32)
    padded = xp.concatenate([projected, xp.ones((len(projected), 1), np.float32)], axis=1)
    step = block_rows(projected, BLOCK_ROWS, max(1, DEVICE_SCORES // len(landmarks)))
    scores = xp.empty((min(step, max(1, len(projected))), len(landmarks)), np.float32)
    # Blocks this small lose more by waking BLAS threads than they gain.
    with blas_threads().limit(limits=1) if xp is np else nullcontext():
        for start in range(0, len(projected), step):
            block = padded[start : start + step]
            found = xp.matmul(block, folded, out=scores[: len(block)]).argmin(axis=1)
            index[start : start + len(block)] = found
            # The distance comes from the difference: the folded form cancels near zero.
            apart = block[:, :-1] - landmarks[found]
            distance[start : start + len(block)] = xp.sqrt(dots(apart, apart))
    return Nearest(index, distance)


def nearest_of_run(
    projected: NDArray[np.float32],
    landmarks: NDArray[np.float32],
    labels: NDArray[np.int32],
    noise_factor: float,
) -> Nearest:
    """The landmark that answers for each row: a noise one only where it is closer than
    `noise_factor` times the nearest cluster's.

    Args:
        projected: float32[m, d], on any device.
        landmarks: float32[l, d], there or on the host.
        labels: int32[l], noise (-1) last, on the host.
    """
    xp = array_module(projected)
    clusters = int(np.count_nonzero(labels != NOISE))
    if clusters in (0, len(labels)):
        return nearest_landmark(projected, landmarks)
    member = nearest_landmark(projected, landmarks[:clusters])
    noise = nearest_landmark(projected, landmarks[clusters:])
    is_noise = noise.distance < noise_factor * member.distance
    return Nearest(
        xp.where(is_noise, noise.row + clusters, member.row),
        xp.where(is_noise, noise.distance, member.distance),
    )


@functools.cache
def blas_threads() -> ThreadpoolController:
    """A handle on the BLAS libraries that are loaded; finding them takes milliseconds, so once."""
    return ThreadpoolController().select(user_api="blas")


class Codebook(NamedTuple):
    """Landmarks as vectors are named by them: all that it takes, on any machine. Its own arrays are
    on the host; what it finds is where the vectors are.

    points float32[l, d]; labels int32[l], noise (-1) last; noise_factor as in `nearest_of_run`;
    reach, the distance beyond which a row is of no cluster.
    """

    projection: Projection
    layout: Layout
    points: NDArray[np.float32]
    labels: NDArray[np.int32]
    noise_factor: float
    reach: float

    def nearest(self, vectors: NDArray[np.float32]) -> tuple[Nearest, NDArray[np.bool_]]:
        """The landmark of each vector float32[m, 20], and whether it lies beyond reach: bool[m]."""
        projected = self.projection(vectors, self.layout)
        found = nearest_of_run(projected, self.points, self.labels, self.noise_factor)
        return found, found.distance > self.reach

    def nearest_member(self, vectors: NDArray[np.float32]) -> NDArray[np.int32]:
        """Each vector's label, were there no landmarks of noise; -1 beyond reach: int32[m].

        For rows that are behaviours for sure, of another night: between two clusters that move
        together lies what was noise, and would hide that they met.
        """
        members = self.labels != NOISE
        if not members.any():
            none: NDArray[np.int32] = array_module(vectors).full(len(vectors), NOISE, np.int32)
            return none
        points = self.points[members]
        found = nearest_landmark(self.projection(vectors, self.layout), points)
        return labels_within(self.labels[members], found.row, found.distance > self.reach)

    def label(self, vectors: NDArray[np.float32]) -> NDArray[np.int32]:
        """Each vector's label, -1 for noise and beyond reach: int32[m]."""
        found, beyond = self.nearest(vectors)
        return labels_within(self.labels, found.row, beyond)


def labels_within(
    labels: NDArray[np.int32], row: NDArray[np.int64], beyond: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """The label of each row's landmark, -1 for the rows beyond reach: int32[m].

    Args:
        labels: int32[l], on the host.
        row, beyond: int64[m] and bool[m], on any device.
    """
    xp = array_module(row)
    found: NDArray[np.int32] = xp.where(beyond, NOISE, xp.asarray(labels)[row]).astype(np.int32)
    return found


class Classified(NamedTuple):
    """Of m fingerprints: cluster_id int32[m] (-1: none), probability float32[m], map place
    float32[m, 2], zone index int8[m] into ZONES, and zone confidence float32[m]."""

    cluster_id: NDArray[np.int32]
    probability: NDArray[np.float32]
    place: NDArray[np.float32]
    zone: NDArray[np.int8]
    zone_confidence: NDArray[np.float32]


class Classifier:
    """Classifies fingerprints against one run's artifacts.

    Args:
        artifacts: a verified run.

    Attributes:
        codebook: its landmarks; place: float32[l, 2], where they are on the map; labels: the
            clusters' names by id.

    Raises:
        ArtifactError: the artifacts do not fit together.
    """

    def __init__(self, artifacts: Artifacts) -> None:
        manifest = artifacts.manifest
        projection = artifacts.table("projection").to_pylist()[0]
        landmarks = artifacts.table("landmarks")
        clusters = artifacts.table("clusters")
        self.run_id = artifacts.run_id
        self.layout = Layout.parse(manifest["layout"])
        self.capture_id = str(manifest["capture_id"])
        self.rules = ZoneRules(**manifest["zone_rules"])
        components = np.array(projection["components"], np.float32).reshape(DIMENSIONS, -1)
        fitted = Projection(
            np.array(projection["mean"], np.float32).reshape(-1, DIMENSIONS),
            np.array(projection["scale"], np.float32),
            components,
            np.array(projection["explained"], np.float64),
        )
        flat = landmarks.column("projected").combine_chunks().flatten().to_numpy()
        points = np.ascontiguousarray(flat.reshape(-1, components.shape[1]))
        if len(points) == 0:
            raise ArtifactError(f"{artifacts.folder} has no landmarks: run attn discover again")
        self.codebook = Codebook(
            fitted,
            self.layout,
            points,
            landmarks.column("cluster_id").to_numpy(),
            float(projection["noise_factor"]),
            float(projection["reach"]),
        )
        self.place = np.column_stack([landmarks.column(c).to_numpy() for c in ("x", "y")])
        self._probability = landmarks.column("probability").to_numpy()
        self.labels: dict[int, str] = dict(
            zip(
                clusters.column("cluster_id").to_pylist(),
                clusters.column("label").to_pylist(),
                strict=True,
            )
        )

    @classmethod
    def load(cls, folder: str | Path) -> Classifier:
        """The classifier of a run folder, or of an output folder's `latest`."""
        return cls(load_artifacts(Path(folder)))

    def classify(self, vectors: ArrayLike) -> Classified:
        """Cluster, place and zone of each vector.

        Args:
            vectors: float32[m, 20] (or [20] for one) of the run's layout, finite.

        Raises:
            RecordError: another shape, or a number that is not finite.
        """
        try:
            with np.errstate(over="ignore"):  # too large becomes infinity, which is refused below
                rows = np.asarray(vectors, dtype=np.float32)
        except (ValueError, TypeError, OverflowError) as error:
            raise RecordError(f"a fingerprint is {DIMENSIONS} numbers: {error}") from None
        if rows.ndim == 1:  # one vector, or an empty list of them
            rows = rows.reshape(1 if rows.size else 0, rows.size or DIMENSIONS)
        if rows.ndim != 2 or rows.shape[1] != DIMENSIONS:
            raise RecordError(f"a fingerprint has {DIMENSIONS} numbers, got shape {rows.shape}")
        # One pass finds NaN, infinity and negative shares, whose square root is not a number.
        if not (np.isfinite(rows).all() and (rows >= 0).all()):
            raise RecordError("a fingerprint's numbers must be finite and not negative")
        nearest, beyond = self.codebook.nearest(rows)
        cluster = labels_within(self.codebook.labels, nearest.row, beyond)
        probability = np.where(cluster == NOISE, 0.0, self._probability[nearest.row])
        zoned = self.rules.classify(rows, self.layout)
        return Classified(
            cluster,
            probability.astype(np.float32),
            self.place[nearest.row],
            zoned.zone,
            zoned.confidence,
        )

    def answer(self, vectors: ArrayLike) -> list[dict[str, object]]:
        """What `/classify` and `attn classify` answer for each vector, as JSON objects."""
        found = self.classify(vectors)
        answers: list[dict[str, object]] = []
        for cluster, probability, zone, confidence in zip(
            found.cluster_id.tolist(),
            found.probability.tolist(),
            found.zone.tolist(),
            found.zone_confidence.tolist(),
            strict=True,
        ):
            manifold = {
                "zone": ZONES[zone],
                "confidence": round(confidence, 6),
                "cluster_id": cluster,
                "cluster_label": self.labels.get(cluster),
                "probability": round(probability, 6),
            }
            answers.append({"manifold": manifold, "schema_version": 1, "run_id": self.run_id})
        return answers
