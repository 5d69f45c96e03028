"""Names, columns and versions of the artifacts of a run (DESIGN.md section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pyarrow as pa
from msgspec import Meta

from capture_kernels.fingerprint.vector import DIMENSIONS
from pipeline.record import PHASES

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
# UTC time, with a suffix if it was taken.
RUN_ID = r"\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(-\d{1,9})?"
# Files that every run has; the first versions of attn wrote no others.
REQUIRED_FILES = tuple(
    f"{name}.parquet" for name in ("embedding", "clusters", "landmarks", "projection")
)
# What a run leaves for the next one of its lineage.
REFERENCES, SHARES = "references.parquet", "shares.parquet"
# Cluster id of rows that are in no cluster.
NOISE = -1
# What makes vectors comparable, and so one lineage.
IDENTITY = ("model", "layout", "capture_id")

Manifest = dict[str, Any]

RunId = Annotated[str, Meta(pattern=rf"\A{RUN_ID}\Z")]
# A file of the run's own folder: no path, and not a hidden file.
FileName = Annotated[str, Meta(pattern=r"\A[\w-][\w.-]*\Z")]
ClusterId = Annotated[int, Meta(ge=0, lt=2**30)]


class FileFacts(TypedDict):
    bytes: int
    sha256: str


class Counts(TypedDict):
    rows_in_window: int
    rows: int
    clusters: int


class Parameters(TypedDict):
    hours: float


class Gate(TypedDict):
    passed: bool
    served: NotRequired[bool]


class Quality(TypedDict):
    gate: Gate
    noise_share: float
    trustworthiness: float
    neighbor_recall: float
    classifier_agreement: float | None


class ZoneShares(TypedDict):
    shares: dict[str, float]


class Stages(TypedDict):
    zones: ZoneShares


class ClusterEvent(TypedDict):
    event: str
    cluster_id: ClusterId
    parents: list[ClusterId]
    children: list[ClusterId]
    stability: NotRequired[float | None]
    requests: NotRequired[float]
    perhaps_chance: NotRequired[bool]
    lost: NotRequired[float]


class PastEvent(ClusterEvent):
    run_id: RunId
    label: str


class ParentCluster(TypedDict):
    cluster_id: ClusterId
    label: str
    share: float


class Area(TypedDict):
    requests: float


class Lineage(TypedDict, total=False):
    areas: list[Area]
    gone_areas: list[int]
    parent_clusters: list[ParentCluster]
    events: list[ClusterEvent]
    history: list[PastEvent]


class ManifestFields(TypedDict):
    """The fields of a manifest that a reader relies on; the others may hold anything."""

    run_id: RunId
    layout: Literal["log16", "layered"]
    capture_id: str
    model: str
    counts: Counts
    parameters: Parameters
    quality: Quality
    stages: Stages
    zone_rules: dict[str, float]
    parent_run: RunId | None
    files: dict[FileName, FileFacts]
    lineage: NotRequired[Lineage | None]


_WORD = pa.dictionary(pa.int32(), pa.string())
EMBEDDING_COLUMNS = pa.schema(
    [
        ("request_id", pa.string()),
        ("position", pa.int32()),
        ("layer", pa.int16()),
        ("phase", _WORD),
        ("token_id", pa.int32()),
        ("x", pa.float32()),
        ("y", pa.float32()),
        ("cluster_id", pa.int32()),
        ("probability", pa.float32()),
        ("second_cluster_id", pa.int32()),
        ("second_probability", pa.float32()),
        ("zone", _WORD),
        ("zone_confidence", pa.float32()),
    ]
)
_EXEMPLAR = pa.struct(
    [("request_id", pa.string()), ("position", pa.int32()), ("layer", pa.int16())]
)
_TOKEN = pa.struct(
    [
        ("token_id", pa.int32()),
        ("text", pa.string()),
        ("share", pa.float64()),
        ("lift", pa.float64()),
    ]
)
CLUSTER_COLUMNS = pa.schema(
    [
        ("cluster_id", pa.int32()),
        ("label", pa.string()),
        ("says", pa.string()),
        ("zone", pa.string()),
        ("size", pa.int64()),
        ("share", pa.float64()),
        ("persistence", pa.float64()),
        ("stability", pa.float64()),
        ("family", pa.int32()),
        ("centroid", pa.list_(pa.float32(), DIMENSIONS)),
        ("x", pa.float32()),
        ("y", pa.float32()),
        ("traits", pa.list_(pa.string())),
        ("phases", pa.struct([(phase, pa.float64()) for phase in PHASES])),
        ("tokens", pa.list_(_TOKEN)),
        ("exemplars", pa.list_(_EXEMPLAR)),
        ("born_in", pa.string()),
        ("parents", pa.list_(pa.int32())),
    ]
)
SHARE_COLUMNS = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("share", pa.float64()),
        ("covariance", pa.list_(pa.float64())),
        ("requests", pa.int64()),
        ("rows", pa.int64()),
        ("effective_rows", pa.float64()),
    ]
)


def landmark_columns(dimensions: int) -> pa.Schema:
    """Columns of landmarks.parquet for prototypes of `dimensions` numbers."""
    return pa.schema(
        [
            ("projected", pa.list_(pa.float32(), dimensions)),
            ("x", pa.float32()),
            ("y", pa.float32()),
            ("cluster_id", pa.int32()),
            ("probability", pa.float32()),
            ("second_cluster_id", pa.int32()),
            ("second_probability", pa.float32()),
        ]
    )


def was_served(manifest: Manifest) -> bool:
    """Whether a run passed its gate, or was let through by --no-gate."""
    gate = manifest["quality"]["gate"]
    return bool(gate.get("served", gate["passed"]))


def identity_of(manifest: Manifest) -> dict[str, str]:
    """Model, layout and capture_id: runs that differ in one of them are never compared."""
    return {name: manifest[name] for name in IDENTITY}


def identity_in_words(identity: Mapping[str, str]) -> str:
    return f"{identity['model']} ({identity['layout']}, capture {identity['capture_id']})"
