"""The job on a million rows of real attention: seconds in a process and as a separate one.

    python benchmarks/real_million.py --folder DIR [--copies 49] [--engine rapids] [--times 2]
        [--json PATH]

Rows are the shipped sample's, as often as --copies says: each copy has other request ids, and each
bin of its histograms is multiplied by a random factor, so that rows differ as other requests of the
same tasks would. They are kept in --folder. After a run of one copy the job runs --times times in
this process, the fastest of which counts (the first still compiles and allocates), and then once as
`attn discover`, whose start is in its figure. Exits 1 where a run does not pass its gate or does
not hold each row once, or where its clusters say less of the tasks than LEAST_AMI.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.metrics import adjusted_mutual_info_score

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import SAMPLE, WrongAnswerError
from benchmarks.timed_run import Timed, timed_run
from capture_kernels.fingerprint.vector import HIST_BINS, LOG16_BAND_BINS
from discovery.artifacts.read import open_artifacts
from discovery.engines.protocol import ENGINES
from discovery.options import DiscoverOptions
from pipeline.record import KEY, vectors
from pipeline.store.open import open_store

COPIES, MOVED = 49, 0.15
FIRST_SEED = 42
# Two copies' clusters have 0.29, those of 49 have 0.37.
LEAST_AMI = 0.25


def copied_store(folder: Path, copies: int) -> Path:
    """A Parquet store of so many copies of the sample, made where it is not there yet."""
    path, begun = folder / f"sample-{copies}", folder / f"sample-{copies}.begun"
    if not path.exists():
        shutil.rmtree(begun, ignore_errors=True)
        records = common.read_records(SAMPLE)
        with open_store(begun, create=True) as store:
            for number in range(copies):
                store.append(copy_of(records, number))
        begun.rename(path)
    return path


def copy_of(records: pa.Table, number: int) -> pa.Table:
    """The records with other request ids, their histograms moved at random."""
    found = vectors(records).copy()
    hist = found[:, -HIST_BINS:]
    hist *= 1 + MOVED * np.random.default_rng(number).standard_normal(hist.shape).clip(-3, 3)
    hist /= hist.sum(axis=1, keepdims=True)
    # A vector begins with its three bands.
    found[:, :3] = np.add.reduceat(hist, LOG16_BAND_BINS[:-1], axis=1)
    moved = pa.FixedSizeListArray.from_arrays(pa.array(found.clip(0, 1).ravel()), found.shape[1])
    ids = [f"{each}-{number:03d}" for each in records["request_id"].to_pylist()]
    for name, column in (("request_id", pa.array(ids)), ("vector", moved)):
        at = records.schema.get_field_index(name)
        records = records.set_column(at, records.schema.field(at), column)
    return records


def task_agreement(folder: Path, rows: int) -> float:
    """AMI of a run's clusters with the task that each request's id begins with; WrongAnswerError if
    the run does not hold so many rows, each once."""
    table = open_artifacts(folder).table("embedding").select([*KEY, "cluster_id"])
    different = table.group_by(list(KEY)).aggregate([]).num_rows
    if not table.num_rows == different == rows:
        raise WrongAnswerError(
            f"{table.num_rows} rows, {different} of them different, where {rows} were expected"
        )
    task = [each.split("-")[0] for each in table["request_id"].to_pylist()]
    return float(adjusted_mutual_info_score(task, table["cluster_id"].to_numpy()))


def figures_of(run: Timed, rows: int) -> dict[str, Any]:
    counts, quality = run.manifest["counts"], run.manifest["quality"]
    return {
        "seconds": run.seconds,
        "rows": counts["rows"],
        "clusters": counts["clusters"],
        "ami_with_task": task_agreement(run.folder, rows),
        "passed_gate": quality["gate"]["passed"],
        "peak_host_gb": run.host_gb,
        "peak_device_gb": run.device_gb,
        "stage_seconds": run.stage_seconds,
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name}, {found['rows']:,} rows: {found['seconds']:.2f} s, {found['clusters']} clusters, "
        f"AMI with the task {found['ami_with_task']:.3f}"
    )
    stages = ", ".join(f"{stage} {s:.2f}" for stage, s in found["stage_seconds"].items())
    print(f"  seconds by stage: {stages}", flush=True)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    db, warm_up = (copied_store(asked.folder, copies) for copies in (asked.copies, 1))

    def options(of: Path) -> DiscoverOptions:
        output = str(asked.folder / "runs" / of.name)
        return DiscoverOptions(
            db=str(of), output=output, hours=0, seed=FIRST_SEED, engine=asked.engine
        )

    # A run does not take all rows of long requests.
    taken = asked.copies * timed_run(options(warm_up)).manifest["counts"]["rows"]
    warm = [timed_run(options(db)) for _ in range(asked.times)]
    # The folder, and so AMI, is the last run's.
    found = {
        "in_a_process": {
            **figures_of(min(warm, key=lambda run: run.seconds), taken),
            "seconds_of_each": [run.seconds for run in warm],
        },
        "as_a_process": figures_of(timed_run(options(db), gpus=1), taken),
    }
    for name, each in found.items():
        show(name.replace("_", " "), each)
    return found


def check(found: dict[str, Any]) -> None:
    """Raise WrongAnswerError where a run is not what is promised."""
    for name, each in found.items():
        if not each["passed_gate"]:
            raise WrongAnswerError(f"{name}: the run did not pass its gate")
        if each["ami_with_task"] < LEAST_AMI:
            raise WrongAnswerError(f"{name}: AMI {each['ami_with_task']:.3f} is below {LEAST_AMI}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="keeps stores and runs")
    parser.add_argument("--copies", type=int, default=COPIES)
    parser.add_argument("--engine", choices=ENGINES, default="rapids")
    parser.add_argument("--times", type=int, default=2, help="runs in this process")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    if asked.copies < 1 or asked.times < 1:
        parser.error("--copies and --times must be 1 or more")
    asked.folder = asked.folder.resolve()
    asked.folder.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        figures = measure(asked)
        if asked.json:
            command = common.command_of("real_million.py", None)
            common.write_figures(asked.json, {"command": command, **figures})
        check(figures)

    return common.exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
