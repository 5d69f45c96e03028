"""One row of a step's results on the host, as a request's entries are made of it."""

from __future__ import annotations

from collections.abc import Sequence

from capture_kernels.layer_plan import LOGSUMEXP_COLUMN
from capture_kernels.serving.step import StepResults
from pipeline.engines.serving.request import CaptureRequest
from pipeline.engines.serving.rows import HeadRows, LayerRow


def wants_lists(request: CaptureRequest) -> bool:
    """Whether a request's entries list each of its heads, where the server has their top k."""
    return request.mode == "raw" and request.heads is not None


def layer_rows(
    found: StepResults, row: int, layers: Sequence[int], request: CaptureRequest
) -> list[LayerRow]:
    """A row's layers.

    Args:
        found: of the step, on the host.
        layers: indices among the captured layers.
        request: whose row it is; its `layers` are the numbers of these.
    """
    rows = []
    for number, layer in zip(request.layers, layers, strict=True):
        mean = found.mean[layer, row].numpy()
        heads = None
        if request.heads is not None and wants_lists(request) and found.logits.numel():
            of_heads = (found.positions, found.logits, found.per_head[..., LOGSUMEXP_COLUMN])
            lists = (each[layer, row][request.heads].numpy() for each in of_heads)
            heads = HeadRows(request.heads, *lists)
        rows.append(
            LayerRow(
                number, mean, float(mean[LOGSUMEXP_COLUMN]),
                found.mean_positions[layer, row].numpy(), found.mean_masses[layer, row].numpy(),
                heads,
            )
        )  # fmt: skip
    return rows
