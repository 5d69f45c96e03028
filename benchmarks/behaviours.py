"""The judge of clustering methods: how well behaviours are found, on data that nobody tuned to.

    python benchmarks/behaviours.py                          # the half to develop on
    python benchmarks/behaviours.py --half held_out          # only to report
    python benchmarks/behaviours.py --method module:function --only sparse,sample
    python benchmarks/behaviours.py --artifacts DIR          # only what a run's clusters say

Data, in two halves without a recipe, seed or request in common (`judge/kinds.py`, `judge/real.py`):
  planted rows     attention simulated key by key, of several kinds (`--only planted`: of all); who
                   drew each row is known
  sample, fresh    real rows: half of the requests of the shipped sample, and captures of the demo
                   model on prompts of other seeds, which are made once and kept below build/judge
  many             captures as these of 2,016 requests, where --only names it
  tied and mixed   five tasks of these, each at context lengths of an octave of its own, as in
                   production; and the same tasks with as many rows each, their lengths mixed
Methods (`judge/methods.py`): today's product; the same with HDBSCAN; the plain recipe (PCA, UMAP,
HDBSCAN) with and without StandardScaler; Leiden on the neighbour graph; k-means with as many
centres as today's clusters. Each sees vectors, positions and requests; neither truth nor task.

Figures: ARI is the adjusted Rand index, 1 for the same clusters, 0 for chance; noise is a cluster
of its own in it, and planted noise is left out. `ceiling` is the ARI of a vote of the nearest
of other rows, whose truth is known. AMI is adjusted mutual information. Of real rows: the ARI of
pairs of seeds; that of the clusters of two halves of the requests, each given to the other half's
rows; AMI with the task, beside that of a classifier which was shown the tasks of other requests;
and the share of log2(position) that the clusters explain, beside the share that the tasks do. Below
these stands what the sample's clusters say (`judge/words.py`): those of the half to develop on, or,
held out, of all of it.

Exits 1 where a row cannot be attention, a method leaves rows without a label, or a run's own tables
do not agree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

# The repository is not an installed package, and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import SAMPLE, WrongAnswerError
from benchmarks.judge import datasets, report, words
from benchmarks.judge.kinds import HALVES, recipes
from benchmarks.judge.methods import METHODS, method_named, missing_methods
from benchmarks.judge.real import FRESH_EACH, sample_records, why_no_captures
from benchmarks.judge.running import judged

QUICK_ROWS, QUICK_EACH = 600, 1
# All kinds of planted rows, where --only names it.
PLANTED = "planted"


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--half", choices=HALVES, default="develop")
    parser.add_argument("--rows", type=int, default=12_000, help="of each planted data set")
    parser.add_argument("--seeds", type=int, default=3, help="of real rows; planted rows have one")
    parser.add_argument("--only", help="data sets, with commas between them")
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas between them")
    parser.add_argument("--method", action="append", default=[], help="module:function, as well")
    parser.add_argument("--workers", type=int, help="processes; as many as there are cores")
    parser.add_argument("--quick", action="store_true", help="one seed, few rows, no real rows")
    parser.add_argument("--artifacts", type=Path, help="a run folder, or an output folder")
    parser.add_argument("--db", type=Path, default=SAMPLE, help="a store, or a file of records")
    parser.add_argument("--permutations", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(arguments)
    if min(options.permutations, options.seeds, options.rows) < 1:
        parser.error("--permutations, --seeds and --rows must be 1 or more")
    if not options.artifacts and not options.db.exists():
        parser.error(f"no records at {options.db}: give --artifacts or --db")
    if options.quick:
        options.rows, options.seeds = min(options.rows, QUICK_ROWS), 1
    known = datasets.names_of(options.half)
    real = [n for n in known if n.removesuffix(datasets.TIED) in datasets.SOURCES[options.half]]
    usual = [name for name in known if name != datasets.MANY]
    chosen = options.only.split(",") if options.only else [*usual, "words"]
    if PLANTED in chosen:
        kinds = [recipe.kind for recipe in recipes(options.half)]
        chosen = [*kinds, *(name for name in chosen if name not in (PLANTED, *kinds))]
    if options.quick and not options.only:
        chosen = [name for name in usual if name not in real]
    if unknown := [name for name in chosen if name not in (*known, "words")]:
        parser.error(f"no data set {unknown[0]!r}: use {', '.join(known)} or words")
    options.names = chosen
    options.methods = [*filter(None, options.methods.split(",")), *options.method]
    try:
        for name in options.methods:
            method_named(name)
    except ValueError as error:
        parser.error(str(error))
    options.workers = options.workers or (1 if options.quick else os.cpu_count() or 1)
    return options


def judge(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every data set that can be had here, printed as well."""
    began = time.perf_counter()
    methods = list(options.methods)
    for name, why in missing_methods(methods).items():
        print(f"{name}: left out, {why}")
        methods.remove(name)
    names = [name for name in options.names if name != "words"]
    captured = [name for name in names if name.startswith(("fresh", datasets.MANY))]
    if captured and (reason := why_no_captures()):
        print(f"fresh: left out, {reason}")
        names = [name for name in names if name not in captured]
    each = QUICK_EACH if options.quick else FRESH_EACH
    tasks = datasets.tasks_of(options.half, names, options.rows, options.seeds, methods, each)
    found = judged(tasks, options.workers, warm=not options.quick)
    figures = {"half": options.half, "methods": methods, "data": found}
    report.print_report(figures)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return figures


def records_of(options: argparse.Namespace) -> pa.Table | None:
    """What the words are of: of the sample, to develop on, the half for that."""
    if options.db != SAMPLE or options.artifacts:
        return common.read_records(options.db) if options.db.exists() else None
    return sample_records(options.half)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    figures: dict[str, Any] = {}
    try:
        if not options.artifacts:
            figures = judge(options)
        if options.artifacts or "words" in options.names:
            figures |= words.report(options.artifacts, records_of(options), options.permutations)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"no fresh captures: {error}", file=sys.stderr)
        return 2
    if options.json:
        command = common.command_of("behaviours.py", arguments)
        common.write_figures(options.json, {"command": command, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
