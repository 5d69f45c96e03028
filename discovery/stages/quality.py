"""quality: the run's measures, by itself and against its parent, and the gate's verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.drift import drift
from discovery.algorithms.metrics import MapQuality, distinct_rows, map_quality
from discovery.artifacts.schema import IDENTITY, NOISE, identity_in_words
from discovery.engines.protocol import Engine
from discovery.gate import QUESTIONS, Measures, judge
from discovery.runs.parent import Parent, damaged_in_words

from .context import RunContext
from .lineage import saved_shares

SAMPLE_ROWS = 2_000
NEIGHBORS = 15
# With fewer distinct rows there is no third neighbour to be wrong: then all rows count.
LEAST_DISTINCT = 4


def parameters(context: RunContext) -> dict[str, Any]:
    rules = asdict(context.options.gate_rules)
    return {"sample": SAMPLE_ROWS, "k": NEIGHBORS, "seed": context.options.seed, "rules": rules}


def run(context: RunContext) -> tuple[dict[str, Any], str]:
    projected = context.saved("neighbors", "fit.npz")["projected"]
    points = context.saved("umap", "map.npz")["points"]
    found, distinct = quality_of_map(context.engine, projected, points, context.options.seed)
    held = {name: array.item() for name, array in context.saved("cluster", "agreement.npz").items()}
    found_clusters = context.saved("cluster", "fit.npz")
    # The rows that extract left out contradict themselves as well.
    impossible = sum(context.summaries["extract"]["impossible"].values())
    inconsistent = impossible + int(context.saved("lineage", "counts.npz")["inconsistent"])
    summary: dict[str, Any] = {
        "trustworthiness": round(found.trustworthiness, 6),
        "neighbor_recall": round(found.recall, 6),
        "distinct_rows": distinct,
        "sampled_rows": min(SAMPLE_ROWS, distinct),
        **{name: context.summaries["cluster"][name] for name in ("noise_share", "between_share")},
        "mean_persistence": mean_known(found_clusters["persistence"]),
        "mean_stability": mean_known(found_clusters["raw_stability"]),
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


def mean_known(figures: Doubles) -> float | None:
    """The mean of figures float64[c], None where there are none or they are unknown."""
    return None if not len(figures) or np.isnan(figures).any() else float(figures.mean())


def quality_of_map(
    engine: Engine, projected: Floats, points: Floats, seed: int
) -> tuple[MapQuality, int]:
    """The figures of a map float32[n, 2] of `projected` float32[n, d], and how many rows they are
    of: equal rows count as one. They are neighbours on any map, and 1% of them were enough to raise
    the neighbour recall of the shipped sample by 0.007.
    """
    rows = distinct_rows(engine.array(projected))
    if LEAST_DISTINCT <= len(rows) < len(projected):
        projected, points = projected[rows], points[rows]
    k = min(NEIGHBORS, (len(projected) - 1) // 3)
    return map_quality(engine, projected, points, k, SAMPLE_ROWS, seed), len(projected)


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
        map_rows=summary["distinct_rows"],
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
