"""Published runs to serve and to reload to, made in milliseconds: no job is run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from planted import planted, planted_batch
from shared import REPO, START, possible_vectors

from capture_kernels.arrays import Int32s
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.projection import Projection
from discovery.artifacts.prototypes import Codebook
from discovery.artifacts.schema import CLUSTER_COLUMNS, NOISE
from discovery.artifacts.tables import landmarks_table, projection_table
from discovery.artifacts.write import write_parquet
from discovery.runs.folder import move_latest
from pipeline.durable import file_facts

GOLDEN = REPO / "tests" / "golden"
MODEL, CAPTURE_ID = "examples/demo_model", "0ee5e517b008"
LAYERED = 2


def run_id_of(number: int) -> str:
    return f"2026-01-10T04-02-11-{number + 2}"


def publish(
    output: Path, number: int = 0, *, change: Callable[[dict[str, Any]], Any] = lambda m: None,
    latest: bool = True,
) -> str:  # fmt: skip
    """Publish the golden run under another id, its cluster labels with that id: what a classifier
    answers says which run it is of.

    Args:
        change: of its manifest.
    """
    run_id = run_id_of(number)
    clusters = pq.read_table(GOLDEN / "run_v1" / "clusters.parquet")
    return _publish(output, run_id, {"clusters": clusters}, change, latest)


def publish_layered(output: Path, number: int = 0, *, latest: bool = True) -> str:
    """Publish a run of layout 2, of a separate capture; rows of its cluster 0 are between it and
    cluster 1."""
    vectors = layered_vectors(400)
    roots = np.sqrt(vectors)
    mean = roots.mean(axis=0)
    _, spread, axes = np.linalg.svd(roots - mean, full_matrices=False)
    projection = Projection(
        mean.reshape(1, -1).astype(np.float32).repeat(16, axis=0),
        np.ones(DIMENSIONS, np.float32), axes[:8].T.astype(np.float32).copy(),
        spread[:8] ** 2 / (spread**2).sum(), np.array(0.5),
    )  # fmt: skip
    kind = np.argmax(vectors[:, :3], axis=1)
    picked = np.concatenate([np.flatnonzero(kind == k)[:10] for k in range(3)])
    prototypes = ((roots[picked] - mean) @ axes[:8].T).astype(np.float32)
    codebook = Codebook(
        projection, Layout.LAYERED, prototypes, kind[picked].astype(np.int32), 1.0, 100.0
    )
    clusters = pa.Table.from_pylist(
        [
            {
                "cluster_id": k, "label": f"behaviour {k}", "says": "", "zone": "diffuse",
                "size": int((kind == k).sum()), "share": float((kind == k).mean()),
                "persistence": 0.5, "centroid": vectors[kind == k].mean(axis=0).tolist(),
                "x": 0.0, "y": 0.0, "traits": [], "phases": None, "tokens": [], "exemplars": [],
                "born_in": run_id_of(number), "parents": [],
            }
            for k in range(3)
        ],
        CLUSTER_COLUMNS,
    )  # fmt: skip
    tables = {
        "clusters": clusters,
        "landmarks": landmarks_table(
            codebook, prototypes[:, :2].copy(), between_first_two(codebook.labels)
        ),
        "projection": projection_table(codebook, np.linspace(0, 1, 101)),
    }
    return _publish(
        output, run_id_of(number), tables,
        lambda m: m.update(layout="layered", capture_id="layered00000"), latest,
    )  # fmt: skip


def between_first_two(labels: Int32s) -> Memberships:
    """Prototypes of these clusters: those of cluster 0 are for 0.4 in cluster 1."""
    first = labels == 0
    return Memberships(
        labels,
        np.where(first, 0.6, 1.0).astype(np.float32),
        np.where(first, 1, NOISE).astype(np.int32),
        np.where(first, 0.4, 0.0).astype(np.float32),
    )


def publish_without_clusters(output: Path, number: int = 0) -> str:
    """Publish a run in which everything is noise."""
    clusters = pq.read_table(GOLDEN / "run_v1" / "clusters.parquet").slice(0, 0)
    landmarks = pq.read_table(GOLDEN / "run_v1" / "landmarks.parquet")
    noise = pa.array(np.full(landmarks.num_rows, NOISE, np.int32))
    landmarks = landmarks.set_column(3, "cluster_id", noise)
    tables = {"clusters": clusters, "landmarks": landmarks}
    return _publish(
        output, run_id_of(number), tables, lambda m: m["counts"].update(clusters=0), True
    )


def _publish(
    output: Path, run_id: str, tables: dict[str, pa.Table], change: Callable[..., Any], latest: bool
) -> str:
    folder = output / run_id
    shutil.copytree(GOLDEN / "run_v1", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["run_id"] = run_id
    labels = [f"{label} ({run_id})" for label in tables["clusters"]["label"].to_pylist()]
    tables["clusters"] = tables["clusters"].set_column(
        tables["clusters"].schema.get_field_index("label"), "label", pa.array(labels, pa.string())
    )
    for name, table in tables.items():
        (folder / f"{name}.parquet").unlink()
        write_parquet(folder / f"{name}.parquet", table)
        manifest["files"][f"{name}.parquet"] = file_facts(folder / f"{name}.parquet")
    manifest["files"].pop("report.html", None)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if latest:
        move_latest(output, run_id)
    return run_id


def classifier_of(output: Path, run_id: str) -> Classifier:
    return Classifier.load(output / run_id)


def rows_of(rows: int, prefix: str = "request", seed: int = 0, **others: Any) -> pa.RecordBatch:
    """Fingerprints that the golden run can classify, ten of each request."""
    given = {"rows_per_request": 10, "model": MODEL, "capture_id": CAPTURE_ID} | others
    return planted_batch(vectors_of(rows, seed), START, prefix, **given)


def vectors_of(rows: int, seed: int = 0) -> NDArray[np.float32]:
    """Fingerprints of layout 1: float32[rows, 20]."""
    return planted(rows, seed)[0]


def layered_vectors(rows: int, seed: int = 0) -> NDArray[np.float32]:
    """Fingerprints of layout 2: float32[rows, 20]."""
    return possible_vectors(np.full(rows, LAYERED), np.random.default_rng(seed))
