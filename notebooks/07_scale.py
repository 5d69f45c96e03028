# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. At scale on GPUs
#
# The same job runs on two cores and on several GPUs. This notebook times it on the machine that it
# runs on, shows the two mechanisms that make it scale, and draws the measured figures of larger
# machines beside its own.

# %%
import json
from pathlib import Path

import pandas as pd

from discovery.engines.open import open_engine
from discovery.engines.rapids import why_not
from discovery.notebook import (
    agreement,
    open_data,
    plot_seconds,
    plot_shares,
    shown,
    stored_table,
    trial,
)

data = open_data()
table = stored_table(data.store)
engine = open_engine("auto")
print(f"engine {engine.name}; RAPIDS: {why_not() or 'works here'}")

# %% [markdown]
# ## On this machine
#
# How much longer do twice as many rows take? A first run compiles umap-learn, or the CUDA kernels,
# so it is not timed.

# %%
trial(table.slice(0, 200))
sizes = [len(table) // part for part in (8, 4)]
runs = {size: trial(table.take(list(range(0, len(table), len(table) // size)))) for size in sizes}
here = pd.Series({run.manifest["counts"]["rows"]: run.seconds().sum() for run in runs.values()})
for rows, seconds in here.items():
    print(f"{rows:>7,} rows: {seconds:.1f} s in stages")

# %% [markdown]
# ## Fitted and placed rows
#
# A map is not fitted to a hundred million rows. Past `--umap-sample-size` rows the map and the
# clusters are fitted to a sample, and the rest is placed by its neighbours in the sample, in
# chunks. The default is 25,000 rows on a CPU and a million on a GPU. Here a quarter is fitted. A
# sample must be large enough to show each kind of behaviour, which a quarter of a few thousand rows
# may not be.

# %%
whole = runs[sizes[-1]]
rows = table.take(list(range(0, len(table), len(table) // sizes[-1])))
sampled = trial(rows, umap_sample_size=max(100, len(rows) // 4))
for name, run in (("all rows fitted", whole), ("a quarter fitted", sampled)):
    counts, quality = run.manifest["counts"], run.manifest["quality"]
    print(
        f"{name}: {counts['fit_rows']:,} of {counts['rows']:,} rows, "
        f"{counts['clusters']} clusters, trustworthiness {quality['trustworthiness']:.3f}, "
        f"{run.seconds().sum():.1f} s"
    )
print(f"ARI of the two: {agreement(whole, sampled):.2f}")

# %% [markdown]
# ## Workers
#
# With `--long-running` the chunks of each stage go to workers: one for each core, or one for each
# GPU with Dask-CUDA. It is also what writes checkpoints, so that a run that was killed is finished
# later. Who computes a chunk changes no row: on a CPU the files with the map, the clusters of all
# rows and the prototypes are the same, byte for byte. (Others name the run, which is another one.)

# %%
spread = trial(rows, long_running=True)
same = [
    name for name, facts in whole.manifest["files"].items()
    if facts == spread.manifest["files"][name]
]  # fmt: skip
print("the same files:", ", ".join(same))

# %% [markdown]
# ## Larger machines
#
# The files in `benchmarks/results` are what the programs in `benchmarks/` wrote on the machines
# that they name. Their rows have planted behaviours, so that clusters can be checked as well.

# %%
RESULTS = Path("../benchmarks/results")


def result(name):
    """A committed result, the name of its machine, and its job by the number of rows."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    gpus = found["machine"].get("gpus") or []
    cores = f"{found['machine']['cores']} cores"
    machine = f"{len(gpus)} {gpus[0].split(',')[0]}" if gpus else cores
    if "sizes" in found:
        return found, machine, {int(size): one["job"] for size, one in found["sizes"].items()}
    seeds = found.get("job", {}).get("seeds", {})
    return found, machine, {found["job"]["rows"]: seeds["42"]} if seeds else {}


RUNS = ("discovery", "discovery-gpu", "discovery-1m-gpu", "discovery-100m-gpu")
measured, points = [], {}
for name in RUNS:
    found, machine, jobs = result(name)
    for size, job in jobs.items():
        answer = job.get("answer", job)
        measured.append({
            "machine": machine, "date": found["date"], "rows": size, "fitted": job["fit_rows"],
            "seconds": job["seconds"], "ARI to the planted": answer["ari"],
        })  # fmt: skip
        points.setdefault(f"{machine}, {found['date']}", {})[size] = job["seconds"]
forms = {"rows": "{:,}", "fitted": "{:,}", "seconds": "{:.1f}", "ARI to the planted": "{:.3f}"}
shown(pd.DataFrame(measured), forms)

# %%
lines = {f"{engine.name}, here": here} | {name: pd.Series(one) for name, one in points.items()}
plot_seconds(lines, title="Seconds of a discovery run")

# %% [markdown]
# ## Where the time goes
#
# Shares of the stages. What is fitted to a sample (the map, its clusters) takes no longer with more
# rows than the sample has. What touches each row does: reading, finding neighbours, writing.

# %%
stages = {f"{engine.name}, here, {len(rows):,} rows": whole.seconds()}
for name in RUNS:
    _, machine, jobs = result(name)
    size = max(jobs)
    stages[f"{machine}, {size:,} rows"] = pd.Series(jobs[size]["stage_seconds"])
shares = pd.concat(stages, axis=1, sort=False).T.fillna(0.0)
shares = shares.div(shares.sum(axis=1), axis=0)
large = shares.columns[shares.max() >= 0.05]
shares = shares[large].assign(other=1.0 - shares[large].sum(axis=1))
plot_shares(shares, title="Shares of the stages")

# %% [markdown]
# ## Memory
#
# The job keeps within `--max-memory-gb`. What it took, with stores of two sizes:

# %%
for name in ("memory-500k", "memory-5m"):
    found, machine, _ = result(name)
    print(
        f"{found['rows']:>9,} rows on {machine}: limit {found['limit_gb']:g} GB, peak "
        f"{found['peak_gb']:.2f} GB, {found['seconds']:.0f} s"
    )

# %% [markdown]
# All figures, with the commands that made them, are in
# [docs/performance.md](../docs/performance.md). Next:
# [comparing two models](08_two_models.ipynb).
