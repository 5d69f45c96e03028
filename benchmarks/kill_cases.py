"""What `kills.py` kills: commands that write, the state that each begins from, and what must hold
after a kill and at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from benchmarks.common import WrongAnswerError
from benchmarks.interruptions import ATTN, Night, published
from capture_kernels.errors import AttnError
from discovery.artifacts.read import open_artifacts
from discovery.events.schema import STAGE_NAMES
from discovery.runs.state import survey
from pipeline import record
from pipeline.store.base import Appended
from pipeline.store.open import open_store
from pipeline.store.transfer import export_file, import_file
from tests.planted import planted, planted_batch

ROWS_PER_REQUEST = 100
# One row a second from here, so that a store has rows of several days.
START = datetime(2026, 1, 6, 20, 0, tzinfo=UTC)
Numbers = NDArray[np.int64]


class Ended(NamedTuple):
    """How a command ended: its exit code (-9: killed), stdout and stderr."""

    code: int
    out: str
    said: str


class Case(Protocol):
    """A command that is killed, and run again until it ends by itself."""

    name: str

    def fresh(self) -> None:
        """Make everything as it is before the first try."""

    def command(self) -> list[str] | None:
        """What to run now; None if nothing is left to do."""

    def begun(self) -> Callable[[], bool]:
        """Called before a try; gives what says whether the command has begun to write."""

    def check_killed(self, ended: Ended) -> str:
        """Raise WrongAnswerError unless all that was acknowledged is there after a kill; how much
        of the work is done, in a word or two."""

    def check_finished(self, ended: Ended) -> None:
        """Raise WrongAnswerError unless all is as if nothing had been killed; `ended` is the try
        that ended by itself."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise WrongAnswerError(what)


class Truth:
    """The rows that stores of a benchmark are made of: number i is captured i seconds after START.

    Args:
        rows: how many.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._batch = planted_batch(planted(rows, 0)[0], START, rows_per_request=ROWS_PER_REQUEST)

    def batch(self, start: int, end: int) -> pa.RecordBatch:
        return self._batch.slice(start, end - start)

    def numbers(self, batches: Iterable[pa.RecordBatch]) -> Numbers:
        """The numbers of records, in their order; each must be what it was made as."""
        found = [np.empty(0, np.int64)]
        for batch in batches:
            requests = pc.utf8_slice_codeunits(batch.column("request_id"), len("planted-"))
            number = requests.cast(pa.int64()).to_numpy() * ROWS_PER_REQUEST
            number = number + batch.column("position").to_numpy()
            must(bool((number < self.rows).all()), "a row that nobody made")
            made = self._batch.take(pa.array(number))
            same = (record.vectors(batch) == record.vectors(made)).all()
            times = batch.column("captured_at").equals(made.column("captured_at"))
            must(bool(same) and times, "a row is not what it was made as")
            found.append(number)
        return np.concatenate(found)

    def stored(self, path: Path) -> Numbers:
        """The numbers of a store's rows, which is verified."""
        with open_store(path) as store:
            found = store.verify()
            must(found.is_good, f"{path.name} is not good: {found}")
            numbers = self.numbers(store.scan())
            must(len(numbers) == len(set(numbers.tolist())), "a row is there twice")
            must(store.counts().rows == len(numbers), "the store counts other rows than it has")
        return numbers


def how_much(done: int, of: int) -> str:
    """How much of the work is done."""
    return "nothing" if done == 0 else "all" if done == of else "part"


