"""One side of a comparison: which rows it is, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from capture_kernels.arrays import Doubles, Floats
from capture_kernels.errors import ArtifactError
from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS, Layout
from capture_kernels.fingerprint.zones import ZoneRules
from discovery.algorithms.shares import Shares
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.projection import context_octave
from discovery.artifacts.read import Artifacts
from discovery.runs.parent import index_of
from pipeline import record
from pipeline.hashing import Hashes, request_hashes
from pipeline.record import PHASES
from sidecar.watch.drift import Baseline, read_baseline

from .means import Means, means_of
from .names import Name
from .stored import BATCH_ROWS, MOST_ROWS, Rows
from .sums import ENTROPY, Sums


class Run(NamedTuple):
    """A run that classifies rows: its classifier and its shares."""

    classifier: Classifier
    baseline: Baseline
    artifacts: Artifacts

    @property
    def identity(self) -> tuple[str, int, str]:
        layout = int(self.classifier.layout)
        return str(self.artifacts.manifest["model"]), layout, self.classifier.capture_id


def opened_run(artifacts: Artifacts) -> Run:
    """ArtifactError: a file of it is missing or damaged."""
    return Run(Classifier(artifacts), read_baseline(artifacts), artifacts)


@dataclass
class Side:
    """What is known of one side.

    Args:
        about: as the answer has it. layout: of its vectors.
        histogram: shares of the bins; None in the layered layout. bands: mean masses float64[3].
        entropy: the mean as the shares e and 1 - e.
        clusters: shares by `ids`, noise last; None if no run names them.
        axes: mean coordinates on the axes of the run's PCA; None without a run.
        phases: shares of PHASES, and mean entropy in each float64[3]; None if it is not known.
        notes: what limits it.
    """

    about: dict[str, Any]
    layout: Layout
    zones: Shares
    bands: Doubles
    entropy: Shares
    histogram: Shares | None = None
    clusters: Shares | None = None
    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    labels: dict[int, str] = field(default_factory=dict)
    axes: Means | None = None
    phases: tuple[Shares, Doubles] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_one_request(self) -> bool:
        return bool(self.zones.requests <= 1)


def side_of_run(run: Run, name: Name) -> Side:
    """A run as a side: what its artifacts say. It has no vectors but those of its clusters."""
    artifacts, baseline = run.artifacts, run.baseline
    table = artifacts.table("clusters", ["size", "centroid"])
    sizes = table.column("size").to_numpy().astype(np.float64)
    centroids = np.array(table.column("centroid").to_pylist(), np.float32).reshape(-1, 20)
    notes = ["a run's histogram, bands and entropy are those of its clusters"]
    if not sizes.sum():
        raise HTTPException(400, f"run {artifacts.run_id} has no clusters: it cannot be compared")
    mean = np.average(centroids.astype(np.float64), axis=0, weights=sizes)
    manifest, layout = artifacts.manifest, run.classifier.layout

    def known_as(values: Doubles) -> Shares:
        # As precise as the run's other shares.
        spread = (np.diag(values) - np.outer(values, values)) / baseline.zones.effective_rows
        return replace(baseline.zones, shares=values, covariance=spread)

    side = Side(
        about={
            "kind": name.kind, "id": artifacts.run_id, "name": f"run {artifacts.run_id}",
            **{key: manifest[key] for key in ("model", "capture_id", "layout")},
            "requests": baseline.zones.requests, "rows": manifest["counts"]["rows"],
            "used_rows": manifest["counts"]["rows"], "is_whole": True,
            "first_at": None, "last_at": None, "comparable": True,
        },
        layout=layout, zones=baseline.zones, bands=mean[:3],
        entropy=known_as(np.array([mean[ENTROPY], 1.0 - mean[ENTROPY]])),
        clusters=baseline.clusters, ids=baseline.ids, labels=run.classifier.labels,
        axes=_means_of_run(run), notes=notes,
    )  # fmt: skip
    if layout is Layout.LOG16:
        histogram = mean[4:] / mean[4:].sum()
        side.histogram = known_as(histogram)
    return side


def _means_of_run(run: Run) -> Means:
    """A run's own mean is 0 on each axis, as they are centred on its rows. How far these spread is
    that of the rows which it kept of each cluster; of a run without them it is not known."""
    projection, layout = run.classifier.codebook.projection, run.classifier.layout
    zeros = np.zeros(projection.components.shape[1])
    unknown = Means(zeros, zeros * np.nan, zeros * np.nan, 1.0, np.full(HIST_BINS, 1 / HIST_BINS))
    try:
        kept = run.artifacts.table("references", ["cluster_id", "vector"])
    except ArtifactError:
        return unknown
    flat = kept.column("vector").combine_chunks().flatten().to_numpy()
    vectors: Floats = np.asarray(flat, np.float32).reshape(-1, DIMENSIONS)
    index = run.baseline.cluster_index(kept.column("cluster_id").to_numpy())
    shares = run.baseline.clusters.shares
    of_cluster = np.bincount(index, minlength=len(shares))
    weight = (shares / np.maximum(of_cluster, 1))[index]
    if not weight.sum():
        return unknown
    points = projection(vectors, layout).astype(np.float64)
    centre = np.average(points, axis=0, weights=weight)
    variance = np.average(np.square(points - centre), axis=0, weights=weight)
    counts = np.bincount(context_octave(vectors, layout), weight, HIST_BINS)
    # One more row that is spread evenly: an octave of which none was kept may still have some.
    octaves = (len(vectors) * counts / weight.sum() + 1.0 / HIST_BINS) / (len(vectors) + 1)
    # As many independent rows as requests at most.
    known_by = min(run.baseline.zones.effective_rows, float(run.baseline.zones.requests))
    precision = variance / known_by if known_by > 1 else variance * np.nan
    return Means(zeros, precision, np.sqrt(variance), max(known_by - 1.0, 1.0), octaves)


def side_of_rows(rows: Rows, run: Run | None) -> Side:
    """Rows read, classified and added up; at most MOST_ROWS are looked at.

    Args:
        run: names clusters and axes, if the rows are of its model, layout and capture.
    """
    model, layout_number, capture_id = rows.group
    layout = Layout(layout_number)
    if run is not None and (model, layout_number, capture_id) != run.identity:
        run = None
    sums = Sums(len(run.baseline.ids) if run else None, _axes(run))
    looked, left_out, is_whole = 0, 0, True
    times: list[datetime] = []
    for batch in rows.batches:
        if looked >= MOST_ROWS:
            is_whole = False
            break
        looked += batch.num_rows
        vectors = record.vectors(batch) if batch.num_rows else np.empty((0, 20), np.float32)
        possible = (np.isfinite(vectors) & (vectors >= 0)).all(axis=1)
        left_out += int(len(vectors) - possible.sum())
        if not possible.any():
            continue
        batch, vectors = batch.filter(pa.array(possible)), vectors[possible]
        phases = pc.index_in(batch.column("phase").cast(pa.string()), pa.array(PHASES))
        add_classified(
            sums, run, layout, request_hashes(batch), vectors, phases.fill_null(0).to_numpy()
        )
        ends = pc.min_max(batch.column("captured_at")).as_py()
        times += [at for at in ends.values() if at is not None]
        times = [min(times), max(times)] if times else []
    if not sums.rows:
        raise HTTPException(404, f"the store has no rows of {rows.shown}")
    notes = list(rows.notes)
    if left_out:
        notes.append(
            f"{left_out:,} rows of {rows.shown} that no attention row can have are left out"
        )
    if not is_whole:
        notes.append(f"only the first {MOST_ROWS:,} rows of {rows.shown} are read")
    about = {
        "kind": rows.name.kind, "id": rows.name.id, "name": rows.shown, "model": model,
        "capture_id": capture_id, "layout": layout.label, "requests": sums.requests,
        "rows": looked, "used_rows": sums.rows, "is_whole": is_whole,
        "first_at": times[0] if times else None, "last_at": times[-1] if times else None,
        "comparable": run is not None,
    }  # fmt: skip
    return _side_of_sums(sums, layout, run, about, notes)


def _axes(run: Run | None) -> int:
    return int(run.classifier.codebook.projection.components.shape[1]) if run else 0


def add_classified(
    sums: Sums, run: Run | None, layout: Layout, requests: Hashes, vectors: Floats,
    phases: NDArray[np.integer[Any]],
) -> None:  # fmt: skip
    """Add rows with their zone and, of a run, their cluster and coordinates."""
    if run is None:
        zone = ZoneRules().classify(vectors, layout).zone
        sums.add(requests, vectors, zone, phases)
        return
    found = run.classifier.classify(vectors)
    projected = run.classifier.codebook.projection(vectors, layout)
    cluster = index_of(run.baseline.ids, found.cluster_id) % (len(run.baseline.ids) + 1)
    octave = context_octave(vectors, layout)
    sums.add(requests, vectors, found.zone, phases, cluster, (projected, octave))


def _side_of_sums(
    sums: Sums, layout: Layout, run: Run | None, about: dict[str, Any], notes: list[str]
) -> Side:
    side = Side(
        about, layout, zones=sums.shares("zones"), bands=sums.mean("vector")[:3],
        entropy=sums.entropy(), notes=notes,
    )  # fmt: skip
    if layout is Layout.LOG16:
        side.histogram = sums.shares_of_vector(slice(4, 4 + HIST_BINS))
    entropies = sums.weighted("phase_entropy").sum(axis=0)
    counts = sums.weighted("phases").sum(axis=0)
    with np.errstate(invalid="ignore"):
        side.phases = sums.shares("phases"), entropies / counts
    if run is not None:
        side.clusters, side.ids = sums.shares("clusters"), run.baseline.ids
        side.labels = run.classifier.labels
        names = ("axes", "axes_squared", "rows", "octaves")
        sums_of, squares, counts, octaves = (sums.weighted(name) for name in names)
        side.axes = means_of(sums_of, squares, counts[:, 0], octaves)
    return side


def side_of_vectors(
    shown: str, model: str | None, layout: Layout, capture_id: str | None, vectors: Floats,
    phases: NDArray[np.integer[Any]], run: Run | None,
) -> Side:  # fmt: skip
    """The rows of a trace, as those of one request.

    Args:
        vectors: float32[n, 20], finite and not negative, n >= 1.
        capture_id: None if it is not known: then it is taken for the run's, which a note says.
    """
    notes = []
    if run is not None and (layout, capture_id or run.identity[2]) != run.identity[1:]:
        run = None
    elif run is not None and capture_id is None:
        notes.append(f"{shown} does not say how it was captured: taken for a capture of the run's")
    sums = Sums(len(run.baseline.ids) if run else None, _axes(run))
    for begin in range(0, len(vectors), BATCH_ROWS):
        some = slice(begin, begin + BATCH_ROWS)
        requests = np.zeros(len(vectors[some]), np.uint64)
        add_classified(sums, run, layout, requests, vectors[some], phases[some])
    about = {
        "kind": "trace", "id": None, "name": shown, "model": model, "capture_id": capture_id,
        "layout": layout.label, "requests": 1, "rows": len(vectors), "used_rows": len(vectors),
        "is_whole": True, "first_at": None, "last_at": None, "comparable": run is not None,
    }  # fmt: skip
    return _side_of_sums(sums, layout, run, about, notes)
