"""Names, columns and versions of the artifacts of a run (DESIGN.md section 6)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from capture_kernels.fingerprint.vector import DIMENSIONS
from pipeline.record import PHASES

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
# Without these keys a run can be neither shown nor served.
MANIFEST_KEYS = {
    "run_id", "layout", "capture_id", "model", "counts", "quality", "stages", "zone_rules",
    "parameters", "parent_run",
}  # fmt: skip
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
        ]
    )


def was_served(manifest: Manifest) -> bool:
    """Whether a run passed its gate, or was let through by --no-gate."""
    gate = manifest["quality"]["gate"]
    return bool(gate.get("served", gate["passed"]))


def identity_of(manifest: Manifest) -> dict[str, str]:
    """Model, layout and capture_id: runs that differ in one of them are never compared."""
    return {name: manifest[name] for name in IDENTITY}
