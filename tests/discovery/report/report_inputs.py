"""Runs as the report sees them, made by hand: blobs on a map, and a manifest of any kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.schema import CLUSTER_COLUMNS, EMBEDDING_COLUMNS
from discovery.report.page import report_html
from pipeline.record import PHASES

PARENT, RUN = "2026-01-09T04-02-11", "2026-01-10T04-02-11"
ROWS_PER_REQUEST = 50
HOSTILE = (
    "</script ></script><script>hacked=1</script><!--<img src=x onerror=hacked=1>"
    "$data&amp;\u2028'\""
)
# Columns that the first published runs did not have.
ADDED = ("says", "phases", "tokens")


class Inputs(NamedTuple):
    manifest: dict[str, Any]
    clusters: pa.Table
    embedding: Path
    rows: pa.Table

    def html(self) -> bytes:
        return report_html(self.manifest, self.clusters, self.embedding)


def blobs(rows: int, count: int, seed: int = 0) -> pa.Table:
    """An embedding: `count` round clusters with ids 0, 1, .., and a tenth of the rows noise."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-10, 10, (max(count, 1), 2))
    cluster = rng.integers(0, count, rows) if count else np.full(rows, -1)
    noise = rng.random(rows) < 0.1
    cluster[noise] = -1
    places = centres[cluster] + rng.normal(0, 0.6, (rows, 2))
    places[cluster < 0] = rng.uniform(-12, 12, ((cluster < 0).sum(), 2))
    zone = pa.DictionaryArray.from_arrays(pa.array(cluster % len(ZONES), pa.int32()), list(ZONES))
    phase = pa.DictionaryArray.from_arrays(pa.array(np.arange(rows) % 3, pa.int32()), list(PHASES))
    columns = {
        "request_id": [f"chat-{i // ROWS_PER_REQUEST:05}" for i in range(rows)],
        "position": np.arange(rows) % ROWS_PER_REQUEST + 100,
        "layer": np.full(rows, -1),
        "phase": phase,
        "token_id": pa.array(np.arange(rows) % 700, mask=np.arange(rows) % 5 == 0),
        "x": places[:, 0],
        "y": places[:, 1],
        "cluster_id": cluster,
        "probability": rng.random(rows),
        "second_cluster_id": np.where(cluster >= 0, (cluster + 1) % max(count, 1), -1),
        "second_probability": rng.random(rows) * (cluster >= 0),
        "zone": zone,
        "zone_confidence": rng.random(rows),
    }
    return pa.table(
        [pa.array(columns[f.name]).cast(f.type) for f in EMBEDDING_COLUMNS],
        schema=EMBEDDING_COLUMNS,
    )


def clusters_of(rows: pa.Table, earlier: bool = False) -> pa.Table:
    """The clusters of an embedding; `earlier` as runs had them before they had sentences."""
    rng = np.random.default_rng(1)
    ids = rows["cluster_id"].to_numpy()
    out = []
    for cluster in np.unique(ids[ids >= 0]).tolist():
        own = ids == cluster
        x, y = (float(np.median(rows[name].to_numpy()[own])) for name in ("x", "y"))
        vector = [*rng.dirichlet([4, 3, 1]), rng.random(), *rng.dirichlet(np.ones(16))]
        row = {
            "cluster_id": cluster,
            "label": f"label {cluster}",
            "zone": ZONES[cluster % len(ZONES)],
            "size": int(own.sum()),
            "share": float(own.mean()),
            "persistence": 0.25,
            "centroid": vector,
            "x": x,
            "y": y,
            "traits": ["local_attention", "focused"],
            "exemplars": [
                {"request_id": rows["request_id"][0].as_py(), "position": 7, "layer": -1}
            ],
            "born_in": RUN if cluster % 2 else PARENT,
            "parents": [],
            "says": f"Cluster {cluster} looks back.",
            "phases": {"prompt": 0.5, "think": 0.2, "output": 0.3},
            "tokens": [{"token_id": cluster, "text": "␣the", "share": 0.1, "lift": 4.0}],
        }
        out.append(row)
    table = pa.Table.from_pylist(out, schema=CLUSTER_COLUMNS)
    return table.drop_columns(list(ADDED)) if earlier else table


def first_run(folder: Path, rows: int = 600, count: int = 5, layout: str = "log16") -> Inputs:
    """A run without a parent, with what runs had before lineage, drift and checks."""
    embedding = folder / "embedding.parquet"
    table = blobs(rows, count)
    pq.write_table(table, embedding, row_group_size=70_000)
    manifest = {
        "schema_version": 1,
        "run_id": RUN,
        "created_at": "2026-01-10T04:02:11+00:00",
        "layout": layout,
        "capture_id": "a10c7a1ed959",
        "model": "examples/demo_model",
        "engine": "cpu",
        "versions": {"numpy": "2"},
        "parameters": {"seed": 42, "hours": 24.0, "model": None},
        "window": {"start": None, "end": None},
        "counts": {
            "rows_in_window": rows + 7,
            "over_request_limit": 7,
            "left_out": [],
            "rows": rows,
            "fit_rows": rows,
            "sampled": False,
            "landmarks": 99,
            "clusters": count,
        },
        "stages": {
            "pca": {"components": 2, "explained": [0.6, 0.2]},
            "zones": {"shares": dict.fromkeys(ZONES, 0.2)},
        },
        "stage_seconds": {"pca": 1.5},
        "quality": {
            "trustworthiness": 0.97,
            "classifier_agreement": None,
            "noise_share": 0.1,
            "gate": {"passed": True, "reasons": []},
        },
        "zone_rules": {"entropy": 0.7},
        "parent_run": None,
    }
    return Inputs(manifest, clusters_of(table, earlier=True), embedding, table)


