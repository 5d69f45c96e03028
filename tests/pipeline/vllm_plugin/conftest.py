"""Recorders over a small model, and what of vLLM the plug-in imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import install

torch = pytest.importorskip("torch")

from vllm_steps import CONTEXT, Steps  # noqa: E402

from pipeline.engines.serving.options import ServeOptions  # noqa: E402
from pipeline.engines.serving.steps.ranks import Ranks  # noqa: E402
from pipeline.engines.vllm.model_process import captured_model  # noqa: E402


@pytest.fixture
def vllm(monkeypatch) -> SimpleNamespace:
    """vLLM is not installed here: small classes in the places of its own."""
    return install(monkeypatch, CONTEXT)


@pytest.fixture
def steps(vllm, monkeypatch, tmp_path: Path) -> Iterator[Callable[..., Steps]]:
    monkeypatch.setattr(captured_model, "attention_layers", lambda runner: runner.layers)
    made: list[Steps] = []

    def make(
        store: Path | None = None, ranks: Ranks | None = None, *, layout: str = "NHD",
        windowed: bool = False, parser: str = "", kind: type[Steps] = Steps, **options: Any,
    ) -> Steps:  # fmt: skip
        given = {"return_attention_tokens": True, "layers": "all", "store": store} | options
        model = {"layout": layout, "windowed": windowed, "parser": parser}
        made.append(kind(tmp_path, ServeOptions(**given), ranks, **model))
        return made[-1]

    yield make
    for one in made:
        one.close()
