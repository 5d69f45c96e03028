"""Live clusters: what both ways of clustering recent rows answer with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from capture_kernels.arrays import Floats, Int32s, Mask
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.schema import NOISE, identity_of
from sidecar.serving import ServedRun
from sidecar.times import iso_time
from sidecar.traits import AxisInWords, SamplingHint, cluster_traits, explain, sampling_hint

from .groups import Group

# Gives the run that is served at the moment, None without artifacts.
GetServed = Callable[[], ServedRun | None]


class NearestCluster(msgspec.Struct, frozen=True):
    """The cluster of the served run that a live centroid is put to; distance to its nearest
    prototype in PCA space."""

    cluster_id: int
    label: str
    distance: float


class LiveCluster(msgspec.Struct, frozen=True):
    """One cluster of recent rows.

    cluster_id: never given to another cluster while the service runs; not a cluster id of a run.
    centroid: the mean of its vectors. size: rows, or with decay their weight.
    share: of all rows, unclustered ones included, in [0, 1].
    created_at, updated_at: UTC, ISO 8601.
    drift: Hellinger distance that the centroid moved over the last interval.
    traits: keys of `discovery.describe.claims.TRAITS`.
    axes: the PCA axes of the served run that the centroid is farthest out on; empty without a run
        of the rows' group.
    """

    cluster_id: int
    centroid: list[float]
    size: float
    share: float
    created_at: str
    updated_at: str
    drift: float
    traits: list[str]
    sampling_hint: SamplingHint
    zone: str
    nearest_cluster: NearestCluster | None
    axes: list[AxisInWords]


class Prediction(NamedTuple):
    """Of n vectors the nearest live cluster: cluster_id int32[n] (-1 without clusters, or where
    noise is nearest), its distance float32[n] (infinite without clusters), and whether the vector
    is in the cluster, bool[n]: a nearest one that is too far away is named, but not within."""

    cluster_id: Int32s
    distance: Floats
    within: Mask

    @classmethod
    def none(cls, rows: int) -> Prediction:
        """What is answered while there are no clusters."""
        far = np.full(rows, np.inf, np.float32)
        return cls(np.full(rows, NOISE, np.int32), far, np.zeros(rows, bool))


class Known(NamedTuple):
    """What is known of a live cluster before it is put in words; centroid float32[20], times in
    seconds since 1970."""

    cluster_id: int
    centroid: Floats
    size: float
    share: float
    created_at: float
    updated_at: float
    drift: float


def group_of(served: ServedRun | None) -> Group | None:
    """Model, layout and capture of the served run."""
    if served is None:
        return None
    identity = identity_of(served.manifest)
    layout = int(served.classifier.layout)
    return Group(identity["model"], layout, identity["capture_id"])


def in_words(
    known: list[Known], usual: Floats, group: Group, served: ServedRun | None
) -> list[LiveCluster]:
    """Live clusters with traits, zone, sampling hint and the nearest cluster of the served run.

    Args:
        usual: float32[20], the mean of all recent rows.
        group: of the rows; clusters of a served run of another group are not looked for.
    """
    if not known:
        return []
    layout = group.parsed_layout
    same = group_of(served) == group
    rules = ZoneRules(**served.manifest["zone_rules"]) if served and same else ZoneRules()
    centroids = np.stack([cluster.centroid for cluster in known])
    zones = [ZONES[index] for index in rules.classify(centroids, layout).zone]
    nearest = nearest_clusters(centroids, served.classifier) if served and same else None
    axes = explain(centroids, served.classifier) if served and same else None
    found = []
    for index, (cluster, zone) in enumerate(zip(known, zones, strict=True)):
        traits = cluster_traits(cluster.centroid, usual, layout)
        found.append(
            LiveCluster(
                cluster_id=cluster.cluster_id,
                centroid=[round(float(x), 6) for x in cluster.centroid],
                size=round(cluster.size, 3),
                share=round(cluster.share, 6),
                created_at=iso_time(cluster.created_at),
                updated_at=iso_time(cluster.updated_at),
                drift=round(cluster.drift, 6),
                traits=traits,
                sampling_hint=sampling_hint(zone, traits),
                zone=zone,
                nearest_cluster=nearest[index] if nearest else None,
                axes=axes[index] if axes else [],
            )
        )
    return found


def nearest_clusters(centroids: Floats, classifier: Classifier) -> list[NearestCluster] | None:
    """The cluster of a run that each centroid float32[c, 20] is put to; None for a run without
    clusters."""
    codebook = classifier.codebook
    members = codebook.labels != NOISE
    if not members.any():
        return None
    found = codebook.member(centroids)
    ids = codebook.labels[members][found.row].tolist()
    return [
        NearestCluster(cluster, classifier.labels.get(cluster, ""), round(distance, 6))
        for cluster, distance in zip(ids, found.distance.tolist(), strict=True)
    ]


def hellinger(a: Floats, b: Floats) -> Floats:
    """Euclidean distance between the square roots of vectors float[..., 20]."""
    apart = np.sqrt(np.maximum(a, 0)) - np.sqrt(np.maximum(b, 0))
    return np.asarray(np.sqrt((apart * apart).sum(axis=-1)), np.float32)
