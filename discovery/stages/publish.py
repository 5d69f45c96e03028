"""publish: the artifacts, whole and verified, and then `latest` (DESIGN.md section 6)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import StoreError
from capture_kernels.fingerprint import DIMENSIONS
from capture_kernels.zones import ZONES
from pipeline.record import PHASES

from .. import runs
from ..artifacts import (
    CLUSTERS,
    EMBEDDING,
    FILES,
    MANIFEST,
    SCHEMA_VERSION,
    landmark_schema,
    load_artifacts,
    write_parquet,
)
from ..checkpoint import file_facts, write_json
from ..describe import describe_cluster
from ..options import FREE_ON_RESUME
from .project import saved_projection

if TYPE_CHECKING:
    from ..job import Job

EXEMPLARS = 5


def parameters(job: Job) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION}


def run(job: Job) -> tuple[dict[str, Any], str]:
    ids = job.stage_parts("lineage").read_arrays("ids.npz")["ids"]
    # Noise is label -1, which picks the last element.
    lookup = np.append(ids, np.int32(-1))
    rows = job.stage_parts("cluster").read_arrays("rows.npz")
    cluster_id = lookup[rows["label"]]
    clusters = clusters_table(job, ids, rows)
    write_parquet(job.folder / "embedding.parquet", embedding_table(job, rows, cluster_id))
    write_parquet(job.folder / "clusters.parquet", clusters)
    write_parquet(job.folder / "landmarks.parquet", landmarks_table(job, lookup))
    write_parquet(job.folder / "projection.parquet", projection_table(job))
    manifest = build_manifest(job, clusters.num_rows, float((cluster_id < 0).mean()))
    for left in job.folder.glob(".*.tmp"):  # by a job that was killed while it wrote
        left.unlink()
    write_json(job.folder / MANIFEST, manifest)
    # Read back what is on disk, not what was meant to be there, before anybody is served by it.
    load_artifacts(job.folder)
    if job.options.no_gate or manifest["quality"]["gate"]["passed"]:
        runs.move_latest(job.options.output_dir, job.run_id)
        says = f"{job.folder} is latest"
    else:
        says = f"{job.folder} is kept, and latest stays where it was"
    try:
        with job.open_store() as store:
            store.record_run(noted_run(job, manifest), clusters.to_pylist())
    except StoreError as error:
        # The artifacts are out and whole: a store that is read-only does not unpublish them.
        says += f"; not noted in the store: {error}"
    return {}, says


def noted_run(job: Job, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the store keeps of a run."""
    same = ("run_id", "created_at", "engine", "model", "capture_id")
    return {
        **{name: manifest[name] for name in same},
        "layout": int(job.layout),
        "status": "published" if manifest["quality"]["gate"]["passed"] else "failed its check",
        "rows": manifest["counts"]["rows"],
        "clusters": manifest["counts"]["clusters"],
        "noise_share": manifest["quality"]["noise_share"],
        "output": str(job.folder),
        "manifest": manifest,
    }


def embedding_table(
    job: Job, rows: dict[str, NDArray[Any]], cluster_id: NDArray[np.int32]
) -> pa.Table:
    """One row for each fingerprint of the run, in the order of extract."""
    zones = job.stage_parts("zones").read_arrays("zones.npz")
    keys = pa.Table.from_batches(
        [job.rows.batch(i).drop_columns(["vector"]) for i in range(len(job.rows.names))]
    ).unify_dictionaries()
    zone_names = pa.DictionaryArray.from_arrays(
        pa.array(zones["index"].astype(np.int32)), pa.array(ZONES)
    )
    columns = {
        **{name: keys.column(name) for name in keys.schema.names},
        "x": pa.array(rows["place"][:, 0]),
        "y": pa.array(rows["place"][:, 1]),
        "cluster_id": pa.array(cluster_id),
        "probability": pa.array(rows["probability"]),
        "zone": zone_names,
        "zone_confidence": pa.array(zones["confidence"]),
    }
    return pa.table([columns[field.name] for field in EMBEDDING], schema=EMBEDDING)


def clusters_table(job: Job, ids: NDArray[np.int32], rows: dict[str, NDArray[Any]]) -> pa.Table:
    """One row for each cluster: where it lies, what it is like, and rows that show it."""
    layout = job.layout
    label, place = rows["label"], rows["place"]
    count = len(ids)
    sizes = np.bincount(label[label >= 0], minlength=count)
    sums = np.zeros((count, DIMENSIONS))
    phases = np.zeros((count, len(PHASES)))
    for offset, vectors in job.rows.vectors():
        own = label[offset : offset + len(vectors)]
        inside = own >= 0
        np.add.at(sums, own[inside], vectors[inside].astype(np.float64))
    for index, offset in enumerate(job.rows.offsets):
        phase = job.rows.batch(index).column("phase")
        codes = np.array([PHASES.index(word) for word in phase.dictionary.to_pylist()])
        own = label[offset : offset + len(phase)]
        np.add.at(phases, (own[own >= 0], codes[phase.indices.to_numpy()][own >= 0]), 1.0)
    centroids = (sums / sizes[:, None]).astype(np.float32)
    zones = job.stage_parts("zones").read_arrays("zones.npz")["index"]
    persistence = job.stage_parts("cluster").read_arrays("fit.npz")["persistence"]

    out: list[dict[str, Any]] = []
    for index in range(count):
        members = np.flatnonzero(label == index)
        zone = ZONES[np.bincount(zones[members], minlength=len(ZONES)).argmax()]
        shares = dict(zip(PHASES, (phases[index] / sizes[index]).tolist(), strict=True))
        said = describe_cluster(centroids[index], layout, zone, shares)
        middle = np.median(place[members], axis=0)
        out.append(
            {
                "cluster_id": int(ids[index]),
                "label": said.label,
                "zone": zone,
                "size": int(sizes[index]),
                "share": float(sizes[index] / len(label)),
                "persistence": float(persistence[index]),
                "centroid": centroids[index].tolist(),
                "x": float(middle[0]),
                "y": float(middle[1]),
                "traits": said.traits,
                "exemplars": exemplars(job, members, centroids[index]),
                "born_in": job.run_id,
                "parents": [],
            }
        )
    return pa.Table.from_pylist(out, schema=CLUSTERS)


