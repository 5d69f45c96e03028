"""Records to fill stores with: every column used, every value from a seed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shared import possible_vectors

from pipeline import record
from pipeline.store.open import open_store

Records = Callable[..., pa.RecordBatch]
EXPERTS = (None, [-1], [-1, 0], [-1, 0, 1])
START = datetime(2026, 1, 9, 22, 0, tzinfo=UTC)


@pytest.fixture(scope="session")
def records() -> Records:
    """Make `count` records, the first one numbered `first`: `every_s` seconds apart, 40 to a
    request, three requests to a session; every third request is of another model."""

    def make(
        count: int, first: int = 0, seed: int = 0, every_s: int = 1, **columns: Any
    ) -> pa.RecordBatch:
        number = np.arange(first, first + count)
        request = number // 40
        layout = (request % 3 // 2 + 1).astype(np.uint8)
        vectors = possible_vectors(layout, np.random.default_rng((seed, first)))
        made: dict[str, Any] = {
            "request_id": strings("request-{:06d}", request),
            "session_id": strings("session-{}", request // 3, null=request % 5 == 4),
            "position": (number % 40 // 2).astype(np.int32),
            "prompt_len": pa.array(request, pa.int32(), mask=request % 7 == 0),
            "layer": (number % 2 - 1).astype(np.int16),
            "captured_at": pa.array(
                (number * every_s + int(START.timestamp())) * 1_000_000,
                pa.timestamp("us", tz="UTC"),
            ),
            "model": pa.array(np.where(request % 3 == 0, "big", "small"), pa.string()),
            "capture_id": strings("capture-{}", request % 3 % 2),
            "layout": pa.array(layout),
            "phase": pa.array(np.array(record.PHASES)[number % 3], pa.string()),
            "token_id": pa.array(number, pa.int32(), mask=number % 11 == 0),
            "sink_mass": pa.array(vectors[:, 0], pa.float32(), mask=number % 13 == 0),
            "top_experts": pa.array([EXPERTS[n] for n in number % 4], pa.list_(pa.int16())),
            "router_entropy": pa.array(number.astype(np.float32), mask=number % 2 == 1),
            "response_id": strings("chatcmpl-{:x}", request, null=request % 4 == 1),
            "traceparent": strings("00-{0:032x}-{0:016x}-01", request + 1, null=request % 4 > 1),
            "vector": vectors,
        }
        return record.make_batch(made | columns, count)

    def strings(pattern: str, numbers: Any, null: Any = None) -> pa.Array:
        return pa.array([pattern.format(n) for n in numbers.tolist()], pa.string(), mask=null)

    return make


@pytest.fixture(params=["sqlite", "parquet"])
def store_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where a new store of each kind may be made."""
    return tmp_path / ("fingerprints.db" if request.param == "sqlite" else "fingerprints")


@pytest.fixture
def store(store_path: Path) -> Any:
    with open_store(store_path, create=True) as opened:
        yield opened
