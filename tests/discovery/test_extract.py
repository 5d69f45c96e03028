"""extract: the rows of a scan, however it was cut, become full parts on disk."""

from __future__ import annotations

import shutil
from itertools import pairwise
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted, planted_batch
from shared import NOW

from capture_kernels.errors import WriteError
from discovery.algorithms.sampling import row_hashes
from discovery.execution.request_limit import RequestLimit
from discovery.runs.checkpoint import StageCheckpoint
from discovery.stages.extract import (
    COLUMNS,
    full_chunks,
    kept_rows,
    merge,
    write_chunks,
)
from pipeline.hashing import request_hashes


def scanned(rows: int, cuts: list[int]) -> list[pa.RecordBatch]:
    """Planted rows as a scan gives them, in batches cut at `cuts`."""
    batch = planted_batch(planted(rows, 1)[0], NOW, rows_per_request=7).select(COLUMNS)
    edges = [0, *cuts, rows]
    return [batch.slice(a, b - a) for a, b in pairwise(edges) if b > a]


@given(
    rows=st.integers(1, 60), size=st.integers(1, 70), data=st.data(), most=st.sampled_from([0, 3])
)
def test_the_chunks_have_the_kept_rows_in_order_however_they_were_scanned(
    rows, size, data, most, tmp_path_factory
):
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=5)))
    batches = scanned(rows, cuts)
    whole = merge(batches)
    folder = tmp_path_factory.mktemp("extract") / ".hashes"
    with RequestLimit(folder, most, rows, 10**6) as limit:
        for batch in batches:
            requests = request_hashes(batch)
            limit.add(requests, row_hashes(requests, batch, 1))
        keep = limit.kept()
        parts = [merge(part) for part in full_chunks(kept_rows(iter(batches), keep), size)]
    assert [part.num_rows for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 0 < parts[-1].num_rows <= size
    found = pa.Table.from_batches(parts).combine_chunks()
    assert found.equals(pa.Table.from_batches([whole.filter(pa.array(keep))]).combine_chunks())


def context_of(parts: StageCheckpoint, size: int, done: list) -> SimpleNamespace:
    """What `write_chunks` needs of a run; `done` gets what was reported and what was on disk."""
    return SimpleNamespace(
        options=SimpleNamespace(chunk_rows=size),
        checkpoint=parts,
        chunk_done=lambda at, of: done.append((at, of, parts.names(".arrow"))),
    )


def test_a_chunk_is_reported_when_it_is_on_disk(tmp_path):
    parts, done = StageCheckpoint(tmp_path / "extract", "key"), []
    times = write_chunks(context_of(parts, 100, done), iter(scanned(250, [30, 130])), 250)
    names = [f"rows-{index:05d}.arrow" for index in range(3)]
    assert done == [(index, 3, names[:index]) for index in (1, 2, 3)]
    assert [parts.read_batch(name).num_rows for name in names] == [100, 100, 50]
    assert times[1] - times[0] == 249_000_000


def test_chunks_that_are_there_are_not_written_again(tmp_path):
    parts = StageCheckpoint(tmp_path / "extract", "key")
    parts.path("rows-00000.arrow").write_bytes(b"kept")
    write_chunks(context_of(parts, 100, []), iter(scanned(150, [])), 150)
    assert parts.path("rows-00000.arrow").read_bytes() == b"kept"
    assert parts.read_batch("rows-00001.arrow").num_rows == 50


def test_a_chunk_that_cannot_be_written_ends_the_stage(tmp_path):
    parts = StageCheckpoint(tmp_path / "extract", "key")
    context = context_of(parts, 100, [])
    # Nothing is being written then: the second part is the first that finds no folder.
    context.chunk_done = lambda done, total: shutil.rmtree(parts.folder)
    with pytest.raises(WriteError, match=r"cannot write .*rows-00001\.arrow: .*free space"):
        write_chunks(context, iter(scanned(300, [100, 200])), 300)


def test_a_stop_leaves_whole_chunks(tmp_path):
    parts = StageCheckpoint(tmp_path / "extract", "key")
    context = context_of(parts, 100, [])

    def stop(done, total):
        raise KeyboardInterrupt

    context.chunk_done = stop
    with pytest.raises(KeyboardInterrupt):
        write_chunks(context, iter(scanned(300, [])), 300)
    assert parts.names(".arrow") == ["rows-00000.arrow"]
    assert parts.read_batch("rows-00000.arrow").num_rows == 100
    assert not [name for name in parts.names("") if name.startswith(".")]
