"""Recorders over a small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from recorder_steps import DIM, HEADS, KEY_HEADS, LAYERS, Steps  # noqa: E402

from pipeline.engines.serving.options import ServeOptions  # noqa: E402
from pipeline.engines.serving.steps.ranks import Ranks  # noqa: E402
from pipeline.engines.sglang.model_process import captured_model  # noqa: E402


@pytest.fixture
def steps(monkeypatch) -> Callable[..., Steps]:
    layer = SimpleNamespace(
        tp_q_head_num=HEADS, tp_k_head_num=KEY_HEADS, qk_head_dim=DIM, scaling=DIM**-0.5,
        logit_cap=0, logit_capping_method="tanh", xai_temperature_len=-1, sliding_window_size=-1,
    )  # fmt: skip
    found = dict.fromkeys(range(LAYERS), layer)
    monkeypatch.setattr(captured_model, "attention_layers", lambda model: found)
    monkeypatch.setattr(captured_model, "routers_of", lambda model: {})
    monkeypatch.setattr(captured_model, "arguments_of", lambda runner: runner.server_args)

    def make(
        store: Path | None = None, ranks: Ranks | None = None, *, kind: type[Steps] = Steps,
        **options: Any,
    ) -> Steps:  # fmt: skip
        given = {"return_attention_tokens": True, "layers": "all", "store": store} | options
        return kind(ServeOptions(**given), ranks)

    return make
