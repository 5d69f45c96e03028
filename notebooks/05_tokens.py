# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. One request token by token
#
# Which tokens did each token of an answer look at? This notebook starts the demo model behind the
# attention API and a sidecar beside it, asks one question, and shows the answer as the page does:
# each token with its links, its fingerprint, and the cluster that it belongs to.

# %%
import numpy as np
import pandas as pd

from discovery.notebook import Run, open_data, plot_fingerprints, shown
from pipeline.analysis import build_token_map, collect_entries, find_tokens, read_raw
from pipeline.examples.files import demo_model
from sidecar.notebook import LocalEngine, LocalSidecar, TokenView, stored_rows

data = open_data()
run = Run(data.runs)
sidecar = LocalSidecar(data.folder / "asked.db", data.runs)
engine = LocalEngine(sidecar)
print(f"sidecar {sidecar.url}, run {sidecar.client.discovery_status()['serving']['run_id']}")

# %% [markdown]
# ## Ask
#
# The prompt has four numbers by their names, and asks for one of them.

# %%
prompt = "alpha: 1729\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha:"
response = engine.ask(prompt, max_tokens=6)
print(repr(response["choices"][0]["text"]))
usage = response["usage"]
print(f"{usage['prompt_tokens']} tokens of prompt, {usage['completion_tokens']} of the answer")

# %% [markdown]
# ## The token view
#
# The view is the page's own. Point at a token to see where the row that led to it looked. Click to
# pin it. The lens has the links of each layer, the fingerprint, the zone with its evidence, and the
# cluster of the run. The second token of the answer is pinned, and layer 2 is shown.

# %%
rows = stored_rows(sidecar.client, response["id"], rows=usage["completion_tokens"])
first = usage["prompt_tokens"]
view = TokenView(response, records=rows, run=run, layer=2, pinned=first + 1)
view

# %% [markdown]
# `view.pinned` is the token that is pinned, in both directions: click one, and run the next cell
# again.

# %%
texts, _ = build_token_map(str(demo_model()), prompt, response)
print(f"pinned: token {view.pinned}, {texts[view.pinned]!r}")

# %% [markdown]
# ## The same in numbers
#
# An entry of the response has the keys that a layer attends to most, with true probabilities: over
# all keys, not only these. The row that led to a token is that of the token before it.

# %%
entries = read_raw(collect_entries(response))
top = [
    {
        "token": repr(texts.get(first + entry.step, "")), "layer": entry.layer,
        "looks at": " ".join(repr(texts[p]) for p in entry.token_positions[:4]),
        "most": float(entry.probabilities[0]), "in 16 keys": entry.mass_captured,
    }
    for entry in entries if entry.step is not None and entry.step < 4
]  # fmt: skip
shown(pd.DataFrame(top), {"most": "{:.0%}", "in 16 keys": "{:.0%}"})

# %% [markdown]
# How much of each row, and of each layer, lies on the line that has the answer?

# %%
wanted = find_tokens(texts, "alpha: 1729", 0, first)
on_line = pd.DataFrame([
    {"token": f"{entry.step}: {texts.get(first + entry.step, '')!r}", "layer": entry.layer,
     "share": float(entry.probabilities[np.isin(entry.token_positions, wanted)].sum())}
    for entry in entries if entry.step is not None
])  # fmt: skip
table = on_line.pivot(index="token", columns="layer", values="share")
table.style.format("{:.0%}").background_gradient("Blues", vmin=0, vmax=1)

# %% [markdown]
# ## What the sidecar stored
#
# The engine sent a fingerprint of each row to the sidecar, which classified and stored them.

# %%
known = pd.DataFrame(rows)
known["token"] = [repr(texts[position]) for position in known["position"]]
labels = {-1: ""} | run.classifier.labels
known["cluster"] = [labels[cluster] for cluster in known["cluster_id"]]
columns = ["position", "token", "phase", "zone", "cluster", "sink_mass"]
shown(known[columns], {"sink_mass": "{:.1%}"})

# %%
vectors = np.array(known["vector"].to_list())
plot_fingerprints(vectors, known["token"].to_list(), title="Rows of the answer: where each looks")

# %%
engine.close()
sidecar.close()

# %% [markdown]
# `attn explore` has the same view for conversations, in the browser. A trace that was exported
# there opens here: `TokenView(read_trace("trace.jsonl"))`. Next: [tuning](06_tuning.ipynb).
