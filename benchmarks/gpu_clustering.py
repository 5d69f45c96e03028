"""The clustering stage alone, on 2-D maps: seconds, and whether it is HDBSCAN's answer.

    python benchmarks/gpu_clustering.py [--rows 200000,1000000,10000000] [--engine rapids]
        [--map-rows 1000000] [--json PATH]

The map is the engine's own: planted rows (tests/planted.py) projected as the job does it, their
neighbours, and UMAP, of the largest size up to --map-rows. Smaller sizes are rows drawn from it.
For larger ones places on the map are drawn with replacement and moved at random, by a normal
deviate as wide as half the way to their 10th neighbour: as dense as the map everywhere, no two
alike.

Clusters are at least 1% of the rows, which is what the job chooses, and at least 50 rows, which
makes a deep condensed tree. Planted behaviours are islands on the map, which every clustering
finds; so where there is a judge, the map is also blurred, each point moved by a normal deviate of
a fifth of the map's width, until islands run together and much is noise. Each library is called as
its users call it, on points where it wants them (cuML: on the device), with min_samples 10, after a
warm-up on 20,000 points; the figure is the median of three calls, or of as many
as it takes to spend 10 seconds. The peers are cuML's HDBSCAN and fast_hdbscan, up to 1,000,000
rows. Up to 200,000 rows hdbscan, with exact trees, is the judge, called once. Points drawn for
sizes above the map's are compared with the points that they were drawn from, by the engine's own
clusters of both.

Exits 1 where ARI (noise a label of its own) with the judge, or of drawn points with their map, is
below 0.98. With each peer it is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.pca import Moments
from discovery.engines.open import open_engine
from discovery.engines.protocol import ENGINES, Engine
from discovery.engines.rapids import why_not
from discovery.stages.fit_clusters import smallest_cluster
from discovery.stages.neighbors import self_first
from discovery.stages.umap import INIT_SPREAD
from tests.planted import planted

SEED, MIN_SAMPLES, MAP_NEIGHBORS = 42, 10, 30
WARM_UP_ROWS, SMALL_CLUSTER = 20_000, 50
PEERS_MOST, JUDGE_MOST = 1_000_000, 200_000
TIMES, ENOUGH_SECONDS = 3, 10.0
# Of the map's width, its standard deviation.
BLUR = 0.2
LEAST_ARI = 0.98

Labels = NDArray[np.integer[Any]]
# Points float32[n, 2] and the fewest rows of a cluster, to labels int[n] on the host.
Clusterer = Callable[[NDArray[np.float32], int], Labels]


def map_of_planted(rows: int, engine: Engine) -> NDArray[np.float32]:
    """The map that the engine makes of so many planted rows: float32[n, 2]."""
    vectors, _ = planted(rows, SEED)
    projection = Moments.of(vectors, Layout.LOG16).projection()
    space = np.ascontiguousarray(projection(vectors, Layout.LOG16))
    indices = np.empty((rows, MAP_NEIGHBORS), np.int32)
    distances = np.empty((rows, MAP_NEIGHBORS), np.float32)
    for start in range(0, rows, engine.search_rows):
        own = slice(start, start + engine.search_rows)
        found = engine.neighbors(space, space[own], MAP_NEIGHBORS)
        indices[own], distances[own] = self_first(*found, start)
    init = space[:, :2] * np.float32(INIT_SPREAD / np.abs(space[:, :2]).max())
    return engine.layout(space, (indices, distances), init, 0.0, SEED, lambda done, total: None)


def points_of(
    made: NDArray[np.float32], rows: int, engine: Engine
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """So many points from a map float32[n, 2], some of its own, or a denser one like it; and which
    of the map each was drawn from."""
    rng = np.random.default_rng(SEED)
    if rows <= len(made):
        drawn = np.sort(rng.choice(len(made), rows, replace=False))
        return made[drawn], drawn
    _, distance = engine.neighbors(made, made, MIN_SAMPLES + 1)
    drawn = rng.integers(0, len(made), rows)
    moved = rng.standard_normal((rows, 2), np.float32) * (distance[drawn, -1:] / 2)
    return np.asarray(made[drawn] + moved, np.float32), drawn


def blurred(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """The points float32[n, 2], each moved at random."""
    moved = np.random.default_rng(SEED).standard_normal(points.shape, np.float32)
    return points + moved * np.float32(BLUR * points.std())


def clusterers(engine: Engine, rows: int) -> dict[str, Clusterer]:
    """What is timed for so many rows, by name; the engine's own way first."""

    def own(points: NDArray[np.float32], size: int) -> Labels:
        return engine.cluster(points, size, MIN_SAMPLES, len(points)).labels

    def cuml(points: NDArray[np.float32], size: int) -> Labels:
        import cupy
        from cuml.cluster import HDBSCAN

        model = HDBSCAN(min_cluster_size=size, min_samples=MIN_SAMPLES).fit(cupy.asarray(points))
        return np.asarray(cupy.asnumpy(model.labels_))

    def fast_hdbscan(points: NDArray[np.float32], size: int) -> Labels:
        from fast_hdbscan import HDBSCAN

        model = HDBSCAN(min_cluster_size=size, min_samples=MIN_SAMPLES).fit(points)
        return np.asarray(model.labels_)

    def judge(points: NDArray[np.float32], size: int) -> Labels:
        from hdbscan import HDBSCAN

        model = HDBSCAN(
            min_cluster_size=size, min_samples=MIN_SAMPLES, approx_min_span_tree=False
        ).fit(points.astype(np.float64))
        return np.asarray(model.labels_)

    found: dict[str, Clusterer] = {"engine": own}
    if rows <= PEERS_MOST and why_not() is None:
        found["cuml"] = cuml
    if rows <= PEERS_MOST:
        found["fast_hdbscan"] = fast_hdbscan
    if rows <= JUDGE_MOST:
        found["hdbscan"] = judge
    return found


