"""Sessions and requests of a Parquet store, in the files whose footers name them.

A footer has hashes of its requests and sessions, and times. A file is read column by column: those
that decide first, and the others where a row group has rows that are looked for.

Every function returns None if a file was replaced or removed meanwhile: list the files again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.arrays import Ints, Mask
from capture_kernels.fingerprint.zones import ZONES
from pipeline import record
from pipeline.hashing import string_hash, string_hashes
from pipeline.store.columns import integers, readable, zones_of
from pipeline.store.lookups import RequestRows, session_facts

from .files import DataFile

_GROUP = ["session_id", "model", "capture_id", "layout"]
# Which rows of each file are left out, as `duplicate_rows` gives them.
Duplicates = dict[str, Ints]


class _FileGoneError(Exception):
    """A file was replaced or removed since it was listed."""


class _Found(NamedTuple):
    """Rows of one row group that are looked for."""

    file: DataFile
    row_group: int
    rows: Ints  # within the row group, ascending
    read: Callable[[list[str]], pa.Table]  # columns of all rows of the row group


def _find(
    files: list[DataFile],
    duplicates: Duplicates,
    names: list[str],
    wanted: Callable[[pa.Table], Mask],
) -> Iterator[_Found]:
    """The row groups with rows that are wanted, by these columns, and are not left out."""
    for file in files:
        if (source := file.open()) is None:
            raise _FileGoneError
        visible = np.ones(file.rows, bool)
        visible[duplicates.get(file.name, [])] = False
        for row_group, span in file.row_groups:

            def read(
                columns: list[str], file: DataFile = file, group: int = row_group,
                source: pa.NativeFile = source,
            ) -> pa.Table:  # fmt: skip
                return file.read(group, columns, source)

            rows = np.flatnonzero(wanted(read(names)) & visible[span])
            if len(rows):
                yield _Found(file, row_group, rows, read)


def request(
    files: list[DataFile], duplicates: Duplicates, request_id: str, offset: int, limit: int
) -> RequestRows | None:
    """See `Store._request`."""
    hashed = string_hashes(pa.array([request_id]))[0]
    named = [file for file in files if _has(file.summary.requests["hash"], hashed)]

    def wanted(table: pa.Table) -> Mask:
        return _equals(table.column("request_id"), request_id)

    try:
        found = list(_find(named, duplicates, ["request_id"], wanted))
        keys = [one.read(["position", "layer"]).take(one.rows) for one in found]
        if not keys:
            return RequestRows(0, record.SCHEMA.empty_table())
        position, layer = (
            np.concatenate([integers(table.column(name)) for table in keys])
            for name in ("position", "layer")
        )
        chosen = np.lexsort((layer, position))[offset : offset + limit]
        owner = np.repeat(np.arange(len(found)), [len(one.rows) for one in found])
        within = np.concatenate([one.rows for one in found])
        tables, order = [], []
        for number in np.unique(owner[chosen]):
            mine = np.flatnonzero(owner[chosen] == number)
            order.append(mine)
            tables.append(found[number].read(record.SCHEMA.names).take(within[chosen[mine]]))
    except _FileGoneError:
        return None
    if not tables:
        return RequestRows(len(position), record.SCHEMA.empty_table())
    rows = _readable(pa.concat_tables(tables)).take(np.argsort(np.concatenate(order)))
    return RequestRows(len(position), rows)


def session(
    files: list[DataFile], duplicates: Duplicates, session_id: str
) -> list[dict[str, Any]] | None:
    """See `Store.session`."""
    try:
        return _facts(files, duplicates, {session_id})
    except _FileGoneError:
        return None


def sessions(
    files: list[DataFile], duplicates: Duplicates, limit: int, last_at: int, tie: int
) -> list[dict[str, Any]] | None:
    """See `Store._sessions`."""
    newest: dict[tuple[Any, ...], int] = {}
    by_time = sorted(files, key=lambda file: -file.summary.last)
    names = [*_GROUP, "captured_at"]
    chosen: list[tuple[Any, ...]] = []
    try:
        for number, file in enumerate(by_time):
            for one in _find([file], duplicates, ["session_id"], _has_session):
                table = _readable(one.read(names).take(one.rows))
                for *key, last in _last_times(table):
                    newest[tuple(key)] = max(last, newest.get(tuple(key), last))
            # The last time of a session is sure if no file to come has later rows.
            sure = by_time[number + 1].summary.last if number + 1 < len(by_time) else None
            chosen = sorted(
                (key for key, last in newest.items()
                 if (last, _tie(key)) < (last_at, tie) and (sure is None or last > sure)),
                key=lambda key: (newest[key], _tie(key)), reverse=True,
            )[:limit]  # fmt: skip
            if len(chosen) == limit:
                break
        facts = _facts(files, duplicates, {key[0] for key in chosen})
    except _FileGoneError:
        return None
    of_key = {tuple(one[name] for name in _GROUP): one for one in facts}
    return [of_key[key] for key in chosen]


def _facts(
    files: list[DataFile], duplicates: Duplicates, session_ids: set[str]
) -> list[dict[str, Any]]:
    """What the rows of some sessions say, newest first."""
    texts = pa.array(sorted(session_ids), pa.string())
    hashes = string_hashes(texts)
    named = [f for f in files if any(_has(f.summary.sessions, one) for one in hashes)]

    def wanted(table: pa.Table) -> Mask:
        known = pc.is_in(readable(record.one_chunk(table.column(0))), value_set=texts)
        return _mask(known)

    tables = [pa.table({name: pa.array([], _types()[name]) for name in _types()})]
    names = [*_GROUP, "request_id", "captured_at", "vector"]
    for one in _find(named, duplicates, ["session_id"], wanted):
        table = _readable(one.read(names).take(one.rows))
        columns = {name: _plain(table.column(name)) for name in [*_GROUP, "request_id"]}
        columns["at"] = pa.array(integers(table.column("captured_at")))
        columns["zone"] = pa.array(zones_of(table.combine_chunks()))
        tables.append(pa.table(columns).select(list(_types())))
    rows = pa.concat_tables(tables)
    zones = [
        (pc.equal(rows.column("zone"), number), f"zone_{number}") for number in range(len(ZONES))
    ]
    for hit, name in zones:
        rows = rows.append_column(name, hit.cast(pa.int64()))
    found = rows.group_by(_GROUP, use_threads=False).aggregate(
        [("request_id", "count_distinct"), ("at", "count"), ("at", "min"), ("at", "max")]
        + [(name, "sum") for _, name in zones]
    )
    facts = []
    for row in found.to_pylist():
        key = tuple(row[name] for name in _GROUP)
        values = {name: row[name] for name in _GROUP}
        values |= {"requests": row["request_id_count_distinct"], "fingerprints": row["at_count"]}
        counts = [row[f"{name}_sum"] for _, name in zones]
        facts.append(session_facts(values, counts, (row["at_min"], row["at_max"]), _tie(key)))
    return sorted(facts, key=lambda one: (one["last_at"], one["cursor"]), reverse=True)


def _types() -> dict[str, pa.DataType]:
    text = dict.fromkeys(["session_id", "model", "capture_id"], pa.string())
    numbers = {"layout": pa.uint8(), "request_id": pa.string(), "at": pa.int64()}
    return text | numbers | {"zone": pa.int64()}


def _last_times(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Each group of session and comparable rows, and its last time in microseconds."""
    columns = {name: _plain(table.column(name)) for name in _GROUP}
    columns["at"] = pa.array(integers(table.column("captured_at")))
    groups = pa.table(columns).group_by(_GROUP, use_threads=False).aggregate([("at", "max")])
    for row in groups.to_pylist():
        yield *(row[name] for name in _GROUP), row["at_max"]