def exemplars(
    job: Job, members: NDArray[np.int64], centroid: NDArray[np.float32]
) -> list[dict[str, Any]]:
    """The keys of the members nearest to the centroid, at most one of a request, nearest first."""
    projection = saved_projection(job)
    target = projection(centroid[None], job.layout)
    ends = np.searchsorted(members, [*job.rows.offsets[1:], job.rows.count])
    begin = 0
    found: list[tuple[float, int, int]] = []
    for index, end in enumerate(ends):
        local = members[begin:end] - job.rows.offsets[index]
        begin = int(end)
        apart = np.linalg.norm(
            projection(job.rows.part_vectors(index)[local], job.layout) - target, axis=1
        )
        nearest = np.argsort(apart, kind="stable")[: 20 * EXEMPLARS]
        found += [(float(apart[i]), index, int(local[i])) for i in nearest]
    chosen: dict[str, dict[str, Any]] = {}
    for _, index, row in sorted(found):
        batch = job.rows.batch(index)
        key = {n: batch.column(n)[row].as_py() for n in ("request_id", "position", "layer")}
        chosen.setdefault(key["request_id"], key)
        if len(chosen) == EXEMPLARS:
            break
    return list(chosen.values())


def landmarks_table(job: Job, lookup: NDArray[np.int32]) -> pa.Table:
    saved = job.stage_parts("cluster").read_arrays("landmarks.npz")
    dimensions = saved["projected"].shape[1]
    flat = pa.array(np.ascontiguousarray(saved["projected"]).reshape(-1))
    return pa.table(
        [
            pa.FixedSizeListArray.from_arrays(flat, dimensions),
            pa.array(saved["place"][:, 0]),
            pa.array(saved["place"][:, 1]),
            pa.array(lookup[saved["label"]]),
            pa.array(saved["probability"]),
        ],
        schema=landmark_schema(dimensions),
    )


def projection_table(job: Job) -> pa.Table:
    """One row: the arrays of `Projection`, and the distances to the nearest landmark."""
    projection = saved_projection(job)
    landmarks = job.stage_parts("cluster").read_arrays("landmarks.npz")
    quantiles = landmarks["quantiles"]
    floats = pa.list_(pa.float32())
    return pa.table(
        {
            "transform": pa.array(["sqrt"]),
            "mean": pa.array([projection.mean.reshape(-1)], floats),
            "scale": pa.array([projection.scale], floats),
            "components": pa.array([projection.components.reshape(-1)], floats),
            "explained": pa.array([projection.explained], pa.list_(pa.float64())),
            "distance_quantiles": pa.array([quantiles], pa.list_(pa.float64())),
            "reach": pa.array([float(quantiles[-1])]),
            "noise_factor": pa.array([float(landmarks["noise_factor"])]),
        }
    )


def build_manifest(job: Job, clusters: int, noise_share: float) -> dict[str, Any]:
    window, summaries = job.window, job.summaries
    given = job.options.as_json()
    free = {*FREE_ON_RESUME, "zone_rules"}
    parameters = {name: value for name, value in given.items() if name not in free}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": job.run_id,
        "created_at": job.created_at,
        "layout": job.layout.label,
        "capture_id": window["capture_id"],
        "model": window["model"],
        "engine": job.engine.name,
        "versions": job.engine.versions,
        "parameters": parameters,
        "window": {k: window[k] for k in ("start", "end")},
        "counts": {
            "rows_in_window": summaries["extract"]["rows_in_window"],
            "over_request_limit": summaries["extract"]["over_request_limit"],
            "left_out": window["left_out"],
            "rows": summaries["extract"]["rows"],
            "fit_rows": summaries["neighbors"]["fit_rows"],
            "sampled": summaries["neighbors"]["sampled"],
            "landmarks": summaries["cluster"]["landmarks"],
            "clusters": clusters,
        },
        "stages": {name: summary for name, summary in summaries.items() if name != "extract"},
        "stage_seconds": job.seconds,
        "quality": {**summaries["quality"], "noise_share": noise_share},
        "zone_rules": job.options.zone_rules.as_dict(),
        "parent_run": None,
        "files": {name: file_facts(job.folder / name) for name in FILES},
    }


def clear_checkpoint(checkpoint: Path) -> None:
    """Remove a finished run's checkpoint: renamed first, so that half of one is never resumed."""
    done = checkpoint.with_name(checkpoint.name + ".done")
    checkpoint.replace(done)
    shutil.rmtree(done)
