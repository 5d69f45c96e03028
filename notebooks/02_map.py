# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. The map
#
# A discovery run puts rows that attend alike next to each other on a map, and finds clusters on it.
# This notebook reads the latest run of the shipped sample: the map, the clusters, and linked views
# in which a selection on the map is a selection in PCA space.

# %%
from discovery.notebook import (
    KEY,
    Run,
    frame,
    linked_maps,
    on_host,
    open_data,
    plot_fingerprints,
    plot_map,
    read_rows,
    shown,
    with_task,
)

data = open_data()
run = Run(data.runs)
rows = run.map()
print(f"run {run.run_id}, frames of {type(rows).__module__.split('.')[0]}")
print(f"{len(rows):,} rows, {run.manifest['counts']['clusters']} clusters")

# %% [markdown]
# `run.map()` is a cuDF frame where a GPU answers, and a pandas frame where none does. What follows
# is the same code for both.

# %%
clusters = run.clusters()
noise = float((rows["cluster_id"] == -1).mean())
print(f"{noise:.1%} of the rows are in no cluster")
plot_map(rows, "cluster_id", labels=run.classifier.labels)

# %%
plot_map(rows, "zone")

# %% [markdown]
# ## The clusters
#
# A label says what is more frequent in a cluster than elsewhere: distances, phases, tokens.
# Stability is how far half of the requests find a cluster again, 1 for all of its rows.

# %%
clusters["tokens"] = [
    " ".join(one["text"] or "" for one in tokens[:5]) for tokens in clusters["tokens"]
]
columns = ["cluster_id", "label", "zone", "size", "share", "stability", "tokens"]
forms = {"size": "{:,}", "share": "{:.1%}", "stability": "{:.2f}"}
shown(clusters.head(12)[columns], forms)

# %%
centroids, labels = run.centroids()
plot_fingerprints(centroids[:12], labels[:12], title="Mean fingerprints of the largest clusters")

# %% [markdown]
# ## What the rows were doing
#
# The sample's request ids begin with the task of their prompt. The run never saw the tasks. A line
# is a cluster, and says of which tasks its rows are.

# %%
tasks = frame(with_task(on_host(rows)[["request_id", "cluster_id"]]))
table = tasks[tasks["cluster_id"] >= 0].groupby(["cluster_id", "task"]).size().reset_index()
table = on_host(table)
table.columns = ["cluster_id", "task", "rows"]
table = table.pivot(index="cluster_id", columns="task", values="rows").fillna(0)
shares = table.div(table.sum(axis=1), axis=0).loc[clusters["cluster_id"].head(12)]
shares.style.format("{:.0%}").background_gradient("Blues", vmin=0, vmax=1)

# %% [markdown]
# ## Linked views
#
# The map on the left, the first two axes of PCA space on the right. Draw a lasso (hold shift) or
# hover: both views follow. PCA space is where neighbours are found, and its axes have words.

# %%
stored = read_rows(data.store)
space = run.projected(stored)
stored = stored[KEY].assign(pc1=space[:, 0], pc2=space[:, 1])
both = on_host(rows).merge(stored, on=KEY)
widget, scatters = linked_maps(
    both, {"map": ("x", "y"), "PC1 and PC2": ("pc1", "pc2")}, tooltip=("zone", "request_id")
)
widget

# %%
shown(run.axes().head(4), {"explained": "{:.1%}"})

# %% [markdown]
# A selection is a list of rows, in both directions. Here the largest cluster is selected; the views
# above show it.

# %%
largest = int(clusters["cluster_id"][0])
scatters[0].selection(both.index[both["cluster_id"] == largest])
selected = both.loc[scatters[0].selection()]
print(f"{len(selected):,} rows of cluster {largest}: {clusters['label'][0]}")
print("phases:", selected["phase"].value_counts(normalize=True).round(2).to_dict())

# %% [markdown]
# The same map is in `report.html` of the run and in the view Manifold of `attn explore`. Next:
# [nights and lineage](03_nights.ipynb).
