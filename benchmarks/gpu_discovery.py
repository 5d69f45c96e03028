"""The job on a GPU: seconds from a Parquet folder to verified artifacts, and how good they are.

    python benchmarks/gpu_discovery.py --folder DIR [--rows 1000000,10000000] [--engine rapids]
        [--clustering consensus] [--times 1] [--long-running [--gpus N]] [--peers [--cpu-all]]
        [--sampling] [--sample] [--json PATH]

Rows are planted (benchmarks/large.py) and kept in --folder. A run of 50,000 rows comes first, so
that loading libraries and compiling is in no figure; then each size runs in this process, up to
1,000,000 rows --times times, the fastest of which counts. With --gpus a run is a process of its own
that sees N GPUs, and its start, its loading and its workers' are in the figure. ARI is over 200,000
rows spread over the store, noise being a cluster of its own; trustworthiness is the manifest's.
Beside each stage stands its floor (benchmarks/floors.py), in one process.

The peers, up to 1,000,000 rows, are cuML's pipeline as its documentation shows it (PCA, UMAP and
HDBSCAN on device arrays, from vectors in memory to labels: no store, no sample, no artifacts), and,
at the largest such size, the CPU engine on Dask workers with its own sample of 25,000 rows, with
--cpu-all also with all rows fitted. --sampling runs sizes above that again with 250,000 fitted
rows. --sample runs the shipped sample with eight seeds on the engine and on the CPU: runs of two
seeds differ much on a continuum, so the means of all pairs of different seeds are compared.

Exits 1 where ARI or trustworthiness is more than 0.01 below cuML's, ARI of the other sizes below
0.9, a run does not pass its gate, or the engines agree on the sample by more than 0.02 less than
two CPU seeds do.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.metrics import adjusted_rand_score

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, large
from benchmarks.common import SAMPLE, WrongAnswerError
from benchmarks.floors import Rates, measured_rates, stage_work
from benchmarks.gpu import cuml_recipe
from benchmarks.timed_run import Timed, timed_run
from discovery.algorithms.metrics import map_quality
from discovery.engines.open import open_engine
from discovery.engines.protocol import ENGINES, Engine
from discovery.engines.rapids import why_not
from discovery.options import CLUSTERINGS, DiscoverOptions
from discovery.stages.quality import NEIGHBORS, SAMPLE_ROWS
from pipeline.record import KEY

FIRST_SEED = 42
WARM_UP_ROWS, RECIPE_WARM_UP_ROWS = 50_000, 20_000
# Most rows that the peers, and several runs of one size, are worth waiting for.
PEER_MOST = 1_000_000
CHECKED_ROWS = 200_000
SAMPLED_FIT_ROWS = 250_000
SAMPLE_SEEDS = range(42, 50)
BELOW_PEER, LEAST_ARI, BELOW_SEEDS = 0.01, 0.9, 0.02


def options_for(asked: argparse.Namespace, db: Path, name: str, **changed: Any) -> DiscoverOptions:
    """A run over all of a store, in an output folder of its own."""
    given: dict[str, Any] = {
        "engine": asked.engine, "long_running": asked.long_running,
        "clustering": asked.clustering, **changed,
    }  # fmt: skip
    output = asked.folder / "runs" / name
    return DiscoverOptions(db=str(db), output=str(output), hours=0, seed=FIRST_SEED, **given)


def figures_of(run: Timed, rows: int) -> dict[str, Any]:
    manifest = run.manifest
    neighbors = manifest["stages"]["neighbors"]
    return {
        "seconds": run.seconds,
        "microseconds_a_row": run.seconds / rows * 1e6,
        **{name: manifest["counts"][name] for name in ("fit_rows", "sampled", "clusters")},
        "neighbors": {name: neighbors[name] for name in ("method", "recall") if name in neighbors},
        "answer": large.agreement(run.folder, rows, CHECKED_ROWS),
        "trustworthiness": manifest["quality"]["trustworthiness"],
        "passed_gate": manifest["quality"]["gate"]["passed"],
        "peak_host_gb": run.host_gb,
        "peak_device_gb": run.device_gb,
        "stage_seconds": run.stage_seconds,
    }


def measure_size(asked: argparse.Namespace, rows: int, rates: Rates | None) -> dict[str, Any]:
    """The job's figures for one size, its floors and, where it has any, its peers."""
    db = large.planted_folder(asked.folder, rows, asked.processes)
    times = asked.times if rows <= PEER_MOST else 1
    runs = [timed_run(options_for(asked, db, f"{rows}"), asked.gpus) for _ in range(times)]
    best = min(runs, key=lambda run: run.seconds)
    # The folder, and so ARI, is the last run's.
    found: dict[str, Any] = {
        "rows": rows,
        "job": {**figures_of(best, rows), "seconds_of_each": [run.seconds for run in runs]},
    }
    if rates:
        work = stage_work(db, best.manifest, best.part_bytes)
        found["floors"] = {
            stage: {
                "seconds": least.seconds(rates),
                **{k: v for k, v in least._asdict().items() if v},
            }
            for stage, least in work.items()
        }
    if asked.sampling and rows > PEER_MOST:
        few = options_for(asked, db, f"{rows}-sampled", umap_sample_size=SAMPLED_FIT_ROWS)
        found["sampled_to_250k"] = figures_of(timed_run(few, asked.gpus), rows)
    if asked.peers and rows <= PEER_MOST:
        if reason := why_not():
            print(f"cuML's pipeline is left out: {reason}")
        else:
            found["cuml"] = measure_cuml(rows, open_engine("rapids"))
        if rows == max(size for size in asked.rows if size <= PEER_MOST):
            found |= measure_cpu(asked, db, rows)
    print_size(found)
    return found


