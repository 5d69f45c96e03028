"""publish: the artifacts, whole and verified, and then `latest` (DESIGN.md section 6)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import StoreError
from discovery.artifacts.read import open_artifacts
from discovery.artifacts.schema import (
    EMBEDDING_COLUMNS,
    MANIFEST,
    REFERENCES,
    SCHEMA_VERSION,
    SHARES,
    was_served,
)
from discovery.artifacts.tables import landmarks_table, projection_table
from discovery.artifacts.write import write_parquet
from discovery.describe.lineage_words import event_in_words
from discovery.options import FREE_ON_RESUME, RULES
from discovery.report.page import report_html
from discovery.runs import folder as runs
from discovery.runs.parent import references_table, shares_table
from pipeline.durable import write_atomically, write_json

from . import lineage
from .cluster import run_codebook
from .context import RunContext
from .tables import clusters_table, embedding_batches

# Stages whose summary stands elsewhere in the manifest.
OMITTED_SUMMARIES = {"extract", "lineage", "quality", "publish"}
REPORT = "report.html"


def parameters(context: RunContext) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    ids = context.checkpoint_of("lineage").read_arrays("ids.npz")["ids"]
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
    tables = {
        "clusters.parquet": clusters,
        **prototype_tables(context, lookup),
        **tables_for_next_run(context, ids, lookup),
    }
    for name, table in tables.items():
        files[name] = write_parquet(context.folder / name, table)
    manifest = build_manifest(context, clusters.to_pylist())
    page = report_html(manifest, clusters, context.folder / "embedding.parquet")
    files[REPORT] = write_atomically(context.folder / REPORT, lambda file: file.write(page))
    manifest["files"] = files
    for leftover in context.folder.glob(".*.tmp"):  # of a job that was killed while it wrote
        leftover.unlink()
    write_json(context.folder / MANIFEST, manifest)
    # Verify what is on disk before `latest` moves.
    open_artifacts(context.folder).verify()
    if not manifest["quality"]["gate"]["served"]:
        says = f"{context.folder} is kept, and latest stays where it was"
    elif newer := runs.newer_latest(context.options.output_dir, context.run_id):
        says = f"{context.folder} is kept; latest is {newer}, a newer run, and stays"
    else:
        runs.move_latest(context.options.output_dir, context.run_id)
        says = f"{context.folder} is latest"
    try:
        with context.open_store() as store:
            store.record_run(run_record(context, manifest), clusters.to_pylist())
    except StoreError as error:
        # The artifacts are published: a store that is read-only does not change that.
        says += f"; not noted in the store: {error}"
    return {}, says


def prototype_tables(context: RunContext, lookup: NDArray[np.int32]) -> dict[str, pa.Table]:
    """The classifier, by the names of its files."""
    codebook = run_codebook(context)
    saved = context.checkpoint_of("cluster").read_arrays("landmarks.npz")
    named = codebook._replace(labels=lookup[codebook.labels])
    return {
        "landmarks.parquet": landmarks_table(named, saved["coordinates"], saved["probability"]),
        "projection.parquet": projection_table(named, saved["quantiles"]),
    }


def tables_for_next_run(
    context: RunContext, ids: NDArray[np.int32], lookup: NDArray[np.int32]
) -> dict[str, pa.Table]:
    """What the next run of this lineage is compared with, by the names of its files."""
    checkpoint = context.checkpoint_of("lineage")
    kept = checkpoint.read_arrays("references.npz")
    references = references_table(kept["vectors"], lookup[kept["label"]])
    saved = checkpoint.read_arrays("shares.npz")
    zones, clusters = (lineage.from_arrays(kind, saved) for kind in ("zones", "clusters"))
    return {REFERENCES: references, SHARES: shares_table(zones, clusters, ids)}


def lineage_entry(context: RunContext, clusters: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's entry on where the clusters come from, with a sentence for each event."""
    found, parent = context.summaries["lineage"], context.parent
    labels = {cluster["cluster_id"]: cluster["label"] for cluster in clusters}
    before = dict(zip(parent.ids.tolist(), parent.labels, strict=True)) if parent else {}
    events = [{**event, "says": event_in_words(event, labels, before)} for event in found["events"]]
    names = {**before, **labels}
    history = [
        {"run_id": context.run_id, **event, "label": names[event["cluster_id"]]}
        for event in events
        if event["event"] != "kept"
    ]
    return {**found, "events": events, "history": [*(parent.history if parent else []), *history]}


def run_record(context: RunContext, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the store keeps of a run."""
    same = ("run_id", "created_at", "engine", "model", "capture_id")
    return {
        **{name: manifest[name] for name in same},
        "layout": int(context.layout),
        "status": "published" if was_served(manifest) else "failed its check",
        "rows": manifest["counts"]["rows"],
        "clusters": manifest["counts"]["clusters"],
        "noise_share": manifest["quality"]["noise_share"],
        "output": str(context.folder),
        "manifest": manifest,
    }


def build_manifest(context: RunContext, clusters: list[dict[str, Any]]) -> dict[str, Any]:
    window, summaries = context.window, context.summaries
    quality = summaries["quality"]
    # A run that --no-gate lets through is served, and the next run follows it.
    served = context.options.no_gate or quality["gate"]["passed"]
    given = context.options.as_json()
    free = {*FREE_ON_RESUME, *RULES}
    parameters = {name: value for name, value in given.items() if name not in free}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": context.run_id,
        "created_at": context.created_at,
        "layout": context.layout.label,
        "capture_id": window["capture_id"],
        "model": window["model"],
        "engine": context.engine.name,
        "versions": context.engine.versions,
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
        "stages": {
            name: found for name, found in summaries.items() if name not in OMITTED_SUMMARIES
        },
        "stage_seconds": context.seconds,
        "quality": {**quality, "gate": {**quality["gate"], "served": served}},
        "zone_rules": context.options.zone_rules.as_dict(),
        "parent_run": context.summaries["lineage"]["parent"],
        "lineage": lineage_entry(context, clusters),
    }
