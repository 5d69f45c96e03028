"""The SQLite file: how it is opened, created and migrated, and what its errors mean.

All access goes through the SQLite library in the ADBC driver: it moves Arrow columns in and out of
C, several times faster than Python rows. Two SQLite libraries must not have one file open in one
process (POSIX locks belong to the process, so closing it in one drops the other's locks): do not
open an open store with Python's `sqlite3`. Other processes may at any time.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from adbc_driver_sqlite import dbapi

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import BATCH_ROWS, BUSY_TIMEOUT_S
from pipeline.store.columns import readable
from pipeline.store.refusals import check_parent, locked_error, os_errors, store_gone

from .migrations import MIGRATIONS, OLDEST_READABLE

APPLICATION_ID = 0x6174746E  # "attn"; schema.sql sets the same
SCHEMA_VERSION = 2
CACHE_KIB = 64 * 1024
_BATCH_ROWS = "adbc.sqlite.query.batch_rows"

_DAMAGED = (
    "{path} is damaged: restore it from a backup, or save what"
    " `sqlite3 {path} .recover` still reads"
)
# SQLite's messages, and what they mean to the user. ADBC passes on messages, not result codes.
_MEANINGS = (
    ("is locked", str(locked_error(Path("{path}")))),
    ("not a database", "{path} is not a SQLite file: give another path"),
    ("malformed", _DAMAGED),
    ("unsupported file format", _DAMAGED),
    ("readonly", "{path} or its folder is read-only: make it writable, or work on a copy"),
    ("is full", "the disk of {path} is full: make room"),
    ("disk I/O", "{path} cannot be read or written: its disk is full, over quota or failing"),
    ("to open", "{path} cannot be opened: is its folder there, and may you read and write in it?"),
)  # fmt: skip


def store_error(path: Path, error: dbapi.Error) -> StoreError:
    """What an error of the driver means to the user."""
    text = str(error)
    for message, meaning in _MEANINGS:
        if message in text:
            return StoreError(meaning.format(path=path))
    return StoreError(f"{path}: {text.splitlines()[0]}")


@dataclass(eq=False)
class Database:
    """One connection. Not thread-safe.

    Raises:
        StoreError: from every method.
    """

    path: Path  # an existing file, or with `mode` "rwc" a new one
    mode: str  # of SQLite's URIs: "ro", "rw" or "rwc"
    busy_timeout_s: float = BUSY_TIMEOUT_S  # how long to wait for another process's lock

    def __post_init__(self) -> None:
        uri = f"file:{quote(str(self.path.absolute()))}?mode={self.mode}"
        try:
            self._connection = dbapi.connect(uri, autocommit=True)
        except dbapi.Error as error:
            raise store_error(self.path, error) from None
        self.identity: tuple[int, int] | None = None
        try:
            # NORMAL: a committed batch survives kill -9 of the process. Power loss may undo whole
            # batches since the last checkpoint, and never damages the file.
            self.run(f"PRAGMA busy_timeout = {round(self.busy_timeout_s * 1000)}")
            self.run("PRAGMA synchronous = NORMAL")
            self.run(f"PRAGMA cache_size = -{CACHE_KIB}")
            self.scalar("PRAGMA user_version")  # the first access to the file itself
            self.identity = self._identity()
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def _identity(self) -> tuple[int, int] | None:
        """Device and inode of what the path names now; None if that is nothing."""
        with os_errors(self.path):
            try:
                status = self.path.stat()
            except FileNotFoundError:
                return None
            return status.st_dev, status.st_ino

    def check_same(self) -> None:
        """StoreError if the path is another file's now, or no file's."""
        if self._identity() != self.identity:
            raise store_gone(self.path)

    def again(self) -> Database:
        """Another connection to the same file.

        Raises:
            StoreError: also if the file was deleted or replaced.
        """
        self.check_same()
        other = Database(self.path, self.mode.replace("rwc", "rw"), self.busy_timeout_s)
        if other.identity != self.identity:
            other.close()
            raise store_gone(self.path)
        return other

    def table(
        self,
        sql: str,
        parameters: Sequence[Any] | pa.RecordBatch | None = None,
        batch_rows: int = BATCH_ROWS,
    ) -> pa.Table:
        """The result of one query.

        Args:
            parameters: one value for each `?`, or a batch with a column for each: the query runs
                once for each row, and the results are concatenated.
            batch_rows: at least the rows expected: the driver infers column types from that many.
        """
        try:
            with self._connection.cursor(adbc_stmt_kwargs={_BATCH_ROWS: str(batch_rows)}) as cursor:
                cursor.execute(sql, parameters)
                return cursor.fetch_arrow_table()
        except dbapi.Error as error:
            raise store_error(self.path, error) from None

    def rows(self, sql: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        columns = [record.one_chunk(column) for column in self.table(sql, parameters).columns]
        texts = [readable(c) if pa.types.is_string(c.type) else c for c in columns]
        return list(zip(*(column.to_pylist() for column in texts), strict=True))

    def run(self, sql: str, parameters: Sequence[Any] | pa.RecordBatch | None = None) -> None:
        """Run one statement, once for each row if `parameters` is a batch."""
        try:
            with self._connection.cursor() as cursor:
                many = isinstance(parameters, pa.RecordBatch)
                (cursor.executemany if many else cursor.execute)(sql, parameters)
        except dbapi.Error as error:
            raise store_error(self.path, error) from None

    def insert(self, table: str, rows: pa.RecordBatch, conflict: str = "") -> None:
        """Insert the rows of a batch; `conflict` is "OR IGNORE", say."""
        names, marks = ", ".join(rows.schema.names), ", ".join("?" * rows.num_columns)
        self.run(f"INSERT {conflict} INTO {table} ({names}) VALUES ({marks})", rows)

    @contextmanager
    def transaction(self, write: bool = True) -> Iterator[None]:
        """A transaction: all or nothing, without other writers.

        Without `write`, all reads inside see the same state of the file.

        Raises:
            StoreError: also if the file was deleted or replaced, so that what was written is gone.
        """
        self.run("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            # After a full disk SQLite has rolled back already.
            with suppress(StoreError):
                self.run("ROLLBACK")
            raise
        if write:
            self.check_same()

    def scalar(self, sql: str) -> int:
        """The integer that a query returns."""
        found = self.rows(sql)
        if not found or not isinstance(found[0][0], int):
            raise StoreError(_DAMAGED.format(path=self.path))
        return found[0][0]

    def has_traces(self) -> bool:
        """Whether any fingerprint may have a response_id or a traceparent."""
        if self.scalar("PRAGMA user_version") < 2:
            return False
        return bool(self.rows("SELECT 1 FROM traces LIMIT 1"))

    def is_empty(self) -> bool:
        return not self.rows("SELECT 1 FROM sqlite_master LIMIT 1")


def statements(script: str) -> Iterator[str]:
    """The statements of an SQL script, in order."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


