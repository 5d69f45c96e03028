"""neighbors: which rows the map is fitted on, and every row's nearest among them, once and for all.

The fit rows' neighbours are UMAP's; the other rows' neighbours place them on the finished map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.sampling import cell_fit_rows, fit_cells, stratified_rows
from discovery.artifacts.classifier import nearest_landmark
from discovery.artifacts.projection import Projection
from discovery.engines.protocol import Engine

from .project import saved_projection
from .rows import VectorsOfPart

if TYPE_CHECKING:
    from discovery.job import Job

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
    k = fitted_neighbors(job, len(rows))
    step = int(fit["search_rows"])
    fit_starts = range(0, len(rows), step)
    sampled = len(rows) < job.rows.count
    total = len(fit_starts) + (len(job.rows.names) if sampled else 0)

    todo = [start for start in fit_starts if not job.parts.has(fit_part(start))]
    done = len(fit_starts) - len(todo)
    chunks = ((start, start + step) for start in todo)
    found = job.executor.run(search_fit_rows, chunks, (job.engine, projected, k))
    for start, (indices, distances) in zip(todo, found, strict=True):
        job.parts.write_arrays(fit_part(start), indices=indices, distances=distances)
        done += 1
        job.part_done(done, total)

    if sampled:
        todo = [i for i in range(len(job.rows.names)) if not job.parts.has(rest_part(i))]
        done = total - len(todo)
        placing = min(PLACING_NEIGHBORS, len(rows))
        rests = ((job.rows.reference(i), job.rows.outside(i, rows)) for i in todo)
        found = job.executor.run(
            search_rest, rests, (job.engine, saved_projection(job), job.layout, projected, placing)
        )
        for index, (indices, distances) in zip(todo, found, strict=True):
            job.parts.write_arrays(rest_part(index), indices=indices, distances=distances)
            done += 1
            job.part_done(done, total)
    method, recall = str(fit["method"]), float(fit["recall"])
    summary = {"fit_rows": len(rows), "sampled": sampled, "k": k, "method": method,
               "recall": recall}  # fmt: skip
    says = f"{method}, {k} of each of {len(rows):,} rows"
    if recall < 1:
        says += f", {recall:.2%} of the true ones found"
    if sampled:
        says += f" (a stratified sample; {job.rows.count - len(rows):,} placed by {placing})"
    return summary, says


def fitted_neighbors(job: Job, fit_rows: int) -> int:
    """Neighbours of each fit row, itself among them."""
    return min(job.options.umap_neighbors, fit_rows - 1)


def search_fit_rows(
    engine: Engine, fit: NDArray[np.float32], k: int, chunk: tuple[int, int]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k nearest of the fit rows from the first number of the chunk to before the second."""
    start, end = chunk
    return self_first(*engine.neighbors(fit, fit[start:end], k), start)


