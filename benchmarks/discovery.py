"""How well the job finds planted behaviours, beside the plain recipe.

    python benchmarks/discovery.py [--rows 100000] [--seeds 2] [--ablation-rows 20000] [--json PATH]

Rows are drawn by tests/planted.py: 12 behaviours, some of them neighbours that overlap, and 5%
noise. The job runs on all of them once a seed. Adjusted Rand index (ARI) is over all rows, joined
by their keys; noise counts as a cluster of its own, among the true ones and among the found.
Exits 1 where ARI, ARI between two seeds, or trustworthiness is below 0.9.

The peer is what one would write: StandardScaler, PCA, UMAP by its defaults and HDBSCAN(20, 10) on
the map, on the same rows. Each map's trustworthiness is that of all rows, placed ones too, to the
space that it is a map of. Exits 1 as well where the job is not twice as fast as the peer, or below
it in ARI or trustworthiness.

The ablation maps and clusters --ablation-rows rows as the job does, in four spaces: plain vectors,
z-scores, square roots, and square roots centred by context octave, which is the job's. Where the
sample is there it also says how much of log2(position) the clusters of the sample explain: how far
the map is a map of context length.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

# The repository is no installed package; and `discovery` must be the package, not this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import SAMPLE, WrongAnswerError, by_key
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout
from discovery.algorithms import map_clusters
from discovery.algorithms.metrics import map_quality
from discovery.algorithms.pca import Moments, fit_projection
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.projection import square_roots
from discovery.engines.cpu import CpuEngine
from discovery.options import DiscoverOptions
from discovery.stages import neighbors as neighbors_stage
from discovery.stages import quality as quality_stage
from discovery.stages import umap as umap_stage
from discovery.stages.fit_clusters import smallest_cluster
from pipeline.record import vectors as record_vectors
from tests.planted import planted, planted_batch

LEAST = 0.9
# How many times as fast as the plain recipe the job must be.
FASTER = 2.0
FIRST_SEED = 42
SPACES = ("plain vectors", "z-scores", "square roots", "the job's")


def requests_of(rows: pa.RecordBatch | pa.Table) -> NDArray[np.int64]:
    """A number for each row's request: int[n]."""
    return np.unique(rows.column("request_id").to_pylist(), return_inverse=True)[1]


class Planted:
    """Planted rows in a store, and what is true of them in the order of their keys."""

    def __init__(self, rows: int, folder: Path) -> None:
        vectors, truth = planted(rows, seed=0)
        batch = planted_batch(vectors, common.NOW)
        self.requests = requests_of(batch)
        table = pa.Table.from_batches([batch]).append_column("truth", pa.array(truth))
        self.db = common.make_store(folder / f"planted-{rows}.db", batch)
        self.records = by_key(table)
        self.vectors = record_vectors(self.records)
        self.truth: NDArray[np.int64] = self.records.column("truth").to_numpy()

    def labels_of(self, run: common.Run) -> NDArray[np.int32]:
        """The clusters that a run found, int32[n], in the order of the keys."""
        found = by_key(run.artifacts.table("embedding"))
        common.check_same_keys(found, self.records, "embedding.parquet")
        return np.asarray(found.column("cluster_id").to_numpy())


def agreement(
    truth: NDArray[np.integer[Any]], found: NDArray[np.integer[Any]]
) -> dict[str, float | int]:
    """ARI over all rows and over those of a behaviour, clusters, the share called noise, and the
    share of the true noise that is."""
    real = truth >= 0
    return {
        "ari": float(adjusted_rand_score(truth, found)),
        "ari_without_true_noise": float(adjusted_rand_score(truth[real], found[real])),
        "clusters": len(np.unique(found[found >= 0])),
        "noise_share": float((found < 0).mean()),
        "true_noise_called_noise": float((found[~real] < 0).mean()),
    }


