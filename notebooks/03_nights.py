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
# moves little. Here the requests of the sample are spread over three nights. The first night has no
# prompts with brackets, the third has none that count. So the nights share no row, and a kind of
# behaviour may come and go.

# %%
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
        f"{run.manifest['parent_run']}, gate {'passed' if gate['passed'] else 'failed'}"
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
checks[["name", "value", "limit", "passed"]].style.format(
    {"value": "{:.3g}", "limit": "{:.3g}"}, na_rep="-"
).hide(axis="index")

# %%
zones = {night: Run(data.nights / night).manifest["stages"]["zones"]["shares"] for night in nights}
plot_shares(pd.DataFrame(zones).T.fillna(0.0), title="Zones of each night")

# %% [markdown]
# The same map, one night later: a cluster is where it was, and has the same colour.

# %%
names = dict(zip(last["cluster_id"], last["label"], strict=True))
plot_map(Run(data.nights / nights[-2]).map(), labels=names)

# %%
plot_map(newest.map(), labels=names)

# %% [markdown]
# `attn runs diff` and `attn runs lineage` print the same in a terminal. Next:
# [zones and their thresholds](04_zones.ipynb).
