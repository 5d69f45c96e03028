"""Part files of a Parquet store: how one is written, and what its footer says about its rows.

A part's footer sums up its rows (groups, and per request the range of positions), so that a store
knows what a part holds, and whether two parts can share a key, without reading rows.
"""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.durable import sync
from pipeline.hashing import GOLDEN, mix64, string_hashes
from pipeline.store.base import BATCH_ROWS
from pipeline.store.columns import Ints, distinct, encoded, extremes, integers

FOOTER_KEY = "attn"
DAY_US = 86_400_000_000
TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".part-", ".tmp"
_NAME = re.compile(r"part-(\d{12})(?:-(\d{12}))?\.parquet")
_REQUESTS = np.dtype([("hash", "<u8"), ("low", "<i8"), ("high", "<i8")])
# Few distinct values: a dictionary. Vectors and counters have none, and would only try.
_WORD_COLUMNS = ["request_id", "session_id", "prompt_len", "layer", "model", "capture_id", "layout",
                 "phase"]  # fmt: skip
# The value of each base-85 digit, by its ASCII code.
_DIGITS = np.zeros(256, np.uint8)
_DIGITS[list(base64.b85encode(np.arange(85, dtype=">u4").tobytes())[4::5])] = np.arange(85)
_NUMBERS = count()  # of this process's temporary files

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Summary:
    """What some rows hold.

    Args:
        groups: (model, layout, capture_id) -> rows, first and last captured_at in microseconds.
        requests: per distinct request_id, in order of hash: its hash, lowest and highest position.
        sessions: sorted hashes of the distinct session_ids.
    """

    groups: dict[tuple[str, int, str], tuple[int, int, int]]
    requests: NDArray[np.void]
    sessions: Hashes

    @property
    def rows(self) -> int:
        return sum(rows for rows, _, _ in self.groups.values())

    @property
    def first(self) -> int:
        return min(first for _, first, _ in self.groups.values())

    @property
    def last(self) -> int:
        return max(last for _, _, last in self.groups.values())


@dataclass(frozen=True)
class Part:
    """One file: rows of one day, in order of arrival.

    Args:
        name: path within the store, `day=2026-01-10/part-000000000007.parquet`.
        runs: (sequence, rows) of each append that the rows come from, ascending.
        replaces: names of the parts that this one was made from; they are to be ignored.
    """

    name: str
    day: str
    runs: tuple[tuple[int, int], ...]
    replaces: frozenset[str]
    summary: Summary
    metadata: pq.FileMetaData

    @property
    def rows(self) -> int:
        return int(self.metadata.num_rows)

    def rows_until(self, sequence: int) -> int:
        """How many rows were appended up to `sequence`: they are the first ones of the file."""
        return sum(rows for number, rows in self.runs if number <= sequence)

    def sequences(self) -> Ints:
        """The append that each row came with: int64[rows]."""
        numbers, rows = np.array(self.runs, np.int64).T
        return np.repeat(numbers, rows)


def part_name(day: str, first: int, last: int) -> str:
    """A single append's part, or one compacted from the appends `first` to `last`."""
    span = f"{first:012}" if first == last else f"{first:012}-{last:012}"
    return f"day={day}/part-{span}.parquet"


def sequences_in_name(name: str) -> tuple[int, int] | None:
    """First and last append of the part called `name`; None when it is no part."""
    match = _NAME.fullmatch(Path(name).name)
    return (int(match[1]), int(match[2] or match[1])) if match else None


def key_hashes(batch: pa.RecordBatch | pa.Table) -> tuple[Hashes, Hashes]:
    """Hashes of request_id and of the whole key of each row: uint64[n] each.

    Two keys of a billion share a hash with a chance of about one in 40; only rows whose request
    is in two parts at overlapping positions are ever compared by it.
    """
    codes, ids = encoded(one_chunk(batch.column("request_id")))
    requests = string_hashes(ids)[codes]
    low = integers(batch.column("position")) << 16 | integers(batch.column("layer")) + 1
    return requests, mix64(requests + (low - 1).astype(np.uint64) * GOLDEN)


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column


def summarize(batch: pa.RecordBatch) -> Summary:
    """The summary of at least one row."""
    codes, ids = encoded(batch.column("request_id"))
    found = distinct(codes)
    low, high = extremes(found, integers(batch.column("position")))
    requests = np.empty(len(found.first), _REQUESTS)
    requests["hash"], requests["low"], requests["high"] = string_hashes(ids), low, high
    models, model_words = encoded(batch.column("model").cast(pa.string()))
    captures, capture_words = encoded(batch.column("capture_id").cast(pa.string()))
    layouts = integers(batch.column("layout"))
    kinds = distinct(models, layouts, captures)
    first, last = extremes(kinds, integers(batch.column("captured_at")))
    rows = np.bincount(kinds.code)
    groups = {
        (model_words[models[at]].as_py(), int(layouts[at]), capture_words[captures[at]].as_py()):
        (int(rows[k]), int(first[k]), int(last[k]))
        for k, at in enumerate(kinds.first)
    }  # fmt: skip
    sessions = string_hashes(batch.column("session_id").drop_null().unique())
    return Summary(groups, np.sort(requests, order="hash"), np.sort(sessions))


