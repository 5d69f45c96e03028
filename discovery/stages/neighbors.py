"""neighbors: which rows the map is fitted on, and every row's nearest among them.

The fit rows' neighbours are UMAP's; the other rows' neighbours place them on the finished map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Floats, Int32s, Ints
from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.sampling import cell_fit_rows, fit_cells, stratified_rows
from discovery.artifacts.projection import Projection
from discovery.artifacts.prototypes import nearest_prototype
from discovery.engines.protocol import Engine
from discovery.runs.checkpoint import Arrays
from discovery.runs.chunks import ChunkVectors, chunk_file

from .context import RunContext
from .project import saved_projection

# Fewest rows of a cell in a stratified sample: enough to be seen as dense.
CELL_FLOOR = 40
# Neighbours that give a row outside of the fit sample its coordinates and label.
PLACING_NEIGHBORS = 5


def parameters(context: RunContext) -> dict[str, Any]:
    return context.options.some("umap_sample_size", "umap_neighbors", "seed")


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    if not context.checkpoint.has("fit.npz"):
        choose_fit_rows(context)
    fit = context.checkpoint.read_arrays("fit.npz")
    projected, rows = fit["projected"], fit["rows"]
    k, placing = fitted_neighbors(context, len(rows)), min(PLACING_NEIGHBORS, len(rows))
    step = int(fit["search_rows"])
    starts = range(0, len(rows), step)
    files = [f"fit-{start:09d}.npz" for start in starts]
    sampled = len(rows) < context.rows.count
    if sampled:
        files += [chunk_file("rest", index) for index in range(context.rows.chunks)]

    def search(todo: list[int]) -> Iterator[Arrays]:
        own = ((starts[i], starts[i] + step) for i in todo if i < len(starts))
        yield from context.compute(search_fit_rows, own, projected, k)
        chunks = [i - len(starts) for i in todo if i >= len(starts)]
        rests = (context.rows.reference(i, context.rows.outside(i, rows)) for i in chunks)
        shared = (saved_projection(context), context.layout, projected, placing)
        yield from context.compute(search_rest, rests, *shared)

    context.compute_missing(files, search)
    method, recall = str(fit["method"]), float(fit["recall"])
    summary = {"fit_rows": len(rows), "sampled": sampled, "k": k, "method": method,
               "recall": recall}  # fmt: skip
    says = f"{method}, {k} of each of {len(rows):,} rows"
    if recall < 1:
        says += f", {recall:.2%} of the true ones found"
    if sampled:
        says += f" (a stratified sample; {context.rows.count - len(rows):,} placed by {placing})"
    return summary, says


def fitted_neighbors(context: RunContext, fit_rows: int) -> int:
    """Neighbours of each fit row, itself among them."""
    return min(context.options.umap_neighbors, fit_rows - 1)


def search_fit_rows(engine: Engine, fit: Floats, k: int, chunk: tuple[int, int]) -> Arrays:
    """indices int32[m, k] and distances float32[m, k] of the k nearest of the m fit rows from the
    first number of the chunk to before the second."""
    start, end = chunk
    indices, distances = self_first(*engine.neighbors(fit, fit[start:end], k), start)
    return {"indices": indices, "distances": distances}


def search_rest(
    engine: Engine, projection: Projection, layout: Layout, fit: Floats, k: int, rest: ChunkVectors
) -> Arrays:
    """The k fit rows nearest to the other rows of a chunk."""
    queries = projection(rest.load(engine), layout)
    indices, distances = engine.neighbors(fit, engine.host(queries), k)
    return {"indices": indices, "distances": distances}


def choose_fit_rows(context: RunContext) -> None:
    """Save which rows are fitted, all or a stratified sample, and how neighbours are found, so that
    a run finished on another engine does the same."""
    count, seed = context.rows.count, context.options.seed
    size = context.options.fit_rows
    if count <= size:
        rows = np.arange(count)
    else:
        centres = fit_cells(projected_rows(context, cell_fit_rows(count, seed)), size, seed)
        shared = (saved_projection(context), context.layout, centres)
        found = context.compute(cells_of_chunk, context.rows.references(), *shared)
        cell = np.empty(count, np.uint8)
        for offset, own in zip(context.rows.offsets, found, strict=True):
            context.stop_if_asked()
            cell[offset : offset + len(own)] = own
        rows = stratified_rows(context.engine.array(cell), size, CELL_FLOOR, seed)
    projected = projected_rows(context, rows)
    search = context.engine.search(projected, fitted_neighbors(context, len(rows)), seed)
    context.checkpoint.write_arrays(
        "fit.npz",
        rows=rows,
        projected=projected,
        search_rows=np.array(context.engine.search_rows),
        method=np.array(search.method),
        recall=np.array(search.recall),
    )


def cells_of_chunk(
    engine: Engine, projection: Projection, layout: Layout, centres: Floats, vectors: ChunkVectors
) -> NDArray[np.uint8]:
    """The cell of the stratified sample that each row of a chunk is in: uint8[n]."""
    found = nearest_prototype(projection(vectors.load(engine), layout), centres)
    return engine.host(found.row.astype(np.uint8))


def projected_rows(context: RunContext, rows: Ints) -> Floats:
    """The projected vectors of some rows, by their ascending numbers: float32[len(rows), d]."""
    chosen, shared = context.rows.chosen(rows), (saved_projection(context), context.layout)
    return joined(context.compute(project_chunk, chosen, *shared))


def project_chunk(
    engine: Engine, projection: Projection, layout: Layout, vectors: ChunkVectors
) -> Floats:
    """Rows of a chunk, projected: float32[m, d]."""
    return engine.host(projection(vectors.load(engine), layout))


def self_first(indices: Int32s, distances: Floats, start: int) -> tuple[Int32s, Floats]:
    """Put each row itself first, at distance 0, as UMAP expects; among exact duplicates another may
    have come before it, or crowded it out. Changes the arrays in place."""
    own = np.arange(start, start + len(indices), dtype=indices.dtype)
    # Nearly every row is where it should be already.
    rows = np.flatnonzero(indices[:, 0] != own)
    is_own = indices[rows] == own[rows, None]
    # If a row is not among its own neighbours, the last one makes room.
    at = np.where(is_own.any(axis=1), is_own.argmax(axis=1), indices.shape[1] - 1)
    column = np.arange(indices.shape[1])
    order = np.where(column[None] <= at[:, None], column[None] - 1, column[None])
    order[:, 0] = at
    indices[rows] = np.take_along_axis(indices[rows], order, axis=1)
    distances[rows] = np.take_along_axis(distances[rows], order, axis=1)
    indices[:, 0], distances[:, 0] = own, 0.0
    return indices, distances


def fit_neighbors(context: RunContext) -> tuple[Int32s, Floats]:
    """int32[n, k] and float32[n, k] of all fit rows."""
    return joined(fit_chunks(context, "indices")), joined(fit_chunks(context, "distances"))


def fit_distances(context: RunContext, neighbor: int) -> Floats:
    """Distance of each fit row to this neighbour (0: itself), or to its last one: float32[n]."""
    found = (distances.T for distances in fit_chunks(context, "distances"))
    return joined(columns[min(neighbor, len(columns) - 1)] for columns in found)


def fit_chunks(context: RunContext, name: str) -> Iterator[NDArray[Any]]:
    """The saved "indices" or "distances" of the fit rows, chunk by chunk."""
    saved = context.checkpoint_of("neighbors")
    return (saved.read_arrays(f, name)[name] for f in saved.names(".npz") if f.startswith("fit-"))


def joined(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """The arrays one after another, without a copy if there is only one."""
    found = list(arrays)
    return found[0] if len(found) == 1 else np.concatenate(found)
