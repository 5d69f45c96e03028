"""publish: the artifacts, whole and verified, and then `latest` (DESIGN.md section 6)."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import StoreError
from discovery.artifacts.read import (
    EMBEDDING,
    MANIFEST,
    SCHEMA_VERSION,
    load_artifacts,
    write_parquet,
)
from discovery.describe.lineage_words import event_in_words
from discovery.options import FREE_ON_RESUME, RULES
from discovery.report.page import report_html
from discovery.runs import folder as runs
from discovery.runs.parent import REFERENCES, SHARES, references_table, shares_table, was_served
from pipeline.durable import write_atomically, write_json

from . import lineage
from .tables import clusters_table, embedding_batches, landmarks_table, projection_table

if TYPE_CHECKING:
    from discovery.job import Job

# Stages whose summary has a place of its own in the manifest.
TOLD_ELSEWHERE = {"extract", "lineage", "quality", "publish"}
REPORT = "report.html"


def parameters(job: Job) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION}


def run(job: Job) -> tuple[dict[str, Any], str]:
    ids = job.stage_parts("lineage").read_arrays("ids.npz")["ids"]
    # Noise is label -1, which picks the last element.
    lookup = np.append(ids, np.int32(-1))
    embedding = pa.RecordBatchReader.from_batches(EMBEDDING, embedding_batches(job, lookup))
    # Encoding needs no interpreter lock: meanwhile the clusters are described.
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write_parquet, job.folder / "embedding.parquet", embedding)
        clusters = clusters_table(job, ids)
        files = {"embedding.parquet": writing.result()}
    tables = {
        "clusters.parquet": clusters,
        "landmarks.parquet": landmarks_table(job, lookup),
        "projection.parquet": projection_table(job),
        **handed_on(job, ids, lookup),
    }
    for name, table in tables.items():
        files[name] = write_parquet(job.folder / name, table)
    manifest = build_manifest(job, clusters.to_pylist())
    page = report_html(manifest, clusters, job.folder / "embedding.parquet")
    files[REPORT] = write_atomically(job.folder / REPORT, lambda file: file.write(page))
    manifest["files"] = files
    for left in job.folder.glob(".*.tmp"):  # by a job that was killed while it wrote
        left.unlink()
    write_json(job.folder / MANIFEST, manifest)
    # Read back what is on disk, not what was meant to be there, before anybody is served by it.
    load_artifacts(job.folder)
    if not manifest["quality"]["gate"]["served"]:
        says = f"{job.folder} is kept, and latest stays where it was"
    elif newer := runs.newer_latest(job.options.output_dir, job.run_id):
        says = f"{job.folder} is kept; latest is {newer}, a newer run, and stays"
    else:
        runs.move_latest(job.options.output_dir, job.run_id)
        says = f"{job.folder} is latest"
    try:
        with job.open_store() as store:
            store.record_run(noted_run(job, manifest), clusters.to_pylist())
    except StoreError as error:
        # The artifacts are out and whole: a store that is read-only does not unpublish them.
        says += f"; not noted in the store: {error}"
    return {}, says


def handed_on(job: Job, ids: NDArray[np.int32], lookup: NDArray[np.int32]) -> dict[str, pa.Table]:
    """What the next run of this lineage is compared with, by the names of its files."""
    parts = job.stage_parts("lineage")
    kept = parts.read_arrays("references.npz")
    references = references_table(kept["vectors"], lookup[kept["label"]])
    saved = parts.read_arrays("shares.npz")
    zones, clusters = (lineage.from_arrays(kind, saved) for kind in ("zones", "clusters"))
    return {REFERENCES: references, SHARES: shares_table(zones, clusters, ids)}


def lineage_told(job: Job, clusters: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's account of where the clusters come from, in words as well."""
    found, parent = job.summaries["lineage"], job.parent
    labels = {cluster["cluster_id"]: cluster["label"] for cluster in clusters}
    before = dict(zip(parent.ids.tolist(), parent.labels, strict=True)) if parent else {}
    told = [{**event, "says": event_in_words(event, labels, before)} for event in found["events"]]
    names = {**before, **labels}
    history = [
        {"run_id": job.run_id, **event, "label": names[event["cluster_id"]]}
        for event in told
        if event["event"] != "kept"
    ]
    return {**found, "events": told, "history": [*(parent.history if parent else []), *history]}


def noted_run(job: Job, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the store keeps of a run."""
    same = ("run_id", "created_at", "engine", "model", "capture_id")
    return {
        **{name: manifest[name] for name in same},
        "layout": int(job.layout),
        "status": "published" if was_served(manifest) else "failed its check",
        "rows": manifest["counts"]["rows"],
        "clusters": manifest["counts"]["clusters"],
        "noise_share": manifest["quality"]["noise_share"],
        "output": str(job.folder),
        "manifest": manifest,
    }


def build_manifest(job: Job, clusters: list[dict[str, Any]]) -> dict[str, Any]:
    window, summaries = job.window, job.summaries
    quality = summaries["quality"]
    # What --no-gate lets through is what the next run follows.
    served = job.options.no_gate or quality["gate"]["passed"]
    given = job.options.as_json()
    free = {*FREE_ON_RESUME, *RULES}
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
            "clusters": len(clusters),
        },
        "stages": {name: found for name, found in summaries.items() if name not in TOLD_ELSEWHERE},
        "stage_seconds": job.seconds,
        "quality": {**quality, "gate": {**quality["gate"], "served": served}},
        "zone_rules": job.options.zone_rules.as_dict(),
        "parent_run": job.summaries["lineage"]["parent"],
        "lineage": lineage_told(job, clusters),
    }


def clear_checkpoint(checkpoint: Path) -> None:
    """Remove a finished run's checkpoint: renamed first, so that half of one is never resumed."""
    done = checkpoint.with_name(checkpoint.name + ".done")
    checkpoint.replace(done)
    shutil.rmtree(done)
