"""The parent run: the last one of the same model, layout and capture_id that was served.

A new run is compared with the parent's artifacts alone; the parent's rows may have been pruned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints
from capture_kernels.errors import ArtifactError, NewRunNeededError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.known_areas import InAreas, KnownAreas, weights_of
from discovery.algorithms.shares import Shares
from discovery.artifacts.prototypes import Codebook
from discovery.artifacts.read import AGAIN, open_artifacts, read_manifest
from discovery.artifacts.schema import (
    MANIFEST,
    NOISE,
    REFERENCES,
    SHARE_COLUMNS,
    SHARES,
    identity_of,
)
from discovery.artifacts.tables import read_prototypes
from pipeline.record import vector_array
from pipeline.record import vectors as batch_vectors

from . import folder as runs
from .history import history
from .state import survey

# Earlier runs whose row counts are compared: a week, and the same weekday of the week before.
VOLUMES_KEPT = 8
# Fields of `Shares` that are one number.
TOTALS = ("requests", "rows", "effective_rows")


class Parent(NamedTuple):
    """What a run is compared with.

    ids int32[p], labels and traits of the clusters; share float64[p], of all rows; stability
    float64[p], NaN where it is not known;
    references float32[m, 20], rows of the clusters, with reference_cluster int64[m], the index of
    each one's cluster, and areas; codebook, whose labels are indices of clusters; coordinates
    float32[l, 2] of its prototypes on the map; zones and clusters, the shares that drift is
    measured from.
    """

    run_id: str
    ids: Int32s
    labels: list[str]
    traits: list[list[str]]
    share: Doubles
    stability: Doubles
    born_in: list[str]
    references: Floats
    reference_cluster: Ints
    areas: KnownAreas
    codebook: Codebook
    coordinates: Floats
    zones: Shares
    clusters: Shares
    history: list[dict[str, Any]]


def index_of(known: Int32s, ids: Int32s) -> Ints:
    """The index in `known` of each of `ids`, -1 for noise: int64[n]."""
    if not len(known):
        return np.full(len(ids), -1, np.int64)
    order = np.argsort(known)
    at = order[np.searchsorted(known, ids, sorter=order).clip(max=len(known) - 1)]
    return np.where(ids >= 0, at, -1)


def before_this_run(
    output: Path, run_id: str, window: dict[str, Any], hours: float, *, new_lineage: bool = False
) -> dict[str, Any]:
    """What a new run follows, determined once and kept with it, as JSON values.

    Args:
        window: what the new run reads, as extract froze it.
        hours: length of the window.
        new_lineage: follow no run.

    Returns:
        parent: run id of the newest undamaged one, or None; damaged: run_id and reason of each
        newer run that it would have followed, or may have: the identity of a run whose manifest
        cannot be read is not known; volumes: rows in the window of the earlier runs, newest first,
        with windows of the same length; latest: the run that `latest` names, or None; served: its
        identity, None if it cannot be read; same, others: how many earlier finished runs are of
        this identity, and of another.
    """
    identity = identity_of({**window, "layout": Layout(window["layout"]).label})
    this = runs.run_order(run_id)
    found = [run for run in survey(output) if runs.run_order(run.run_id) < this]
    same = [identity_of(run.manifest) == identity for run in found if run.manifest]
    own = [
        run.manifest
        for run in reversed(found)
        if run.served and run.manifest and identity_of(run.manifest) == identity
    ]
    usable = {m["run_id"] for m in own if {REFERENCES, SHARES} <= set(m["files"])}
    broken = {
        run.run_id: str(run.reason).removesuffix(AGAIN)
        for run in found
        if run.manifest is None and (output / run.run_id / MANIFEST).exists()
    }
    served, latest = None, runs.latest_id(output)
    try:
        served = identity_of(read_manifest(output / "latest"))
    except ArtifactError:
        if latest and runs.RUN_ID.fullmatch(latest) and runs.run_order(latest) < this:
            broken.setdefault(latest, f"{output / latest}, which is latest, holds no finished run")
    parent, damaged = None, []
    for one in sorted(usable | broken.keys(), key=runs.run_order, reverse=True):
        reason = broken.get(one) or damage(output / one)
        if reason is None:
            parent = one
            break
        damaged.append({"run_id": one, "reason": reason})
    alike = (m for m in own if m["parameters"]["hours"] == hours)
    return {
        "parent": None if new_lineage else parent,
        "damaged": damaged,
        "volumes": [m["counts"]["rows_in_window"] for m in alike][:VOLUMES_KEPT],
        "latest": latest,
        "served": served,
        "same": same.count(True),
        "others": same.count(False),
    }


def damage(folder: Path) -> str | None:
    """Why the files of a run are not those that were published; None if they are."""
    try:
        open_artifacts(folder).verify()
    except ArtifactError as error:
        return str(error).removesuffix(AGAIN)
    return None


def damaged_in_words(follows: dict[str, Any]) -> str | None:
    """The newest damaged run of `before_this_run`, and how many more there are; None without."""
    damaged = follows.get("damaged", [])
    if not damaged:
        return None
    more = f", nor can {len(damaged) - 1} more" if damaged[1:] else ""
    return f"run {damaged[0]['run_id']} cannot be followed ({damaged[0]['reason']}){more}"


def open_parent(output: Path, run_id: str) -> Parent:
    """Read and verify the parent run.

    Raises:
        NewRunNeededError: it is gone or damaged, so this run cannot be finished.
    """
    try:
        artifacts = open_artifacts(runs.run_folder(output, run_id))
        codebook, coordinates, _ = read_prototypes(artifacts)
        clusters, references, shares = map(artifacts.table, ("clusters", "references", "shares"))
    except ArtifactError as error:
        raise NewRunNeededError(
            f"the parent run {run_id} cannot be read ({error}): bring it back, or start a new run"
        ) from None
    ids = clusters.column("cluster_id").to_numpy()

    def index(of: Int32s) -> Int32s:
        return index_of(ids, of).astype(np.int32)

    vectors = [batch_vectors(batch) for batch in references.to_batches()]
    reference_cluster = index_of(ids, references.column("cluster_id").to_numpy())
    share = clusters.column("share").to_numpy()
    return Parent(
        run_id,
        ids,
        clusters.column("label").to_pylist(),
        clusters.column("traits").to_pylist(),
        share,
        known_stability(clusters),
        clusters.column("born_in").to_pylist(),
        np.concatenate([np.empty((0, DIMENSIONS), np.float32), *vectors]),
        reference_cluster,
        known_areas(references, reference_cluster, share, artifacts.manifest),
        codebook.renamed(index),
        coordinates,
        *saved_shares(shares.to_pylist()),
        history(artifacts.manifest),
    )


def known_stability(clusters: pa.Table) -> Doubles:
    """float64[p], NaN by HDBSCAN, and in runs of before it was published."""
    if "stability" not in clusters.column_names:
        return np.full(len(clusters), np.nan)
    return np.array(clusters.column("stability").to_pylist(), np.float64)


def saved_shares(rows: list[dict[str, Any]]) -> tuple[Shares, Shares]:
    """Shares of zones and of clusters (noise last), as `shares_table` wrote them."""
    found = []
    for kind in ("zones", "clusters"):
        own = [row for row in rows if row["kind"] == kind]
        share, covariance = (np.array([row[n] for row in own]) for n in ("share", "covariance"))
        found.append(Shares(share, covariance, **{name: own[0][name] for name in TOTALS}))
    return found[0], found[1]


def shares_table(zones: Shares, clusters: Shares, ids: Int32s) -> pa.Table:
    """shares.parquet: what the next run's drift is measured from, a row for each zone and cluster.

    Args:
        clusters: shares of the clusters `ids`, and of noise last.
    """
    names = [str(i) for i in (*ids.tolist(), NOISE)]
    rows = [
        {"kind": kind, "name": name, "share": share, "covariance": covariance.tolist(),
         **{total: getattr(shares, total) for total in TOTALS}}
        for kind, shares, own in (("zones", zones, ZONES), ("clusters", clusters, names))
        for name, share, covariance in zip(own, shares.shares, shares.covariance, strict=True)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SHARE_COLUMNS)


def references_table(vectors: Floats, cluster_id: Int32s, areas: InAreas) -> pa.Table:
    """references.parquet: rows of each cluster that the next run is matched with."""
    vector = vector_array(vectors)
    rows = {"cluster_id": cluster_id, "vector": vector}
    return pa.table({**rows, "area": areas.area, "area_share": areas.share})


def known_areas(
    references: pa.Table, cluster: Ints, share: Doubles, manifest: dict[str, Any]
) -> KnownAreas:
    """The areas of a run; runs of before there were any have none.

    Args:
        cluster: int64[m], of each reference; share: float64[p], of each cluster.
    """
    weight = weights_of(cluster.astype(np.int32), share)
    if "area" not in references.column_names:
        return KnownAreas(InAreas.none(len(cluster)), weight, np.empty(0))
    requests = [area["requests"] for area in manifest["lineage"]["areas"]]
    rows = InAreas(*(references.column(name).to_numpy() for name in ("area", "area_share")))
    return KnownAreas(rows, weight, np.array(requests, np.float64))
