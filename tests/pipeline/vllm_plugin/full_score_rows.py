"""What a worker said of full scores, against a softmax in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm_steps import HEADS, SCALE, Req, Steps

Scored = dict[int, dict[int, Any]]


def scored(some: Steps, req: Req) -> Scored:
    """What was said of a request since the last time: by layer and position, the row."""
    some.said(req)
    found: Scored = {}
    for (layer, begin, shape), part in some.blocks.pop(req.request_id, []):
        rows = np.frombuffer(part, np.float16).reshape(shape)
        assert shape[2] == begin + len(rows)
        for position, row in enumerate(rows, begin):
            assert position not in found.setdefault(layer, {}), "a row came twice"
            found[layer][position] = row
    return found


def check_scores(
    some: Steps, req: Req, found: Scored, positions: range, *, layers: tuple[int, ...] = (0, 1),
    heads: list[int] | None = None, mask: int = 0,
) -> None:  # fmt: skip
    """They are those of the reference, of the masked prefix 0, and of every row once."""
    assert {layer: sorted(rows) for layer, rows in found.items()} == {
        layer: list(positions) for layer in layers
    }
    for layer, rows in found.items():
        window = some.windows[layer]
        for position, row in rows.items():
            first = max(mask, position - window + 1 if window else 0)
            keys = req.keys[layer, first : position + 1].double()
            keys = keys.repeat_interleave(HEADS // keys.shape[1], dim=1)
            logits = torch.einsum("hd,thd->ht", req.queries[layer, position].double(), keys)
            p = (logits * SCALE).softmax(dim=1).numpy()[slice(None) if heads is None else heads]
            np.testing.assert_allclose(row[:, first : position + 1], p, atol=1e-3)
            assert not row[:, :first].any() and not row[:, position + 1 :].any()
