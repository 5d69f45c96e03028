"""The map of a run as binary columns, for a page that draws a million points.

Little-endian columns of n rows, in the order of embedding.parquet, one after the other: float32 x,
float32 y, uint16 cluster, uint8 zone. `cluster` is an index into `cluster_ids` of the map's
description, as a cluster's id may not fit in 16 bits; 65,535 is noise. `zone` is an index into
`zones`.
"""

from __future__ import annotations

import mmap
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.arrays import Int32s
from capture_kernels.errors import ArtifactError, WriteError
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.read import Artifacts
from discovery.artifacts.schema import NOISE

# Version of the columns, part of every ETag.
MAP_VERSION = 1
NOISE_INDEX = 65_535
TYPES = {"x": "float32", "y": "float32", "cluster": "uint16", "zone": "uint8"}
# Bytes of all maps that are kept; a map of a million rows has 11 MB.
MOST_KEPT_BYTES = 1 << 29
CHUNK_BYTES = 1 << 18
# Rows that are converted at a time.
CHUNK_ROWS = 1 << 16
EMBEDDING = "embedding.parquet"


@dataclass(frozen=True)
class Map:
    """The map of one run.

    Args:
        rows: n. content: all columns. about: what `/map/meta` answers.
    """

    rows: int
    content: bytes | mmap.mmap
    about: dict[str, Any]

    def part(self, names: Sequence[str], start: int, end: int) -> Iterator[bytes]:
        """Bytes `start` to `end` of these columns, one after the other, in chunks."""
        at = 0
        for name in names:
            first, size = self.about["columns"][name]["offset"], self._bytes(name)
            low, high = max(start - at, 0), min(end - at, size)
            for begin in range(low, high, CHUNK_BYTES):
                stop = min(begin + CHUNK_BYTES, high)
                yield self.content[first + begin : first + stop]
            at += size

    def size(self, names: Sequence[str]) -> int:
        return sum(map(self._bytes, names))

    def _bytes(self, name: str) -> int:
        return self.rows * np.dtype(TYPES[name]).itemsize


class Maps:
    """Maps that were asked for lately, in files without a name, which end with the process.

    Safe to call from several threads; one map is made at a time.
    """

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Map] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, artifacts: Artifacts) -> Map:
        """The map of a run.

        Raises:
            ArtifactError: a file of the run is missing or damaged.
            WriteError: there is no room for the map.
        """
        key = f"{artifacts.folder}:{etag_of(artifacts, tuple(TYPES))}"
        with self._lock:
            found = self._kept.pop(key, None) or make_map(artifacts)
            self._kept[key] = found  # the newest last
            while len(self._kept) > 1 and self.kept_bytes > self._most_bytes:
                self._kept.popitem(last=False)  # whoever reads it still does
        return found

    @property
    def kept_bytes(self) -> int:
        return sum(len(known.content) for known in self._kept.values())


def etag_of(artifacts: Artifacts, names: Sequence[str]) -> str:
    """The ETag of some columns of a run's map: from the hash of its file, which is not read."""
    published = artifacts.manifest["files"][EMBEDDING]["sha256"]
    return f'"{published[:32]}-{MAP_VERSION}-{"".join(name[0] for name in names)}"'


def make_map(artifacts: Artifacts) -> Map:
    """The columns of a run's map.

    Raises:
        ArtifactError: a file of the run is missing, damaged, or not what it should be.
        WriteError: there is no room for it.
    """
    try:
        return _made(artifacts)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        # Its hashes are right, and its tables are not those of a run.
        raise ArtifactError(
            f"{artifacts.folder} has no map ({error}): run attn discover again"
        ) from None


