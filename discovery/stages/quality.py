"""quality: the run's measures, by itself and against its parent, and the gate's verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.drift import drift
from discovery.algorithms.metrics import map_quality
from discovery.artifacts.schema import IDENTITY
from discovery.gate import Measures, judge

from .context import RunContext
from .lineage import from_arrays

SAMPLE_ROWS = 2_000
NEIGHBORS = 15


def parameters(context: RunContext) -> dict[str, Any]:
    return {
        "sample": SAMPLE_ROWS,
        "k": NEIGHBORS,
        "seed": context.options.seed,
        "rules": context.options.gate_rules.as_dict(),
    }


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    fit = context.checkpoint_of("neighbors").read_arrays("fit.npz")
    points = context.checkpoint_of("umap").read_arrays("map.npz")["points"]
    cluster = context.checkpoint_of("cluster")
    k = min(NEIGHBORS, (len(points) - 1) // 3)
    found = map_quality(
        context.engine, fit["projected"], points, k, SAMPLE_ROWS, context.options.seed
    )
    held = cluster.read_arrays("agreement.npz")
    persistence = cluster.read_arrays("fit.npz")["persistence"]
    inconsistent_rows = int(
        context.checkpoint_of("lineage").read_arrays("shares.npz")["inconsistent"]
    )
    summary: dict[str, Any] = {
        "trustworthiness": round(found.trustworthiness, 6),
        "neighbor_recall": round(found.recall, 6),
        "sampled_rows": min(SAMPLE_ROWS, len(points)),
        "noise_share": context.summaries["cluster"]["noise_share"],
        "mean_persistence": float(persistence.mean()) if len(persistence) else None,
        "classifier_agreement": float(held["agreement"]) if held["rows"] else None,
        "classifier_held_out_rows": int(held["rows"]),
        "classifier_noise_recognised": (
            float(held["noise_recognised"]) if held["noise_rows"] else None
        ),
        "inconsistent_rows": inconsistent_rows / context.rows.count,
        "drift": None,
        "recognised": None,
        "agreement": None,
    }
    if context.parent:
        summary |= against_parent(context)
    summary["gate"] = judge(measures(context, summary), context.options.gate_rules)
    says = f"trustworthiness {found.trustworthiness:.3f}, neighbours kept {found.recall:.0%}"
    if held["rows"]:
        says += f", classifier agrees on {float(held['agreement']):.1%} of held-out rows"
    if summary["agreement"] is not None:
        says += f", agreement with {context.follows['parent']} {summary['agreement']:.2f}"
    says += "".join(f"; FAILED: {reason}" for reason in summary["gate"]["reasons"])
    return summary, says


def against_parent(context: RunContext) -> dict[str, Any]:
    """How far this run is from the parent's, by the parent's prototypes."""
    assert context.parent
    lineage = context.checkpoint_of("lineage")
    saved, own = lineage.read_arrays("of_parent.npz"), lineage.read_arrays("shares.npz")
    names = [str(i) for i in (*context.parent.ids.tolist(), -1)]
    seed = context.options.seed
    return {
        "recognised": 1.0 - float(saved["beyond"]) / context.rows.count,
        # A parent without clusters has nothing to agree with.
        "agreement": mutual_information(saved["contingency"]) if len(context.parent.ids) else None,
        "drift": {
            "zones": drift(context.parent.zones, from_arrays("zones", own), ZONES, seed),
            "clusters": drift(context.parent.clusters, from_arrays("labelled", saved), names, seed),
        },
    }


def mutual_information(contingency: NDArray[np.int64]) -> float:
    """Adjusted mutual information of two labellings from their contingency table int64[r, s]."""
    from sklearn.metrics import adjusted_mutual_info_score

    # The score is of labels: shrunk to so many rows, it is the same to three digits.
    shrunk = np.round(contingency * min(1.0, 50_000 / contingency.sum())).astype(np.int64)
    rows, columns = np.indices(shrunk.shape)
    count = shrunk.ravel()
    return float(
        adjusted_mutual_info_score(
            np.repeat(rows.ravel(), count), np.repeat(columns.ravel(), count)
        )
    )


def measures(context: RunContext, summary: dict[str, Any]) -> Measures:
    """What the gate judges: this stage's figures, and what was noted when the run began."""
    follows, options = context.follows, context.options
    identity = {**context.window, "layout": context.layout.label}
    served = follows["served"]
    asked = [name for name in IDENTITY if getattr(options, name) is not None]
    changed = [name for name in IDENTITY if served and served[name] != identity[name]]
    drifted = summary["drift"] or {"zones": None, "clusters": None}
    same = ("inconsistent_rows", "trustworthiness", "neighbor_recall", "noise_share",
            "mean_persistence", "classifier_agreement", "recognised", "agreement")  # fmt: skip
    return Measures(
        identity=in_words(identity),
        rows=context.summaries["extract"]["rows_in_window"],
        fit_rows=context.summaries["neighbors"]["fit_rows"],
        clusters=context.summaries["cluster"]["clusters"],
        held_out_rows=summary["classifier_held_out_rows"],
        zone_drift=drifted["zones"],
        cluster_drift=drifted["clusters"],
        fewest_rows=min(follows["volumes"], default=None),
        served=in_words(served) if served else None,
        asked=set(changed) <= set(asked),
        **{name: summary[name] for name in same},
    )


def in_words(identity: dict[str, Any]) -> str:
    return f"{identity['model']} ({identity['layout']}, capture {identity['capture_id']})"
