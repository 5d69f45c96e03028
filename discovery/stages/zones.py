"""zones: every row's zone and confidence by `ZoneRules`, and the zones over time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, Zoned, ZoneRules
from discovery.engines.protocol import Engine
from discovery.runs.chunks import ChunkVectors

from .context import RunContext
from .extract import captured_at

# Most time bins that the zones are counted in, and the lengths of a bin in seconds; after the last
# one the length is doubled until there are few enough bins.
MOST_BINS = 96
MINUTE, HOUR, DAY = 60, 3_600, 86_400
STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR),
    *(DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY),
)
MICROS = 1_000_000


def parameters(context: RunContext) -> dict[str, Any]:
    return {"rules": context.options.zone_rules.as_dict()}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    first, last = context.summaries["extract"]["captured_at"]
    step = bin_seconds(first, last)
    start = first // (step * MICROS)
    bins = last // (step * MICROS) - start + 1
    counts = np.zeros((len(ZONES), bins), np.int64)
    total = context.rows.chunks
    todo = [index for index in range(total) if not context.checkpoint.has(zones_file(index))]
    found = context.executor.run(
        zones_of_chunk,
        map(context.rows.reference, todo),
        (context.engine, context.options.zone_rules, context.layout),
    )
    for index in range(total):
        if index in todo:
            zoned = next(found)
            context.checkpoint.write_arrays(zones_file(index), **zoned._asdict())
        else:
            zoned = Zoned(**context.checkpoint.read_arrays(zones_file(index)))
        zone = zoned.zone.astype(np.int64)
        when = captured_at(context.rows.batch(index)) // (step * MICROS) - start
        cells = np.bincount(zone * bins + when, minlength=counts.size)
        counts += cells.reshape(counts.shape)
        context.chunk_done(index + 1, total)
    shares = counts.sum(axis=1) / context.rows.count
    summary = {zone: float(share) for zone, share in zip(ZONES, shares, strict=True)}
    over_time = {
        "start": datetime.fromtimestamp(start * step, UTC).isoformat(),
        "step_seconds": step,
        "counts": dict(zip(ZONES, counts.tolist(), strict=True)),
    }
    says = ", ".join(f"{zone} {share:.0%}" for zone, share in summary.items() if share >= 0.005)
    return {"shares": summary, "over_time": over_time}, says


def zones_of_chunk(
    engine: Engine, rules: ZoneRules, layout: Layout, vectors: ChunkVectors
) -> Zoned:
    found = rules.classify(vectors.load(engine), layout)
    return Zoned(engine.host(found.zone), engine.host(found.confidence))


def bin_seconds(first: int, last: int) -> int:
    """The shortest bin, in seconds, of which at most `MOST_BINS` reach from `first` to `last`.

    Bins begin at multiples of their length since 1970, so that the bins of two runs line up.

    Args:
        first, last: microseconds since 1970.
    """
    steps = list(STEPS)
    while True:
        for step in steps:
            if last // (step * MICROS) - first // (step * MICROS) < MOST_BINS:
                return step
        steps = [2 * steps[-1]]


def zones_file(index: int) -> str:
    return f"zones-{index:05d}.npz"