def _made(artifacts: Artifacts) -> Map:
    ids = artifacts.table("clusters", ["cluster_id"]).column("cluster_id").to_numpy()
    table = artifacts.table("embedding", ["x", "y", "cluster_id", "zone"])
    if len(ids) >= NOISE_INDEX:
        raise ArtifactError(f"run {artifacts.run_id} has {len(ids):,} clusters: too many for a map")
    # A chunk at a time: what NumPy computes meanwhile holds up every other thread.
    chunks = table.to_batches(CHUNK_ROWS)
    about: dict[str, Any] = {
        "run_id": artifacts.run_id, "version": MAP_VERSION, "rows": table.num_rows, "bytes": 0,
        "etag": etag_of(artifacts, tuple(TYPES)), "columns": {}, "noise": NOISE_INDEX,
        "cluster_ids": ids.tolist(), "zones": list(ZONES),
        **{f"{axis}_range": _range([one.column(axis) for one in chunks]) for axis in ("x", "y")},
    }  # fmt: skip
    converted: dict[str, Callable[[pa.RecordBatch], NDArray[Any]]] = {
        "x": lambda chunk: chunk.column("x").to_numpy(),
        "y": lambda chunk: chunk.column("y").to_numpy(),
        "cluster": lambda chunk: _indices(chunk.column("cluster_id").to_numpy(), ids, artifacts),
        "zone": lambda chunk: _zones(chunk.column("zone")),
    }
    try:
        with tempfile.TemporaryFile(prefix="attn-map-") as file:
            for name, kind in TYPES.items():
                about["columns"][name] = {"type": kind, "offset": file.tell()}
                stored = np.dtype(kind).newbyteorder("<")
                for chunk in chunks:
                    file.write(np.ascontiguousarray(converted[name](chunk), stored).data)
            file.flush()
            about["bytes"] = file.tell()
            empty = not table.num_rows
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WriteError(f"no room for the map of {artifacts.run_id}: {error.strerror}") from None
    return Map(table.num_rows, content, about)


def _zones(column: pa.Array) -> NDArray[Any]:
    """The index in `ZONES` of each zone of a dictionary column: [n]."""
    found = pc.index_in(column.cast(pa.string()), value_set=pa.array(ZONES))
    if found.null_count:
        raise ArtifactError("embedding.parquet has an unknown zone: run attn discover again")
    indices: NDArray[Any] = found.to_numpy()
    return indices


def _indices(clusters: Int32s, ids: Int32s, artifacts: Artifacts) -> NDArray[np.uint16]:
    """The index in `ids` of each cluster, NOISE_INDEX for noise: uint16[n]."""
    order = np.argsort(ids)
    found = np.full(len(clusters), NOISE_INDEX, np.uint16)
    member = clusters != NOISE
    if not member.any():
        return found
    at = np.searchsorted(ids, clusters[member], sorter=order).clip(max=max(len(ids) - 1, 0))
    if not len(ids) or not (ids[order[at]] == clusters[member]).all():
        raise ArtifactError(
            f"run {artifacts.run_id} is damaged (embedding.parquet has clusters that "
            "clusters.parquet has not): run attn discover again"
        )
    found[member] = order[at]
    return found


def _range(chunks: list[pa.Array]) -> list[float] | None:
    """The least and the largest finite number."""
    ends = []
    for chunk in chunks:
        values = chunk.to_numpy()
        finite = values[np.isfinite(values)]
        ends += [float(finite.min()), float(finite.max())] if len(finite) else []
    return [min(ends), max(ends)] if ends else None


def chosen_columns(given: str | None) -> tuple[str, ...]:
    """Columns by name, separated by commas, in the order of the map. ValueError: unknown."""
    if given is None:
        return tuple(TYPES)
    names = {name.strip() for name in given.split(",")}
    if unknown := sorted(names - TYPES.keys()):
        raise ValueError(f"no column {unknown[0][:40]!r} in a map: use some of {', '.join(TYPES)}")
    return tuple(name for name in TYPES if name in names)


_RANGE = re.compile(r"bytes=\s*(\d{0,18})-(\d{0,18})\s*", re.ASCII)


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The bytes that a Range header asks for: start and end (exclusive); None for all of them.

    Several ranges, or what is not one, are answered with everything, as RFC 9110 allows.

    Raises:
        ValueError: there are no such bytes.
    """
    if header is None or not (found := _RANGE.fullmatch(header)):
        return None
    first, last = found.groups()
    if not first:
        if not last:
            return None
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if last and int(last) < start:
            return None  # not a range at all
    if start >= end:
        raise ValueError(f"the map has {size:,} bytes")
    return start, end


def is_unchanged(header: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names the ETag."""
    if header is None:
        return False
    known = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return etag in known or header.strip() == "*"