def later_run(
    folder: Path, rows: int = 600, count: int = 5, layout: str = "log16", passed: bool = True
) -> Inputs:
    """A run with a parent: 0 was kept, 1 has come off it, 2 took in 20, 3 is born, 21 has died."""
    inputs = first_run(folder, rows, count, layout)
    clusters = clusters_of(inputs.rows)
    share = dict(
        zip(*(clusters[name].to_pylist() for name in ("cluster_id", "share")), strict=True)
    )
    parents = [c for c in share if c not in (1, 3)]
    links = [(c, c) for c in parents] + [(0, 1), (20, 2)]

    def event(name: str, cluster: int, before: list[int], after: list[int]) -> dict[str, Any]:
        return {
            "event": name,
            "cluster_id": cluster,
            "parents": before,
            "children": after,
            "says": f"{cluster} (label {cluster}): {name} in words",
        }

    events = [event("kept", c, [c], []) for c in parents if c != 2]
    events += [event("split", 1, [0], []), event("merged", 2, [2, 20], [])]
    events += [event("born", 3, [], []), event("absorbed", 20, [], [2]), event("died", 21, [], [])]
    old = event("born", 0, [], [])
    drift = {
        "psi": 0.021,
        "low": 0.011,
        "high": 0.034,
        "by_chance": 0.008,
        "requests": 12,
        "shares": {"0": 0.6, "-1": 0.4},
        "parent_shares": {"0": 0.5, "-1": 0.5},
    }
    says = "the mix of zones has moved: check the traffic, or --no-gate"
    check = {"name": "zone_drift", "value": 0.021, "limit": 0.2, "low": 0.011, "high": 0.034}
    manifest = inputs.manifest | {
        "parent_run": PARENT,
        "window": {"start": "2026-01-09T04:02:11+00:00", "end": "2026-01-10T04:02:11+00:00"},
        "lineage": {
            "parent": PARENT,
            "says": "3 clusters went on",
            "parent_clusters": [
                {"cluster_id": c, "label": f"label {c}", "share": share.get(c, 0.05)}
                for c in [*parents, 20, 21]
            ],
            "links": [{"parent": p, "child": c, "share": share[c] / 2} for p, c in links],
            "events": events,
            "history": [{"run_id": PARENT, "label": "label 0", **old}],
        },
        "quality": inputs.manifest["quality"]
        | {
            "gate": {
                "passed": passed,
                "reasons": [] if passed else [says],
                "checks": [
                    {**check, "passed": passed, "says": "steady" if passed else says},
                    {"name": "clusters_found", "passed": True, "value": 5.0, "limit": 1.0,
                     "low": None, "high": None, "says": "5 clusters"},
                ],
                "rules": {"zone_drift": 0.2},
            },
            "drift": {"zones": {**drift, "shares": dict.fromkeys(ZONES, 0.2),
                                "parent_shares": dict.fromkeys(ZONES, 0.2)},
                      "clusters": drift},
        },
        "stages": {
            "pca": {"explained": [0.6], "axes": [
                {"name": "PC1", "explained": 0.6, "low": "near", "high": "far", "says": "reach"}]},
            "zones": {
                "shares": dict.fromkeys(ZONES, 0.2),
                "over_time": {"start": "2026-01-09T04:00:00+00:00", "step_seconds": 3600,
                              "counts": {zone: [3, 0, 5, 8] for zone in ZONES}},
            },
        },
    }  # fmt: skip
    return Inputs(manifest, clusters, inputs.embedding, inputs.rows)


def hostile(inputs: Inputs) -> Inputs:
    """The same run with markup for every text that comes from outside."""
    rows = inputs.rows
    requests = pa.array([HOSTILE] * rows.num_rows)
    rows = rows.set_column(rows.schema.get_field_index("request_id"), "request_id", requests)
    pq.write_table(rows, inputs.embedding)
    clusters = inputs.clusters.to_pylist()
    for cluster in clusters:
        cluster |= {"label": HOSTILE, "says": HOSTILE, "traits": [HOSTILE], "born_in": HOSTILE}
        cluster["tokens"][0]["text"] = HOSTILE
        cluster["exemplars"][0]["request_id"] = HOSTILE
    text = json.dumps(inputs.manifest)
    for word in ("examples/demo_model", "in words", "3 clusters went on", "steady", "reach"):
        assert word in text
        text = text.replace(word, json.dumps(HOSTILE)[1:-1])
    manifest = json.loads(text) | {"run_id": HOSTILE, "capture_id": HOSTILE}
    table = pa.Table.from_pylist(clusters, schema=inputs.clusters.schema)
    return Inputs(manifest, table, inputs.embedding, rows)
