"""The Parquet artifacts of a run, as tables, from the parts that its stages kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.lineage import GONE
from discovery.artifacts.projection import Projection, context_octave
from discovery.artifacts.read import CLUSTERS, EMBEDDING, landmark_schema
from discovery.describe.clusters import Earlier, describe_clusters
from discovery.describe.exemplars import Candidates, Exemplars, candidates
from discovery.describe.profiles import Profiles
from discovery.engines.protocol import Engine
from pipeline.record import PHASES
from pipeline.token_text import TokenText, open_tokens

from .cluster import labelled_rows, rows_part
from .project import saved_projection
from .rows import VectorsOfPart
from .zones import zones_part

if TYPE_CHECKING:
    from discovery.job import Job

EXEMPLARS = 5
# Vectors of a part, label int32[n], request int32[n], and reach float64[clusters].
Part = tuple[VectorsOfPart, NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]


def embedding_batches(job: Job, lookup: NDArray[np.int32]) -> Iterator[pa.RecordBatch]:
    """One row for each fingerprint of the run, in the order of extract, a part at a time.

    They are asked for by another thread than the job's, so nothing here stops or pauses it.

    Args:
        lookup: int32[clusters + 1], the id of each label; the last is that of noise, label -1.
    """
    zones = job.stage_parts("zones")
    for index, rows in enumerate(labelled_rows(job)):
        zoned = zones.read_arrays(zones_part(index))
        columns = {
            **{name: rows.batch.column(name) for name in ("request_id", "position", "layer")},
            # All words in every row group, whichever a part happens to have.
            "phase": words(phase_codes(rows.batch), PHASES),
            "token_id": rows.batch.column("token_id"),
            "x": pa.array(rows.place[:, 0]),
            "y": pa.array(rows.place[:, 1]),
            "cluster_id": pa.array(lookup[rows.label]),
            "probability": pa.array(rows.probability),
            "zone": words(zoned["zone"], ZONES),
            "zone_confidence": pa.array(zoned["confidence"]),
        }
        yield pa.record_batch([columns[field.name] for field in EMBEDDING], schema=EMBEDDING)


def words(codes: NDArray[Any], names: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))


def phase_codes(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Each row's phase as its place in `PHASES`: int64[n]."""
    phase = batch.column("phase")
    places = np.array([PHASES.index(word) for word in phase.dictionary.to_pylist()], np.int64)
    return places[phase.indices.to_numpy()]


def clusters_table(job: Job, ids: NDArray[np.int32]) -> pa.Table:
    """One row for each cluster: where it lies, what it is like, and rows that show it."""
    profiles = profiles_of(job, len(ids))
    found = [profiles.cluster(index) for index in range(len(ids))]
    said = describe_clusters(profiles, token_texts(job), earlier_words(job, ids))
    centroids = np.array([profile.centroid for profile in found], np.float32).reshape(
        -1, DIMENSIONS
    )
    shown = exemplars(job, centroids)
    fit = job.stage_parts("cluster").read_arrays("fit.npz")
    points = job.stage_parts("umap").read_arrays("map.npz")["points"]
    events = job.summaries["lineage"]["events"]
    told = {event["cluster_id"]: event for event in events if event["event"] not in GONE}
    born = dict(zip(job.parent.ids.tolist(), job.parent.born_in, strict=True)) if job.parent else {}

    out: list[dict[str, Any]] = []
    for index, (cluster_id, profile, words) in enumerate(
        zip(ids.tolist(), found, said, strict=True)
    ):
        middle = np.median(points[fit["labels"] == index], axis=0)
        out.append(
            {
                "cluster_id": cluster_id,
                "label": words.label,
                "says": words.says,
                "zone": max(ZONES, key=profile.zones.__getitem__),
                "size": profile.size,
                "share": profile.share,
                "persistence": float(fit["persistence"][index]),
                "centroid": centroids[index].tolist(),
                "x": float(middle[0]),
                "y": float(middle[1]),
                "traits": words.traits,
                "phases": profile.phases,
                "tokens": [token._asdict() for token in words.tokens],
                "exemplars": shown.of(index),
                "born_in": born.get(cluster_id, job.run_id),
                "parents": told[cluster_id]["parents"],
            }
        )
    return pa.Table.from_pylist(out, schema=CLUSTERS)


