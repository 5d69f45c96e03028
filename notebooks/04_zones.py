# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. Zones, thresholds and their evidence
#
# A zone is one of five coarse kinds of attention. One table of rules decides it from the 20
# numbers, everywhere: in capture, in runs, and in the sidecar. This notebook shows the rules, what
# the sample says about them, and what a change of a threshold does.

# %%
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from capture_kernels.fingerprint.zones import ZONES, ZoneRules, ripple
from discovery.notebook import (
    Run,
    open_data,
    plot_axis,
    plot_evidence,
    plot_shares,
    read_rows,
    with_task,
)

data = open_data()
run = Run(data.runs)
rules = ZoneRules(**run.manifest["zone_rules"])
rows = with_task(read_rows(data.store))
vectors = rows[list(run.layout.columns)].to_numpy(np.float32)
print(f"{len(rows):,} rows, thresholds {asdict(rules)}")

# %% [markdown]
# ## The rules
#
# Each zone has one signal with one strong value. Evidence is 0 without the signal, 0.5 at its
# strong value, and 1 at most. The zone with the most evidence wins. Its confidence is its share of
# the evidence of all five.

# %%
plot_evidence(rules)

# %%
evidence = rules.evidence(vectors, run.layout)
found = rules.classify(vectors, run.layout)
rows["zone"], rows["confidence"] = found.names, found.confidence
example = int(found.confidence.argmax())
table = pd.DataFrame({"evidence": evidence[example]}, index=list(ZONES))
print(
    f"the surest row: {rows['request_id'][example]}, position {rows['position'][example]}, "
    f"confidence {found.confidence[example]:.2f}"
)
table.style.format("{:.2f}").bar(color="#0072b255", vmin=0, vmax=1)

# %% [markdown]
# ## What tasks do
#
# The rules know nothing of tasks. How much do the sample's tasks differ in their zones?

# %%
shares = rows.groupby("task")["zone"].value_counts(normalize=True).unstack(fill_value=0.0)
plot_shares(shares, title="Zones of each task")

# %% [markdown]
# How clear are the decisions? With five zones, a confidence of 0.2 would be a tie of all.

# %%
confidences = dict(list(rows.groupby("zone")["confidence"]))
plot_axis(
    {zone: confidences[zone] for zone in ZONES if zone in confidences},
    title="Confidence by zone: median, quartiles, 5% to 95%", xlabel="confidence", mark=0.2,
)  # fmt: skip

# %% [markdown]
# ## The evidence behind `ripple`
#
# `structure_ripple` stands for text with a period: counting, tables, code. Its signal is the share
# of low waves in the histogram's spectrum. The signal is worth something if it ranks rows of such
# tasks above rows of prose. The AUC is the probability of that: 0.5 is chance.

# %%
rows["ripple"] = ripple(vectors, run.layout)
prose = rows["ripple"][rows["task"] == "prose"]
aucs = {}
for task in ("counting", "table", "code"):
    own = rows["ripple"][rows["task"] == task]
    truth = np.r_[np.ones(len(own)), np.zeros(len(prose))]
    aucs[task] = roc_auc_score(truth, np.r_[own, prose])
print("AUC against prose, all rows:", {task: round(float(auc), 3) for task, auc in aucs.items()})


# %%
results = json.loads(Path("../benchmarks/results/zones.json").read_text())
signals = results["auc"]["position >= 1"]
pd.DataFrame({name: by_task["overall"] for name, by_task in signals.items()}).T.sort_values(
    "mean", ascending=False
).style.format("{:.2f}").background_gradient("Blues", vmin=0.5, vmax=0.9)

# %% [markdown]
# The table is the committed result of `python benchmarks/zones.py`: the signal in use, `ripple`,
# and the ones that were tried. Compare the columns: what serves tables may do little for code.

# %%
groups = dict(list(rows.groupby("task")["ripple"]))
plot_axis(groups, title="ripple by task, and its strong value", xlabel="ripple", mark=rules.ripple)

# %% [markdown]
# ## What a threshold does
#
# A lower strong value gives a zone more rows, and takes them from the others. `--zone-rules FILE`
# overrides thresholds for a run, and the table in force is part of the run.

# %%
moved = {}
for strong in (0.3, 0.45, 0.6, 0.75, 0.9):
    changed = replace(rules, ripple=strong).classify(vectors, run.layout)
    moved[f"ripple {strong}"] = pd.Series(changed.names).value_counts(normalize=True)
plot_shares(pd.DataFrame(moved).T.fillna(0.0), title="Zones by the strong value of ripple")

# %%
step = 0.05
for name, strong in asdict(rules).items():
    other = replace(rules, **{name: strong + step}).classify(vectors, run.layout)
    share = float((other.zone != found.zone).mean())
    print(f"{name:>10} {strong:.2f} -> {strong + step:.2f}: {share:.1%} of the rows change zone")

# %% [markdown]
# Zones are a first word, and clusters are found in the data. Next:
# [one request token by token](05_tokens.ipynb).
