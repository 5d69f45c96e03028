"""zones: every row's zone and confidence, by the one table of rules, and the zones over time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, Zoned, ZoneRules
from discovery.engines.protocol import Engine

from .extract import captured_at
from .rows import VectorsOfPart

if TYPE_CHECKING:
    from discovery.job import Job

# Most bins that the zones are counted in over time, and how long one may be, in seconds; above the
# last it is doubled until there are few enough.
MOST_BINS = 96
MINUTE, HOUR, DAY = 60, 3_600, 86_400
STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR),
    *(DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY),
)
MICROS = 1_000_000


def parameters(job: Job) -> dict[str, Any]:
    return {"rules": job.options.zone_rules.as_dict()}


def run(job: Job) -> tuple[dict[str, Any], str]:
    first, last = job.summaries["extract"]["captured_at"]
    step = bin_seconds(first, last)
    start = first // (step * MICROS)
    bins = last // (step * MICROS) - start + 1
    counts = np.zeros((len(ZONES), bins), np.int64)
    total = len(job.rows.offsets)
    todo = [index for index in range(total) if not job.parts.has(zones_part(index))]
    found = job.executor.run(
        zones_of_part,
        map(job.rows.reference, todo),
        (job.engine, job.options.zone_rules, job.layout),
    )
    for index in range(total):
        if index in todo:
            zoned = next(found)
            job.parts.write_arrays(zones_part(index), **zoned._asdict())
        else:
            zoned = Zoned(**job.parts.read_arrays(zones_part(index)))
        zone = zoned.zone.astype(np.int64)
        when = captured_at(job.rows.batch(index)) // (step * MICROS) - start
        cells = np.bincount(zone * bins + when, minlength=counts.size)
        counts += cells.reshape(counts.shape)
        job.part_done(index + 1, total)
    shares = counts.sum(axis=1) / job.rows.count
    summary = {zone: float(share) for zone, share in zip(ZONES, shares, strict=True)}
    over_time = {
        "start": datetime.fromtimestamp(start * step, UTC).isoformat(),
        "step_seconds": step,
        "counts": dict(zip(ZONES, counts.tolist(), strict=True)),
    }
    says = ", ".join(f"{zone} {share:.0%}" for zone, share in summary.items() if share >= 0.005)
    return {"shares": summary, "over_time": over_time}, says


def zones_of_part(
    engine: Engine, rules: ZoneRules, layout: Layout, vectors: VectorsOfPart
) -> Zoned:
    found = rules.classify(vectors.load(engine), layout)
    return Zoned(engine.host(found.zone), engine.host(found.confidence))


def bin_seconds(first: int, last: int) -> int:
    """The shortest bin, in seconds, of which at most `MOST_BINS` reach from `first` to `last`.

    Bins begin at whole multiples of their length since 1970, so that the bins of two nights meet.

    Args:
        first, last: microseconds since 1970.
    """
    steps = list(STEPS)
    while True:
        for step in steps:
            if last // (step * MICROS) - first // (step * MICROS) < MOST_BINS:
                return step
        steps = [2 * steps[-1]]


def zones_part(index: int) -> str:
    return f"zones-{index:05d}.npz"
