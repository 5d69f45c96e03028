"""Files of the Parquet store: how one is written, and what its footer says about its rows.

The footer summarises the rows (groups, and the range of positions of each request), so that a store
knows what a file holds, and whether two files can share a key, without reading rows.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.arrays import Ints
from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.durable import sync
from pipeline.hashing import Hashes, mix64, string_hashes
from pipeline.store.base import BATCH_ROWS
from pipeline.store.columns import encoded, integers

from .summary import Summary, merge, pack, summarize, unpack

FOOTER_KEY = "attn"
DAY_US = 86_400_000_000
TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".part-", ".tmp"
_NAME = re.compile(r"part-(\d{12})(?:-(\d{12}))?\.parquet")
# Few distinct values: a dictionary pays. Vectors and counters have none, and would only try.
_DICTIONARY_COLUMNS = ["request_id", "session_id", "prompt_len", "layer", "model", "capture_id",
                       "layout", "phase", "response_id", "traceparent"]  # fmt: skip
MOVES_IT = "; `attn db verify --repair` moves it aside"
# What tells a file from another one of its name: inode, time of its last change in ns, bytes.
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class DataFile:
    """One file: rows of one day, in order of arrival.

    Args:
        root: the store's folder.
        name: path within it, `day=2026-01-10/part-000000000007.parquet`.
        appends: (sequence number, rows) of each append that the rows come from, ascending.
        replaces: names of the files that this one was made from; they are to be ignored.
        stamp: of the file when its footer was read.
    """

    root: Path
    name: str
    appends: tuple[tuple[int, int], ...]
    replaces: frozenset[str]
    summary: Summary
    metadata: pq.FileMetaData
    stamp: Stamp

    @property
    def day(self) -> str:
        return self.name.partition("/")[0].removeprefix("day=")

    @property
    def rows(self) -> int:
        return int(self.metadata.num_rows)

    @property
    def row_groups(self) -> Iterator[tuple[int, slice]]:
        """The number of each row group, and which of the file's rows it holds."""
        start = 0
        for number in range(self.metadata.num_row_groups):
            stop = start + self.metadata.row_group(number).num_rows
            yield number, slice(start, stop)
            start = stop

    def open(self) -> pa.NativeFile | None:
        """The file, which can be read for as long as it is open, whatever becomes of its name. None
        if the name is another file's now, or no file's.

        Raises:
            StoreError: it may not be read.
        """
        path = self.root / self.name
        try:
            source = pa.OSFile(str(path))
            return source if stamp(path) == self.stamp else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise damaged(path, error) from None

    def read(
        self, row_group: int, columns: Sequence[str], source: pa.NativeFile | None = None
    ) -> pa.Table:
        """Some columns of one row group, in their `record.SCHEMA` types.

        Args:
            source: from `open`; by default, the file is opened by its name.

        Raises:
            StoreError: the file is damaged or gone.
        """
        path, new = self.root / self.name, set(record.SINCE_VERSION_2)
        try:
            with pq.ParquetFile(source or path, metadata=self.metadata) as opened:
                # One thread: a scan reads several row groups at once instead.
                lacking = self._lacking(row_group, new & set(columns))
                asked = [name for name in columns if name not in lacking] or ["position"]
                table = opened.read_row_group(row_group, columns=asked, use_threads=False)
                for name in lacking:
                    table = table.append_column(name, pa.nulls(table.num_rows, pa.string()))
            if table.num_rows != self.metadata.row_group(row_group).num_rows:
                raise ValueError("rows are missing")
            fields = [record.SCHEMA.field(name).with_nullable(True) for name in columns]
            return table.select(list(columns)).cast(pa.schema(fields))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise damaged(path, error, MOVES_IT) from None

    def _lacking(self, row_group: int, names: set[str]) -> list[str]:
        """Which of these text columns a row group does not have, as a file of version 1, or has
        only nulls in."""
        if not names:
            return []
        written, group = self.metadata.schema.names, self.metadata.row_group(row_group)

        def is_empty(name: str) -> bool:
            if name not in written:
                return True
            found = group.column(written.index(name)).statistics
            return found is not None and found.null_count == group.num_rows

        return [name for name in names if is_empty(name)]

    def rows_of(self, after: int, upto: int) -> slice:
        """The rows of the appends `after` < number <= `upto`."""
        start = sum(rows for number, rows in self.appends if number <= after)
        return slice(start, max(start, sum(rows for n, rows in self.appends if n <= upto)))

    def sequences(self) -> Ints:
        """The append that each row came with: int64[rows]."""
        numbers, rows = np.array(self.appends, np.int64).T
        return np.repeat(numbers, rows)


