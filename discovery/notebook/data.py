"""The data that the notebooks look at: the shipped sample, a run of it, and three nights of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from capture_kernels.errors import OptionError
from discovery.job import discover
from discovery.options import DiscoverOptions
from discovery.runs.folder import run_ids
from discovery.runs.state import survey
from pipeline.examples.files import demo_model, sample
from pipeline.store.open import open_store

# The end of the first night; a night's rows are those of the hour before.
FIRST_NIGHT = datetime(2026, 1, 10, 4, tzinfo=UTC)
# The task that each night is without: one appears in the second, one is gone in the third.
ABSENT = ("brackets", None, "counting")
Say = Callable[[str], object]


@dataclass(frozen=True)
class NotebookData:
    """Where the data of the notebooks is.

    Attributes:
        folder: holds all of it.
    """

    folder: Path

    @property
    def store(self) -> Path:
        """The store with the shipped sample."""
        return self.folder / "fingerprints.db"

    @property
    def runs(self) -> Path:
        """The output folder of a run of the whole sample."""
        return self.folder / "runs"

    @property
    def nights_store(self) -> Path:
        """The store in which each third of the sample's requests was captured on a night of its
        own."""
        return self.folder / "nights.db"

    @property
    def nights(self) -> Path:
        """The output folder of three nightly runs, each with the one before as its parent."""
        return self.folder / "nights"


def open_data(folder: str | Path = "../build/notebooks") -> NotebookData:
    """The data in a folder; what is absent is made first, which takes a minute.

    Args:
        folder: by default that of `make notebooks`, seen from notebooks/.
    """
    return prepare(Path(folder), say=print)


def prepare(
    folder: Path, *, requests_per_task: int | None = None, say: Say = lambda line: None
) -> NotebookData:
    """Make the stores and runs that are not there yet.

    Args:
        requests_per_task: of the sample, the first ones; None for all, which are 28.
        say: called with a line before each step.

    Raises:
        OptionError: the sample is not installed, or the folder cannot be made.
        AttnError: as of `discovery.job.discover`.
    """
    data = NotebookData(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot make {folder}: {error.strerror}") from None
    if not any(run.served for run in survey(data.runs)):
        say(f"{data.runs}: storing the sample, and one run of it")
        rows = sample_rows(requests_per_task)
        with open_store(data.store, create=True) as store:
            store.append(rows)
        discover(_options(data.store, data.runs, hours=0))
    if len(run_ids(data.nights)) < len(ABSENT):
        say(f"{data.nights}: {len(ABSENT)} nights, each of a third of the requests")
        with open_store(data.nights_store, create=True) as store:
            for night in range(len(ABSENT)):
                store.append(rows_of_night(sample_rows(requests_per_task), night))
        for night in range(len(run_ids(data.nights)), len(ABSENT)):
            discover(_options(data.nights_store, data.nights, hours=1), now=end_of(night))
    return data


def _options(store: Path, output: Path, hours: float) -> DiscoverOptions:
    return DiscoverOptions(
        str(store), str(output), hours=hours, late_hours=0, tokenizer=str(demo_model())
    )


def sample_rows(requests_per_task: int | None = None) -> pa.Table:
    """The shipped fingerprints in the record's schema, of the first requests of each task."""
    rows = pq.read_table(sample())
    if requests_per_task is None:
        return rows
    number = pc.cast(pc.utf8_slice_codeunits(rows.column("request_id"), -4), pa.int32())
    return rows.filter(pc.less_equal(number, requests_per_task))


def end_of(night: int) -> datetime:
    """When the window of a night ends: the first is night 0."""
    return FIRST_NIGHT + timedelta(days=night)


def rows_of_night(rows: pa.Table, night: int) -> pa.Table:
    """Every third request of these rows, captured in the hour before a night's run.

    Args:
        rows: in the record's schema, of the sample: request ids are TASK-NUMBER.
        night: from 0; it decides which requests, and which task is left out.
    """
    ids = rows.column("request_id")
    number = pc.cast(pc.utf8_slice_codeunits(ids, -4), pa.int32())
    count = len(ABSENT)
    third = pc.equal(pc.subtract(number, pc.multiply(pc.divide(number, count), count)), night)
    kept = rows.filter(third)
    if absent := ABSENT[night]:
        kept = kept.filter(pc.invert(pc.starts_with(kept.column("request_id"), f"{absent}-")))
    # In the order of the rows, spread over 50 minutes.
    step = timedelta(minutes=50) / max(kept.num_rows, 1)
    first = end_of(night) - timedelta(minutes=55)
    times = pa.array([first + step * i for i in range(kept.num_rows)], pa.timestamp("us", tz="UTC"))
    index = kept.schema.get_field_index("captured_at")
    return kept.set_column(index, "captured_at", times)
