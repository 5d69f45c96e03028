"""embedding.parquet and clusters.parquet, from the checkpoints of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.projection import Projection, context_octave
from discovery.artifacts.schema import CLUSTER_COLUMNS, EMBEDDING_COLUMNS
from discovery.describe.clusters import Earlier, describe_clusters
from discovery.describe.exemplars import Candidates, Exemplars, candidates
from discovery.describe.profiles import Profiles
from discovery.engines.protocol import Engine
from discovery.runs.chunks import ChunkVectors, chunk_file
from pipeline.record import KEY, PHASES
from pipeline.token_text import TokenText, open_tokens, tokenizer_facts

from .cluster import labelled_rows
from .context import RunContext
from .project import saved_projection

EXEMPLARS = 5
# Vectors of a chunk, label int32[n], request int32[n], and reach float64[clusters].
LabelledChunk = tuple[ChunkVectors, Int32s, Int32s, Doubles]


def embedding_batches(context: RunContext, lookup: Int32s) -> Iterator[pa.RecordBatch]:
    """One row for each fingerprint of the run, in the order of extract, chunk by chunk.

    Another thread than the job's consumes them, so nothing here stops or pauses the run.

    Args:
        lookup: int32[clusters + 1], the id of each label; the last is that of noise, label -1.
    """
    for index, rows in enumerate(labelled_rows(context)):
        zoned = context.saved("zones", chunk_file("zones", index))
        x, y = rows.coordinates.T
        columns = {
            **{name: rows.batch.column(name) for name in (*KEY, "token_id")},
            # Every row group has the whole dictionary, whichever values a chunk has.
            "phase": encoded(phase_codes(rows.batch), PHASES),
            "x": x,
            "y": y,
            "cluster_id": lookup[rows.members.label],
            "probability": rows.members.probability,
            "second_cluster_id": lookup[rows.members.second],
            "second_probability": rows.members.second_probability,
            "zone": encoded(zoned["zone"], ZONES),
            "zone_confidence": zoned["confidence"],
        }
        yield pa.RecordBatch.from_pydict(columns, schema=EMBEDDING_COLUMNS)


def encoded(codes: NDArray[Any], names: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))


def phase_codes(batch: pa.RecordBatch) -> Ints:
    """Each row's phase as its index in `PHASES`: int64[n]."""
    phase = batch.column("phase")
    # A store's dictionary also has a word for what is no phase; no row of a run uses it.
    index_of = pc.fill_null(pc.index_in(phase.dictionary, value_set=pa.array(PHASES)), -1)
    return index_of.to_numpy().astype(np.int64)[phase.indices.to_numpy()]


def clusters_table(context: RunContext, ids: Int32s) -> pa.Table:
    """One row for each cluster: coordinates, profile, label, and exemplars."""
    profiles = profiles_of(context, len(ids))
    parent = context.parent
    earlier = {}
    born: dict[int, str] = {}
    if parent:
        words = map(Earlier, parent.labels, parent.traits)
        before = dict(zip(parent.ids.tolist(), words, strict=True))
        earlier = {i: before[own] for i, own in enumerate(ids.tolist()) if own in before}
        born = dict(zip(parent.ids.tolist(), parent.born_in, strict=True))
    described = describe_clusters(profiles, token_text(context), earlier)
    found = [profiles.cluster(index) for index in range(len(ids))]
    centroids = np.array([profile.centroid for profile in found], np.float32)
    shown = exemplars(context, centroids.reshape(-1, DIMENSIONS))
    fit = context.saved("cluster", "fit.npz")
    points = context.saved("umap", "map.npz")["points"]
    # The events of this run's clusters come first, in their order.
    events = context.summaries["lineage"]["events"]
    out: list[dict[str, Any]] = []
    for index, (cluster_id, profile, words_of) in enumerate(
        zip(ids.tolist(), found, described, strict=True)
    ):
        x, y = np.median(points[fit["label"] == index], axis=0).tolist()
        out.append(
            {
                "cluster_id": cluster_id,
                "label": words_of.label,
                "says": words_of.says,
                "zone": max(ZONES, key=profile.zones.__getitem__),
                "size": profile.size,
                "share": profile.share,
                # One of them is unknown, by the way in which clusters were found.
                "persistence": known(fit["persistence"][index]),
                "stability": known(fit["stability"][index]),
                "family": int(fit["family"][index]) if fit["family"][index] >= 0 else None,
                "centroid": centroids[index].tolist(),
                "x": x,
                "y": y,
                "traits": words_of.traits,
                "phases": profile.phases,
                "tokens": [token._asdict() for token in words_of.tokens],
                "exemplars": shown.of(index),
                "born_in": born.get(cluster_id, context.run_id),
                "parents": events[index]["parents"],
            }
        )
    return pa.Table.from_pylist(out, schema=CLUSTER_COLUMNS)


