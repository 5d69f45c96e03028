"""What a model's attention is, in float64: by transformers' own eager attention on the same tokens.

Probabilities are what transformers returns as `attentions`. Logits it does not return: they are
made of the queries and keys that its attention was called with, and their softmax is compared with
its probabilities.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from capture_kernels.fingerprint.vector import Layout, Visibility, fingerprint
from pipeline.engines.attention_tap import AttentionCall, AttentionTap

Doubles = NDArray[np.float64]


class AttentionReference:
    """Logits and probabilities of some tokens: float64[L, H, T, T].

    Soft caps, sliding windows and learned sinks are those of the model. Of a row with a sink the
    probabilities sum to less than 1, and its logsumexp has the sink in it.
    """

    def __init__(self, folder: Path, tokens: list[int]) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        logits, sinks, self._windows = {}, {}, {}
        positions = np.arange(len(tokens))
        distance = positions[:, None] - positions

        def observe(call: AttentionCall) -> None:
            keys = call.key[0].repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=0)
            own = call.query[0] @ keys.transpose(1, 2) * call.options["scaling"]
            if cap := call.options.get("softcap"):
                own = cap * torch.tanh(own / cap)
            seen = self._windows[call.layer] = call.options.get("sliding_window") or len(tokens)
            hidden = (distance < 0) | (distance >= seen)
            logits[call.layer] = np.where(hidden, -np.inf, own.numpy())
            learned = call.options.get("s_aux")
            none = np.full(len(own), -np.inf)
            sinks[call.layer] = none if learned is None else learned.detach().numpy()

        ids = torch.tensor([tokens])
        with torch.inference_mode():
            self.p = torch.stack(model(ids, output_attentions=True).attentions)[:, 0].numpy()
            with AttentionTap(model, observe):
                model(ids)
        self.logits = np.stack([logits[layer] for layer in sorted(logits)])
        self.sinks = np.stack([sinks[layer] for layer in sorted(logits)])
        sums = np.logaddexp(np.logaddexp.reduce(self.logits, axis=3), self.sinks[..., None])
        own = np.exp(self.logits - sums[..., None])
        # Its eager attention takes the softmax in float32, whatever the model's type.
        np.testing.assert_allclose(own, self.p, rtol=0, atol=2e-6)

    def row(
        self, layer: int, position: int, heads: list[int] | None = None, mask: int = 0,
        window: int = 0,
    ) -> tuple[Doubles, Doubles]:  # fmt: skip
        """p float64[H, n] and logsumexp float64[H] over the keys mask..position of one row."""
        first = max(mask, position - window + 1 if window else 0)
        chosen = slice(None) if heads is None else heads
        logits = self.logits[layer, chosen, position, first : position + 1]
        logsumexp = np.logaddexp(np.logaddexp.reduce(logits, axis=1), self.sinks[layer, chosen])
        hidden = np.zeros((len(logits), first - mask))
        p = np.exp(logits - logsumexp[:, None])
        return np.concatenate([hidden, p], axis=1), logsumexp

    def fingerprint(
        self, layers: list[int], position: int, *, heads: list[int] | None = None,
        layout: Layout = Layout.LOG16, visibility: Visibility | None = None,
    ) -> NDArray[np.float32] | None:  # fmt: skip
        chosen = slice(None) if heads is None else heads
        rows = [self.p[layer, chosen, position, : position + 1] for layer in layers]
        first = [max(0, position + 1 - self._windows[layer]) for layer in layers]
        found = fingerprint(rows, position, layout, visibility, first)
        return None if found is None else found.vector


def routed(folder: Path, tokens: list[int]) -> list[Doubles]:
    """Natural logarithms of the routers' probabilities, float64[T, experts] of each layer."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    found: list[Doubles] = [np.empty(0)] * len(model.model.layers)
    for number, layer in enumerate(model.model.layers):

        def keep(module, given, output, number=number):
            found[number] = output[0].double().log_softmax(dim=1).numpy()

        layer.mlp.gate.register_forward_hook(keep)
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    return found
