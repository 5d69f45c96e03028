"""What the discovery benchmarks share: the machine, the job, the plain recipe, the sample."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from capture_kernels.errors import AttnError
from discovery.artifacts.read import Artifacts, open_artifacts
from discovery.job import discover
from discovery.options import DiscoverOptions
from pipeline.record import KEY, conform
from pipeline.store.base import Selection
from pipeline.store.open import open_store

REPO = Path(__file__).resolve().parents[1]
SAMPLE = REPO / "examples" / "sample" / "fingerprints.parquet"
LIBRARIES = ("numpy", "scikit-learn", "umap-learn", "hdbscan", "pyarrow", "numba", "fast-hdbscan")
GPU_LIBRARIES = ("cuml-cu13", "cudf-cu13", "cuvs-cu13", "cupy-cuda13x", "dask-cuda")
# A fixed clock, so that a run's name and window do not depend on the day of the benchmark.
NOW = datetime(2026, 1, 10, 4, 2, 11, tzinfo=UTC)
# The plain recipe. Of 20 numbers 16 are free (three are sums of others, the histogram sums to 1).
PLAIN_COMPONENTS, PLAIN_CLUSTER_SIZE, PLAIN_MIN_SAMPLES = 16, 20, 10
# Names of the same browser.
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class WrongAnswerError(Exception):
    """A figure or an answer is not what it must be."""


def exit_code(work: Callable[[], None]) -> int:
    """Of a benchmark: 0, 1 where an answer is wrong, 2 where it cannot be done as asked."""
    try:
        work()
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    except AttnError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def about(libraries: Sequence[str] = LIBRARIES) -> dict[str, Any]:
    """Date, versions and machine, to stand beside figures. No host names and no paths. Of the
    libraries, and those of the GPU, the ones that are installed."""
    versions = {"python": platform.python_version()}
    for library in (*libraries, *GPU_LIBRARIES):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    machine: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if found := gpus():
        machine["gpus"] = found
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions,
        "machine": machine,
    }


def gpus() -> list[str]:
    """Name, memory and driver of each GPU, as the driver's own tool says; none where it is not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=False)
    return said.stdout.splitlines() if said.returncode == 0 else []


def cpu_model() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def chromium_path() -> str | None:
    """Path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def command_of(script: str, arguments: Sequence[str] | None) -> str:
    """The command of a benchmark's figures: its arguments, or this process's, without --json."""
    left = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in left:
        at = left.index("--json")
        del left[at : at + 2]
    left = [word for word in left if not word.startswith("--json=")]
    return shlex.join(["python", f"benchmarks/{script}", *left])


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**about(), **figures}, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")


def events_of(run: Path) -> list[dict[str, Any]]:
    """The events of a finished run, oldest first, from its log."""
    lines = (run / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_records(path: Path) -> pa.Table:
    """The records of a store, or of a Parquet file, that a run would take: those of the commonest
    model, layout and capture."""
    if path.is_file() and path.suffix == ".parquet":
        batches = [conform(batch).batch for batch in pq.read_table(path).to_batches()]
        table = pa.Table.from_batches(batches).unify_dictionaries()
        groups = table.group_by(["model", "layout", "capture_id"]).aggregate([([], "count_all")])
        top = groups.sort_by([("count_all", "descending")]).slice(0, 1).to_pylist()[0]
        keep = np.ones(len(table), bool)
        for name in ("model", "layout", "capture_id"):
            column = table.column(name)
            plain = column.cast(pa.string()) if name != "layout" else column
            keep &= np.array(plain.to_pylist()) == top[name]
        return table.filter(pa.array(keep)).combine_chunks()
    with open_store(path, read_only=True) as store:
        group = store.groups()[0]
        chosen = Selection(model=group.model, layout=group.layout, capture_id=group.capture_id)
        return pa.Table.from_batches(list(store.scan(chosen))).unify_dictionaries().combine_chunks()


def make_store(path: Path, records: pa.Table | pa.RecordBatch) -> Path:
    """A store file of its own, which the job may note its runs in."""
    with open_store(path, create=True) as store:
        store.append(records)
    return path


class Run(NamedTuple):
    """A finished run of the job: its artifacts, and the seconds that it took."""

    artifacts: Artifacts
    seconds: float


def run_job(db: Path, output: Path, seed: int, engine: str = "auto") -> Run:
    """The job as `attn discover --hours 0 --seed SEED --engine ENGINE` runs it."""
    options = DiscoverOptions(db=str(db), output=str(output), hours=0, seed=seed, engine=engine)
    began = time.perf_counter()
    run_id = discover(options, now=NOW)["run_id"]
    seconds = time.perf_counter() - began
    # By its own name: `latest` does not move to a run that fails its gate.
    return Run(open_artifacts(output / run_id), seconds)


def by_key(table: pa.Table) -> pa.Table:
    """The table in the order of its records' keys."""
    return table.sort_by([(name, "ascending") for name in KEY])