def known(figure: float) -> float | None:
    """The figure, None for NaN."""
    return None if np.isnan(figure) else float(figure)


def token_text(context: RunContext) -> TokenText:
    """Texts of tokens by the tokenizer that the run was begun with.

    Raises:
        OptionError: the file has changed since then.
    """
    path = context.options.tokenizer
    if tokenizer_facts(path) != context.started["tokenizer"]:
        raise OptionError(
            f"{path} was changed since run {context.run_id} began: give the file as it was with "
            "--tokenizer and resume"
        )
    return open_tokens(Path(path) if path else None, "")


def profiles_of(context: RunContext, clusters: int) -> Profiles:
    """The statistics that the clusters are described from, over all rows."""

    def columns(index: int) -> tuple[ChunkVectors, dict[str, NDArray[Any]]]:
        batch = context.rows.batch(index)
        return context.rows.reference(index), {
            "label": saved_labels(context, index),
            "phase": phase_codes(batch).astype(np.int8),
            "zone": context.saved("zones", chunk_file("zones", index))["zone"],
            # -1: no token.
            "token_ids": batch.column("token_id").fill_null(-1).to_numpy(),
        }

    profiles = Profiles(clusters, context.layout)
    chunks = map(columns, range(context.rows.chunks))
    for own in context.compute(profile_chunk, chunks, clusters, context.layout):
        context.stop_if_asked()
        profiles.join(own)
    return profiles


def saved_labels(context: RunContext, index: int) -> Int32s:
    """The labels of a chunk's rows, by the cluster stage."""
    return context.saved("cluster", chunk_file("rows", index))["label"]


def profile_chunk(
    engine: Engine,
    clusters: int,
    layout: Layout,
    chunk: tuple[ChunkVectors, dict[str, NDArray[Any]]],
) -> Profiles:
    """The statistics of one chunk's rows, whose other columns are given by name."""
    source, columns = chunk
    vectors = source.load(engine)
    moved = {name: engine.array(column) for name, column in columns.items()}
    profiles = Profiles(clusters, layout)
    octave, has_token = context_octave(vectors, layout), moved["token_ids"] >= 0
    profiles.add(vectors=vectors, octave=octave, has_token=has_token, **moved)
    return profiles


def exemplars(context: RunContext, centroids: Floats) -> Exemplars:
    """The rows nearest to each cluster's centroid in PCA space."""
    projection = saved_projection(context)
    found = Exemplars(len(centroids), EXEMPLARS)

    def chunk(index: int) -> LabelledChunk:
        request = context.rows.batch(index).column("request_id").dictionary_encode().indices
        label = saved_labels(context, index)
        return context.rows.reference(index), label, request.to_numpy(), found.reach.copy()

    shared = (projection, context.layout, projection(centroids, context.layout))
    chunks = map(chunk, range(context.rows.chunks))
    for index, own in enumerate(context.compute(candidates_of_chunk, chunks, *shared)):
        context.stop_if_asked()
        found.add(own, saved_labels(context, index), context.rows.batch(index))
    return found


def candidates_of_chunk(
    engine: Engine, projection: Projection, layout: Layout, targets: Floats, chunk: LabelledChunk
) -> Candidates:
    """The rows of a chunk that may be exemplars of their clusters."""
    vectors, label, request, reach = chunk
    projected = projection(vectors.load(engine), layout)
    own, requests = engine.array(label), engine.array(request)
    near = engine.array(targets), engine.array(reach)
    return candidates(projected, own, requests, *near, EXEMPLARS)