def open_database(
    path: Path,
    *,
    create: bool,
    read_only: bool,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    migrations: Sequence[str] = MIGRATIONS,
) -> Database:
    """The store at `path`, created or migrated if that is needed and allowed.

    Args:
        migrations: the scripts from each schema version to the next, in order.

    Raises:
        StoreError: missing, not ours, of a newer version, locked, or not permitted; read-only also
            of a version before `OLDEST_READABLE`.
    """
    target = len(migrations) + 1
    check_parent(path)
    if path.is_dir():
        raise StoreError(f"{path} is a folder: give a file, or a folder that holds a Parquet store")
    create = create and not read_only
    if not path.exists() and not create:
        raise StoreError(
            f"{path} does not exist: check the path, or make it with `attn db init --db {path}`"
        )
    database = (
        _read_only(path, busy_timeout_s) if read_only else Database(path, "rwc", busy_timeout_s)
    )
    try:
        if database.scalar("PRAGMA application_id") != APPLICATION_ID:
            if not database.is_empty():
                raise StoreError(
                    f"{path} is a SQLite file of another program, and was not touched:"
                    " give another path"
                )
            if not create:
                raise StoreError(
                    f"{path} is an empty file: make it a store with `attn db init --db {path}`"
                )
            _create(database)
        version = database.scalar("PRAGMA user_version")
        if version > target:
            raise StoreError(
                f"{path} has schema version {version} and this attn reads up to {target}:"
                " upgrade attn"
            )
        if version < target:
            if not read_only:
                _migrate(database, migrations)
            elif version < OLDEST_READABLE:
                raise StoreError(
                    f"{path} has the old schema version {version}: open it once for writing, "
                    f"`attn db init --db {path}`, to bring it up to date"
                )
    except BaseException:
        database.close()
        raise
    return database


def _read_only(path: Path, busy_timeout_s: float) -> Database:
    try:
        return Database(path, "ro", busy_timeout_s)
    except StoreError:
        # A reader of a WAL database creates a lock file beside it. If it may not, and there is no
        # WAL, nobody is writing: SQLite may then read the file without locks.
        wal = path.with_name(f"{path.name}-wal")
        if os.access(path.parent, os.W_OK) or wal.exists():
            raise
        return Database(path, "ro&immutable=1", busy_timeout_s)


def _create(database: Database) -> None:
    script = resources.files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")
    deadline = time.monotonic() + database.busy_timeout_s
    while True:
        try:
            # The busy timeout does not cover the switch to WAL, which another process may be doing.
            database.run("PRAGMA page_size = 8192")
            database.run("PRAGMA journal_mode = WAL")
            break
        except StoreError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with database.transaction():
        if not database.is_empty():  # another process was faster
            return
        # What stands before BEGIN was done above: it must run outside a transaction.
        for statement in statements(
            script.partition("BEGIN IMMEDIATE;")[2].partition("COMMIT;")[0]
        ):
            database.run(statement)


def _migrate(database: Database, migrations: Sequence[str]) -> None:
    with database.transaction():
        # Another process may have been faster: check again now that nobody else can write.
        version = database.scalar("PRAGMA user_version")
        for number, script in enumerate(migrations[version - 1 :], start=version + 1):
            for statement in statements(script):
                database.run(statement)
            database.run(f"PRAGMA user_version = {number}")