def check_same_keys(a: pa.Table, b: pa.Table, what: str) -> None:
    """Raise WrongAnswerError unless both hold the same records in the same order."""
    for name in KEY:
        if a.num_rows != b.num_rows or not a.column(name).equals(b.column(name)):
            raise WrongAnswerError(f"{what}: not the same records")


class Plain(NamedTuple):
    """What the plain recipe gives: labels int[n], map float32[n, 2], the space float32[n, 16] that
    the map is of, seconds, and the fitted steps to place other rows with."""

    labels: NDArray[np.int64]
    points: NDArray[np.float32]
    space: NDArray[np.float32]
    seconds: float
    steps: tuple[Any, Any, Any, Any]


def plain_recipe(vectors: NDArray[np.float32], seed: int, scaled: bool = True) -> Plain:
    """The peer: StandardScaler, PCA, UMAP and HDBSCAN(20, 10), otherwise by their defaults.

    Args:
        vectors: float32[n, 20].
        scaled: whether each number is divided by its deviation.
    """
    from hdbscan import HDBSCAN
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler
    from umap import UMAP

    began = time.perf_counter()
    scaler = StandardScaler(with_std=scaled)
    pca = PCA(PLAIN_COMPONENTS, random_state=seed)
    space = pca.fit_transform(scaler.fit_transform(vectors))
    with warnings.catch_warnings():
        # umap-learn warns that a seed means one thread.
        warnings.filterwarnings("ignore", message="n_jobs value")
        reducer = UMAP(random_state=seed)
        points = reducer.fit_transform(space)
    clusterer = HDBSCAN(
        min_cluster_size=PLAIN_CLUSTER_SIZE, min_samples=PLAIN_MIN_SAMPLES, prediction_data=True
    ).fit(points)
    seconds = time.perf_counter() - began
    return Plain(
        np.asarray(clusterer.labels_),
        np.asarray(points, np.float32),
        np.asarray(space, np.float32),
        seconds,
        (scaler, pca, reducer, clusterer),
    )


def explained_share(
    labels: NDArray[np.integer[Any]], values: NDArray[np.float64]
) -> dict[str, float]:
    """How much of a number's variance the clusters explain, over the rows that are in one.

    eta_squared is the between-cluster share; epsilon_squared is corrected for the number of
    clusters (Kelley 1935), 0 on average where there is nothing.
    """
    inside = labels >= 0
    _, group = np.unique(labels[inside], return_inverse=True)
    x = values[inside]
    sizes = np.bincount(group)
    n, k = len(x), len(sizes)
    if k < 2 or n <= k:
        return {"eta_squared": 0.0, "epsilon_squared": 0.0}
    means = np.bincount(group, x) / sizes
    eta = 1.0 - ((x - means[group]) ** 2).sum() / ((x - x.mean()) ** 2).sum()
    return {
        "eta_squared": float(eta),
        "epsilon_squared": float(1.0 - (1.0 - eta) * (n - 1) / (n - k)),
    }


def log2_position(table: pa.Table) -> NDArray[np.float64]:
    return np.log2(np.maximum(table.column("position").to_numpy(), 1))
