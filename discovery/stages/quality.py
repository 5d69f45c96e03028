"""quality: what can be measured of a run by itself. Without an earlier run there is no drift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..metrics import map_quality

if TYPE_CHECKING:
    from ..job import Job

SAMPLE_ROWS = 2_000
NEIGHBORS = 15


def parameters(job: Job) -> dict[str, Any]:
    return {"sample": SAMPLE_ROWS, "k": NEIGHBORS, "seed": job.options.seed}


def gate(clusters: int) -> dict[str, Any]:
    """Whether this run may be served, and why not. It is the first to be compared with nothing, so
    the one thing asked is that it found something."""
    reasons = (
        [] if clusters else ["no clusters: try a longer --hours or a smaller --min-cluster-size"]
    )
    return {"passed": not reasons, "reasons": reasons}


def run(job: Job) -> tuple[dict[str, Any], str]:
    fit = job.stage_parts("neighbors").read_arrays("fit.npz")
    points = job.stage_parts("umap").read_arrays("map.npz")["points"]
    cluster = job.stage_parts("cluster")
    k = min(NEIGHBORS, (len(points) - 1) // 3)
    found = map_quality(fit["projected"], points, k, SAMPLE_ROWS, job.options.seed)
    held = cluster.read_arrays("agreement.npz")
    persistence = cluster.read_arrays("fit.npz")["persistence"]
    summary: dict[str, Any] = {
        "trustworthiness": round(found.trustworthiness, 6),
        "neighbor_recall": round(found.recall, 6),
        "sampled_rows": min(SAMPLE_ROWS, len(points)),
        "noise_share": job.summaries["cluster"]["noise_share"],
        "mean_persistence": float(persistence.mean()) if len(persistence) else None,
        "classifier_agreement": float(held["agreement"]) if held["rows"] else None,
        "classifier_held_out_rows": int(held["rows"]),
        "classifier_noise_recognised": (
            float(held["noise_recognised"]) if held["noise_rows"] else None
        ),
        "gate": gate(len(persistence)),
    }
    says = f"trustworthiness {found.trustworthiness:.3f}, neighbours kept {found.recall:.0%}"
    if held["rows"]:
        says += f", classifier agrees on {float(held['agreement']):.1%} of held-out rows"
    says += "".join(f"; FAILED: {reason}" for reason in summary["gate"]["reasons"])
    return summary, says
