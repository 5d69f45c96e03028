"""Records to fill stores with: every column used, every value from a seed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline import record
from pipeline.store.open import open_store

Records = Callable[..., pa.RecordBatch]
START = datetime(2026, 1, 9, 22, 0, tzinfo=UTC)


@pytest.fixture(scope="session")
def records() -> Records:
    """Make `count` records, the first one numbered `first`: a second apart, 40 to a request, three
    requests to a session; every third request is another model's."""

    def make(count: int, first: int = 0, seed: int = 0, **columns: Any) -> pa.RecordBatch:
        rng = np.random.default_rng((seed, first))
        number = np.arange(first, first + count)
        request = number // 40
        vectors = rng.random((count, 20), np.float32)
        made: dict[str, Any] = {
            "request_id": pa.array([f"request-{r:06d}" for r in request], pa.string()),
            "session_id": pa.array(
                [None if r % 5 == 4 else f"session-{r // 3}" for r in request], pa.string()
            ),
            "position": (number % 40 // 2).astype(np.int32),
            "prompt_len": pa.array([None if r % 7 == 0 else int(r) for r in request], pa.int32()),
            "layer": (number % 2 - 1).astype(np.int16),
            "captured_at": pa.array(
                number * 1_000_000 + int(START.timestamp()) * 1_000_000,
                pa.timestamp("us", tz="UTC"),
            ),
            "model": pa.array(["big" if r % 3 == 0 else "small" for r in request], pa.string()),
            "capture_id": pa.array([f"capture-{r % 3 % 2}" for r in request], pa.string()),
            "layout": pa.array((request % 3 // 2 + 1).astype(np.uint8)),
            "phase": pa.array([record.PHASES[n % 3] for n in number], pa.string()),
            "token_id": pa.array([None if n % 11 == 0 else int(n) for n in number], pa.int32()),
            "sink_mass": pa.array(
                [
                    None if n % 13 == 0 else float(v[0])
                    for n, v in zip(number, vectors, strict=True)
                ],
                pa.float32(),
            ),
            "top_experts": pa.array(
                [None if n % 4 == 0 else list(range(-1, n % 4 - 1)) for n in number],
                pa.list_(pa.int16()),
            ),
            "router_entropy": pa.array([None if n % 2 else float(n) for n in number], pa.float32()),
            "vector": vectors,
        }
        return record.make_batch(made | columns, count)

    return make


@pytest.fixture(params=["sqlite", "parquet"])
def store_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where a new store of each kind may be made."""
    return tmp_path / ("fingerprints.db" if request.param == "sqlite" else "fingerprints")


@pytest.fixture
def store(store_path: Path) -> Any:
    with open_store(store_path, create=True) as opened:
        yield opened
