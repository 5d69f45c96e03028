"""A step's results on the host: entries of many requests, which ask for different things."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from capture_kernels.fingerprint.vector import Layout  # noqa: E402
from capture_kernels.serving.step import StepResults  # noqa: E402
from pipeline.engines.serving.collect import RequestCollector  # noqa: E402
from pipeline.engines.serving.request import CaptureRequest  # noqa: E402
from pipeline.engines.serving.rows import Row  # noqa: E402
from pipeline.engines.serving.steps.states import (  # noqa: E402
    HostRows,
    NotedRow,
    RequestState,
    take_row,
)

LAYERS, ROWS, MOST = (3, 7), 6, 8
NOON = datetime(2026, 1, 10, 12, tzinfo=UTC)
ASKED = st.tuples(
    st.sampled_from(["raw", "sketch", "fingerprint"]), st.integers(1, MOST),
    st.sampled_from([(0,), (1,), (0, 1)]), st.booleans(),
)  # fmt: skip


def results(seed: int) -> StepResults:
    """Rows that see 0 to 10 keys."""
    random = np.random.default_rng(seed)
    shape = len(LAYERS), ROWS
    keys = random.integers(0, 11, ROWS)
    mean = np.zeros((*shape, 32), np.float32)
    mean[..., :16] = random.dirichlet(np.full(16, 0.3), shape)
    mean[..., 26:28], mean[..., 29] = random.random((*shape, 2)), random.normal(size=shape)
    mean[..., 28] = keys > 0
    masses = -np.sort(-random.random((*shape, MOST)).astype(np.float32), axis=2)
    there = np.arange(MOST) < keys[:, None]
    positions = np.where(there, random.integers(0, 99, (*shape, MOST)), -1).astype(np.int32)
    empty = torch.empty((*shape, 0, MOST))
    return StepResults(
        torch.tensor(mean), torch.tensor(positions), torch.tensor(np.where(there, masses, 0)),
        torch.empty((*shape, 0, 32)), empty.int(), empty, torch.empty(0),
    )  # fmt: skip


def noted(row: int, mode: str, k: int, layers: tuple[int, ...], entries: bool) -> NotedRow:
    numbers = [LAYERS[index] for index in layers]
    request = CaptureRequest(layers=numbers, mode=mode, top_k=k, stream_entries=entries)
    collector = RequestCollector(
        request, request_id=f"r{row}", model="demo", capture_id="c", layout=Layout.LOG16,
        prompt_len=5, keep_records=False,
    )  # fmt: skip
    collector.feed(1)
    return NotedRow(row, row, RequestState(collector, layers), 5, 1)


@given(
    seed=st.integers(0, 2**32 - 1), order=st.permutations(range(ROWS)),
    asked=st.lists(ASKED, min_size=1, max_size=ROWS),
)  # fmt: skip
def test_entries_are_those_of_a_request_alone(seed, order, asked):
    """Whatever the others of its step ask for."""
    notes = [noted(row, *given) for row, given in zip(order, asked, strict=False)]
    found = HostRows(results(seed), notes)
    for note in notes:
        take_row(note, found, LAYERS, 1, NOON, record=False)
        alone = noted(note.row, *asked[notes.index(note)])
        row = Row(5, 1, found.layer_rows(alone, LAYERS, {}, {}), NOON)
        expected = alone.state.collector.add_encoded(row)
        assert note.state.entries == expected
        assert bool(expected) == bool(
            alone.state.collector.request.stream_entries and found.mean[0, note.row, 28]
        )
        assert note.state.collector.seconds > 0 or not note.state.is_asked
