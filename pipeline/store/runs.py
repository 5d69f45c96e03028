"""Discovery runs as a store keeps them: plain column values."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import numpy as np

from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import DIMENSIONS

RUN_FIELDS = ("run_id", "created_at", "status", "engine", "model", "layout", "capture_id", "rows",
              "clusters", "noise_share", "output", "manifest")  # fmt: skip
CLUSTER_FIELDS = ("cluster_id", "label", "zone", "size", "share", "persistence", "centroid")


def run_values(
    run: dict[str, Any], clusters: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run and its clusters as plain column values, each with all of its columns.

    Times become ISO 8601, `manifest` and a cluster's other keys (`details`) JSON, and a centroid
    80 bytes (float32[20], little-endian).

    Raises:
        StoreError: run_id, created_at or a cluster_id is missing, or a centroid is not 20 numbers.
    """
    for name in ("run_id", "created_at"):
        if not run.get(name):
            raise StoreError(f"a discovery run cannot be recorded without its {name}")
    recorded = {name: run.get(name) for name in RUN_FIELDS}
    for name in ("created_at", "output"):
        if (time := recorded[name]) is not None:
            recorded[name] = time.isoformat() if isinstance(time, datetime) else str(time)
    if not isinstance(recorded["manifest"], str):
        recorded["manifest"] = json.dumps(run.get("manifest") or run, sort_keys=True, default=str)
    cluster_values = []
    for cluster in clusters:
        if cluster.get("cluster_id") is None:
            raise StoreError(f"a cluster of run {run['run_id']} has no cluster_id")
        values = {"run_id": run["run_id"]} | {name: cluster.get(name) for name in CLUSTER_FIELDS}
        if (centroid := values["centroid"]) is not None:
            blob = (
                centroid if isinstance(centroid, bytes) else np.asarray(centroid, "<f4").tobytes()
            )
            if len(blob) != 4 * DIMENSIONS:
                raise StoreError(f"a centroid has {DIMENSIONS} numbers, got {len(blob) / 4:g}")
            values["centroid"] = blob
        others = {k: v for k, v in cluster.items() if k not in (*CLUSTER_FIELDS, "run_id")}
        values["details"] = json.dumps(others, sort_keys=True) if others else None
        cluster_values.append(values)
    return recorded, cluster_values
