"""The whole job on several GPUs, by what its workers talk over: UCX, TCP, or the job's own TLS.

    python benchmarks/gpu_transports.py --folder DIR [--rows 10000000] [--gpus 2]
        [--engine rapids] [--transports own,tcp,ucx] [--umap-sample-size F] [--batch-size B]
        [--json PATH]

`own` is `attn discover --long-running`, which starts a worker for each GPU itself, over TLS. For
the others this program starts such workers, with Dask-CUDA and the same options but a protocol of
their own and no key, and gives the job their address by --scheduler; only a machine without other
users may do that. Each run is a process of its own, whose start is in its seconds; that of the
workers is not, but for `own`. Rows are planted (benchmarks/large.py) and kept in --folder.

The last transport has a second run, with kill -9 of the job while rows are placed; it is resumed on
the same workers. What every run found is compared with the first one, and with the truth. Exits 1
where its ARI with the first run is below 0.99. With --engine cpu the workers are processes of Dask,
over own and tcp alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from sklearn.metrics import adjusted_rand_score

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, large
from benchmarks.common import NOW, WrongAnswerError
from benchmarks.gpu_kills import LEAST_ARI, RUN_ID, Attempt
from benchmarks.timed_run import seconds_by_stage
from discovery.artifacts.read import open_artifacts
from discovery.engines.protocol import ENGINES
from discovery.execution.dask_cluster import POOL_KEPT

OWN = "own"
TRANSPORTS = (OWN, "tcp", "ucx")
CHECKED_ROWS = 200_000


@contextmanager
def workers(protocol: str, gpus: int, on_gpus: bool) -> Iterator[str]:
    """Workers that talk over a protocol, one for each GPU: the address of their scheduler."""
    # Their programs are at hand, and so is this repository's.
    own: dict[str, Any] = {
        "n_workers": gpus, "threads_per_worker": 1, "protocol": protocol, "host": "127.0.0.1",
        "dashboard_address": None,
    }  # fmt: skip
    if on_gpus:
        from dask_cuda import LocalCUDACluster

        cluster = LocalCUDACluster(
            **own, rmm_async=True, rmm_release_threshold=POOL_KEPT,
            rmm_allocator_external_lib_list=["cupy"],
        )  # fmt: skip
    else:
        from distributed import LocalCluster

        cluster = LocalCluster(**own)
    with cluster:
        cluster.wait_for_workers(gpus)
        yield cluster.scheduler_address


class Transports:
    """Runs of one store."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked, self._runs = asked, asked.folder / "transports"
        self._first: pa.Table | None = None  # what the first run found
        db = large.planted_folder(asked.folder, asked.rows, asked.processes)
        self._again = ["--db", str(db), "--engine", asked.engine, "--long-running"]
        self._new = [*self._again, "--hours", "0", "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}"]
        for name in ("umap_sample_size", "batch_size"):
            if (value := getattr(asked, name)) is not None:
                self._new += ["--" + name.replace("_", "-"), str(value)]
        shutil.rmtree(self._runs, ignore_errors=True)
        self._runs.mkdir(parents=True)

    def measured(self, transport: str, killed: bool) -> dict[str, Any]:
        """The figures of a run over a transport; with `killed` also of one that is resumed."""
        if transport == OWN:
            return self._both(transport, [], killed)
        with workers(transport, self._asked.gpus, self._asked.engine != "cpu") as scheduler:
            return self._both(transport, ["--scheduler", scheduler], killed)

    def _both(self, name: str, where: list[str], killed: bool) -> dict[str, Any]:
        seconds = self._attempt(name, [*self._new, *where]).ended()
        found = {"seconds": seconds, **self._answer(name)}
        if killed:
            again = f"{name}-killed"
            run = self._attempt(again, [*self._new, *where])
            if not run.wait_for(run.placing):
                raise WrongAnswerError(f"no row was placed: {run.said()}")
            run.kill()
            resumed = self._attempt(again, [*self._again, *where, "--resume", RUN_ID]).ended()
            found["killed"] = {"in": "placing", "resumed_seconds": resumed, **self._answer(again)}
        return found

    def _attempt(self, name: str, words: list[str]) -> Attempt:
        (self._runs / name).mkdir(exist_ok=True)
        return Attempt(words, self._runs / name)

    def _answer(self, name: str) -> dict[str, Any]:
        folder = self._runs / name / RUN_ID
        found = open_artifacts(folder).table("embedding")
        self._first = found if self._first is None else self._first
        common.check_same_keys(self._first, found, f"{name}'s embedding.parquet")
        clusters = (each.column("cluster_id").to_numpy() for each in (self._first, found))
        return {
            "answer": large.agreement(folder, self._asked.rows, CHECKED_ROWS),
            "ari_with_first": float(adjusted_rand_score(*clusters)),
            "stage_seconds": seconds_by_stage(common.events_of(folder)),
        }


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    runs = Transports(asked)
    figures: dict[str, Any] = {
        "rows": asked.rows, "engine": asked.engine, "gpus": asked.gpus, "transports": {},
    }  # fmt: skip
    for transport in asked.transports:
        found = runs.measured(transport, killed=transport == asked.transports[-1])
        figures["transports"][transport] = found
        print(f"{transport}: {found['seconds']:.1f} s, {summary(found)}", flush=True)
        if killed := found.get("killed"):
            seconds = killed["resumed_seconds"]
            print(f"{transport}, killed: resumed in {seconds:.1f} s, {summary(killed)}", flush=True)
    return figures


def summary(found: dict[str, Any]) -> str:
    return f"ARI {found['answer']['ari']:.3f}, with the first run {found['ari_with_first']:.4f}"


def differing(figures: dict[str, Any]) -> list[str]:
    """The runs whose clusters are not those of the first."""
    runs = {**figures["transports"]}
    runs |= {f"{name}, killed": run["killed"] for name, run in runs.items() if "killed" in run}
    return [name for name, run in runs.items() if run["ari_with_first"] < LEAST_ARI]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="keeps stores and runs")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--engine", choices=ENGINES, default="rapids")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="with commas")
    parser.add_argument("--umap-sample-size", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    asked.folder, asked.transports = asked.folder.resolve(), asked.transports.split(",")
    if unknown := set(asked.transports) - set(TRANSPORTS):
        parser.error(
            f"--transports: {', '.join(sorted(unknown))} is none of {', '.join(TRANSPORTS)}"
        )
    if asked.gpus < 1:
        parser.error("--gpus must be 1 or more")
    return asked


def main() -> int:
    asked = parsed()
    try:
        figures = measure(asked)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    if asked.json:
        common.write_figures(asked.json, figures)
    for name in (other := differing(figures)):
        print(f"wrong answer: {name}: other clusters than the first run's", file=sys.stderr)
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
