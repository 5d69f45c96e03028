"""How steady live clusters are while the traffic is the same.

    python benchmarks/live_rounds.py [--rounds 6] [--json PATH]

Requests of real attention come in random order, 40 at a time. A round clusters the last 10,000 rows
(4,000 of the smaller set), of which a fifth are new. Figures, means over the rounds but the first:
the share of the rows that two rounds both saw which have the same cluster id in both, their ARI,
how many ids came or went in all rounds, and the share of the rows of the next round, which neither
saw, that get the same id from both (of rounds that follow one another).

Peer: each round afresh, a cluster keeping the id of the one that it shares most rows with.
Tried on other captures of the demo model; reported on the shipped sample, on which other choices
of the clustering were made, and on captures that were held back. Exits 1 if rounds that follow one
another are less steady than the peer's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import WrongAnswerError, exit_code, write_figures
from benchmarks.judge.real import fresh_captures, whole_sample
from benchmarks.judge.rows import Rows
from discovery.artifacts.schema import NOISE
from pipeline.hashing import mix64
from sidecar.clusters.rounds import Array, Result, Task
from sidecar.clusters.worker import ids_of, run

AT_A_TIME = 40
NEW = 5  # of a buffer, one row in so many is new in each round


def arrival(requests: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """The order in which n rows come: int64[n]; each request's in its own order."""
    left = {one: list(np.flatnonzero(requests == one)[::-1]) for one in np.unique(requests)}
    queue, order = list(rng.permutation(list(left))), []
    active: list[np.int64] = []
    while queue or active:
        while queue and len(active) < AT_A_TIME:
            active.append(queue.pop())
        at = int(rng.integers(len(active)))
        order.append(left[active[at]].pop())
        if not left[active[at]]:
            active.pop(at)
    return np.array(order)


def clustered(
    vectors: NDArray[np.float32], hashes: NDArray[np.uint64], layout: int, before: Result | None
) -> Result:
    found, next_id = (before.found, before.next_id) if before else (None, 0)
    task = Task(Array.of(vectors), Array.of(hashes), layout, "cpu", 42, None, None, found, next_id)
    return run(task)


def labelled(result: Result, vectors: NDArray[np.float32]) -> NDArray[np.int32]:
    if result.found is None:
        raise WrongAnswerError("a round found no clusters")
    return result.found.rule.codebook().label(vectors)


def steadiness(rows: Rows, buffer: int, rounds: int, follows: bool) -> dict[str, float]:
    """Of rounds that follow one another, or of rounds afresh whose ids go by shared rows."""
    _, requests = np.unique(rows.requests, return_inverse=True)
    order = arrival(requests, np.random.default_rng(0))
    last: Result | None = None
    labels, next_id, same, agree, changes, unseen = None, 0, [], [], 0, []
    for number in range(rounds):
        at = order[number * buffer // NEW :][:buffer]
        vectors, hashes = rows.vectors[at], mix64(requests[at].astype(np.uint64))
        before, last = last, clustered(vectors, hashes, int(rows.layout), last if follows else None)
        now = labelled(last, vectors)
        if follows and before is not None:
            after = rows.vectors[order[number * buffer // NEW + buffer :][: buffer // NEW]]
            unseen.append(float((labelled(before, after) == labelled(last, after)).mean()))
        if not follows:
            now, next_id = named(now, labels, buffer // NEW, next_id)
        if labels is not None:
            earlier, again = labels[buffer // NEW :], now[: buffer - buffer // NEW]
            same.append(float((earlier == again).mean()))
            agree.append(float(adjusted_rand_score(earlier, again)))
            changes += len((set(labels.tolist()) ^ set(now.tolist())) - {NOISE})
        labels = now
    return {
        "same_id": float(np.mean(same)), "ari": float(np.mean(agree)), "came_or_went": changes,
        "clusters": len(set(now.tolist()) - {NOISE}),
        **({"unseen_same_id": float(np.mean(unseen))} if unseen else {}),
    }  # fmt: skip


def named(
    now: NDArray[np.int32], before: NDArray[np.int32] | None, gone: int, next_id: int
) -> tuple[NDArray[np.int32], int]:
    """The labels of a round afresh as ids that go by the rows shared with the one before."""
    numbers = np.unique(now[now != NOISE])
    nothing = np.full(len(numbers), NOISE, np.int32)
    shared = now[: len(now) - gone], before[gone:] if before is not None else None
    ids = ids_of(numbers, *shared, next_id, nothing, np.zeros(len(numbers), bool))
    lookup = np.full(int(numbers.max()) + 2, NOISE, np.int32)  # the last one is noise's
    lookup[numbers] = ids
    return lookup[now], max(next_id, int(ids.max()) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="how many (default 6)")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, rows, buffer in (
        ("sample", whole_sample(), 10_000), ("held_out", fresh_captures("held_out"), 4_000),
    ):  # fmt: skip
        figures[name] = {
            way: steadiness(rows, buffer, options.rounds, way == "follows")
            for way in ("follows", "afresh")
        }
        for way, own in figures[name].items():
            print(f"{name:<9}{way:<8}", *(f"{figure} {value:.3f}" for figure, value in own.items()))
    if options.json:
        command = f"python benchmarks/live_rounds.py --rounds {options.rounds}"
        write_figures(
            options.json,
            {"command": command, "rounds": options.rounds, **figures},
        )
    for name, own in figures.items():
        if own["follows"]["same_id"] < own["afresh"]["same_id"]:
            raise WrongAnswerError(f"{name}: rounds afresh are steadier")


if __name__ == "__main__":
    sys.exit(exit_code(main))
