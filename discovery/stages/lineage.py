"""lineage: cluster ids. Every cluster gets a fresh id; none is matched to an earlier run yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..runs import reserve_cluster_ids

if TYPE_CHECKING:
    from ..job import Job


def parameters(job: Job) -> dict[str, Any]:
    return {"matching": "none"}


def run(job: Job) -> tuple[dict[str, Any], str]:
    persistence = job.stage_parts("cluster").read_arrays("fit.npz")["persistence"]
    count = len(persistence)
    first = reserve_cluster_ids(job.options.output_dir, job.run_id, count)
    job.parts.write_arrays("ids.npz", ids=np.arange(first, first + count, dtype=np.int32))
    says = f"first run of its lineage: {count} new ids from {first}, no earlier run is matched"
    return {"parent": None, "says": says, "born": list(range(first, first + count))}, says