def measure_job(data: Planted, seeds: int, output: Path) -> dict[str, Any]:
    """The job's figures, by seed, and how far the seeds agree with one another."""
    labels, runs = {}, {}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        run = common.run_job(data.db, output / str(seed), seed)
        labels[seed] = data.labels_of(run)
        manifest = run.artifacts.manifest
        runs[str(seed)] = {
            **agreement(data.truth, labels[seed]),
            "trustworthiness": trustworthiness_of_all(data, run),
            "of_fitted_rows": manifest["quality"]["trustworthiness"],
            "classifier_agreement": manifest["quality"]["classifier_agreement"],
            "fit_rows": manifest["counts"]["fit_rows"],
            "seconds": run.seconds,
            "stage_seconds": manifest["stage_seconds"],
        }
    pairs = [float(adjusted_rand_score(a, b)) for a, b in combinations(labels.values(), 2)]
    return {"rows": len(data.truth), "seeds": runs, "ari_between_seeds": pairs}


def trustworthiness_of_all(data: Planted, run: common.Run) -> float:
    """That of the run's whole map, from a sample of all rows."""
    found = by_key(run.artifacts.table("embedding"))
    points = np.column_stack([found.column(name).to_numpy() for name in ("x", "y")])
    codebook = Classifier(run.artifacts).codebook
    space = codebook.projection(data.vectors, codebook.layout)
    return map_quality(
        CpuEngine(), space, points, quality_stage.NEIGHBORS, quality_stage.SAMPLE_ROWS, FIRST_SEED
    ).trustworthiness


def warm_up(folder: Path) -> None:
    """Compile what the libraries compile at first use, which no figure should hold."""
    folder.mkdir()
    # From 4,096 rows on UMAP searches neighbours by another way.
    data = Planted(4_200, folder)
    common.plain_recipe(data.vectors, FIRST_SEED)
    common.run_job(data.db, folder, FIRST_SEED)


def measure_peer(data: Planted) -> dict[str, Any]:
    """The plain recipe's figures."""
    plain = common.plain_recipe(data.vectors, FIRST_SEED)
    quality = map_quality(
        CpuEngine(), plain.space, plain.points, quality_stage.NEIGHBORS,
        quality_stage.SAMPLE_ROWS, FIRST_SEED,
    )  # fmt: skip
    return {
        "rows": len(data.truth),
        **agreement(data.truth, plain.labels),
        "trustworthiness": quality.trustworthiness,
        "seconds": plain.seconds,
    }


def projected(
    vectors: NDArray[np.float32], requests: NDArray[np.int64], space: str, layout: Layout
) -> NDArray[np.float32]:
    """The rows of these requests in one of `SPACES` after the job's PCA: float32[n, d]."""
    if space == "the job's":
        return Moments.of(vectors, layout, requests).projection()(vectors, layout)
    values = vectors.astype(np.float64)
    values = square_roots(values) if space == "square roots" else values
    mean, scale = values.mean(axis=0), np.ones(DIMENSIONS)
    if space == "z-scores":
        deviation = values.std(axis=0)
        scale = np.where(deviation > 0, deviation, 1.0)
    fitted = fit_projection(mean, scale, np.cov(values.T, bias=True), power=1.0)
    return np.asarray(((values - mean) / scale) @ fitted.components, np.float32)


def clusters_in(space: NDArray[np.float32], engine: CpuEngine) -> NDArray[np.int32]:
    """Clusters of rows float32[n, d] by the job's steps from neighbours on: int32[n]."""
    options = DiscoverOptions(db="")
    indices, distances = engine.neighbors(space, space, options.umap_neighbors)
    near = neighbors_stage.self_first(indices, distances, 0)
    start = space[:, :2]
    start = start * np.float32(umap_stage.INIT_SPREAD / np.abs(start).max())
    points = engine.layout(
        space, near, start, options.umap_min_dist, FIRST_SEED, lambda done, total: None
    )
    least = smallest_cluster(options.min_cluster_size, len(space), 1.0)
    largest = max(least, int(map_clusters.LARGEST_CLUSTER * len(space)))
    return engine.cluster(points, least, least, largest).labels


def measure_ablation(data: Planted, most: int) -> dict[str, dict[str, Any]]:
    """By space: ARI on planted rows, and of the sample how much of log2(position) is explained."""
    engine = CpuEngine()
    figures: dict[str, dict[str, Any]] = {}
    sample = None
    if SAMPLE.exists():
        sample = common.read_records(SAMPLE)
        chosen = np.random.default_rng(0).permutation(len(sample))[:most]
        sample = sample.take(pa.array(np.sort(chosen))).combine_chunks()
    for space in SPACES:
        found = clusters_in(projected(data.vectors, data.requests, space, Layout.LOG16), engine)
        figures[space] = {"planted": agreement(data.truth, found)}
        if sample is not None:
            layout = Layout(sample.column("layout")[0].as_py())
            found = clusters_in(
                projected(record_vectors(sample), requests_of(sample), space, layout), engine
            )
            figures[space]["sample"] = {
                "rows": len(sample),
                "clusters": len(np.unique(found[found >= 0])),
                "noise_share": float((found < 0).mean()),
                "log2_position": common.explained_share(found, common.log2_position(sample)),
            }
    return figures