def measure_cuml(rows: int, engine: Engine) -> dict[str, Any]:
    """cuML's pipeline on the same rows, and its answer on the same ones of them."""
    chunks = [large.chunk_rows(chunk, rows) for chunk in range(large.chunks_of(rows))]
    vectors = np.concatenate([own for own, _ in chunks])
    cuml_recipe(vectors[:RECIPE_WARM_UP_ROWS], FIRST_SEED)
    recipe = cuml_recipe(vectors, FIRST_SEED)
    checked = large.checked_chunks(rows, CHECKED_ROWS)
    truth = np.concatenate([chunks[number][1] for number in checked])
    starts = [number * large.CHUNK_ROWS for number in checked]
    found = np.concatenate([recipe.labels[at : at + large.CHUNK_ROWS] for at in starts])
    quality = map_quality(engine, recipe.space, recipe.points, NEIGHBORS, SAMPLE_ROWS, FIRST_SEED)
    return {
        "seconds": recipe.seconds,
        "step_seconds": recipe.step_seconds,
        "clusters": int(recipe.labels.max()) + 1,
        "noise_share": float((recipe.labels < 0).mean()),
        "answer": {"rows": len(found), "ari": float(adjusted_rand_score(truth, found))},
        "trustworthiness": float(quality.trustworthiness),
    }


def measure_cpu(asked: argparse.Namespace, db: Path, rows: int) -> dict[str, Any]:
    """The CPU engine on as many Dask workers as there are cores."""
    cpu: dict[str, Any] = {"engine": "cpu", "long_running": True}
    found = {"cpu": figures_of(timed_run(options_for(asked, db, f"{rows}-cpu", **cpu)), rows)}
    if asked.cpu_all:
        every = options_for(asked, db, f"{rows}-cpu-all", **cpu, umap_sample_size=rows)
        found["cpu_all"] = figures_of(timed_run(every), rows)
    return found


def sample_run(db: Path, output: Path, seed: int, engine: str) -> tuple[pa.Table, float]:
    """The clusters of one run, and its seconds."""
    run = common.run_job(db, output, seed, engine)
    return run.artifacts.table("embedding").select([*KEY, "cluster_id"]), run.seconds


