"""zones: every row's zone and confidence, by the one table of rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from capture_kernels.zones import ZONES

if TYPE_CHECKING:
    from ..job import Job


def parameters(job: Job) -> dict[str, Any]:
    return {"rules": job.options.zone_rules.as_dict()}


def run(job: Job) -> tuple[dict[str, Any], str]:
    zoned = [job.options.zone_rules.classify(v, job.layout) for _, v in job.rows.vectors()]
    index = np.concatenate([z.zone for z in zoned])
    confidence = np.concatenate([z.confidence for z in zoned])
    job.parts.write_arrays("zones.npz", index=index, confidence=confidence)
    shares = np.bincount(index, minlength=len(ZONES)) / len(index)
    summary = {zone: float(share) for zone, share in zip(ZONES, shares, strict=True)}
    says = ", ".join(f"{zone} {share:.0%}" for zone, share in summary.items() if share >= 0.005)
    return {"shares": summary}, says
