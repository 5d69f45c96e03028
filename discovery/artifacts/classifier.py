"""The classifier of a published run: a fingerprint's cluster by its nearest prototype."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capture_kernels.arrays import Floats, Int32s
from capture_kernels.errors import RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS, broken_invariants
from capture_kernels.fingerprint.zones import ZONES, ZoneRules

from .prototypes import labels_within
from .read import Artifacts, open_artifacts
from .schema import NOISE
from .tables import read_prototypes

# Version of what `answer` gives, in the HTTP API and in `attn classify`.
ANSWER_VERSION = 1
LARGEST = float(np.finfo(np.float32).max)


class Classified(NamedTuple):
    """Of m fingerprints: cluster_id int32[m] (-1: none), probability float32[m], coordinates on the
    map float32[m, 2], zone index int8[m] into ZONES, and zone confidence float32[m]; of those
    between two clusters the second one, int32[m] (-1: of the others), and how far they belong
    there, float32[m]."""

    cluster_id: Int32s
    probability: Floats
    coordinates: Floats
    zone: NDArray[np.int8]
    zone_confidence: Floats
    second_cluster_id: Int32s
    second_probability: Floats


class Classifier:
    """Classifies fingerprints by one run's artifacts. Safe to call from several threads at once.

    Attributes:
        run_id, layout, capture_id: of the run; labels: cluster names by id; codebook: its
            prototypes; coordinates: float32[p, 2] of these on the map.

    Raises:
        ArtifactError: a file of the run is missing or damaged.
    """

    def __init__(self, artifacts: Artifacts) -> None:
        manifest = artifacts.manifest
        self.codebook, self.coordinates, self._members = read_prototypes(artifacts)
        clusters = artifacts.table("clusters", ["cluster_id", "label"])
        self.run_id = artifacts.run_id
        self.layout = self.codebook.layout
        self.capture_id = str(manifest["capture_id"])
        self.labels: dict[int, str] = dict(zip(*clusters.to_pydict().values(), strict=True))
        self.rules = ZoneRules(**manifest["zone_rules"])

    @classmethod
    def load(cls, folder: str | Path) -> Classifier:
        """The classifier of a run folder, or of an output folder's `latest`."""
        return cls(open_artifacts(Path(folder)))

    def classify(self, vectors: ArrayLike) -> Classified:
        """Cluster, coordinates and zone of each vector.

        Whether attention can have such a vector is not checked, only that its numbers are finite
        and not negative: `answer` refuses one that breaks an invariant of a fingerprint
        (`broken_invariants`), this classifies it.

        Args:
            vectors: float32[m, 20] (or [20] for one) of the run's layout, finite, not negative.

        Raises:
            RecordError: another shape, or a number that no fingerprint has.
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
        # A negative share has no square root.
        if not (np.isfinite(rows).all() and (rows >= 0).all()):
            raise RecordError("a fingerprint's numbers must be finite and not negative")
        nearest, beyond = self.codebook.nearest(rows)
        cluster = labels_within(self.codebook.labels, nearest.row, beyond)
        members = self._members.at(nearest.row)
        inside = cluster != NOISE
        between = members.between() & inside
        zoned = self.rules.classify(rows, self.layout)
        return Classified(
            cluster,
            np.where(inside, members.probability, np.float32(0)),
            self.coordinates[nearest.row],
            zoned.zone,
            zoned.confidence,
            np.where(between, members.second, np.int32(NOISE)),
            np.where(between, members.second_probability, np.float32(0)),
        )

    def answer(self, records: Iterable[Any]) -> list[dict[str, Any]]:
        """What `/classify` and `attn classify` answer for each record, as JSON objects.

        Args:
            records: each a list of 20 numbers, or a mapping with "vector" and, optionally, the
                "layout" and "capture_id" that it was captured with.

        Returns:
            For each record manifold, schema_version and run_id; for one that cannot be classified
            error (the reason), schema_version and run_id.
        """
        head = {"schema_version": ANSWER_VERSION, "run_id": self.run_id}
        answers: list[dict[str, Any]] = []
        vectors: list[list[float]] = []
        rows: list[int] = []
        for row, record in enumerate(records):
            answers.append(dict(head))
            try:
                vectors.append(self._vector_of(record))
                rows.append(row)
            except RecordError as error:
                answers[row]["error"] = str(error)
        matrix = np.array(vectors, np.float32).reshape(-1, DIMENSIONS)
        possible = np.ones(len(rows), bool)
        for reason, hit in broken_invariants(matrix, np.full(len(rows), self.layout)).items():
            for index in np.flatnonzero(hit & possible):
                answers[rows[index]]["error"] = f"no attention row has this vector: {reason}"
            possible &= ~hit
        rows = [row for row, fine in zip(rows, possible, strict=True) if fine]
        found = self.classify(matrix[possible])
        for row, manifold in zip(rows, self.manifolds(found), strict=True):
            answers[row]["manifold"] = manifold
        return answers

    def manifolds(self, found: Classified) -> list[dict[str, Any]]:
        """What `/classify` answers for each of m classified fingerprints, as JSON objects."""
        confidence, probability = (
            np.round(values.astype(np.float64), 6).tolist()
            for values in (found.zone_confidence, found.probability)
        )
        columns = (found.zone.tolist(), confidence, found.cluster_id.tolist(), probability)
        answers = [
            {
                "zone": ZONES[zone],
                "confidence": confident,
                "cluster_id": cluster,
                "cluster_label": self.labels.get(cluster),
                "probability": member,
                "second": None,
            }
            for zone, confident, cluster, member in zip(*columns, strict=True)
        ]
        for row in np.flatnonzero(found.second_cluster_id != NOISE).tolist():
            answers[row]["second"] = self.second(found, row)
        return answers

    def second(self, found: Classified, row: int) -> dict[str, Any] | None:
        """The second cluster of a fingerprint between two, as a JSON object; None of others."""
        cluster = int(found.second_cluster_id[row])
        if cluster == NOISE:
            return None
        return {
            "cluster_id": cluster,
            "cluster_label": self.labels.get(cluster),
            "probability": round(float(found.second_probability[row]), 6),
        }

    def _vector_of(self, record: Any) -> list[float]:
        """The vector of a record that this run can classify. RecordError says why it cannot."""
        vector = record
        if isinstance(record, dict):
            vector = record.get("vector")
            if record.get("layout") not in (None, self.layout.label, int(self.layout)):
                raise RecordError(
                    f"has layout {shown(record['layout'])}, the run has {self.layout.label}: "
                    "classify it with a run of its layout"
                )
            if record.get("capture_id") not in (None, self.capture_id):
                raise RecordError(
                    f"is of capture {shown(record['capture_id'])}, the run of {self.capture_id}: "
                    "vectors of different captures cannot be compared"
                )
        if isinstance(vector, np.ndarray):
            vector = vector.tolist()
        if (
            isinstance(vector, list)
            and len(vector) == DIMENSIONS
            and all(isinstance(x, int | float) and 0 <= x <= LARGEST for x in vector)
            and not any(isinstance(x, bool) for x in vector)
        ):
            return list(vector)
        raise RecordError(f"needs a vector of {DIMENSIONS} finite numbers, none of them negative")


def shown(value: Any) -> str:
    """A value of a record for a message: short, on one line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
