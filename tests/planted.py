"""Planted behaviours: log16 fingerprints whose true behaviour is known.

Each behaviour says how a head spreads its mass over the log2-distance bins and how widely within a
bin. A row draws its bin masses from a Dirichlet around that, and a context length that is nothing
to do with the behaviour; entropy follows from both, as it does in a real row. A behaviour's
distances wander from row to row, so that neighbours overlap: a nearest-neighbour vote that is told
the truth reaches an adjusted Rand index of 0.98 on the rows that are not noise. A share of the rows
is noise, drawn from no behaviour at all.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.record import make_batch

# (bin centre, width in bins, share) of each bump, and the spread within a bin (0 point .. 1 flat).
Behaviour = tuple[tuple[tuple[float, float, float], ...], float]
BEHAVIOURS: tuple[Behaviour, ...] = (
    (((0.0, 0.5, 1.0),), 0.3),  # previous token
    (((1.2, 0.9, 1.0),), 0.7),  # the last few tokens
    (((3.0, 0.6, 1.0),), 0.2),  # same place in the line above
    (((4.6, 0.7, 1.0),), 0.3),  # induction within a paragraph
    (((5.6, 1.1, 1.0),), 0.9),  # paragraph at large
    (((7.0, 0.5, 1.0),), 0.1),  # a key a page back
    (((8.6, 0.7, 1.0),), 0.5),  # document retrieval
    (((8.2, 1.4, 1.0),), 0.95),  # the whole document
    (((0.3, 0.6, 0.5), (6.8, 0.6, 0.5)), 0.2),  # local and a page back
    (((0.5, 0.7, 0.55), (3.8, 0.5, 0.45)), 0.5),  # local and the line above
    (((2.0, 0.4, 0.34), (4.0, 0.4, 0.33), (6.0, 0.4, 0.33)), 0.15),  # a comb: period doubling
    (((3.0, 2.6, 1.0),), 0.98),  # diffuse
)
SHARES = np.array([16, 14, 11, 10, 10, 8, 7, 7, 6, 5, 4, 2], float)
CONCENTRATION = 20.0
# A behaviour's distances vary from row to row by this many bins: what makes neighbours overlap.
WANDER = 0.3
SHIFTS = np.linspace(-1.0, 1.0, 41)
NOISE = -1


def bin_profiles(
    shifts: NDArray[np.float64] | None = None, behaviours: Sequence[Behaviour] = BEHAVIOURS
) -> NDArray[np.float64]:
    """Expected mass of each of b behaviours in each bin, its bumps moved by each of s shifts, in
    bins: float64[b, s, 16] (s = 1 without shifts), the last axis summing to 1."""
    moved = np.zeros(1) if shifts is None else shifts
    from_shift = np.arange(16) - moved[:, None]
    rows = [
        sum(s * _normalised(np.exp(-0.5 * ((from_shift - c) / w) ** 2)) for c, w, s in bumps)
        for bumps, _ in behaviours
    ]
    return np.array(rows)


def _normalised(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return weights / weights.sum(axis=-1, keepdims=True)


def planted(
    rows: int,
    seed: int,
    noise: float = 0.05,
    shares: NDArray[np.float64] = SHARES,
    behaviours: Sequence[Behaviour] = BEHAVIOURS,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """`rows` fingerprints and their behaviours: float32[rows, 20], int64[rows] (-1: noise)."""
    rng = np.random.default_rng(seed)
    truth = rng.choice(len(behaviours), rows, p=_normalised(shares))
    truth[rng.random(rows) < noise] = NOISE
    shift = np.searchsorted(SHIFTS, rng.normal(0, WANDER, rows).clip(-1, 1))
    alpha = CONCENTRATION * bin_profiles(SHIFTS, behaviours)[truth, shift] + 0.02
    alpha[truth == NOISE] = 0.35
    spread = np.array([spread for _, spread in behaviours])[truth]
    spread = np.where(truth == NOISE, rng.random(rows), spread)
    spread = np.clip(spread + rng.normal(0, 0.03, rows), 0.0, 1.0)

    context = np.exp(rng.uniform(np.log(1024), np.log(32_768), rows))
    last_bin = np.floor(np.log2(context)).astype(int)
    masses = rng.standard_gamma(alpha) * (np.arange(16) <= last_bin[:, None])
    masses = _normalised(masses)
    # A softmax leaves something on every key: no bin that the context reaches is empty.
    masses = _normalised(masses + 1e-7 * (np.arange(16) <= last_bin[:, None]))
    width = np.maximum(2.0 ** np.arange(16), 2.0)
    logs = np.log(masses, out=np.zeros_like(masses), where=masses > 0)
    within = (masses * np.log(width)).sum(axis=1) * spread
    entropy = np.clip((within - (masses * logs).sum(axis=1)) / np.log(context), 0.0, 1.0)
    bands = [masses[:, :3].sum(axis=1), masses[:, 3:8].sum(axis=1), masses[:, 8:].sum(axis=1)]
    vectors = np.column_stack([*bands, entropy, masses]).astype(np.float32)
    return vectors, truth


def planted_batch(
    vectors: NDArray[np.float32],
    start: dt.datetime,
    prefix: str = "planted",
    rows_per_request: int = 100,
    model: str = "planted-model",
    capture_id: str = "planted00000",
) -> pa.RecordBatch:
    """The vectors as records: `rows_per_request` decode steps a request, one second a row."""
    rows = len(vectors)
    index = np.arange(rows)
    stamps = np.datetime64(start.replace(tzinfo=None), "us") + index.astype("timedelta64[s]")
    return make_batch(
        {
            "request_id": [f"{prefix}-{i // rows_per_request:07d}" for i in range(rows)],
            "position": index % rows_per_request,
            "layer": -1,
            "captured_at": pa.array(stamps).cast(pa.timestamp("us", tz="UTC")),
            "model": model,
            "capture_id": capture_id,
            "layout": 1,
            "phase": "output",
            "vector": vectors,
        },
        rows,
    )
