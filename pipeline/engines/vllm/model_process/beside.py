"""Capture in a CUDA graph, beside what the model does next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Beside:
    """A stream for capture in whole CUDA graphs of decode steps.

    The graph gets a branch that begins after a layer's attention and ends with the model's forward
    pass: kernels of capture that do not fill the GPU run beside the layers that follow. Elsewhere
    capture stays on the model's stream, as pieces of a graph may write over a layer's queries.

    Args:
        model: whose forward pass ends a branch.
        device: of the stream; None where there is no GPU, or where capture talks to other ranks,
            as two streams of one rank must not do that at once.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device | None) -> None:
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._is_joined = False
        # Of the branches that are being captured: what they read must not be written before.
        self._queries: list[Tensor] = []
        self._hook = model.register_forward_hook(self._join)

    def is_open(self) -> bool:
        """Whether `branch` has a branch now: a whole graph of a decode step is being captured."""
        from vllm.forward_context import get_forward_context

        # The model's hook was seen to run in the steps that vLLM warms up with, or a graph would
        # never end.
        return (
            self._stream is not None
            and self._is_joined
            and torch.cuda.is_current_stream_capturing()
            and get_forward_context().cudagraph_runtime_mode.name == "NONE"
        )

    @contextmanager
    def branch(self, query: Tensor) -> Iterator[Tensor]:
        """Kernels of the block may run beside the model's that follow, in turn with those of
        earlier blocks.

        Args:
            query: what they read of the model, which it writes over after the layer.

        Yields:
            The queries to read.
        """
        if self._stream is None or not self.is_open():
            yield query
            return
        query = query.clone()
        self._queries.append(query)
        self._stream.wait_stream(torch.cuda.current_stream(query.device))
        with torch.cuda.stream(self._stream):
            yield query

    def _join(self, *_: Any) -> None:
        self._is_joined = True
        if self._stream is not None and self._queries:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._queries.clear()

    def close(self) -> None:
        self._hook.remove()
