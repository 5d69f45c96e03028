"""The points of the report's map: an even sample of the embedding, as columns a page can hold."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Ints
from discovery.algorithms.threads import usable_cpus
from discovery.artifacts.memberships import BETWEEN

# Points that a browser can draw at every frame.
MOST_POINTS = 100_000
BATCH_ROWS = 65_536
# Row groups that are read at once.
READERS = 8
COLUMNS = ["request_id", "position", "layer", "phase", "token_id", "x", "y", "cluster_id",
           "probability", "second_cluster_id", "second_probability", "zone"]  # fmt: skip
NO_TOKEN = -1
# Coordinates are 16-bit steps between the two ends of their axis.
STEPS = 65_535
# The initial view leaves out at most this share of the points at each edge: a few points far from
# all others would shrink the rest to a dot.
OUTLIERS = 0.002


def map_points(embedding: Path, cluster_ids: list[int]) -> dict[str, Any]:
    """At most 100,000 rows of an embedding.parquet, evenly over the file, as JSON values.

    The rows are divided into as many intervals of equal length as there will be points, and one row
    of each is drawn with a fixed seed: the same points for the same file, and no aliasing with the
    order of requests. Row groups are read in parallel, each in batches of 65,536 rows.

    Args:
        embedding: path of a file in the schema `EMBEDDING`, of any number of rows.
        cluster_ids: the clusters of the run; noise is -1 in the file.

    Returns:
        shown and total (rows), extent and view ([x0, x1, y0, y1] of all points and of the initial
        view), between (`memberships.BETWEEN`), words by code (requests, clusters, zones, phases)
        and the columns in base64, little endian: x, y uint16 within the extent; request uint32,
        cluster and second (cluster) uint16, zone and phase uint8 codes; position and token int32
        (-1 without one); layer int16; probability and second_probability uint8 (255 is 1).
    """
    metadata = pq.read_metadata(embedding)
    total = metadata.num_rows
    table = _take(embedding, metadata, even_rows(total, MOST_POINTS))
    x, y = (table[name].to_numpy().astype(np.float64) for name in ("x", "y"))
    extent, view = ([*_ends(x, cut), *_ends(y, cut)] for cut in (0.0, OUTLIERS))
    ids, second = (table[name].to_numpy() for name in ("cluster_id", "second_cluster_id"))
    known = sorted({-1, *cluster_ids, *np.unique(ids).tolist()})
    (requests, request), (zones, zone), (phases, phase) = (
        _codes(table[name]) for name in ("request_id", "zone", "phase")
    )
    token = pc.fill_null(table["token_id"], NO_TOKEN).to_numpy()
    members = ("probability", "second_probability")
    return {
        "shown": table.num_rows,
        "total": total,
        "extent": extent,
        "view": view,
        "between": BETWEEN,
        "requests": requests,
        "clusters": known,
        "zones": zones,
        "phases": phases,
        "columns": {
            "x": _packed(np.rint((x - extent[0]) / (extent[1] - extent[0]) * STEPS), "<u2"),
            "y": _packed(np.rint((y - extent[2]) / (extent[3] - extent[2]) * STEPS), "<u2"),
            "request": _packed(request, "<u4"),
            "cluster": _packed(np.searchsorted(known, ids), "<u2"),
            "zone": _packed(zone, "u1"),
            "phase": _packed(phase, "u1"),
            "position": _packed(table["position"].to_numpy(), "<i4"),
            "token": _packed(token, "<i4"),
            "layer": _packed(table["layer"].to_numpy(), "<i2"),
            "second": _packed(np.searchsorted(known, second), "<u2"),
            **{name: _packed(in_bytes(table[name].to_numpy()), "u1") for name in members},
        },
    }


def in_bytes(shares: Floats) -> Doubles:
    """Shares as whole numbers of 255ths, 0 for NaN."""
    return np.rint(np.nan_to_num(shares).clip(0, 1) * 255)


def even_rows(total: int, most: int) -> Ints:
    """The rows of an even, seeded sample of `total`: int64[min(total, most)], ascending."""
    count = min(total, most)
    edges = np.arange(count + 1) * total // max(count, 1)
    return np.random.default_rng(0).integers(edges[:-1], edges[1:])


def _take(embedding: Path, metadata: pq.FileMetaData, rows: Ints) -> pa.Table:
    """The rows with these numbers, ascending."""
    groups = range(metadata.num_row_groups)
    ends = np.cumsum([metadata.row_group(group).num_rows for group in groups])

    def taken(group: int) -> list[pa.RecordBatch]:
        with pq.ParquetFile(embedding, metadata=metadata, read_dictionary=["request_id"]) as file:
            start = int(ends[group]) - metadata.row_group(group).num_rows
            # One thread, because several row groups are read at once.
            batches = file.iter_batches(
                BATCH_ROWS, row_groups=[group], columns=COLUMNS, use_threads=False
            )
            found = []
            for batch in batches:
                begin, end = np.searchsorted(rows, [start, start + batch.num_rows])
                if end > begin:
                    own = batch.take(pa.array(rows[begin:end] - start))
                    # A dictionary would keep all request ids of the row group in memory.
                    names = own["request_id"].cast(pa.string())
                    found.append(own.set_column(COLUMNS.index("request_id"), "request_id", names))
                start += batch.num_rows
            return found

    with ThreadPoolExecutor(min(READERS, usable_cpus())) as readers:
        chosen = [batch for batches in readers.map(taken, groups) for batch in batches]
    if not chosen:
        return metadata.schema.to_arrow_schema().empty_table().select(COLUMNS)
    return pa.Table.from_batches(chosen).unify_dictionaries()


def _codes(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """The distinct words of a column by first appearance, and each row's code int64[n]."""
    words = column.cast(pa.string()).combine_chunks().dictionary_encode()
    return words.dictionary.to_pylist(), words.indices.to_numpy()


def _ends(values: Doubles, cut: float) -> tuple[float, float]:
    """The range of the values without a share `cut` at either end."""
    low, high = np.quantile(values, [cut, 1 - cut]).tolist() if len(values) else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _packed(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