def file_name(day: str, first: int, last: int) -> str:
    """The name of the file with the rows of the appends `first` to `last`."""
    span = f"{first:012}" if first == last else f"{first:012}-{last:012}"
    return f"day={day}/part-{span}.parquet"


def sequences_in_name(name: str) -> tuple[int, int] | None:
    """First and last append of the file called `name`; None for any other file."""
    match = _NAME.fullmatch(Path(name).name)
    return (int(match[1]), int(match[2] or match[1])) if match else None


def key_hashes(rows: pa.Table) -> tuple[Hashes, Hashes]:
    """Hashes of request_id and of the whole key of each row: uint64[n] each.

    Two of a billion keys share a hash with a probability of about 1/40. Only rows whose request is
    in two files at overlapping positions are ever compared by it.
    """
    codes, ids = encoded(record.one_chunk(rows.column("request_id")))
    requests = string_hashes(ids)[codes]
    low = integers(rows.column("position")) << 16 | integers(rows.column("layer")) + 1
    return requests, mix64(requests + mix64(low.astype(np.uint64)))


def write_file(
    folder: Path, batches: Iterable[pa.RecordBatch], footer: dict[str, Any] | None = None
) -> Path:
    """Write rows to a temporary file in `folder` and fsync it; its path, to be renamed.

    Args:
        footer: `runs` (the appends) and `replaces` of a compacted file.

    Raises:
        StoreError: the disk is full, or the folder cannot be written.
    """
    # Random: a process id comes again after a restart of its container.
    temporary = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    summaries = []
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise write_error(folder, error) from None
    try:
        with pq.ParquetWriter(
            temporary,
            record.SCHEMA,
            compression="zstd",
            compression_level=1,
            use_dictionary=_DICTIONARY_COLUMNS,
            use_byte_stream_split=["vector.list.element"],
        ) as writer:
            for batch in batches:
                writer.write_batch(batch, row_group_size=BATCH_ROWS)
                summaries.append(summarize(batch))
            about = pack(merge(summaries)) | (footer or {})
            writer.add_key_value_metadata({FOOTER_KEY: json.dumps(about)})
        sync(temporary)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(folder, error) from None
        raise
    return temporary


def stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_file(root: Path, name: str) -> DataFile:
    """The file called `name`, its footer read.

    Raises:
        FileNotFoundError: it is gone.
        StoreError: it is damaged or not ours.
    """
    path = root / name
    sequences = sequences_in_name(name)
    try:
        found = stamp(path)
        metadata = pq.read_metadata(path)
        packed = (metadata.metadata or {}).get(FOOTER_KEY.encode())
        if packed is None or sequences is None:
            raise StoreError(f"{path} was not written by this store: move it out of the folder")
        about = json.loads(packed)
        appends = about.get("runs") or [[sequences[0], metadata.num_rows]]
        file = DataFile(
            root,
            name,
            appends=tuple((int(sequence), int(rows)) for sequence, rows in appends),
            replaces=frozenset(about.get("replaces", ())),
            summary=unpack(about),
            metadata=metadata,
            stamp=found,
        )
        groups = (metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
        counts = {sum(rows for _, rows in file.appends), file.summary.rows, sum(groups)}
        if counts != {file.rows}:
            raise ValueError("its footer contradicts itself")
        return file
    except FileNotFoundError:
        raise
    # All that the bytes of a footer, which is JSON in Thrift, can lead to.
    except (pa.ArrowException, OSError, ArithmeticError, AttributeError, LookupError, TypeError,
            ValueError, zlib.error) as error:  # fmt: skip
        raise damaged(path, error, MOVES_IT) from None


def write_error(path: Path, error: OSError) -> StoreError:
    """What a failed write means to the user."""
    reason = error.strerror or str(error).splitlines()[0]
    return StoreError(f"cannot write in {path} ({reason}): make room or make it writable")


def damaged(path: Path, error: Exception, hint: str = "") -> StoreError:
    """What a file that cannot be read means to the user."""
    if isinstance(error, PermissionError):
        return StoreError(f"{path} cannot be read: permission denied")
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return StoreError(
        f"{path} is damaged or cannot be read ({reason}): "
        f"restore it, or delete it to go on without its rows{hint}"
    )