def merge(summaries: list[Summary]) -> Summary:
    """The summary of the rows of all of `summaries`."""
    groups: dict[tuple[str, int, str], tuple[int, int, int]] = {}
    if not summaries:
        return Summary(groups, np.empty(0, _REQUESTS), np.empty(0, np.uint64))
    for summary in summaries:
        for kind, (rows, first, last) in summary.groups.items():
            old = groups.get(kind, (0, first, last))
            groups[kind] = old[0] + rows, min(old[1], first), max(old[2], last)
    requests = np.concatenate([summary.requests for summary in summaries])
    requests.sort(order="hash")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(requests["hash"]) != 0]))
    united = requests[starts].copy()
    united["low"] = np.minimum.reduceat(requests["low"], starts)
    united["high"] = np.maximum.reduceat(requests["high"], starts)
    sessions = np.unique(np.concatenate([summary.sessions for summary in summaries]))
    return Summary(groups, united, sessions)


def write_part(
    folder: Path, batches: Iterable[pa.RecordBatch], footer: dict[str, Any] | None = None
) -> Path:
    """Write rows to a temporary file in `folder` and fsync it; its path, to be renamed.

    Args:
        footer: `runs` and `replaces` of a compacted part.

    Raises:
        StoreError: the disk is full, or the folder cannot be written.
    """
    temporary: Path | None = None
    summaries = []
    try:
        made = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{next(_NUMBERS)}{TEMPORARY_SUFFIX}"
        made.touch(exist_ok=False)
        temporary = made
        with pq.ParquetWriter(
            made,
            record.SCHEMA,
            compression="zstd",
            compression_level=1,
            use_dictionary=_WORD_COLUMNS,
            use_byte_stream_split=["vector.list.element"],
        ) as writer:
            for batch in batches:
                writer.write_batch(batch, row_group_size=BATCH_ROWS)
                summaries.append(summarize(batch))
            about = {**_packed(merge(summaries)), **(footer or {})}
            writer.add_key_value_metadata({FOOTER_KEY: json.dumps(about)})
        sync(temporary)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise write_error(folder, error) from None
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise
    return temporary


def read_part(root: Path, name: str) -> Part:
    """The part called `name`, its footer read.

    Raises:
        FileNotFoundError: it is gone.
        StoreError: it is damaged or not ours.
    """
    sequences = sequences_in_name(name)
    try:
        metadata = pq.read_metadata(root / name)
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(root / name, error) from None
    packed = (metadata.metadata or {}).get(FOOTER_KEY.encode())
    if packed is None or sequences is None:
        raise StoreError(f"{root / name} was not written by this store: move it out of the folder")
    about = json.loads(packed)
    runs = about.get("runs") or [[sequences[0], metadata.num_rows]]
    return Part(
        name=name,
        day=Path(name).parent.name.removeprefix("day="),
        runs=tuple((int(sequence), int(rows)) for sequence, rows in runs),
        replaces=frozenset(about.get("replaces", ())),
        summary=_unpacked(about),
        metadata=metadata,
    )


def read_rows(root: Path, part: Part, row_group: int, columns: list[str]) -> pa.Table:
    """Some columns of one row group.

    Raises:
        StoreError: the file is damaged or gone.
    """
    try:
        with pq.ParquetFile(root / part.name, metadata=part.metadata) as file:
            # One thread: a scan reads several row groups at once instead.
            return file.read_row_group(row_group, columns=columns, use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(root / part.name, error) from None


def write_error(path: Path, error: OSError) -> StoreError:
    """What a failed write means to the user."""
    reason = error.strerror or str(error).splitlines()[0]
    return StoreError(
        f"cannot write in {path} ({reason}): nothing of this batch was stored; "
        "make room or make it writable, and send it again"
    )


def damaged(path: Path, error: Exception) -> StoreError:
    """What a file that cannot be read means to the user."""
    if isinstance(error, PermissionError):
        return StoreError(f"{path} cannot be read: permission denied")
    return StoreError(
        f"{path} is damaged or cannot be read ({str(error).splitlines()[0]}): "
        "restore it, or delete it to go on without its rows"
    )


def _from_base85(text: str) -> bytes:
    """What `base64.b85decode` gives, which takes 20 ms for the requests of a million rows."""
    digits = _DIGITS[np.frombuffer(text.encode("ascii"), np.uint8)].astype(np.int64)
    missing = -len(digits) % 5
    padded = np.concatenate([digits, np.full(missing, 84)]).reshape(-1, 5)
    words = padded @ 85 ** np.arange(4, -1, -1)
    whole = words.astype(">u4").tobytes()
    return whole[: len(whole) - missing]


def _packed(summary: Summary) -> dict[str, Any]:
    return {
        "groups": [[*kind, *values] for kind, values in summary.groups.items()],
        "requests": base64.b85encode(zlib.compress(summary.requests.tobytes(), 1)).decode(),
        "sessions": base64.b85encode(zlib.compress(summary.sessions.tobytes(), 1)).decode(),
    }


def _unpacked(about: dict[str, Any]) -> Summary:
    requests, sessions = (
        zlib.decompress(_from_base85(about[name])) for name in ("requests", "sessions")
    )
    return Summary(
        {
            (model, layout, capture_id): (rows, first, last)
            for model, layout, capture_id, rows, first, last in about["groups"]
        },
        np.frombuffer(requests, _REQUESTS),
        np.frombuffer(sessions, np.uint64),
    )