def as_on_disk(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder."""
    found = {}
    for path in folder.rglob("*"):
        try:
            facts = path.lstat()
        except FileNotFoundError:  # renamed meanwhile
            continue
        found[str(path.relative_to(folder))] = facts.st_size, facts.st_mtime_ns
    return found


class InFolder:
    """What the cases of stores share: a folder of their own, made anew from a template."""

    def __init__(self, name: str, base: Path) -> None:
        self.name = name
        self.folder = base / name.replace(" ", "-")
        self.template = base / f"{self.folder.name}-template"
        self.template.mkdir()

    def fresh(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.template, self.folder)

    def begun(self) -> Callable[[], bool]:
        before = as_on_disk(self.folder)
        return lambda: as_on_disk(self.folder) != before


class Importing(InFolder):
    """`attn db import` of new rows, and some that are there, into a store that has rows.

    Args:
        kind: of the file. db: name of the store.
    """

    def __init__(self, name: str, base: Path, truth: Truth, kind: str, db: str) -> None:
        super().__init__(name, base)
        self._truth, self._db = truth, db
        self._file = base / f"{self.folder.name}.{kind}"
        third, rows = truth.rows // 3, truth.rows
        with open_store(base / f"{self.folder.name}-source.db", create=True) as source:
            source.append(truth.batch(third - 1_000, rows))
            export_file(source, self._file)
        with open_store(self.template / db, create=True) as store:
            # In several files, which the import merges at its end.
            for start in range(0, third, third // 6 + 1):
                store.append(truth.batch(start, min(third, start + third // 6 + 1)))
        self._before, self._again = third, rows - third + 1_000
        self._left = 0

    def fresh(self) -> None:
        super().fresh()
        self._left = self._truth.rows - self._before

    def command(self) -> list[str]:
        store = str(self.folder / self._db)
        return [*ATTN, "db", "import", str(self._file), "--db", store, "--json"]

    def check_killed(self, ended: Ended) -> str:
        there = self._truth.stored(self.folder / self._db)
        must(bool(np.isin(np.arange(self._before), there).all()), "rows of before are lost")
        if ended.out.endswith("\n"):  # said to be stored
            must(len(there) == self._truth.rows, "rows are lost that were said to be stored")
        self._left = self._truth.rows - len(there)
        return how_much(len(there) - self._before, self._truth.rows - self._before)

    def check_finished(self, ended: Ended) -> None:
        must(len(self._truth.stored(self.folder / self._db)) == self._truth.rows, "rows are lost")
        (counted,) = json.loads(ended.out).values()
        must(counted["rows"] == self._again and not counted["rejected"], f"{counted}")
        must(counted["inserted"] + counted["duplicates"] == counted["rows"], f"{counted}")
        must(counted["inserted"] == self._left, f"{self._left} rows were not there: {counted}")


class Exporting(InFolder):
    """`attn db export`, over an older export or where there is none."""

    def __init__(self, name: str, base: Path, truth: Truth, kind: str, *, over: bool) -> None:
        super().__init__(name, base)
        self._truth, self._over = truth, over
        self._db = base / f"{self.folder.name}.db"
        with open_store(self._db, create=True) as store:
            store.append(truth.batch(0, 1_000))
            if over:
                export_file(store, self.template / f"out.{kind}")
            store.append(truth.batch(1_000, truth.rows))
        self._path = self.folder / f"out.{kind}"

    def command(self) -> list[str]:
        return [*ATTN, "db", "export", str(self._path), "--db", str(self._db), "--json"]

    def _rows(self) -> int:
        """How many rows the exported file has, each what it must be; -1 where there is none."""
        if not self._path.exists():
            return -1
        batches: list[pa.RecordBatch] = []

        def append(batch: pa.RecordBatch) -> Appended:
            kept, rejected = record.conform(batch)
            batches.append(kept)
            return Appended(kept.num_rows, 0, rejected)

        found = import_file(append, self._path)
        must(not found.rejected, f"an export has {found.rejected}")
        numbers = np.sort(self._truth.numbers(batches))
        must(bool((numbers == np.arange(len(numbers))).all()), "an export lacks rows")
        return len(numbers)

    def check_killed(self, ended: Ended) -> str:
        whole = {self._truth.rows}
        if not ended.out.endswith("\n"):  # not said to be written
            whole.add(1_000 if self._over else -1)
        must((rows := self._rows()) in whole, f"half an export is there: {rows} rows")
        return how_much(int(rows == self._truth.rows), 1)

    def check_finished(self, ended: Ended) -> None:
        must(self._rows() == self._truth.rows, "an export is not whole")
        must(len(self._truth.stored(self._db)) == self._truth.rows, "an export lost rows")


class Pruning(InFolder):
    """`attn db prune`, of some rows or (a compaction only) of none; of a folder of many small files
    with duplicates, or of a SQLite file.

    Args:
        cut: the first row to stay.
    """

    def __init__(self, name: str, base: Path, truth: Truth, db: str, cut: int) -> None:
        super().__init__(name, base)
        self._truth, self._db, self._cut = truth, db, cut
        step = truth.rows // 40
        with open_store(self.template / db, create=True) as store:
            for start in range(0, truth.rows, step):
                # Every batch begins with rows of the one before it.
                store.append(truth.batch(max(0, start - step // 4), min(truth.rows, start + step)))
            self._order = truth.numbers(store.scan())
        self._files = len(list(self.template.rglob("part-*")))

    def command(self) -> list[str]:
        limit = f"{START + timedelta(seconds=self._cut):%Y-%m-%dT%H:%M:%S}"
        return [*ATTN, "db", "prune", "--db", str(self.folder / self._db), "--before", limit,
                "--yes", "--json"]  # fmt: skip

    def _stay(self, ended: Ended) -> Numbers:
        there = self._truth.stored(self.folder / self._db)
        stay = self._order[self._order >= self._cut]
        kept = np.array_equal(there[there >= self._cut], stay)
        must(kept, "rows are lost that were not to be deleted, or in another order")
        if ended.out.endswith("\n"):  # said to be deleted
            must(len(there) == len(stay), "rows are there that were said to be deleted")
        return there

    def check_killed(self, ended: Ended) -> str:
        there = self._stay(ended)
        if self._cut:
            return how_much(self._truth.rows - len(there), self._cut)
        # A compaction: by how many files there are.
        files = len(list(self.folder.rglob("part-*")))
        fewest = len(list(self.folder.rglob("day=*")))
        return how_much(self._files - files, self._files - fewest)

    def check_finished(self, ended: Ended) -> None:
        must(len(self._stay(ended)) == self._truth.rows - self._cut, "rows to delete are there")


class Discovering:
    """`attn discover` of a second night, resumed until it is finished.

    Args:
        alone: output folder of the second night, run once and left alone.
        stage: its start is when the command has begun; by default, when it logs anything.
    """

    def __init__(
        self, name: str, night: Night, alone: Path, options: tuple[str, ...], stage: str = ""
    ) -> None:
        self.name, self._night, self._options, self._stage = name, night, options, stage
        self._alone, self._made = alone, 0
        self._output = self._db = self._folder = alone
        self._expected = published(alone / night.run_id)
        self._rows = self._count_rows(night.db)

    def _count_rows(self, db: Path) -> int:
        with open_store(db) as store:
            must((found := store.verify()).is_good, f"{db.name} is not good: {found}")
            return found.rows

    def fresh(self) -> None:
        if self._made:
            shutil.rmtree(self._output)
        self._made += 1
        self._output = self._night.output(f"{self.name.replace(' ', '-')}-{self._made}")
        self._db = Path(shutil.copy(self._night.db, self._output / "second.db"))
        self._folder = self._output / self._night.run_id

    def command(self) -> list[str] | None:
        begun = (self._folder / ".checkpoint" / "run.json").exists()
        if self._folder.exists() and not begun:
            # Without a checkpoint it is over. With half of one nothing was acknowledged, and the
            # next run would have another name.
            if (self._folder / "manifest.json").exists():
                return None
            shutil.rmtree(self._folder)
        again = ("--resume", self._night.run_id)
        command = self._night.command(self._db, self._output, 1)
        if begun:
            return [*command[: command.index("--now")], *again, *self._options]
        return [*command, *self._options]

    def begun(self) -> Callable[[], bool]:
        log = self._folder / "progress.jsonl"
        before = log.stat().st_size if log.exists() else 0

        def has_begun() -> bool:
            if not log.exists():
                return False
            with log.open("rb") as file:
                file.seek(before)
                lines = file.read().splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line.endswith(b"\n")]
            started = [e["stage"] for e in events if e["event"] == "stage_started"]
            return self._stage in started if self._stage else bool(lines)

        return has_begun

    def check_killed(self, ended: Ended) -> str:
        must(self._count_rows(self._db) == self._rows, "a run lost rows of its store")
        try:
            served = open_artifacts(self._output)
            served.verify()
            states = {run.run_id: run.state for run in survey(self._output)}
        except AttnError as error:
            raise WrongAnswerError(f"what is served cannot be read: {error}") from error
        must("unreadable" not in states.values(), f"a run cannot be read: {states}")
        if ended.out.strip() or (self._folder / "manifest.json").exists():
            must(published(self._folder) == self._expected, "half a run is published")
        if ended.out.strip():
            must(served.run_id == self._night.run_id, "a run that was said to be served is not")
        finished = (self._folder / ".checkpoint").glob("*/stage.json")
        if not (names := {path.parent.name for path in finished}):
            return "over" if served.run_id == self._night.run_id else "no stage"
        last = max(names, key=STAGE_NAMES.index)
        return f"after {last}" + (", served" if served.run_id == self._night.run_id else "")

    def check_finished(self, ended: Ended) -> None:
        self.check_killed(ended)
        must(published(self._folder) == self._expected, "not the artifacts of a run left alone")
        latest = (self._output / "latest").readlink().name
        must(latest == self._night.run_id, f"latest is {latest}")
        counters = [json.loads((folder / "next_cluster_id").read_text())["next"]
                    for folder in (self._output, self._alone)]  # fmt: skip
        must(counters[0] == counters[1], f"next_cluster_id {counters}")
        with open_store(self._db) as store:
            recorded = [run["run_id"] for run in store.runs()]
        must(recorded == [self._night.run_id], f"runs in the store: {recorded}")
