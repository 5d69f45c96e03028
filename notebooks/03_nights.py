# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Nights and lineage
#
# A nightly run follows the run before it: a cluster that is found again keeps its id, and the map
# starts from the last one. Here the requests of the sample are spread over three nights, so that
# no row is in two of them. The first night has no prompts with brackets, and the third has none
# that count: a kind of behaviour may come and go.

# %%
import numpy as np
import pandas as pd

from discovery.notebook import (
    Run,
    changes,
    life,
    lineage,
    open_data,
    plot_lineage,
    plot_map,
    plot_shares,
    read_rows,
    shown,
    with_task,
)

data = open_data()
shares, events = lineage(data.nights)
nights = list(dict.fromkeys(shares["run_id"]))
rows = with_task(read_rows(data.nights_store))
rows.groupby([rows["captured_at"].dt.date, "task"]).size().unstack(fill_value=0)

# %%
for night in nights:
    run = Run(data.nights / night)
    counts, gate = run.manifest["counts"], run.manifest["quality"]["gate"]
    print(
        f"{night}: {counts['rows']:,} rows, {counts['clusters']} clusters, parent "
        f"{run.manifest['parent_run'] or '-'}, gate {'passed' if gate['passed'] else 'failed'}"
    )
    for reason in gate["reasons"]:
        print("   ", reason)

# %% [markdown]
# ## Who became what

# %%
plot_lineage(shares, events)

# %%
said = changes(data.nights, nights[0], nights[-1])
print(*said[:10], sep="\n")
print(f"... and {len(said[10:])} more lines")

# %% [markdown]
# ## Evidence
#
# No row is in two nights. So the new rows are labelled with the parent's prototypes, and rows that
# the parent kept are labelled with the new ones. Clusters that have more than a fifth in common in
# both are linked.

# %%
events.groupby(["run_id", "event"]).size().unstack(fill_value=0)

# %% [markdown]
# The life of one cluster: the one that is largest on the last night among those that were not there
# on the first, or else the largest.

# %%
last = shares[(shares["run_id"] == nights[-1]) & (shares["cluster_id"] >= 0)]
old = set(shares[shares["run_id"] == nights[0]]["cluster_id"])
new = last[~last["cluster_id"].isin(old)]
chosen = (new if len(new) else last).sort_values("share")["cluster_id"].iloc[-1]
print("\n".join(life(data.nights, int(chosen), nights[-1])))

# %% [markdown]
# ## Drift, and the gate
#
# A run is judged before it is served. Shares of zones and clusters are compared with the parent's.
# The drift is a population stability index with an interval: it must be large beyond chance.

# %%
newest = Run(data.nights / nights[-1])
checks = newest.checks()
shown(checks[["name", "value", "limit", "passed"]], {"value": "{:.3g}", "limit": "{:.3g}"})

# %%
zones = {night: Run(data.nights / night).manifest["stages"]["zones"]["shares"] for night in nights}
plot_shares(pd.DataFrame(zones).T.fillna(0.0), title="Zones of each night")

# %% [markdown]
# ## The map, one night later
#
# The map of a run starts from that of its parent, and a cluster that kept its id kept its colour.
# How far did such clusters move?

# %%
parent = Run(data.nights / nights[-2])
before, after = (run.clusters().set_index("cluster_id")[["x", "y"]] for run in (parent, newest))
moved = np.hypot(*(after - before).dropna().to_numpy().T)
width = np.hypot(*(newest.map(gpu=False)[["x", "y"]].std()))
print(f"{len(moved)} clusters kept their id; the median one moved by {np.median(moved):.2f}")
print(f"the rows of the map lie {width:.2f} from its middle (root mean square)")

# %%
plot_map(parent.map(), labels=parent.classifier.labels, around=newest.map())

# %%
plot_map(newest.map(), labels=newest.classifier.labels, around=parent.map())

# %% [markdown]
# `attn runs diff` and `attn runs lineage` print the same in a terminal. Next:
# [zones and their thresholds](04_zones.ipynb).
