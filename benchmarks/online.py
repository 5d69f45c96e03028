"""How fast and how well online clusters follow a stream.

    python benchmarks/online.py [--seeds 6] [--peer-rows 8000] [--json PATH]

Streams are planted (tests/nights.py): eleven behaviours, most of them overlapping, that drift over
four days of 8,000 rows, and 5% noise. The constants of the clusters were chosen on seeds 0 to 5;
what is reported comes from seeds 10 and up.

- Rows a second on one core, in batches of 256, 1,024 and 8,192. Floor: 500,000.
- ARI of a stream: every row is labelled before it is learned from, and ids must last over the days;
  rows of the first day and noise aside. Beside it the ceiling: the nearest of the true centres.
- River's DenStream, DBSTREAM and CluStream, one row at a time: rows a second to learn and to label,
  and ARI of the last eighth of `--peer-rows` rows. Their parameters are the best of a few on seeds
  0 and 1; CluStream, which is slow, has one set. Ours learns and labels the same rows. Without
  river (`pip install river`) they are left out.
- A round of re-clustering on 10,000 rows: CPU seconds, and ARI of the rows that follow.

Exits 1 if the clusters depend on how rows are split into batches, or if the mean ARI of the streams
falls below 0.85.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import NOW, WrongAnswerError
from capture_kernels.fingerprint.vector import Layout
from sidecar.clusters.online import OnlineClusters
from sidecar.clusters.rounds import Array, Task
from sidecar.processed import Processed
from tests.nights import fortnight
from tests.planted import planted_batch

CHOSEN, REPORTED = (0, 1), 10
DAYS, DAY_ROWS = 4, 8_000
BATCHES = (256, 1_024, 8_192)
# Rows that come in a second, and the rate that one core must take.
ROWS_PER_SECOND, FLOOR_PER_SECOND = 100.0, 500_000
TIMED_ROWS, TIMES = 65_536, 8
LEAST_ARI = 0.85
ROUND_ROWS = 10_000
Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]
Model = Any
# By name: classes of river.cluster, and the parameters that are tried.
PEERS: dict[str, list[dict[str, Any]]] = {
    "DenStream": [
        {"epsilon": epsilon, "beta": 0.5, "mu": 5, "decaying_factor": 1e-4, "n_samples_init": 1_000}
        for epsilon in (0.1, 0.15, 0.2, 0.3)
    ],
    "DBSTREAM": [
        {"clustering_threshold": radius, "fading_factor": 1e-4, "cleanup_interval": 100,
         "intersection_factor": 0.3, "minimum_weight": 2}
        for radius in (0.3, 0.45, 0.6, 0.7, 0.8)
    ],
    # Too slow to try several. Its k-means starts from random centres, by default far outside.
    "CluStream": [
        {"n_macro_clusters": 11, "max_micro_clusters": 100, "time_gap": 500, "time_window": 8_000,
         "mu": 0.3, "sigma": 0.2, "seed": 0}
    ],
}  # fmt: skip


def stream(seed: int) -> tuple[Vectors, Labels]:
    """float32[n, 20] and who each row is, int64[n] (-1: noise)."""
    days = fortnight(seed, DAYS, DAY_ROWS)
    return np.concatenate([d.vectors for d in days]), np.concatenate([d.truth for d in days])


def ari(truth: Labels, labels: NDArray[Any]) -> float:
    """Adjusted Rand index over the rows that are not noise; those in no cluster are one more."""
    from sklearn.metrics import adjusted_rand_score

    known = truth >= 0
    return float(adjusted_rand_score(truth[known], labels[known]))


class Clock:
    """Seconds that pass only when they are added."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def observed(vectors: Vectors) -> Processed:
    """Rows as they arrive while no run is served."""
    none = np.zeros(len(vectors), bool)
    return Processed(planted_batch(vectors, NOW), vectors, None, None, none, 0.0)


