"""The parent run: the last one of the same model, layout and capture_id that was fit to be served.

What tonight is compared with comes from its artifacts alone; its rows may long be pruned.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import ArtifactError, NewRunNeededError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.shares import Shares
from discovery.artifacts.classifier import NOISE, Classifier, Codebook
from discovery.artifacts.read import load_artifacts, read_manifest
from pipeline.record import vector_array
from pipeline.record import vectors as batch_vectors

from . import folder as runs

# What makes vectors comparable, and so one lineage.
IDENTITY = ("model", "layout", "capture_id")
# The artifacts that a run leaves for the next one; the first versions of attn left none.
REFERENCES, SHARES = "references.parquet", "shares.parquet"
SHARES_SCHEMA = pa.schema(
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
# Nights whose row counts are looked back at: a week, and the same weekday of the week before.
NIGHTS_BACK = 8


class Parent(NamedTuple):
    """What tonight is compared with.

    ids int32[p], labels and traits of the clusters; share float64[p], of all rows;
    references float32[m, 20], rows of the clusters, with reference_cluster int64[m], the index of
    each one's cluster; codebook, whose labels are indices of clusters; place float32[l, 2], where
    its landmarks are on the map; zones and clusters, the shares that drift is told from.
    """

    run_id: str
    ids: NDArray[np.int32]
    labels: list[str]
    traits: list[list[str]]
    share: NDArray[np.float64]
    born_in: list[str]
    references: NDArray[np.float32]
    reference_cluster: NDArray[np.int64]
    codebook: Codebook
    place: NDArray[np.float32]
    zones: Shares
    clusters: Shares
    history: list[dict[str, Any]]


def index_of(known: NDArray[np.int32], ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where each of `ids` stands in `known`, -1 for noise."""
    if not len(known):
        return np.full(len(ids), -1, np.int64)
    order = np.argsort(known)
    at = order[np.searchsorted(known, ids, sorter=order).clip(max=len(known) - 1)]
    return np.where(ids >= 0, at, -1)


def before_this_run(
    output: Path, run_id: str, window: dict[str, Any], hours: float
) -> dict[str, Any]:
    """What a new run follows, looked up once and kept with it: JSON-able.

    Args:
        window: what the new run reads, as extract froze it.
        hours: length of the window.

    Returns:
        parent: run id of the newest one that is whole, or None; volumes: rows in the window of the
        nights before, newest first, where their windows were as long; served: the identity of
        `latest`, or None.
    """
    identity = {**window, "layout": Layout(window["layout"]).label}
    earlier = [manifest for manifest in manifests_before(output, run_id) if was_served(manifest)]
    own = [manifest for manifest in earlier if identity_of(manifest) == identity_of(identity)]
    usable = [manifest for manifest in own if {REFERENCES, SHARES} <= set(manifest["files"])]
    whole = (manifest["run_id"] for manifest in usable if is_whole(output / manifest["run_id"]))
    return {
        "parent": next(whole, None),
        "volumes": [
            manifest["counts"]["rows_in_window"]
            for manifest in own
            if manifest["parameters"]["hours"] == hours
        ][:NIGHTS_BACK],
        "served": served_identity(output),
    }


def manifests_before(output: Path, run_id: str) -> list[dict[str, Any]]:
    """Manifests of the finished runs whose id is before `run_id`, newest first.

    One that cannot be read, or is a copy under another id, is left out.
    """
    ids = runs.run_ids(output)
    found = []
    for earlier in reversed(ids[: ids.index(run_id)]):
        # Nobody can follow such a run, and it must not end tonight's.
        with suppress(ArtifactError):
            manifest = read_manifest(output / earlier)
            if manifest["run_id"] == earlier:
                found.append(manifest)
    return found


def is_whole(folder: Path) -> bool:
    """Whether every file of a run is what it was when it was published."""
    try:
        load_artifacts(folder)
    except ArtifactError:
        return False
    return True


def was_served(manifest: dict[str, Any]) -> bool:
    """Whether a run passed its gate, or was let through by --no-gate."""
    gate = manifest["quality"]["gate"]
    return bool(gate.get("served", gate["passed"]))


def identity_of(manifest: dict[str, Any]) -> dict[str, str]:
    return {name: manifest[name] for name in IDENTITY}


def served_identity(output: Path) -> dict[str, str] | None:
    """Of `latest`; None where there is none that can be read."""
    try:
        return identity_of(read_manifest(output / "latest"))
    except ArtifactError:
        return None


def open_parent(output: Path, run_id: str) -> Parent:
    """Read and verify the parent run.

    Raises:
        NewRunNeededError: it is gone or damaged, so this run cannot be finished.
    """
    try:
        artifacts = load_artifacts(runs.run_folder(output, run_id))
        classifier = Classifier(artifacts)
    except ArtifactError as error:
        raise NewRunNeededError(
            f"the parent run {run_id} cannot be read ({error}): bring it back, or start a new run"
        ) from None
    clusters = artifacts.table("clusters")
    ids = clusters.column("cluster_id").to_numpy()
    references = artifacts.table("references")
    codebook = classifier.codebook
    return Parent(
        run_id,
        ids,
        clusters.column("label").to_pylist(),
        clusters.column("traits").to_pylist(),
        clusters.column("share").to_numpy(),
        clusters.column("born_in").to_pylist(),
        np.concatenate([batch_vectors(batch) for batch in references.to_batches()])
        if len(references)
        else np.empty((0, DIMENSIONS), np.float32),
        index_of(ids, references.column("cluster_id").to_numpy()),
        codebook._replace(labels=index_of(ids, codebook.labels).astype(np.int32)),
        classifier.place,
        *saved_shares(artifacts.table("shares").to_pylist()),
        artifacts.manifest["lineage"]["history"],
    )


def saved_shares(rows: list[dict[str, Any]]) -> tuple[Shares, Shares]:
    """Shares of zones and of clusters (noise last), as publish wrote them."""
    found = []
    for kind in ("zones", "clusters"):
        own = [row for row in rows if row["kind"] == kind]
        found.append(
            Shares(
                np.array([row["share"] for row in own]),
                np.array([row["covariance"] for row in own]),
                **{name: own[0][name] for name in ("requests", "rows", "effective_rows")},
            )
        )
    return found[0], found[1]


def shares_table(zones: Shares, clusters: Shares, ids: NDArray[np.int32]) -> pa.Table:
    """shares.parquet: what the next run's drift is told from, a row for each zone and cluster.

    Args:
        clusters: shares of the clusters `ids`, and of noise last.
    """
    rows = []
    for kind, night, names in (
        ("zones", zones, ZONES),
        ("clusters", clusters, [str(i) for i in (*ids.tolist(), NOISE)]),
    ):
        for name, share, covariance in zip(names, night.shares, night.covariance, strict=True):
            rows.append(
                {"kind": kind, "name": name, "share": share, "covariance": covariance.tolist(),
                 "requests": night.requests, "rows": night.rows,
                 "effective_rows": night.effective_rows}
            )  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SHARES_SCHEMA)


def references_table(vectors: NDArray[np.float32], cluster_id: NDArray[np.int32]) -> pa.Table:
    """references.parquet: rows that stand for the clusters when the next run looks back."""
    return pa.table({"cluster_id": cluster_id, "vector": vector_array(vectors)})
