"""What is said of two sides: similarity, shares with their intervals, drift, axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from capture_kernels.arrays import Doubles, Ints
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.drift import drift
from discovery.algorithms.shares import Shares
from discovery.artifacts.schema import NOISE
from pipeline.record import PHASES
from sidecar.watch.drift import spread_over

from .means import CONFIDENCE, DIGITS
from .sides import Side

# Of `similarity`; without clusters the others are divided by what is left.
WEIGHTS = {"shape": 0.4, "zones": 0.2, "clusters": 0.2, "entropy": 0.2}
# Half of what chance alone leaves outside of an interval, on both of its ends.
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
BANDS = ("local", "mid", "long")
# Draws of the simulation behind an interval of drift.
SEED = 0


def interval(share: float, variance: float, effective_rows: float) -> tuple[float, float]:
    """The 95% interval of a share by Wilson's score, of as many independent rows as its variance
    stands for (Korn & Graubard 1998)."""
    spread = share * (1.0 - share)
    n = spread / variance if spread > 0 and variance > 0 else effective_rows
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * np.sqrt(spread / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return float(max(0.0, middle - half)), float(min(1.0, middle + half))


def compared_shares(a: Side, b: Side, ours: Shares, theirs: Shares) -> list[dict[str, Any]]:
    """Shares of the same k categories on both sides, with intervals, and whether they differ beyond
    chance: two-sided, at 5% over all k (Bonferroni). Of one request nothing is known of others."""
    limit = NormalDist().inv_cdf(1.0 - 0.025 / max(len(ours.shares), 1))
    testable = not (a.is_one_request or b.is_one_request)
    found = []
    for i, (one, other) in enumerate(zip(ours.shares, theirs.shares, strict=True)):
        row: dict[str, Any] = {"a": round(float(one), DIGITS), "b": round(float(other), DIGITS)}
        for name, side, shares, share in (("a", a, ours, one), ("b", b, theirs, other)):
            low = high = None
            if not side.is_one_request:
                variance = float(shares.covariance[i, i])
                ends = interval(float(share), variance, shares.effective_rows)
                low, high = (round(end, DIGITS) for end in ends)
            row |= {f"{name}_low": low, f"{name}_high": high}
        variance = float(ours.covariance[i, i] + theirs.covariance[i, i])
        far = abs(float(other - one)) > limit * np.sqrt(variance)
        row["differs"] = bool(far) if testable else None
        found.append(row)
    return found


def zones(a: Side, b: Side) -> list[dict[str, Any]]:
    rows = compared_shares(a, b, a.zones, b.zones)
    return [{"zone": zone, **row} for zone, row in zip(ZONES, rows, strict=True)]


def joint_clusters(a: Side, b: Side) -> tuple[Shares, Shares, list[int]] | None:
    """Shares of the clusters that either side has, noise last, and their ids; None if a side has
    none, or if they have none in common."""
    if a.clusters is None or b.clusters is None:
        return None
    if not np.intersect1d(a.ids, b.ids).size and (len(a.ids) or len(b.ids)):
        return None
    union = np.union1d(a.ids, b.ids).astype(np.int32)
    ours, theirs = spread_over(a.clusters, a.ids, union), spread_over(b.clusters, b.ids, union)
    return ours, theirs, [*union.tolist(), NOISE]


def clusters(a: Side, b: Side) -> list[dict[str, Any]] | None:
    if (joint := joint_clusters(a, b)) is None:
        return None
    ours, theirs, ids = joint
    labels = {**a.labels, **b.labels}
    rows = compared_shares(a, b, ours, theirs)
    return [
        {"cluster_id": id_, "label": labels.get(id_), **row}
        for id_, row in zip(ids, rows, strict=True)
        if row["a"] or row["b"]
    ]


def similarity(a: Side, b: Side) -> dict[str, Any]:
    """The weighted sum of its parts, each in [0, 1] (docs/http.md, Comparison)."""
    shapes: list[Doubles] = [
        side.histogram.shares if side.histogram else side.bands for side in (a, b)
    ]
    values = {
        "shape": float(np.sqrt(shapes[0] * shapes[1]).sum()),
        "zones": overlap(a.zones.shares, b.zones.shares),
        "entropy": 1.0 - abs(float(a.entropy.shares[0] - b.entropy.shares[0])),
    }
    if joint := joint_clusters(a, b):
        values["clusters"] = overlap(joint[0].shares, joint[1].shares)
    values = {name: min(max(value, 0.0), 1.0) for name, value in values.items()}
    whole = sum(WEIGHTS[name] for name in values)
    weights = {name: WEIGHTS[name] / whole for name in WEIGHTS if name in values}
    total = sum(values[name] * weight for name, weight in weights.items())
    parts = [
        {"name": name, "value": round(values[name], DIGITS), "weight": round(weight, DIGITS)}
        for name, weight in weights.items()
    ]
    return {"total": round(min(total, 1.0), DIGITS), "parts": parts}


def overlap(one: Doubles, other: Doubles) -> float:
    """The share that two distributions have in common."""
    return float(np.minimum(one, other).sum())


def drifts(a: Side, b: Side) -> dict[str, Any]:
    """Drift from a to b of zones and clusters; None where an interval would say nothing."""
    found: dict[str, Any] = {"zones": None, "clusters": None}
    if a.is_one_request or b.is_one_request:
        return found
    found["zones"] = drift(a.zones, b.zones, ZONES, SEED)
    if joint := joint_clusters(a, b):
        ours, theirs, ids = joint
        found["clusters"] = drift(ours, theirs, list(map(str, ids)), SEED)
    return found


def histogram(a: Side, b: Side) -> dict[str, list[float]] | None:
    if a.histogram is None or b.histogram is None:
        return None
    pairs = (("a", a.histogram), ("b", b.histogram))
    return {name: found.shares.round(DIGITS).tolist() for name, found in pairs}


def bands(a: Side, b: Side) -> list[dict[str, Any]]:
    rows = zip(BANDS, a.bands.round(DIGITS).tolist(), b.bands.round(DIGITS).tolist(), strict=True)
    return [{"band": band, "a": one, "b": other} for band, one, other in rows]


def phases(a: Side, b: Side) -> list[dict[str, Any]]:
    """Of each phase that a side has rows of; of a side that is a run nothing is known."""
    columns: dict[str, list[float | None]] = {}
    for name, side in (("a", a), ("b", b)):
        known = side.phases is not None
        shares, entropies = side.phases if side.phases is not None else (None, None)
        columns[name] = shares.shares.round(DIGITS).tolist() if shares else [None] * len(PHASES)
        columns[f"{name}_entropy"] = [
            round(float(e), DIGITS) if known and np.isfinite(e) else None
            for e in (entropies if entropies is not None else [np.nan] * len(PHASES))
        ]
    rows = zip(PHASES, *columns.values(), strict=True)
    found = [{"phase": phase, **dict(zip(columns, values, strict=True))} for phase, *values in rows]
    return [row for row in found if row["a"] or row["b"]]


def by_size(rows: Sequence[dict[str, Any]]) -> Ints:
    """Indices of compared shares, the largest difference first."""
    found: Ints = np.argsort([-abs(row["b"] - row["a"]) for row in rows], kind="stable")
    return found


def as_one(shares: Shares, bins: slice) -> Shares:
    """The share of some categories together, against the others."""
    inside = np.zeros(len(shares.shares))
    inside[bins] = 1.0
    share = float(shares.shares @ inside)
    variance = float(inside @ shares.covariance @ inside)
    covariance = np.array([[variance, -variance], [-variance, variance]])
    return replace(shares, shares=np.array([share, 1.0 - share]), covariance=covariance)
