# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. From a model to fingerprints
#
# A **fingerprint** is what one attention row did, in 20 numbers: how much of its attention lies
# near, at some distance and far back, how evenly it is spread, and a histogram of the distances in
# 16 bins. This notebook captures a prompt with the demo model that ships with attn, checks a
# fingerprint against the model's own attention, and stores the rows.

# %%
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules
from discovery.notebook import plot_fingerprints, plot_shares, read_rows
from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions
from pipeline.examples.files import demo_model
from pipeline.record import vectors as vectors_of
from pipeline.store.open import open_store

logging.disable_progress_bar()
np.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## Capture
#
# `layers="auto"` takes layers over the depth of the model, four at most. A row is the mean over
# these layers and their heads. The model is not changed: a hook reads the queries and keys of its
# attention.

# %%
options = CaptureOptions(layers="auto", max_new_tokens=6)
engine = load_engine(str(demo_model()), options)
prompt = "alpha: 1729\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha:"
captured = engine.capture(prompt, request_id="needle")

tokens = engine.tokenizer(prompt)["input_ids"] + captured.new_tokens
texts = [engine.tokenizer.decode([token]) for token in tokens]
print(f"layers {engine.layers}, capture {engine.capture_id}")
answer = "".join(texts[captured.prompt_tokens :])
print(f"{captured.prompt_tokens} tokens of prompt, answer {answer!r}")
print(f"{captured.batch.num_rows} rows")

# %% [markdown]
# A row is named after the token that looks, and leads to the token after it. The first token has no
# row: it sees only itself, and as the sink it does not count. The last one has none, as the model
# was not run on it. All others have one.

# %%
vectors = vectors_of(captured.batch)
positions = captured.batch.column("position").to_numpy()
last = slice(-16, None)
names = [f"{position}  {texts[position]!r}" for position in positions[last]]
plot_fingerprints(vectors[last], names, title="The last 16 rows: where each looks")

# %% [markdown]
# ## The 20 numbers
#
# Three bands, the entropy, and the histogram. Each band is the sum of its bins. Here is the last
# row of the prompt, which led to the first token of the answer.

# %%
row = list(positions).index(captured.prompt_tokens - 1)
print(f"the row of {texts[positions[row]]!r}, which led to {texts[positions[row] + 1]!r}")
for name, value in zip(Layout.LOG16.columns, vectors[row], strict=True):
    if value >= 0.005:
        print(f"{name:>12} {value:.3f}  {'█' * round(40 * float(value))}")
histogram = vectors[:, 4:]
sums = np.column_stack([histogram[:, :3].sum(1), histogram[:, 3:8].sum(1), histogram[:, 8:].sum(1)])
print(f"largest difference of a band from its bins: {np.abs(sums - vectors[:, :3]).max():.1e}")

# %% [markdown]
# ## Checked against the model's attention
#
# `transformers` gives the attention probabilities of a model in plain torch. Without the sink
# token and renormalised for each head, the bins of their distances are on average the fingerprint.
# What differs is the rounding of float16, in which the demo model computes.

# %%
model = AutoModelForCausalLM.from_pretrained(demo_model(), attn_implementation="eager").eval()
with torch.inference_mode():
    attentions = model(torch.tensor([tokens[:-1]]), output_attentions=True).attentions
heads = torch.cat([attentions[layer][0] for layer in engine.layers]).double().numpy()

differences = []
for position, fingerprint in zip(positions, vectors, strict=True):
    seen = heads[:, position, 1 : position + 1]
    shares = (seen / seen.sum(axis=1, keepdims=True)).mean(axis=0)
    distance = position - np.arange(1, position + 1)
    by_hand = np.bincount(np.log2(np.maximum(distance, 1)).astype(int), shares, minlength=16)
    differences.append(np.abs(by_hand - fingerprint[4:]).max())
difference = max(differences)
print(f"{len(positions)} rows, {len(heads)} heads, largest difference of a bin: {difference:.1e}")
assert difference < 1e-3

# %% [markdown]
# ## Zones, and the store
#
# A **zone** is one of five coarse kinds of attention, decided from the vector by fixed rules.
# Records go into a store: a SQLite file, or a Parquet folder. The key of a record is its request,
# position and layer. So storing the same rows again changes nothing.

# %%
prompts = {
    "needle-2": "red: 51\nblue: 9340\ngreen: 27\nblue:",
    "counting": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "brackets": "Close: ( [ ] ) ( [ [ ] ( ) ] ( ) { } ) ( ( ) ) { { [",
    "table": "|   # | name  | value |\n|   1 | red   |     6 |\n|   2 | blue  |     8 |",
}
db = Path(mkdtemp()) / "fingerprints.db"
with open_store(db, create=True) as store:
    for name, text in prompts.items():
        store.append(engine.capture(text, request_id=name).batch)
    for _ in range(2):
        stored = store.append(captured.batch)
        print(f"stored {stored.inserted} rows, {stored.duplicates} were there already")

# %%
rows = read_rows(db)
rows["zone"] = ZoneRules().classify(rows[list(Layout.LOG16.columns)], Layout.LOG16).names
zones = rows.groupby("request_id")["zone"].value_counts(normalize=True).unstack(fill_value=0)
plot_shares(zones, title="Zones of each request")

# %% [markdown]
# With more than a few prompts, `attn capture --model MODEL --prompts FILE --db STORE` does the
# same, and `attn serve` does it for requests of clients. Next: [the map](02_map.ipynb) that a
# discovery run makes of such rows.