def timed(work: Callable[[], Labels], times: int) -> tuple[Labels, list[float]]:
    """The labels, and the seconds of each call."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < times and sum(seconds) < ENOUGH_SECONDS):
        began = time.perf_counter()
        labels = work()
        seconds.append(time.perf_counter() - began)
    return labels, seconds


def measure_case(
    kind: str,
    points: NDArray[np.float32],
    size: int,
    ways: dict[str, Clusterer],
    before: Labels | None = None,
) -> dict[str, Any]:
    """Seconds and labels of each way on one map; how far the engine's agree with every other's,
    and with those that the points had on the map that they were drawn from."""
    figures: dict[str, Any] = {
        "map": kind, "rows": len(points), "min_cluster_size": size, "ways": {},
    }  # fmt: skip
    labels: dict[str, Labels] = {}
    for name, way in ways.items():
        times = 1 if name == "hdbscan" else TIMES
        labels[name], seconds = timed(partial(way, points, size), times)
        figures["ways"][name] = {
            "seconds": statistics.median(seconds),
            "calls": len(seconds),
            "clusters": int(labels[name].max()) + 1,
            "noise_share": float((labels[name] < 0).mean()),
            "ari_with_engine": float(adjusted_rand_score(labels["engine"], labels[name])),
            "same_noise": float(((labels["engine"] < 0) == (labels[name] < 0)).mean()),
        }
    if before is not None:
        figures["ari_with_map"] = float(adjusted_rand_score(before, labels["engine"]))
    print_case(figures)
    return figures


def measure(options: argparse.Namespace, sizes: list[int]) -> dict[str, Any]:
    engine = open_engine(options.engine)
    if reason := why_not():
        print(f"cuML's HDBSCAN is left out: {reason}")
    map_rows = min(max(sizes), options.map_rows)
    began = time.perf_counter()
    made = map_of_planted(map_rows, engine)
    seconds = time.perf_counter() - began
    print(f"map of {map_rows:,} rows by {engine.name}: {seconds:.1f} s", flush=True)
    first, _ = points_of(made, min(WARM_UP_ROWS, map_rows), engine)
    for way in clusterers(engine, len(first)).values():
        way(first, SMALL_CLUSTER)
    figures: dict[str, Any] = {"engine": engine.name, "map_rows": map_rows, "cases": []}
    for rows in sizes:
        points, drawn = points_of(made, rows, engine)
        ways = clusterers(engine, rows)
        of_job = smallest_cluster(None, rows, 1.0)
        before = None
        if rows > map_rows:
            before = ways["engine"](made, smallest_cluster(None, map_rows, 1.0))[drawn]
        cases = figures["cases"]
        cases.append(measure_case("map", points, of_job, ways, before))
        cases.append(measure_case("map", points, SMALL_CLUSTER, ways))
        if "hdbscan" in ways:
            for size in (of_job, SMALL_CLUSTER):
                cases.append(measure_case("blurred map", blurred(points), size, ways))
        # The peers may outlast the time that the machine is to be had.
        if options.json:
            common.write_figures(options.json, figures)
    return figures


def print_case(figures: dict[str, Any]) -> None:
    size = figures["min_cluster_size"]
    print(f"{figures['map']}, {figures['rows']:,} points, clusters of {size:,} or more")
    own = figures["ways"]["engine"]["seconds"]
    if "ari_with_map" in figures:
        print(f"  ARI with the clusters of the map {figures['ari_with_map']:.4f}")
    for name, found in figures["ways"].items():
        print(
            f"  {name:<13}{found['seconds']:8.3f} s ({found['seconds'] / own:5.1f}x, median of "
            f"{found['calls']}), {found['clusters']:,} clusters, {found['noise_share']:.1%} noise; "
            f"with the engine: ARI {found['ari_with_engine']:.4f}, {found['same_noise']:.2%} alike "
            "in noise"
        )
    sys.stdout.flush()


def check(figures: dict[str, Any]) -> None:
    """Raise WrongAnswerError where the engine's clusters are not the judge's, or their map's."""
    for case in figures["cases"]:
        judge = case["ways"].get("hdbscan", {}).get("ari_with_engine")
        for name, ari in (("hdbscan", judge), ("their map", case.get("ari_with_map"))):
            if ari is not None and ari < LEAST_ARI:
                raise WrongAnswerError(
                    f"{case['map']}, {case['rows']:,} points, clusters of "
                    f"{case['min_cluster_size']:,} or more: ARI with {name} {ari:.4f} is below "
                    f"{LEAST_ARI}"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="200000,1000000,10000000", help="sizes, with commas")
    parser.add_argument("--engine", choices=ENGINES, default="rapids")
    parser.add_argument("--map-rows", type=int, default=1_000_000, help="most rows of the map")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    try:
        sizes = [int(size) for size in options.rows.split(",")]
    except ValueError:
        parser.error("--rows must be numbers with commas between them")
    if min(*sizes, options.map_rows) < 1_000:
        parser.error("--rows and --map-rows must be 1000 or more")
    return common.exit_code(lambda: check(measure(options, sizes)))


if __name__ == "__main__":
    sys.exit(main())
