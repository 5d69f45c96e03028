"""neighbors: which rows the map is fitted on, and every row's nearest among them, once and for all.

The fit rows' neighbours are UMAP's; the other rows' neighbours place them on the finished map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engine import Engine
from ..sampling import cell_fit_rows, fit_cells, stratified_rows
from .project import saved_projection

if TYPE_CHECKING:
    from ..job import Job

# Fit rows whose neighbours are looked for at a time.
CHUNK_ROWS = 8_192
# Fewest rows of a cell in a stratified sample: enough to be seen as dense.
CELL_FLOOR = 40
# Neighbours that place a row which is not of the fit sample.
PLACING_NEIGHBORS = 5


def parameters(job: Job) -> dict[str, Any]:
    o = job.options
    return {
        "umap_sample_size": o.umap_sample_size,
        "umap_neighbors": o.umap_neighbors,
        "seed": o.seed,
    }


def run(job: Job) -> tuple[dict[str, Any], str]:
    if not job.parts.has("fit.npz"):
        choose_fit_rows(job)
    fit = job.parts.read_arrays("fit.npz")
    projected, rows = fit["projected"], fit["rows"]
    k = min(job.options.umap_neighbors, len(rows) - 1)
    fit_starts = range(0, len(rows), CHUNK_ROWS)
    sampled = len(rows) < job.rows.count
    total = len(fit_starts) + (len(job.rows.names) if sampled else 0)

    todo = [start for start in fit_starts if not job.parts.has(fit_part(start))]
    done = len(fit_starts) - len(todo)
    chunks = (projected[start : start + CHUNK_ROWS] for start in todo)
    found = job.executor.run(search, chunks, (job.engine, projected, k))
    for start, (indices, distances) in zip(todo, found, strict=True):
        indices, distances = self_first(indices, distances, start)
        job.parts.write_arrays(fit_part(start), indices=indices, distances=distances)
        done += 1
        job.part_done(done, total)

    if sampled:
        todo = [i for i in range(len(job.rows.names)) if not job.parts.has(rest_part(i))]
        done = total - len(todo)
        placing = min(PLACING_NEIGHBORS, len(rows))
        found = job.executor.run(
            search, rest_chunks(job, todo, rows), (job.engine, projected, placing)
        )
        for index, (indices, distances) in zip(todo, found, strict=True):
            job.parts.write_arrays(rest_part(index), indices=indices, distances=distances)
            done += 1
            job.part_done(done, total)
    summary = {"fit_rows": len(rows), "sampled": sampled, "k": k, "method": "exact"}
    says = f"exact, {k} of each of {len(rows):,} rows"
    if sampled:
        says += f" (a stratified sample; {job.rows.count - len(rows):,} placed by {placing})"
    return summary, says


def search(
    engine: Engine, fit: NDArray[np.float32], k: int, queries: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return engine.neighbors(fit, queries, k)


def choose_fit_rows(job: Job) -> None:
    """All rows where they are few enough, a stratified sample of them where they are not."""
    count, seed = job.rows.count, job.options.seed
    size = job.options.umap_sample_size
    if count <= size:
        rows = np.arange(count)
    else:
        projection = saved_projection(job)
        cells = fit_cells(projected_rows(job, cell_fit_rows(count, seed)), size, seed)
        cell = np.empty(count, np.uint8)
        for offset, vectors in job.rows.vectors():
            job.stop_if_asked()
            found = cells.predict(projection(vectors, job.layout))
            cell[offset : offset + len(vectors)] = found
        rows = stratified_rows(cell, size, CELL_FLOOR, seed)
    job.parts.write_arrays("fit.npz", rows=rows, projected=projected_rows(job, rows))


def projected_rows(job: Job, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The projected vectors of some rows, by their ascending numbers: float32[len(rows), d]."""
    projection = saved_projection(job)
    starts = np.searchsorted(rows, [*job.rows.offsets, job.rows.count])
    found = []
    for index, offset in enumerate(job.rows.offsets):
        own = rows[starts[index] : starts[index + 1]] - offset
        if len(own):
            found.append(projection(job.rows.part_vectors(index)[own], job.layout))
    return np.concatenate(found)


def rest_chunks(
    job: Job, indices: list[int], fit_rows: NDArray[np.int64]
) -> Iterator[NDArray[np.float32]]:
    """The projected rows of these parts that are not of the fit sample."""
    projection = saved_projection(job)
    for index in indices:
        rest = job.rows.outside(index, fit_rows)
        yield projection(job.rows.part_vectors(index)[rest], job.layout)


def self_first(
    indices: NDArray[np.int32], distances: NDArray[np.float32], start: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Put each row itself first, at distance 0, as UMAP expects; among exact duplicates another may
    have come before it, or crowded it out."""
    own = np.arange(start, start + len(indices), dtype=indices.dtype)
    is_own = indices == own[:, None]
    # Where a row is not among its own neighbours, the last one makes room.
    at = np.where(is_own.any(axis=1), is_own.argmax(axis=1), indices.shape[1] - 1)
    column = np.arange(indices.shape[1])
    order = np.where(column[None] <= at[:, None], column[None] - 1, column[None])
    order[:, 0] = at
    indices = np.take_along_axis(indices, order, axis=1)
    distances = np.take_along_axis(distances, order, axis=1)
    indices[:, 0], distances[:, 0] = own, 0.0
    return indices, distances


def fit_part(start: int) -> str:
    return f"fit-{start:09d}.npz"


def rest_part(index: int) -> str:
    return f"rest-{index:05d}.npz"


def fit_neighbors(job: Job) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """int32[n, k] and float32[n, k] of all fit rows."""
    parts = job.stage_parts("neighbors")
    chunks = [parts.read_arrays(name) for name in parts.names(".npz") if name.startswith("fit-")]
    return (
        np.concatenate([chunk["indices"] for chunk in chunks]),
        np.concatenate([chunk["distances"] for chunk in chunks]),
    )