def profiles_of(job: Job, clusters: int) -> Profiles:
    """The statistics that the clusters are described from, over all rows."""
    cluster, zones = job.stage_parts("cluster"), job.stage_parts("zones")

    def columns(index: int) -> tuple[VectorsOfPart, dict[str, NDArray[Any]]]:
        batch = job.rows.batch(index)
        return job.rows.reference(index), {
            "label": cluster.read_arrays(rows_part(index))["label"],
            "phase": phase_codes(batch).astype(np.int8),
            "zone": zones.read_arrays(zones_part(index))["zone"],
            # A negative id is no token's.
            "token_ids": batch.column("token_id").fill_null(-1).to_numpy(),
        }

    profiles = Profiles(clusters, job.layout)
    chunks = map(columns, range(len(job.rows.offsets)))
    for own in job.executor.run(profile_part, chunks, (job.engine, clusters, job.layout)):
        job.stop_if_asked()
        profiles.join(own)
    return profiles


def profile_part(
    engine: Engine,
    clusters: int,
    layout: Layout,
    chunk: tuple[VectorsOfPart, dict[str, NDArray[Any]]],
) -> Profiles:
    """The statistics of one part's rows, of which the other columns are given by name."""
    part, columns = chunk
    vectors = part.load(engine)
    moved = {name: engine.array(column) for name, column in columns.items()}
    profiles = Profiles(clusters, layout)
    profiles.add(
        vectors=vectors,
        octave=context_octave(vectors, layout),
        has_token=moved["token_ids"] >= 0,
        **moved,
    )
    return profiles


def token_texts(job: Job) -> TokenText:
    asked = job.options.tokenizer
    return open_tokens(Path(asked) if asked else None, job.window["model"])


def earlier_words(job: Job, ids: NDArray[np.int32]) -> dict[int, Earlier]:
    """What the parent run said of the clusters that went on, by their index in this run."""
    if not job.parent:
        return {}
    at = {cluster_id: index for index, cluster_id in enumerate(job.parent.ids.tolist())}
    return {
        index: Earlier(job.parent.labels[at[cluster_id]], job.parent.traits[at[cluster_id]])
        for index, cluster_id in enumerate(ids.tolist())
        if cluster_id in at
    }


def exemplars(job: Job, centroids: NDArray[np.float32]) -> Exemplars:
    """The rows nearest to each cluster's centroid, in the space that neighbours are found in."""
    projection = saved_projection(job)
    found = Exemplars(len(centroids), EXEMPLARS)
    cluster = job.stage_parts("cluster")

    def chunk(index: int) -> Part:
        request = job.rows.batch(index).column("request_id").dictionary_encode().indices
        label = cluster.read_arrays(rows_part(index))["label"]
        return job.rows.reference(index), label, request.to_numpy(), found.reach.copy()

    shared = (job.engine, projection, job.layout, projection(centroids, job.layout))
    chunks = map(chunk, range(len(job.rows.offsets)))
    for index, own in enumerate(job.executor.run(candidates_of_part, chunks, shared)):
        job.stop_if_asked()
        found.add(own, cluster.read_arrays(rows_part(index))["label"], job.rows.batch(index))
    return found


def candidates_of_part(
    engine: Engine,
    projection: Projection,
    layout: Layout,
    targets: NDArray[np.float32],
    part: Part,
) -> Candidates:
    """The rows of a part that may be exemplars of their clusters, from its vectors, and each row's
    label and request, within the reach of the clusters."""
    vectors, label, request, reach = part
    return candidates(
        projection(vectors.load(engine), layout),
        engine.array(label),
        engine.array(request),
        engine.array(targets),
        engine.array(reach),
        EXEMPLARS,
    )


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
