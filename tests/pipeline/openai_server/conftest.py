"""The demo model in float32, and servers of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from shared import REPO

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attention_reference import AttentionReference  # noqa: E402
from live_server import LiveServer, running  # noqa: E402

from pipeline.engines.serving.options import ServeOptions  # noqa: E402

DEMO = REPO / "examples" / "demo_model"
ALL = ServeOptions(
    return_attention_tokens=True,
    layers="all",
    enable_attention_instrumentation=True,
    instrumentation_layers="all",
)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in float32: what is left between a server and the reference in float64 is
    the server's own error, not the rounding of the weights' type."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(demo: Path) -> Iterator[LiveServer]:
    """A server that captures whatever it is asked for."""
    with running(demo, ALL) as live:
        yield live


@pytest.fixture(scope="session")
def reference(demo: Path) -> Callable[[list[int]], AttentionReference]:
    """The reference of some tokens."""

    @cache
    def make(tokens: tuple[int, ...]) -> AttentionReference:
        return AttentionReference(demo, list(tokens))

    return lambda tokens: make(tuple(tokens))
