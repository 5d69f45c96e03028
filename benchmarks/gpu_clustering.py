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
as it takes to spend 10 seconds. The peers are cuML's HDBSCAN, up to 1,000,000 rows, and
fast_hdbscan, above that for the job's size alone. Up to 200,000 rows hdbscan, with exact trees, is
the judge, called once.

Exits 1 where ARI with the judge (noise a label of its own) is below 0.98. Above its sizes ARI with
each peer is printed.
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
from capture_kernels.fingerprint import DIMENSIONS, Layout
from discovery.engine import ENGINES, Engine, open_engine
from discovery.projection import Moments, Projection
from discovery.rapids import why_not
from discovery.stages.cluster import smallest_cluster
from discovery.stages.neighbors import self_first
from discovery.stages.umap import INIT_SPREAD
from tests.planted import planted

SEED, MIN_SAMPLES, MAP_NEIGHBORS = 42, 10, 30
WARM_UP_ROWS, SMALL_CLUSTER = 20_000, 50
CUML_MOST, JUDGE_MOST = 1_000_000, 200_000
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
    moments = Moments.empty().add(vectors, Layout.LOG16)
    projection = Projection.fit(moments.means, np.ones(DIMENSIONS), moments.covariance)
    space = np.ascontiguousarray(projection(vectors, Layout.LOG16))
    indices = np.empty((rows, MAP_NEIGHBORS), np.int32)
    distances = np.empty((rows, MAP_NEIGHBORS), np.float32)
    for start in range(0, rows, engine.search_rows):
        own = slice(start, start + engine.search_rows)
        found = engine.neighbors(space, space[own], MAP_NEIGHBORS)
        indices[own], distances[own] = self_first(*found, start)
    init = space[:, :2] * np.float32(INIT_SPREAD / np.abs(space[:, :2]).max())
    return engine.layout(space, (indices, distances), init, 0.0, SEED, lambda done, total: None)


def points_of(made: NDArray[np.float32], rows: int, engine: Engine) -> NDArray[np.float32]:
    """So many points from a map float32[n, 2]: some of its own, or a denser one like it."""
    rng = np.random.default_rng(SEED)
    if rows <= len(made):
        return made[np.sort(rng.choice(len(made), rows, replace=False))]
    _, distance = engine.neighbors(made, made, MIN_SAMPLES + 1)
    drawn = rng.integers(0, len(made), rows)
    moved = rng.standard_normal((rows, 2), np.float32) * (distance[drawn, -1:] / 2)
    return np.asarray(made[drawn] + moved, np.float32)


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
    if rows <= CUML_MOST and why_not() is None:
        found["cuml"] = cuml
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
    kind: str, points: NDArray[np.float32], size: int, ways: dict[str, Clusterer]
) -> dict[str, Any]:
    """Seconds and labels of each way on one map; how far the engine's agree with every other's."""
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
    print_case(figures)
    return figures


def measure(sizes: list[int], most: int, name: str, path: Path | None) -> dict[str, Any]:
    engine = open_engine(name)
    if reason := why_not():
        print(f"cuML's HDBSCAN is left out: {reason}")
    map_rows = min(max(sizes), most)
    began = time.perf_counter()
    made = map_of_planted(map_rows, engine)
    seconds = time.perf_counter() - began
    print(f"map of {map_rows:,} rows by {engine.name}: {seconds:.1f} s", flush=True)
    first = points_of(made, min(WARM_UP_ROWS, map_rows), engine)
    for way in clusterers(engine, len(first)).values():
        way(first, SMALL_CLUSTER)
    figures: dict[str, Any] = {"engine": engine.name, "map_rows": map_rows, "cases": []}
    for rows in sizes:
        points = points_of(made, rows, engine)
        ways = clusterers(engine, rows)
        of_job = smallest_cluster(None, rows, 1.0)
        cases = figures["cases"]
        cases.append(measure_case("map", points, of_job, ways))
        few = ways if rows <= CUML_MOST else {"engine": ways["engine"]}
        cases.append(measure_case("map", points, SMALL_CLUSTER, few))
        if "hdbscan" in ways:
            for size in (of_job, SMALL_CLUSTER):
                cases.append(measure_case("blurred map", blurred(points), size, ways))
        # The peers may outlast the time that the machine is to be had.
        if path:
            common.write_figures(path, figures)
    return figures


def print_case(figures: dict[str, Any]) -> None:
    size = figures["min_cluster_size"]
    print(f"{figures['map']}, {figures['rows']:,} points, clusters of {size:,} or more")
    own = figures["ways"]["engine"]["seconds"]
    for name, found in figures["ways"].items():
        print(
            f"  {name:<13}{found['seconds']:8.3f} s ({found['seconds'] / own:5.1f}x, median of "
            f"{found['calls']}), {found['clusters']:,} clusters, {found['noise_share']:.1%} noise; "
            f"with the engine: ARI {found['ari_with_engine']:.4f}, {found['same_noise']:.2%} alike "
            "in noise"
        )
    sys.stdout.flush()


def check(figures: dict[str, Any]) -> None:
    """Raise WrongAnswerError where the engine's clusters are not the judge's."""
    for case in figures["cases"]:
        judge = case["ways"].get("hdbscan")
        if judge and judge["ari_with_engine"] < LEAST_ARI:
            raise WrongAnswerError(
                f"{case['map']}, {case['rows']:,} points, clusters of "
                f"{case['min_cluster_size']:,} or more: ARI with hdbscan "
                f"{judge['ari_with_engine']:.4f} is below {LEAST_ARI}"
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
    return common.exit_code(
        lambda: check(measure(sizes, options.map_rows, options.engine, options.json))
    )


if __name__ == "__main__":
    sys.exit(main())
