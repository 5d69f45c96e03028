"""quality: the run's measures, by itself and against its parent, and the gate's verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from capture_kernels.arrays import Ints
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.drift import drift
from discovery.algorithms.metrics import map_quality
from discovery.artifacts.schema import IDENTITY, NOISE, identity_in_words
from discovery.gate import QUESTIONS, Measures, judge
from discovery.runs.parent import Parent, damaged_in_words

from .context import RunContext
from .lineage import saved_shares

SAMPLE_ROWS = 2_000
NEIGHBORS = 15


def parameters(context: RunContext) -> dict[str, Any]:
    rules = asdict(context.options.gate_rules)
    return {"sample": SAMPLE_ROWS, "k": NEIGHBORS, "seed": context.options.seed, "rules": rules}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    projected = context.saved("neighbors", "fit.npz")["projected"]
    points = context.saved("umap", "map.npz")["points"]
    k = min(NEIGHBORS, (len(points) - 1) // 3)
    found = map_quality(context.engine, projected, points, k, SAMPLE_ROWS, context.options.seed)
    held = {name: array.item() for name, array in context.saved("cluster", "agreement.npz").items()}
    persistence = context.saved("cluster", "fit.npz")["persistence"]
    # The rows that extract left out contradict themselves as well.
    impossible = sum(context.summaries["extract"]["impossible"].values())
    inconsistent = impossible + int(context.saved("lineage", "counts.npz")["inconsistent"])
    summary: dict[str, Any] = {
        "trustworthiness": round(found.trustworthiness, 6),
        "neighbor_recall": round(found.recall, 6),
        "sampled_rows": min(SAMPLE_ROWS, len(points)),
        "noise_share": context.summaries["cluster"]["noise_share"],
        "mean_persistence": float(persistence.mean()) if len(persistence) else None,
        "classifier_agreement": held["agreement"] if held["rows"] else None,
        "classifier_held_out_rows": held["rows"],
        "classifier_effective_rows": round(held["effective_rows"], 1),
        "classifier_noise_recognised": held["noise_recognised"] if held["noise_rows"] else None,
        "inconsistent_rows": inconsistent / (impossible + context.rows.count),
        "drift": None,
        "recognised": None,
        "agreement": None,
    }
    if context.parent:
        summary |= against_parent(context, context.parent)
    summary["gate"] = judge(measures(context, summary), context.options.gate_rules)
    says = f"trustworthiness {found.trustworthiness:.3f}, neighbours kept {found.recall:.0%}"
    if held["rows"]:
        says += f", classifier agrees on {held['agreement']:.1%} of held-out rows"
    if summary["agreement"] is not None:
        says += f", agreement with {context.follows['parent']} {summary['agreement']:.2f}"
    says += "".join(f"; FAILED: {reason}" for reason in summary["gate"]["reasons"])
    return summary, says


def against_parent(context: RunContext, parent: Parent) -> dict[str, Any]:
    """How far this run is from the parent's, by the parent's prototypes."""
    saved = context.saved("lineage", "counts.npz")
    zones, clusters = (saved_shares(context, name) for name in ("zones", "labelled"))
    names = [str(i) for i in (*parent.ids.tolist(), NOISE)]
    seed = context.options.seed
    return {
        "recognised": 1.0 - float(saved["beyond"]) / context.rows.count,
        # A parent without clusters has nothing to agree with.
        "agreement": mutual_information(saved["contingency"]) if len(parent.ids) else None,
        "drift": {
            "zones": drift(parent.zones, zones, ZONES, seed),
            "clusters": drift(parent.clusters, clusters, names, seed),
        },
    }


def mutual_information(contingency: Ints) -> float:
    """Adjusted mutual information of two labellings from their contingency table int64[r, s]."""
    from sklearn.metrics import adjusted_mutual_info_score

    # The score takes labels: of a table scaled down to this many rows it is equal to three digits.
    scaled = np.round(contingency * min(1.0, 50_000 / contingency.sum())).astype(np.int64)
    rows, columns = (np.repeat(of.ravel(), scaled.ravel()) for of in np.indices(scaled.shape))
    return float(adjusted_mutual_info_score(rows, columns))


def measures(context: RunContext, summary: dict[str, Any]) -> Measures:
    """What the gate judges: this stage's figures, and what was recorded when the run began."""
    follows, options = context.follows, context.options
    identity = {**context.window, "layout": context.layout.label}
    served = follows["served"]
    drifted = summary["drift"] or {"zones": None, "clusters": None}
    return Measures(
        identity=identity_in_words(identity),
        rows=context.summaries["extract"]["rows_in_window"],
        fit_rows=context.summaries["neighbors"]["fit_rows"],
        clusters=context.summaries["cluster"]["clusters"],
        held_out_rows=summary["classifier_held_out_rows"],
        effective_rows=summary["classifier_effective_rows"],
        zone_drift=drifted["zones"],
        cluster_drift=drifted["clusters"],
        fewest_rows=min(follows["volumes"], default=None),
        latest=follows.get("latest"),
        served=identity_in_words(served) if served else None,
        asked=all(
            getattr(options, name) is not None
            for name in IDENTITY
            if served and served[name] != identity[name]
        ),
        parent=follows["parent"] or "no run",
        damaged=None if options.new_lineage else damaged_in_words(follows),
        **{name: summary[name] for name in QUESTIONS.keys() & summary.keys()},
    )
