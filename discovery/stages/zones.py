"""zones: every row's zone and confidence by `ZoneRules`, and the zones over time."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.engines.protocol import Engine
from discovery.runs.checkpoint import Arrays
from discovery.runs.chunks import ChunkVectors, chunk_file

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
    return {"rules": asdict(context.options.zone_rules)}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    files = [chunk_file("zones", index) for index in range(context.rows.chunks)]
    context.compute_missing(
        files,
        lambda todo: context.compute(
            zones_of_chunk, map(context.rows.reference, todo), context.options.zone_rules,
            context.layout,
        ),
    )  # fmt: skip
    first, last = context.summaries["extract"]["captured_at"]
    step = bin_seconds(first, last)
    start = first // (step * MICROS)
    bins = last // (step * MICROS) - start + 1
    counts = np.zeros(len(ZONES) * bins, np.int64)
    for index, file in enumerate(files):
        zone = context.checkpoint.read_arrays(file)["zone"].astype(np.int64)
        when = captured_at(context.rows.batch(index)) // (step * MICROS) - start
        counts += np.bincount(zone * bins + when, minlength=counts.size)
    by_zone = counts.reshape(len(ZONES), bins)
    shares = (by_zone.sum(axis=1) / context.rows.count).tolist()
    over_time = {
        "start": datetime.fromtimestamp(start * step, UTC).isoformat(),
        "step_seconds": step,
        "counts": dict(zip(ZONES, by_zone.tolist(), strict=True)),
    }
    summary = dict(zip(ZONES, shares, strict=True))
    says = ", ".join(f"{zone} {share:.0%}" for zone, share in summary.items() if share >= 0.005)
    return {"shares": summary, "over_time": over_time}, says


def zones_of_chunk(
    engine: Engine, rules: ZoneRules, layout: Layout, vectors: ChunkVectors
) -> Arrays:
    found = rules.classify(vectors.load(engine), layout)
    return {name: engine.host(array) for name, array in found._asdict().items()}


def bin_seconds(first: int, last: int) -> int:
    """The shortest bin, in seconds, of which at most `MOST_BINS` reach from `first` to `last`.

    Bins begin at multiples of their length since 1970, so that the bins of two runs line up.

    Args:
        first, last: microseconds since 1970.
    """
    doubled = (STEPS[-1] << power for power in itertools.count(1))
    return next(
        step
        for step in itertools.chain(STEPS, doubled)
        if last // (step * MICROS) - first // (step * MICROS) < MOST_BINS
    )