def search_rest(
    engine: Engine,
    projection: Projection,
    layout: Layout,
    fit: NDArray[np.float32],
    k: int,
    chunk: tuple[VectorsOfPart, NDArray[np.bool_]],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k fit rows nearest to those rows of a part that the mask bool[n] has."""
    part, rest = chunk
    vectors = part.load(engine)[engine.array(rest)]
    return engine.neighbors(fit, engine.host(projection(vectors, layout)), k)


def choose_fit_rows(job: Job) -> None:
    """All rows where they are few enough, a stratified sample of them where they are not; and how
    their neighbours are looked for, which a run that is finished on another engine keeps to."""
    count, seed = job.rows.count, job.options.seed
    size = job.options.fit_rows
    if count <= size:
        rows = np.arange(count)
    else:
        centres = fit_cells(projected_rows(job, cell_fit_rows(count, seed)), size, seed)
        found = job.executor.run(
            cells_of_part,
            job.rows.references(),
            (job.engine, saved_projection(job), job.layout, centres),
        )
        cell = np.empty(count, np.uint8)
        for offset, own in zip(job.rows.offsets, found, strict=True):
            job.stop_if_asked()
            cell[offset : offset + len(own)] = own
        rows = stratified_rows(job.engine.array(cell), size, CELL_FLOOR, seed)
    projected = projected_rows(job, rows)
    search = job.engine.search(projected, fitted_neighbors(job, len(rows)), seed)
    job.parts.write_arrays(
        "fit.npz",
        rows=rows,
        projected=projected,
        search_rows=np.array(job.engine.search_rows),
        method=np.array(search.method),
        recall=np.array(search.recall),
    )


def cells_of_part(
    engine: Engine,
    projection: Projection,
    layout: Layout,
    centres: NDArray[np.float32],
    vectors: VectorsOfPart,
) -> NDArray[np.uint8]:
    """The cell of the stratified sample that each row of a part is in: uint8[n]."""
    found = nearest_landmark(projection(vectors.load(engine), layout), centres)
    return engine.host(found.row.astype(np.uint8))


def projected_rows(job: Job, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The projected vectors of some rows, by their ascending numbers: float32[len(rows), d]."""
    chunks = (
        (job.rows.reference(index), own if len(own) < job.rows.size(index) else None)
        for index in range(len(job.rows.offsets))
        if len(own := job.rows.among(index, rows))
    )
    shared = (job.engine, saved_projection(job), job.layout)
    return joined(list(job.executor.run(project_part, chunks, shared)))


def project_part(
    engine: Engine,
    projection: Projection,
    layout: Layout,
    chunk: tuple[VectorsOfPart, NDArray[np.int64] | None],
) -> NDArray[np.float32]:
    """Some rows of a part, by their numbers in it, or all of them, projected: float32[m, d]."""
    part, rows = chunk
    return engine.host(projection(part.load(engine, rows), layout))


def self_first(
    indices: NDArray[np.int32], distances: NDArray[np.float32], start: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Put each row itself first, at distance 0, as UMAP expects; among exact duplicates another may
    have come before it, or crowded it out. Changes the arrays in place."""
    own = np.arange(start, start + len(indices), dtype=indices.dtype)
    # Nearly every row is where it should be already.
    rows = np.flatnonzero(indices[:, 0] != own)
    is_own = indices[rows] == own[rows, None]
    # Where a row is not among its own neighbours, the last one makes room.
    at = np.where(is_own.any(axis=1), is_own.argmax(axis=1), indices.shape[1] - 1)
    column = np.arange(indices.shape[1])
    order = np.where(column[None] <= at[:, None], column[None] - 1, column[None])
    order[:, 0] = at
    indices[rows] = np.take_along_axis(indices[rows], order, axis=1)
    distances[rows] = np.take_along_axis(distances[rows], order, axis=1)
    indices[:, 0], distances[:, 0] = own, 0.0
    return indices, distances


def fit_part(start: int) -> str:
    return f"fit-{start:09d}.npz"


def rest_part(index: int) -> str:
    return f"rest-{index:05d}.npz"


def fit_neighbors(job: Job) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """int32[n, k] and float32[n, k] of all fit rows."""
    return joined(list(fit_chunks(job, "indices"))), joined(list(fit_chunks(job, "distances")))


def fit_distances(job: Job, neighbor: int) -> NDArray[np.float32]:
    """How far each fit row's neighbour of that number is, 0 being the row itself, or its last where
    it has not so many: float32[n]."""
    found = (distances.T for distances in fit_chunks(job, "distances"))
    return joined([columns[min(neighbor, len(columns) - 1)] for columns in found])


def fit_chunks(job: Job, name: str) -> Iterator[NDArray[Any]]:
    """The kept "indices" or "distances" of the fit rows, chunk by chunk."""
    parts = job.stage_parts("neighbors")
    for part in parts.names(".npz"):
        if part.startswith("fit-"):
            yield parts.read_arrays(part)[name]


def joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """The arrays one after another, without a copy where there is one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
