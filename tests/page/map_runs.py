"""Runs with a map of any size, and nights that follow one another, made in milliseconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from shared import REPO

sys.path.insert(0, str(REPO / "tests" / "discovery" / "report"))

from report_inputs import blobs, clusters_of
from served_runs import publish, vectors_of

from discovery.artifacts.write import write_parquet
from discovery.runs.folder import move_latest
from pipeline.durable import file_facts


class Night(NamedTuple):
    """A published run: its id, its embedding and the rows of its clusters.parquet."""

    run_id: str
    rows: pa.Table
    clusters: list[dict[str, Any]]


def publish_map(
    output: Path, number: int = 0, *, rows: int = 600, count: int = 5, parent: Night | None = None,
    text: str | None = None, seed: int = 0, latest: bool = True, prefix: str = "chat",
) -> Night:  # fmt: skip
    """Publish a run whose map is `count` round clusters of `rows` rows, 50 of each request.

    Args:
        parent: the run before. Of its clusters the last one has died; all others were kept, and
            those of this run that it has not are new.
        text: in place of every text that comes from outside.
        prefix: of the ids of requests.
    """
    run_id = publish(output, number, latest=False)
    folder = output / run_id
    table = blobs(rows, count, seed)
    names = pc.replace_substring(table["request_id"], "chat", prefix)
    if text is not None:
        names = pa.array([text] * rows, pa.string())
    table = table.set_column(0, "request_id", names)
    known = clusters_of(table).to_pylist()
    for cluster in known:
        cluster["born_in"] = run_id
        cluster["stability"], cluster["family"] = 0.7, cluster["cluster_id"] // 2
        cluster["centroid"] = vectors_of(1, seed=cluster["cluster_id"])[0].tolist()
        cluster["exemplars"] = [
            {"request_id": name, "position": 7, "layer": -1}
            for name in table["request_id"].slice(0, 1).to_pylist()
        ]
        if text is not None:
            cluster |= {"label": text, "says": text, "traits": [text]}
            cluster["tokens"] = [{"token_id": 1, "text": text, "share": 0.1, "lift": 4.0}]
    schema = clusters_of(table).schema
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, found in (("embedding", table), ("clusters", pa.Table.from_pylist(known, schema))):
        path = folder / f"{name}.parquet"
        path.unlink()
        write_parquet(path, found)
        manifest["files"][path.name] = file_facts(path)
    manifest["counts"] |= {"rows": rows, "clusters": len(known), "rows_in_window": rows}
    noise = table["cluster_id"].to_numpy() < 0
    manifest["quality"]["noise_share"] = float(noise.mean()) if rows else 0.0
    manifest["lineage"] = _lineage(run_id, known, parent, text)
    manifest["parent_run"] = parent.run_id if parent else None
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if latest:
        move_latest(output, run_id)
    return Night(run_id, table, known)


def _lineage(
    run_id: str, known: list[dict[str, Any]], parent: Night | None, text: str | None
) -> dict[str, Any]:
    ids = [cluster["cluster_id"] for cluster in known]
    before = {one["cluster_id"]: one for one in parent.clusters} if parent else {}

    def event(name: str, cluster: int, parents: list[int]) -> dict[str, Any]:
        says = text or f"{cluster} ({name})"
        return {"event": name, "cluster_id": cluster, "parents": parents, "children": [],
                "says": says}  # fmt: skip

    events = [event("kept", c, [c]) if c in before else event("born", c, []) for c in ids]
    events += [event("died", c, []) for c in before if c not in ids]
    labels = {c["cluster_id"]: c["label"] for c in (*before.values(), *known)}
    return {
        "parent": parent.run_id if parent else None,
        "says": text or ("as it was" if parent else "the first run of its lineage"),
        "parent_clusters": [
            {name: one[name] for name in ("cluster_id", "label", "share")}
            for one in before.values()
        ],
        "links": [
            {"parent": c["cluster_id"], "child": c["cluster_id"], "share": c["share"]}
            for c in known if c["cluster_id"] in before
        ],
        "events": events,
        "history": [
            {"run_id": run_id, "label": labels[one["cluster_id"]], **one} for one in events
        ],
    }  # fmt: skip


def lonely(night: Night, count: int) -> list[dict[str, Any]]:
    """The rows of clusters that lie the farthest from any other, with their numbers."""
    places = np.column_stack([night.rows[name].to_numpy() for name in ("x", "y")])
    apart = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    alone = apart.min(axis=1)
    alone[night.rows["cluster_id"].to_numpy() < 0] = -1
    return [
        {"row": int(i), **night.rows.slice(int(i), 1).to_pylist()[0]}
        for i in np.argsort(-alone)[:count]
    ]
