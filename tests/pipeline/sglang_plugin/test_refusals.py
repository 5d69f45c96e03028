"""What of SGLang cannot be captured, by its arguments and its model's runner."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pipeline.engines.sglang.model_process.layers import refusal  # noqa: E402


@pytest.fixture
def graphs(monkeypatch) -> SimpleNamespace:
    """SGLang's settings of CUDA graphs of prompts."""
    prefill = SimpleNamespace(backend="breakable")
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    context = SimpleNamespace(get_exec=lambda: SimpleNamespace(graph=graph))
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return prefill


def runner(**arguments: object) -> SimpleNamespace:
    usual = {"enable_two_batch_overlap": False, "attn_cp_size": 1, "pp_size": 1}
    return SimpleNamespace(
        server_args=SimpleNamespace(**usual | arguments),
        use_mla_backend=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        supports_sampling_observer=lambda: True,
        model=torch.nn.Module(),
        is_hybrid_swa=False,
        prefill_attention_backend_str="triton",
        decode_attention_backend_str="triton",
    )


def test_data_parallel_attention_is_captured(graphs):
    assert refusal(runner(enable_dp_attention=True, dp_size=2)) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"pp_size": 2}, "--pp-size"),
    ],
)
def test_what_splits_steps_is_refused_by_name(graphs, arguments, says):
    assert says in (refusal(runner(**arguments)) or "")


def test_graphs_of_whole_prompts_are_refused(graphs):
    graphs.backend = "full"
    assert "graphs of whole prompts" in (refusal(runner()) or "")
