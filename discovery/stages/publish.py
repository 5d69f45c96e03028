"""publish: the artifacts, whole and verified, and then `latest` (DESIGN.md section 6)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Int32s
from capture_kernels.errors import ArtifactError, NewRunNeededError, StoreError
from discovery.algorithms.known_areas import InAreas
from discovery.artifacts.read import Artifacts, open_artifacts
from discovery.artifacts.schema import (
    EMBEDDING_COLUMNS,
    MANIFEST,
    REFERENCES,
    SCHEMA_VERSION,
    SHARES,
    Manifest,
    was_served,
)
from discovery.artifacts.tables import landmarks_table, projection_table
from discovery.artifacts.write import write_parquet
from discovery.describe.clusters import event_in_words
from discovery.options import FREE_ON_RESUME, RULES
from discovery.report.page import report_html
from discovery.runs import folder as runs
from discovery.runs.history import history_to_keep
from discovery.runs.parent import references_table, shares_table
from pipeline.durable import write_atomically, write_json
from pipeline.store.open import open_store

from .cluster import run_codebook, saved_members
from .context import RunContext
from .lineage import saved_shares
from .tables import clusters_table, embedding_batches

# Stages whose summary stands elsewhere in the manifest.
OMITTED_SUMMARIES = {"extract", "lineage", "quality", "publish"}
REPORT = "report.html"
# Where the manifest's counts stand in the summaries.
COUNTS = (
    ("extract", ("rows_in_window", "late", "impossible", "over_request_limit", "left_out", "rows")),
    ("neighbors", ("fit_rows", "sampled")),
    ("cluster", ("landmarks",)),
)


def parameters(context: RunContext) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    artifacts = written_before(context) or write_artifacts(context)
    says = serve(context, artifacts.manifest)
    try:
        with open_store(context.options.db) as store:
            clusters = artifacts.table("clusters").to_pylist()
            store.record_run(run_record(context, artifacts.manifest), clusters)
    except StoreError as error:
        # The artifacts are published: a store that is read-only does not change that.
        says += f"; not noted in the store: {error}"
    return {}, says


def written_before(context: RunContext) -> Artifacts | None:
    """What this run wrote before it was stopped, if that is whole: nothing of a folder that may be
    served already is written again.

    Raises:
        NewRunNeededError: the folder is served, and damaged.
    """
    try:
        artifacts = open_artifacts(context.folder)
        artifacts.verify()
    except ArtifactError as error:
        if runs.latest_id(context.options.output_dir) == context.run_id:
            raise NewRunNeededError(str(error)) from None
        return None
    return artifacts


def write_artifacts(context: RunContext) -> Artifacts:
    """Write all artifacts, the manifest last, and verify what is on disk."""
    ids = context.saved("lineage", "ids.npz")["ids"]
    # Noise is label -1, which picks the last element.
    lookup = np.append(ids, np.int32(-1))
    embedding = pa.RecordBatchReader.from_batches(
        EMBEDDING_COLUMNS, embedding_batches(context, lookup)
    )
    # Encoding releases the GIL: meanwhile the clusters are described.
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write_parquet, context.folder / "embedding.parquet", embedding)
        clusters = clusters_table(context, ids)
        files = {"embedding.parquet": writing.result()}
    tables = {"clusters.parquet": clusters, **other_tables(context, ids, lookup)}
    for name, table in tables.items():
        files[name] = write_parquet(context.folder / name, table)
    manifest = build_manifest(context, clusters.to_pylist())
    page = report_html(manifest, clusters, context.folder / "embedding.parquet")
    files[REPORT] = write_atomically(context.folder / REPORT, lambda file: file.write(page))
    manifest["files"] = files
    for leftover in context.folder.glob(".*.tmp"):  # of a job that was killed while it wrote
        leftover.unlink()
    write_json(context.folder / MANIFEST, manifest)
    artifacts = open_artifacts(context.folder)
    artifacts.verify()
    return artifacts


def serve(context: RunContext, manifest: Manifest) -> str:
    """Move `latest` to this run if it may be served; says what came of it."""
    output, run_id = context.options.output_dir, context.run_id
    if not was_served(manifest):
        kept = "latest stays where it was" if runs.latest_id(output) else "no run is served yet"
        return f"{context.folder} is kept, and {kept}"
    if newer := runs.newer_latest(output, run_id):
        return f"{context.folder} is kept; latest is {newer}, a newer run, and stays"
    runs.move_latest(output, run_id)
    return f"{context.folder} is latest"


def other_tables(context: RunContext, ids: Int32s, lookup: Int32s) -> dict[str, pa.Table]:
    """The classifier, and what the next run of this lineage is compared with, by file name."""
    codebook = run_codebook(context).renamed(lambda of: lookup[of])
    saved = context.saved("cluster", "landmarks.npz")
    numbers = saved_members(saved)
    members = numbers._replace(label=codebook.labels, second=lookup[numbers.second])
    kept = context.saved("lineage", "references.npz")
    zones, clusters = (saved_shares(context, name) for name in ("zones", "clusters"))
    return {
        "landmarks.parquet": landmarks_table(codebook, saved["coordinates"], members),
        "projection.parquet": projection_table(codebook, saved["quantiles"]),
        REFERENCES: references_table(
            kept["vectors"], lookup[kept["label"]], InAreas(**context.saved("lineage", "areas.npz"))
        ),
        SHARES: shares_table(zones, clusters, ids),
    }


def lineage_entry(context: RunContext, clusters: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's entry on where the clusters come from, with a sentence for each event."""
    found, parent = context.summaries["lineage"], context.parent
    labels = {cluster["cluster_id"]: cluster["label"] for cluster in clusters}
    before = dict(zip(parent.ids.tolist(), parent.labels, strict=True)) if parent else {}
    events = [{**event, "says": event_in_words(event, labels, before)} for event in found["events"]]
    names = {**before, **labels}
    own = [
        {"run_id": context.run_id, **event, "label": names[event["cluster_id"]]}
        for event in events
        if event["event"] != "kept"
    ]
    history = history_to_keep(parent.history if parent else [], own)
    return {**found, "events": events, "history": history}