def _tie(key: tuple[Any, ...]) -> int:
    """Orders sessions of one time: 63 bits of a hash of what they are."""
    return string_hash("\0".join(map(str, key))) >> 1


def _has(hashes: Any, one: np.uint64) -> bool:
    """Whether an ascending array has a hash."""
    at = int(np.searchsorted(hashes, one))
    return at < len(hashes) and bool(hashes[at] == one)


def _has_session(table: pa.Table) -> Mask:
    return _mask(table.column("session_id").is_valid())


def _equals(column: pa.ChunkedArray, text: str) -> Mask:
    return _mask(pc.equal(column, text))


def _mask(found: pa.Array | pa.ChunkedArray) -> Mask:
    mask: Mask = pc.fill_null(record.one_chunk(found), False).to_numpy(zero_copy_only=False)
    return mask


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """Without a dictionary, which no two files share."""
    one = record.one_chunk(column)
    return one.cast(one.type.value_type) if pa.types.is_dictionary(one.type) else one


def _readable(table: pa.Table) -> pa.Table:
    """Rows of files as a scan gives them: text that is not UTF-8 with U+FFFD, in `SCHEMA`."""
    fields = [record.SCHEMA.field(name) for name in table.column_names]
    arrays = [
        readable(column).cast(field.type) if pa.types.is_string(_text(field.type)) else column
        for field, column in zip(fields, map(record.one_chunk, table.columns), strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _text(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