def label(clusters: OnlineClusters, vectors: Vectors) -> NDArray[np.int32]:
    found = clusters.predict(vectors)
    return np.where(found.within, found.cluster_id, np.int32(-1))


def follow(vectors: Vectors, batch: int = 1_024) -> tuple[OnlineClusters, NDArray[np.int32]]:
    """The clusters after a stream, and each row's label before it was learned from."""
    clock = Clock()
    clusters = OnlineClusters(half_life=DAY_ROWS / ROWS_PER_SECOND, clock=clock, wall=clock)
    labels = []
    for start in range(0, len(vectors), batch):
        part = vectors[start : start + batch]
        labels.append(label(clusters, part))
        clusters(observed(part))
        clock.now += len(part) / ROWS_PER_SECOND
    clusters.clusters()
    return clusters, np.concatenate(labels)


def quality(seed: int) -> dict[str, float]:
    """What a stream's clusters are worth, after its first day."""
    vectors, truth = stream(seed)
    clusters, labels = follow(vectors)
    later = slice(DAY_ROWS, None)
    centres = [np.sqrt(vectors[truth == one]).mean(axis=0) for one in range(truth.max() + 1)]
    roots = np.sqrt(vectors)
    ceiling = np.array([((roots - centre) ** 2).sum(axis=1) for centre in centres]).argmin(axis=0)
    noise = truth[later] < 0
    status = clusters.status()
    return {
        "ari": ari(truth[later], labels[later]),
        "ceiling": ari(truth[later], ceiling[later]),
        "behaviours": len(centres),
        "clusters": status["clusters"],
        "ids": status["born"],
        "lost": float((labels[later] < 0)[~noise].mean()),
        "noise_recognised": float((labels[later] < 0)[noise].mean()),
    }


def rates(vectors: Vectors) -> dict[str, dict[str, float]]:
    """Rows a second of CPU time and of wall time, by the size of the batches."""
    found = {}
    for size in BATCHES:
        batches = [observed(vectors[at : at + size]) for at in range(0, len(vectors), size)]
        clusters = OnlineClusters()
        best_cpu, best_wall = np.inf, np.inf
        for _ in range(TIMES):
            cpu, wall = time.process_time(), time.perf_counter()
            for batch in batches:
                clusters(batch)
            best_cpu = min(best_cpu, time.process_time() - cpu)
            best_wall = min(best_wall, time.perf_counter() - wall)
        found[str(size)] = {"cpu": len(vectors) / best_cpu, "wall": len(vectors) / best_wall}
    return found


def check_split(vectors: Vectors) -> None:
    """WrongAnswerError unless batches of any size end in the same clusters."""
    found = []
    for size in BATCHES:
        clock = Clock()
        clusters = OnlineClusters(clock=clock, wall=clock)
        for at in range(0, len(vectors), size):
            clusters(observed(vectors[at : at + size]))
        clock.now = 2.0
        found.append(clusters.clusters())
    if found[0] != found[1] or found[0] != found[2]:
        raise WrongAnswerError("the clusters depend on the size of the batches")


def learned(model: Model, vectors: Vectors, truth: Labels) -> dict[str, float]:
    """Rates and ARI of a model of river's: it learns seven eighths of the rows, and labels the rest
    as it learns it."""
    rows = [dict(enumerate(row)) for row in np.sqrt(vectors).tolist()]
    start = len(rows) * 7 // 8
    learn = label_them = 0.0
    labels = []
    for index, row in enumerate(rows):
        began = time.process_time()
        if index >= start:
            labels.append(model.predict_one(row))
            label_them += time.process_time() - began
            began = time.process_time()
        model.learn_one(row)
        learn += time.process_time() - began
    return {
        "learn_per_second": len(rows) / learn,
        "label_per_second": len(labels) / label_them,
        "ari": ari(truth[start:], np.array(labels)),
    }


def ours_on(vectors: Vectors, truth: Labels) -> float:
    """ARI of the same rows as `learned`."""
    start = len(vectors) * 7 // 8
    return ari(truth[start:], follow(vectors, 256)[1][start:])