def run_record(context: RunContext, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the store keeps of a run."""
    same = ("run_id", "created_at", "engine", "model", "capture_id")
    return {
        **{name: manifest[name] for name in same},
        **{name: manifest["counts"][name] for name in ("rows", "clusters")},
        "layout": int(context.layout),
        "status": "published" if was_served(manifest) else "failed its check",
        "noise_share": manifest["quality"]["noise_share"],
        "output": str(context.folder),
        "manifest": manifest,
    }


def build_manifest(context: RunContext, clusters: list[dict[str, Any]]) -> dict[str, Any]:
    window, summaries = context.window, context.summaries
    quality = summaries["quality"]
    # A run that --no-gate lets through is served, and the next run follows it.
    served = context.options.no_gate or quality["gate"]["passed"]
    # Whether the gate was overridden is in the gate's own entry, as `served`.
    left_out = {*FREE_ON_RESUME, *RULES, "no_gate"}
    given = asdict(context.options).items()
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": context.run_id,
        "created_at": context.started["created_at"],
        "layout": context.layout.label,
        "capture_id": window["capture_id"],
        "model": window["model"],
        "engine": context.engine.name,
        "versions": context.engine.versions,
        "parameters": {
            **{name: value for name, value in given if name not in left_out},
            # The number, where none was given: readers of version 1 rely on one.
            "min_samples": summaries["cluster"]["min_samples"],
        },
        "window": {k: window[k] for k in ("start", "end", "snapshot", "late")},
        "counts": {
            **{name: summaries[stage][name] for stage, names in COUNTS for name in names},
            "clusters": len(clusters),
        },
        "stages": {k: found for k, found in summaries.items() if k not in OMITTED_SUMMARIES},
        "stage_seconds": context.seconds,
        "quality": {**quality, "gate": {**quality["gate"], "served": served}},
        "zone_rules": asdict(context.options.zone_rules),
        "parent_run": context.follows["parent"],
        "lineage": lineage_entry(context, clusters),
    }
