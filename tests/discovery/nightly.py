"""Output folders as a lineage of runs leaves them, written by hand: no job is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from shared import REPO

from discovery.artifacts.schema import REQUIRED_FILES
from discovery.runs.folder import move_latest
from pipeline.durable import file_facts

GOLDEN = REPO / "tests" / "golden" / "manifest_v1.json"
# event, cluster id, parents, children: as the manifest's.
# An event, its cluster, parents and children; of one that was thinned how much it lost.
Told = tuple[str, int, list[int], list[int]] | tuple[str, int, list[int], list[int], float]


def run_id_of(day: int) -> str:
    return f"2026-01-{day:02d}T06-00-00"


class Lineage:
    """Writes one run a day into a folder; each follows the last one that passed its gate."""

    def __init__(self, output: Path, model: str = "model", first_day: int = 1) -> None:
        self.output = output
        self.model = model
        self.day = first_day
        self.parent: str | None = None
        self.clusters: dict[int, float] = {}
        self.history: list[dict[str, Any]] = []
        self.labels: dict[int, str] = {}

    def night(
        self,
        clusters: dict[int, float],
        *told: Told,
        passed: bool = True,
        labels: dict[int, str] | None = None,
        zone: float = 0.5,
    ) -> str:
        """A run with these clusters and shares; what is not told of was kept, or born at first."""
        run_id = run_id_of(self.day)
        self.day += 1
        names = {c: f"cluster number {c}" for c in clusters} | (labels or {})
        if self.parent is None:
            told = tuple(("born", c, [], []) for c in clusters)
        fields = ("event", "cluster_id", "parents", "children", "lost")
        changes = [dict(zip(fields, event, strict=False)) for event in told]
        silent = set(clusters) - {event["cluster_id"] for event in changes}
        kept = [dict(zip(fields, ("kept", c, [c], []), strict=False)) for c in sorted(silent)]
        known = self.labels | names
        history = [
            *self.history,
            *(
                {"run_id": run_id, "label": known[event["cluster_id"]], "says": "", **event}
                for event in changes
            ),
        ]
        manifest = json.loads(GOLDEN.read_text())
        manifest["run_id"], manifest["model"] = run_id, self.model
        manifest["parent_run"] = self.parent
        manifest["counts"] |= {"clusters": len(clusters), "rows": 1_000 * self.day}
        manifest["quality"]["gate"] = {"passed": passed, "reasons": [] if passed else ["bad"]}
        manifest["stages"]["zones"]["shares"] = {"diffuse": zone, "long_range": 1 - zone}
        manifest["lineage"] = {
            "parent": self.parent,
            "says": "",
            "parent_clusters": [
                {"cluster_id": c, "label": self.labels[c], "share": share}
                for c, share in self.clusters.items()
            ]
            if self.parent
            else [],
            "links": [],
            "events": [*kept, *changes],
            "history": history,
        }
        write_run(self.output / run_id, manifest, clusters, names)
        if passed:
            move_latest(self.output, run_id)
            self.parent, self.clusters, self.labels = run_id, clusters, known
            self.history = history
        return run_id


def write_run(
    folder: Path, manifest: dict[str, Any], clusters: dict[int, float], names: dict[int, str]
) -> None:
    folder.mkdir(parents=True)
    for name in REQUIRED_FILES:
        (folder / name).write_bytes(b"not read here" * 1_000)
    table = pa.table(
        {
            "cluster_id": pa.array(clusters, pa.int32()),
            "label": [names[c] for c in clusters],
            "share": pa.array(clusters.values(), pa.float64()),
        }
    )
    pq.write_table(table, folder / "clusters.parquet")
    manifest["files"] = {name: file_facts(folder / name) for name in REQUIRED_FILES}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def unfinished(output: Path, run_id: str, parent: str | None = None) -> Path:
    """A run that was stopped, as its checkpoint tells of it."""
    checkpoint = output / run_id / ".checkpoint"
    checkpoint.mkdir(parents=True)
    saved = {"run_id": run_id, "window": {}, "follows": {"parent": parent}, "options": {}}
    (checkpoint / "run.json").write_text(json.dumps(saved))
    return output / run_id