def peers(rows: int, seeds: Iterable[int]) -> dict[str, Any]:
    """River's clusterings, each with the parameters that were best on the chosen seeds."""
    try:
        from river import cluster
    except ImportError:
        return {"left_out": "river is not installed"}
    chosen, reported = ([first_rows(seed, rows) for seed in some] for some in (CHOSEN, seeds))
    found: dict[str, Any] = {
        "river": version("river"),
        "rows": rows,
        "ours": float(np.mean([ours_on(*data) for data in reported])),
    }
    for name, tried in PEERS.items():
        make: Callable[..., Model] = getattr(cluster, name)
        mean = partial(mean_of, make)
        best = tried[0]
        if len(tried) > 1:
            best = max(tried, key=lambda parameters: mean(parameters, chosen)["ari"])
        found[name] = {"parameters": best, **mean(best, reported)}
        print(f"{name}: {found[name]}", flush=True)
    return found


def first_rows(seed: int, rows: int) -> tuple[Vectors, Labels]:
    vectors, truth = stream(seed)
    return vectors[:rows], truth[:rows]


def mean_of(
    make: Callable[..., Model], parameters: dict[str, Any], data: list[tuple[Vectors, Labels]]
) -> dict[str, float]:
    runs = [learned(make(**parameters), *one) for one in data]
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def reclustered(seed: int) -> dict[str, float]:
    """A round of the re-clustering process, without the process."""
    from sidecar.clusters.worker import run

    vectors, truth = stream(seed)
    rows = Array.of(vectors[:ROUND_ROWS])
    requests = Array.of(np.arange(ROUND_ROWS, dtype=np.uint64))
    task = Task(rows, requests, int(Layout.LOG16), "cpu", 42, None, None, None, 0)
    run(task)  # compiles
    began = time.process_time()
    result = run(task)
    seconds = time.process_time() - began
    after = slice(ROUND_ROWS, 2 * ROUND_ROWS)
    if result.found is None:
        raise WrongAnswerError("re-clustering found nothing")
    labels = result.found.rule.codebook().label(vectors[after])
    return {"cpu_seconds": seconds, "ari": ari(truth[after], labels), "clusters": len(result.ids)}


def measure(options: argparse.Namespace) -> None:
    seeds = range(REPORTED, REPORTED + options.seeds)
    vectors = stream(REPORTED)[0]
    check_split(vectors)
    timed = np.resize(vectors, (TIMED_ROWS, vectors.shape[1]))
    figures: dict[str, Any] = {"rates": rates(timed), "floor_per_second": FLOOR_PER_SECOND}
    for size, rate in figures["rates"].items():
        met = "met" if rate["cpu"] >= FLOOR_PER_SECOND else "not met"
        print(
            f"batches of {size}: {rate['cpu']:,.0f} rows a CPU second, {rate['wall']:,.0f} a "
            f"second (floor {FLOOR_PER_SECOND:,}: {met})"
        )
    figures["streams"] = {str(seed): quality(seed) for seed in seeds}
    for seed, run in figures["streams"].items():
        print(f"seed {seed}: " + ", ".join(f"{name} {value:.3g}" for name, value in run.items()))
    mean = float(np.mean([run["ari"] for run in figures["streams"].values()]))
    figures["ari"] = mean
    figures["reclustered"] = reclustered(REPORTED)
    print(f"mean ARI {mean:.3f}; re-clustered: {figures['reclustered']}", flush=True)
    figures["peers"] = peers(options.peer_rows, seeds)
    if options.json:
        common.write_figures(options.json, figures)
    if mean < LEAST_ARI:
        raise WrongAnswerError(f"mean ARI {mean:.3f} is below {LEAST_ARI}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=6, help="streams that are reported")
    parser.add_argument("--peer-rows", type=int, default=8_000)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    with threadpool_limits(limits=1):
        return common.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
