"""Whether a row's memberships foretell what other requests say of it.

    python benchmarks/memberships.py [--splits 4] [--json PATH]

The requests are divided into halves, and each half is clustered alone, as a run does. A row's
memberships are of the half that it is in. The other half labels the row as it labels the nearest
of the rows there; that cluster counts as the one of the row's half that it shares most of their
rows with. The row was *right* where that is the cluster that it is in.

Figures, means over both halves of each division: how often rows are right; the Brier score of
their probability, mean (probability - right)^2; its calibration error, the mean over tenths of the
probability of how far the rows of a tenth are right more or less often than it says, weighted by
their number; of rows that are not right, how often the second cluster is the one; rows between two
clusters.

Peers: `certain`, which has every row wholly in its cluster and as the second the one whose centroid
is nearest; and `neighbours`, the share of a row's 30 nearest that are in its cluster and the most
of the others. The method was chosen on the shipped sample. Fresh captures of the demo model on
other prompts were held back. Exits 1 if what is published is worse than a peer there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import WrongAnswerError, exit_code, write_figures
from benchmarks.judge.measures import mean_of
from benchmarks.judge.real import fresh_captures, second_half, whole_sample
from benchmarks.judge.rows import Rows
from discovery.algorithms.map_clusters import (
    NEIGHBORS,
    SPARSE_NEIGHBOR,
    clusters_of_rows,
    rows_to_cluster,
)
from discovery.algorithms.pca import Moments
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.schema import NOISE
from discovery.engines.cpu import CpuEngine
from discovery.stages.fit_clusters import smallest_cluster

ENGINE = CpuEngine()
TENTHS = 10


class Half(NamedTuple):
    """rows float32[n, d] in PCA space; near int32[n, 31], of each its neighbours, itself first;
    members: of clusters."""

    rows: NDArray[np.float32]
    near: NDArray[np.int32]
    members: Memberships


def clustered(rows: NDArray[np.float32], requests: NDArray[np.int64], seed: int) -> Half:
    near, distances = ENGINE.neighbors(rows, rows, NEIGHBORS + 1)
    chosen = rows_to_cluster(
        ENGINE, rows, distances[:, SPARSE_NEIGHBOR], requests,
        smallest_cluster(None, len(rows), 1.0), seed,
    )  # fmt: skip
    found = clusters_of_rows(ENGINE, rows, chosen, chosen.clusters())
    return Half(rows, near, found.members)


def certain(half: Half) -> Memberships:
    label = half.members.label
    clusters = int(label.max()) + 1
    centroids = np.stack([half.rows[label == own].mean(axis=0) for own in range(clusters)])
    apart = np.linalg.norm(half.rows[:, None] - centroids[None], axis=2)
    apart[np.arange(len(label)), label] = np.inf
    second = apart.argmin(axis=1).astype(np.int32)
    return Memberships(label, np.ones(len(label), np.float32), second, np.zeros(len(label), "f4"))


def by_neighbours(half: Half) -> Memberships:
    label, rows = half.members.label, np.arange(len(half.rows))
    counts = np.zeros((len(rows), int(label.max()) + 2))
    for column in half.near.T[1:]:
        counts[rows, label[column]] += 1
    return Memberships.of_shares(label, counts[:, :-1] / NEIGHBORS)


METHODS = {
    "published": lambda half: half.members, "neighbours": by_neighbours, "certain": certain,
}  # fmt: skip


def judged(own: Half, other: Half) -> dict[str, dict[str, float]]:
    """Each method's memberships of a half's rows, by what the other half says of them."""
    near, _ = ENGINE.neighbors(other.rows, own.rows, 1)
    theirs = other.members.label[near[:, 0]]
    inside = (theirs != NOISE) & (own.members.label != NOISE)
    mine, theirs = own.members.label[inside], theirs[inside]
    both = np.zeros((theirs.max() + 1, mine.max() + 1))
    np.add.at(both, (theirs, mine), 1)
    either = both.sum(axis=1, keepdims=True) + both.sum(axis=0) - both
    says = (both / either).argmax(axis=1)[theirs]
    found = {}
    for name, method in METHODS.items():
        members = method(own).at(inside)
        right, probability = says == members.label, members.probability.astype(np.float64)
        tenth = np.minimum((probability * TENTHS).astype(int), TENTHS - 1)
        off = [abs((probability - right)[tenth == one].sum()) for one in range(TENTHS)]
        found[name] = {
            "right": float(right.mean()),
            "brier": float(np.square(probability - right).mean()),
            "calibration_error": float(sum(off) / len(right)),
            "second_right": float((members.second == says)[~right].mean()),
            "between": float(members.between().mean()),
        }
    return found


def of_rows(rows: Rows, splits: int) -> dict[str, dict[str, float]]:
    _, requests = np.unique(rows.requests, return_inverse=True)
    space = Moments.of(rows.vectors, rows.layout, requests).projection()
    points = np.ascontiguousarray(space(rows.vectors, rows.layout))
    done = []
    for split in range(splits):
        second = second_half(rows.requests, f"memberships-{split}")
        halves = [clustered(points[own], requests[own], split) for own in (~second, second)]
        done += [judged(halves[0], halves[1]), judged(halves[1], halves[0])]
    return {name: mean_of([one[name] for one in done]) for name in METHODS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--splits", type=int, default=4, help="divisions into halves (default 4)")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    data = {"sample": whole_sample(), "held_out": fresh_captures("held_out")}
    judged_on = {name: of_rows(rows, options.splits) for name, rows in data.items()}
    for name, methods in judged_on.items():
        print(f"{name}: {len(data[name]):,} rows")
        for method, own in methods.items():
            print(f"  {method:<11}", *(f"{figure} {value:.3f}" for figure, value in own.items()))
    if options.json:
        command = f"python benchmarks/memberships.py --splits {options.splits}"
        found = {
            name: {"rows": len(data[name]), "methods": methods}
            for name, methods in judged_on.items()
        }
        write_figures(options.json, {"command": command, "splits": options.splits, **found})
    held_out = judged_on["held_out"]
    for peer in ("neighbours", "certain"):
        if held_out["published"]["brier"] > held_out[peer]["brier"]:
            raise WrongAnswerError(f"{peer} foretell better than what is published")


if __name__ == "__main__":
    sys.exit(exit_code(main))