def measure_sample(engine: str) -> dict[str, Any]:
    """How far the engine and the CPU agree on real fingerprints, and CPU seeds with each other."""
    count = len(SAMPLE_SEEDS)
    with tempfile.TemporaryDirectory() as made:
        db = common.make_store(Path(made) / "sample.db", common.read_records(SAMPLE))
        # First those of the engine, then those of the CPU, which may be the engine.
        asked = [
            (db, Path(made) / f"{number}", seed, name)
            for number, (name, seed) in enumerate(product((engine, "cpu"), SAMPLE_SEEDS))
        ]
        runs = [sample_run(*each) for each in asked[:count]]
        # UMAP with a seed has one thread, so a core each.
        with get_context("spawn").Pool(min(count, len(os.sched_getaffinity(0)))) as pool:
            runs += pool.starmap(sample_run, asked[count:])
    found, seconds = [table for table, _ in runs], [seconds for _, seconds in runs]
    pairs = list(combinations(range(count), 2))
    between = [agreed(found[i], found[count + j]) for a, b in pairs for i, j in ((a, b), (b, a))]
    seeds = [agreed(found[count + i], found[count + j]) for i, j in pairs]
    figures = {
        "rows": found[0].num_rows,
        "seconds": min(seconds[i] for i in range(count)),
        "cpu_seconds": min(seconds[count + i] for i in range(count)),
        "ari_between_engines": between,
        "ari_between_cpu_seeds": seeds,
    }
    print(
        f"the sample, {figures['rows']:,} rows: ARI of {engine} with cpu "
        f"{np.mean(between):.3f}, of two cpu seeds {np.mean(seeds):.3f}; "
        f"{figures['seconds']:.1f} s and {figures['cpu_seconds']:.1f} s",
        flush=True,
    )
    return figures


def agreed(one: pa.Table, other: pa.Table) -> float:
    """ARI of two runs' clusters. Of long requests another seed chooses other rows: of those that
    both runs have."""
    both = one.join(other, list(KEY), join_type="inner", right_suffix="_other")
    return float(adjusted_rand_score(both["cluster_id"], both["cluster_id_other"]))


def warm_up(asked: argparse.Namespace) -> None:
    """Load and compile what is loaded and compiled at first use, which no figure should hold."""
    db = large.planted_folder(asked.folder, WARM_UP_ROWS, 1)
    warm = timed_run(options_for(asked, db, "warm-up"))
    print(f"warm-up, {WARM_UP_ROWS:,} rows: {warm.seconds:.1f} s", flush=True)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "engine": asked.engine, "clustering": asked.clustering, "gpus": asked.gpus,
    }  # fmt: skip
    rates = None
    if asked.gpus is None:
        warm_up(asked)
        engine = open_engine(asked.engine)
        figures["engine"] = engine.name
        rates = measured_rates(asked.folder, engine)
        figures["rates"] = rates._asdict()
        told = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in figures["rates"].items())
        print(f"measured, GB/s and Gop/s: {told}", flush=True)
    figures["sizes"] = {str(rows): measure_size(asked, rows, rates) for rows in asked.rows}
    if asked.sample:
        figures["sample"] = measure_sample(asked.engine)
    return figures


