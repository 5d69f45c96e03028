# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Comparing two models
#
# Does a quantised model attend as the original does? This notebook rounds the weights of the demo
# model to 8, to 4 and to 3 bits, gives the same prompts to all of them, and compares what is stored
# with the sidecar's comparison: similarity, zones with intervals, and what differs beyond chance.

# %%
import copy
import json
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pandas as pd
import torch
from transformers.utils import logging

from discovery.notebook import (
    Run,
    open_data,
    plot_axis,
    plot_histograms,
    read_rows,
    shown,
    with_task,
)
from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions
from pipeline.engines.transformers import TransformersEngine
from pipeline.examples.files import demo_model
from pipeline.store.open import open_store
from sidecar.notebook import LocalSidecar, compared

logging.disable_progress_bar()
# The model is so small that threads would only wait for each other.
torch.set_num_threads(1)
data = open_data()

# %% [markdown]
# ## Copies with fewer bits
#
# Each row of each matrix is rounded to evenly spaced values, fewer than 2 to the power of the bits.
# That is the plainest way of quantisation; real ones lose less.

# %%
options = CaptureOptions(layers="auto", max_new_tokens=8)
original = load_engine(str(demo_model()), options)
original.model.float()


def quantised(engine, bits):
    """A copy of an engine whose matrices are rounded to so many bits, a scale for each row."""
    model, most = copy.deepcopy(engine.model), 2 ** (bits - 1) - 1
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.ndim == 2):
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
            weight.copy_((weight / scale).round() * scale)
    revision = f"{engine.revision}-int{bits}"
    name = f"demo-int{bits}"
    return TransformersEngine(model, engine.tokenizer, options, name=name, revision=revision)


engines = {"demo": original} | {f"demo-int{bits}": quantised(original, bits) for bits in (8, 4, 3)}
original.name = "demo"
for name, engine in engines.items():
    print(f"{name}: capture {engine.capture_id}")

# %% [markdown]
# ## The same prompts
#
# Another model is another capture: its vectors are not mixed with those of the first one in a run.

# %%
lines = Path("../examples/sample/prompts.jsonl").read_text().splitlines()
prompts = [json.loads(line) for line in lines]
chosen = [one for one in prompts if 4 <= int(one["id"][-4:]) < 8]
db = Path(mkdtemp()) / "models.db"
answers = {}
with open_store(db, create=True) as store:
    for name, engine in engines.items():
        for one in chosen:
            captured = engine.capture(one["prompt"], request_id=f"{name}:{one['id']}")
            store.append(captured.batch)
            answers[name, one["id"]] = engine.tokenizer.decode(captured.new_tokens)
same = {
    name: np.mean([answers[name, one["id"]] == answers["demo", one["id"]] for one in chosen])
    for name in engines
}
print(
    f"{len(chosen)} prompts; the same answer as the original:",
    {name: f"{share:.0%}" for name, share in same.items()},
)

# %% [markdown]
# ## Compared by the sidecar
#
# `GET /compare` takes two sides: models, sessions, requests, runs or windows of time. An interval
# is of requests, as rows of one request are alike.

# %%
sidecar = LocalSidecar(db, data.runs)
found = {
    name: sidecar.client.compare("model:demo", f"model:{name}")
    for name in engines if name != "demo"
}  # fmt: skip
for name, answer in found.items():
    print(f"demo and {name}: similarity {answer['similarity']['total']:.3f}")
    for words in answer["words"]:
        print("   ", words)

# %%
similarity = pd.DataFrame({
    name: {part["name"]: part["value"] for part in answer["similarity"]["parts"]}
    for name, answer in found.items()
}).T  # fmt: skip
similarity.style.format("{:.3f}")

# %%
worst = min(found, key=lambda name: found[name]["similarity"]["total"])
zones = compared(found[worst], "zones")
print(f"A is demo, B is {worst}")
shares = ["a", "a_low", "a_high", "b", "b_low", "b_high"]
shown(
    zones[["zone", *shares, "difference", "differs"]],
    dict.fromkeys(shares, "{:.1%}") | {"difference": "{:+.1%}"},
)

# %%
histograms = {"demo": found[worst]["histogram"]["a"]} | {
    name: answer["histogram"]["b"] for name, answer in found.items()
}
plot_histograms(histograms, title="Attention by distance, mean over all rows")

# %% [markdown]
# ## Row by row
#
# Prompts differ from each other more than models may, and few of them leave wide intervals. But
# the prompts are the same, so that each row of a prompt has a counterpart. The Hellinger distance
# of two histograms is 0 for equal ones and 1 for ones without anything in common. The table has its
# median by task.

# %%
rows = read_rows(db)
rows["request_id"] = rows["request_id"].str.split(":").str[1]
rows = with_task(rows[rows["phase"] == "prompt"])
bins = [f"hist_{b}" for b in range(16)]
key = ["request_id", "position"]
before = rows[rows["model"] == "demo"].set_index(key).sort_index()
distances = {}
for name in found:
    after = rows[rows["model"] == name].set_index(key).sort_index()
    apart = np.sqrt(np.clip(1 - np.sqrt(before[bins] * after[bins]).sum(axis=1), 0, 1))
    print(f"{name}: median distance of a row {apart.median():.3f}")
    distances[name] = apart
plot_axis(
    distances, title="Distance of the same row: median, quartiles, 5% to 95%",
    xlabel="Hellinger distance",
)  # fmt: skip

# %%
by_task = pd.DataFrame(distances).groupby(before["task"]).median()
by_task.style.format("{:.3f}").background_gradient("Blues", axis=None, vmin=0)

# %% [markdown]
# The run's classifier takes any vectors. It was trained on the original: how often does it say the
# same of the same row?

# %%
classifier = Run(data.runs).classifier
names = list(classifier.layout.columns)
clusters = {
    name: pd.Series(
        classifier.classify(own.set_index(key).sort_index()[names].to_numpy(np.float32)).cluster_id
    )
    for name, own in rows.groupby("model")
}
for name in found:
    share = (clusters[name] == clusters["demo"]).mean()
    print(f"{name}: the same cluster for {share:.1%} of the rows")
sidecar.close()

# %% [markdown]
# The view Compare of `attn explore` shows the same comparison, and `curl
# 'localhost:9009/compare?a=model:A&b=model:B'` prints it.
