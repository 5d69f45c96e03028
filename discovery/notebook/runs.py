"""Runs, their lineage and stores as data frames."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from capture_kernels.arrays import Floats
from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import Artifacts, open_artifacts
from discovery.artifacts.schema import NOISE
from discovery.commands.history import changes_between, own_clusters, runs_in, story_of
from discovery.engines.rapids import why_not
from pipeline import record
from pipeline.store.open import open_store

# What identifies a row of a store, a map and a run.
KEY = ["request_id", "position", "layer"]


def frame(table: pa.Table | pd.DataFrame, *, gpu: bool | None = None) -> Any:
    """A table as a data frame: cuDF's where a GPU answers, else pandas'.

    Args:
        gpu: True or False to choose.
    """
    if why_not() is None if gpu is None else gpu:
        import cudf

        return cudf.from_pandas(table) if isinstance(table, pd.DataFrame) else (
            cudf.DataFrame.from_arrow(table)
        )  # fmt: skip
    return table if isinstance(table, pd.DataFrame) else table.to_pandas()


def on_host(rows: Any) -> pd.DataFrame:
    """A data frame of either library as pandas'."""
    return rows if isinstance(rows, pd.DataFrame) else rows.to_pandas()


class Run:
    """A published run as tables.

    Args:
        folder: a run folder, or an output folder, whose latest run is meant.

    Raises:
        ArtifactError: there is no run, or it is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.artifacts: Artifacts = open_artifacts(Path(folder))
        self.manifest = self.artifacts.manifest
        self.run_id = self.artifacts.run_id
        self.layout = Layout.parse(self.manifest["layout"])

    def map(self, *, gpu: bool | None = None) -> Any:
        """The map, one row a fingerprint: a frame of `embedding.parquet` (docs/formats.md)."""
        return frame(plain(self.artifacts.table("embedding")), gpu=gpu)

    def clusters(self) -> pd.DataFrame:
        """The clusters by falling size: a frame of `clusters.parquet`, without its centroids."""
        found = self.artifacts.table("clusters").drop_columns(["centroid"]).to_pandas()
        return found.sort_values(["size", "cluster_id"], ascending=[False, True], ignore_index=True)

    def centroids(self) -> tuple[Floats, list[str]]:
        """Mean vectors of the clusters by falling size, float32[c, 20], and their labels."""
        table = self.artifacts.table("clusters", ["cluster_id", "label", "size", "centroid"])
        table = table.sort_by([("size", "descending"), ("cluster_id", "ascending")])
        vectors = np.array(table.column("centroid").to_pylist(), np.float32)
        return vectors.reshape(-1, DIMENSIONS), table.column("label").to_pylist()

    def checks(self) -> pd.DataFrame:
        """The gate's checks: name, value, limit, passed, says."""
        checks = self.manifest["quality"]["gate"]["checks"]
        return pd.DataFrame(checks)[["name", "value", "limit", "passed", "says"]]

    def seconds(self) -> pd.Series[float]:
        """Seconds of each stage, in their order."""
        stages = pd.Series(self.manifest["stage_seconds"], name="seconds", dtype=float)
        known = [name for name in STAGE_ORDER if name in stages.index]
        return stages[known + [name for name in stages.index if name not in known]]

    def axes(self) -> pd.DataFrame:
        """The axes of PCA space: name, explained (a share of the variance), low, high in words."""
        return pd.DataFrame(self.manifest["stages"]["pca"]["axes"])[
            ["name", "explained", "low", "high"]
        ]

    def projected(self, rows: pd.DataFrame) -> Floats:
        """Rows of `read_rows` in PCA space: float32[n, d]."""
        vectors = rows[list(self.layout.columns)].to_numpy(np.float32)
        return self.classifier.codebook.projection(vectors, self.layout)

    @cached_property
    def classifier(self) -> Classifier:
        """The classifier that the sidecar would serve."""
        return Classifier(self.artifacts)


STAGE_ORDER = (
    "extract", "standardize", "pca", "neighbors", "umap", "cluster", "zones", "lineage", "quality",
    "publish",
)  # fmt: skip


def plain(table: pa.Table) -> pa.Table:
    """A table with text in the place of dictionaries, which cuDF and pandas would show as
    categories."""
    fields = [
        field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def stored_table(store: str | Path) -> pa.Table:
    """All rows of a store, in the record's schema.

    Raises:
        StoreError: the store cannot be read, or holds no rows.
    """
    with open_store(store, read_only=True) as opened:
        batches = list(opened.scan())
    if not batches:
        raise StoreError(f"{store} holds no rows: import or capture some first")
    return pa.Table.from_batches(batches)


def read_rows(store: str | Path | pa.Table) -> pd.DataFrame:
    """The rows of a store, with the 20 numbers of the vector as columns of their own.

    Args:
        store: or a table in the record's schema.

    Raises:
        StoreError: as of `stored_table`, or its rows are of several layouts.
    """
    table = store if isinstance(store, pa.Table) else stored_table(store)
    layouts = table.column("layout").unique().to_pylist()
    if len(layouts) != 1:
        raise StoreError("rows of several layouts mean different things: choose one of them")
    rows = plain(table.drop_columns(["layout", "vector"])).to_pandas()
    numbers = np.concatenate([record.vectors(batch) for batch in table.to_batches()])
    names = list(Layout(layouts[0]).columns)
    return pd.concat([rows, pd.DataFrame(numbers, columns=names)], axis=1)


def with_task(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `task`: of the sample, what stands before the number in a request's
    id."""
    return rows.assign(task=rows["request_id"].str.rsplit("-", n=1).str[0])


def same_rows(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Two frames joined on the rows that are in both, with suffixes _a and _b."""
    return first.merge(second, on=KEY, suffixes=("_a", "_b"), validate="one_to_one")


def lineage(output: str | Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The clusters of every run of an output folder, and what happened to them.

    Returns:
        run_id, cluster_id, label, share (of the run's rows, in [0, 1]; noise is -1), oldest run
        first; and the events: run_id, event, cluster_id, parents, children, label.

    Raises:
        ArtifactError: there is no run, or one is damaged.
    """
    folder = Path(output)
    readable, _ = runs_in(folder)
    shares: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for run_id, manifest in readable.items():
        own = own_clusters(folder, manifest)
        for cluster, (label, share) in own.items():
            shares.append({"run_id": run_id, "cluster_id": cluster, "label": label, "share": share})
        noise = 1.0 - sum(share for _, share in own.values())
        shares.append({"run_id": run_id, "cluster_id": NOISE, "label": "noise", "share": noise})
        for event in (manifest.get("lineage") or {}).get("events", []):
            label = own[event["cluster_id"]].label if event["cluster_id"] in own else ""
            events.append({"run_id": run_id, "label": label, **event})
    names = ["run_id", "event", "cluster_id", "parents", "children", "label"]
    return pd.DataFrame(shares), pd.DataFrame(events, columns=names)


def changes(output: str | Path, first: str, second: str = "latest") -> list[str]:
    """What changed from one run to a later one of its lineage, in sentences (`attn runs diff`).

    Raises:
        ArtifactError: there is no such run, or they are not of one lineage.
    """
    return changes_between(Path(output), first, second)[1]


def life(output: str | Path, cluster: int, run: str = "latest") -> list[str]:
    """The life of a cluster up to a run, in sentences (`attn runs lineage`).

    Raises:
        ArtifactError: there is no such run, or its lineage never had the cluster.
    """
    return story_of(Path(output), cluster, run)[1]