def print_size(found: dict[str, Any]) -> None:
    rows, job = found["rows"], found["job"]
    print(f"{rows:,} rows: {summary(job)}, {job['microseconds_a_row']:.2f} us a row")
    method = ", recall ".join(str(value) for value in job["neighbors"].values())
    devices = ", ".join(f"{gb:.1f}" for gb in job["peak_device_gb"]) or "no"
    print(
        f"  {job['fit_rows']:,} fitted ({'sampled' if job['sampled'] else 'all'}), neighbours: "
        f"{method}; peak {job['peak_host_gb']:.1f} GB of the host, {devices} GB of the device"
    )
    for stage, seconds in job["stage_seconds"].items():
        floor = found.get("floors", {}).get(stage)
        print(
            f"  {stage:<15} {seconds:8.2f} s" + (f"  floor {floor['seconds']:.2f}" if floor else "")
        )
    for name, words in (
        ("sampled_to_250k", "250,000 rows fitted"),
        ("cuml", "cuML's pipeline"),
        ("cpu", "CPU engine"),
        ("cpu_all", "CPU engine, all rows fitted"),
    ):
        if peer := found.get(name):
            ratio = peer["seconds"] / job["seconds"]
            print(f"  {words}: {summary(peer)}: {ratio:.1f}x the time")
    sys.stdout.flush()


def summary(found: dict[str, Any]) -> str:
    return (
        f"{found['seconds']:.2f} s, ARI {found['answer']['ari']:.3f}, trustworthiness "
        f"{found['trustworthiness']:.3f}, {found['clusters']} clusters"
    )


def check(figures: dict[str, Any]) -> None:
    """Raise WrongAnswerError where a run is not what is promised."""
    for rows, found in figures["sizes"].items():
        job, peer = found["job"], found.get("cuml")
        if not job["passed_gate"]:
            raise WrongAnswerError(f"{rows} rows: the run did not pass its gate")
        ari, kept = job["answer"]["ari"], job["trustworthiness"]
        least = peer["answer"]["ari"] - BELOW_PEER if peer else LEAST_ARI
        if ari < least:
            raise WrongAnswerError(f"{rows} rows: ARI {ari:.3f} is below {least:.3f}")
        if peer and kept < peer["trustworthiness"] - BELOW_PEER:
            raise WrongAnswerError(
                f"{rows} rows: trustworthiness {kept:.3f}, cuML's pipeline "
                f"{peer['trustworthiness']:.3f}"
            )
    if sample := figures.get("sample"):
        between = np.mean(sample["ari_between_engines"])
        seeds = np.mean(sample["ari_between_cpu_seeds"])
        if between < seeds - BELOW_SEEDS:
            raise WrongAnswerError(
                f"sample: ARI between engines {between:.3f}, between CPU seeds {seeds:.3f}"
            )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="keeps stores and runs")
    parser.add_argument("--rows", default="1000000,10000000", help="sizes, with commas")
    parser.add_argument("--engine", choices=ENGINES, default="rapids")
    parser.add_argument("--clustering", choices=CLUSTERINGS, default=DiscoverOptions.clustering)
    parser.add_argument("--times", type=int, default=1, help="runs of a size up to 1,000,000")
    parser.add_argument("--long-running", action="store_true", help="on Dask workers")
    parser.add_argument("--gpus", type=int, help="with --long-running: a process of its own")
    parser.add_argument("--peers", action="store_true", help="cuML's pipeline and the CPU engine")
    parser.add_argument("--cpu-all", action="store_true", help="the CPU engine without a sample")
    parser.add_argument("--sampling", action="store_true", help="also with 250,000 fitted rows")
    parser.add_argument("--sample", action="store_true", help="the shipped sample on both engines")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    try:
        asked.rows = [int(size) for size in asked.rows.split(",")]
    except ValueError:
        parser.error("--rows must be numbers with commas between them")
    if min(asked.rows) < 1_000 or asked.times < 1:
        parser.error("--rows must be 1000 or more, --times 1 or more")
    if asked.gpus is not None and (asked.gpus < 1 or not asked.long_running):
        parser.error("--gpus must be 1 or more and needs --long-running")
    asked.folder = asked.folder.resolve()
    return asked


def main() -> int:
    asked = parsed()

    def work() -> None:
        figures = measure(asked)
        if asked.json:
            command = common.command_of("gpu_discovery.py", None)
            common.write_figures(asked.json, {"command": command, **figures})
        check(figures)

    return common.exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