def summary(run: dict[str, Any]) -> str:
    return (
        f"ARI {run['ari']:.3f} (without true noise {run['ari_without_true_noise']:.3f}), "
        f"trustworthiness {run['trustworthiness']:.3f}, {run['clusters']} clusters of 12, noise "
        f"{run['noise_share']:.1%} (of the true noise {run['true_noise_called_noise']:.1%}), "
        f"{run['seconds']:.1f} s"
    )


def print_job(job: dict[str, Any]) -> None:
    print(f"the job, {job['rows']:,} planted rows")
    for seed, run in job["seeds"].items():
        print(f"  seed {seed}: {summary(run)}")
        stages = "  ".join(f"{name} {s:.1f}" for name, s in run["stage_seconds"].items())
        print(f"    seconds: {stages}")
    if job["ari_between_seeds"]:
        print(f"  ARI between seeds: {min(job['ari_between_seeds']):.3f}")


def print_figures(figures: dict[str, Any]) -> None:
    print_job(figures["job"])
    peer = figures["plain_recipe"]
    ours = figures["job"]["seeds"][str(FIRST_SEED)]
    print(
        f"the plain recipe, the same {peer['rows']:,} rows\n  seed {FIRST_SEED}: {summary(peer)}\n"
        f"the job to the plain recipe: ARI {ours['ari'] / max(peer['ari'], 1e-9):.2f}x, "
        f"{peer['seconds'] / ours['seconds']:.1f} times as fast"
    )
    print("ablation: the same steps from other spaces")
    for space, cells in figures["ablation"].items():
        line = f"  {space:<24} planted ARI {cells['planted']['ari']:.3f}"
        line += f", {cells['planted']['clusters']} clusters"
        if "sample" in cells:
            eta = cells["sample"]["log2_position"]["eta_squared"]
            line += f"; sample: {eta:.1%} of log2(position), {cells['sample']['clusters']} clusters"
        print(line)


def check(job: dict[str, Any], peer: dict[str, Any]) -> None:
    """Raise WrongAnswerError where a run is not what is promised."""
    for seed, run in job["seeds"].items():
        for name in ("ari", "trustworthiness"):
            if run[name] < max(LEAST, peer[name]):
                raise WrongAnswerError(
                    f"{name} of seed {seed} is {run[name]:.3f}, below {LEAST} or the plain "
                    f"recipe's {peer[name]:.3f}"
                )
        if run["seconds"] * FASTER > peer["seconds"]:
            raise WrongAnswerError(
                f"seed {seed} took {run['seconds']:.0f} s, the plain recipe {peer['seconds']:.0f} s"
            )
    if job["ari_between_seeds"] and min(job["ari_between_seeds"]) < LEAST:
        raise WrongAnswerError(f"ARI between seeds is below {LEAST}: {job['ari_between_seeds']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=2, help="runs of the job")
    parser.add_argument("--ablation-rows", type=int, default=20_000)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if min(options.rows, options.ablation_rows) < 1_000 or options.seeds < 1:
        parser.error("--rows and --ablation-rows must be 1000 or more, --seeds 1 or more")
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as made:
            folder, small = Path(made), Path(made) / "small"
            small.mkdir()
            warm_up(folder / "warm-up")
            data = Planted(options.rows, folder)
            figures = {"job": measure_job(data, options.seeds, folder / "full")}
            figures["plain_recipe"] = measure_peer(data)
            few = Planted(min(options.ablation_rows, options.rows), small)
            figures["ablation"] = measure_ablation(few, options.ablation_rows)
        print_figures(figures)
        print(f"{time.perf_counter() - began:.0f} s in all")
        if options.json:
            common.write_figures(options.json, figures)
        check(figures["job"], figures["plain_recipe"])
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
