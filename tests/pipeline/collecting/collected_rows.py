"""Rows as an engine hands them to a collector, from random attention."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from capture_kernels.fingerprint.reference import decode_statistics
from capture_kernels.fingerprint.vector import Visibility
from pipeline.engines.serving.rows import HeadRows, LayerRow, Row

NOON = datetime(2026, 1, 10, 12, tzinfo=UTC)
HEADS, DEPTH = 4, 16


def random_row(
    position: int, layers: list[int], *, k: int = 32, heads: list[int] | None = None, mask: int = 0,
    sharpness: float = 1.0, seed: int = 0, keys: int | None = None,
) -> Row:  # fmt: skip
    """A row at `position`, its statistics as the float64 reference computes them.

    Args:
        sharpness: of the attention: 0 is even.
    """
    found = []
    for layer in layers:
        rng = np.random.default_rng((seed, layer, position))
        count = len(heads) if heads is not None else HEADS
        statistics = decode_statistics(
            sharpness * rng.standard_normal((count, DEPTH)),
            rng.standard_normal((position + 1, 1, DEPTH)),
            scale=1.0, position=position, visibility=Visibility(1, mask), top_k=k, mean_top_k=k,
        )  # fmt: skip
        columns = np.zeros((count, 32), np.float32)
        columns[:, :16], columns[:, 16:24] = statistics.hist, statistics.places
        columns[:, 24:26] = statistics.bands_layered[:, :2]
        columns[:, 26], columns[:, 27] = statistics.sink_mass, statistics.entropy
        columns[:, 28] = statistics.valid
        own = None
        if heads is not None:
            own = HeadRows(
                heads,
                statistics.top_positions.astype(np.int32),
                statistics.top_logits.astype(np.float32),
                statistics.logsumexp.astype(np.float32),
            )
        found.append(
            LayerRow(
                layer,
                columns.mean(axis=0),
                float(statistics.logsumexp.mean()),
                statistics.mean_top_positions.astype(np.int32),
                statistics.mean_top_mass.astype(np.float32),
                own,
            )
        )
    return Row(position, position % 2000, found, NOON)
