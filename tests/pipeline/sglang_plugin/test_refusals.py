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
    usual = {
        "enable_two_batch_overlap": False, "attn_cp_size": 1, "pp_size": 1,
        "enable_multi_layer_eagle": False, "speculative_eagle_topk": 1,
        "speculative_adaptive": False, "enable_dp_attention": False,
    }  # fmt: skip
    algorithm = arguments.pop("algorithm", None)
    return SimpleNamespace(
        server_args=SimpleNamespace(**usual | arguments),
        use_mla_backend=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: algorithm is None, name=algorithm),
        supports_sampling_observer=lambda: algorithm is None,
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


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_drafts_of_one_chain_are_captured(graphs, algorithm):
    assert refusal(runner(algorithm=algorithm)) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"algorithm": "NGRAM"}, "--speculative-algorithm NGRAM was not tried: use EAGLE, EAGLE3"),
        ({"enable_multi_layer_eagle": True}, "--speculative-algorithm EAGLE was not tried"),
        ({"speculative_eagle_topk": 4}, "use --speculative-eagle-topk 1"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_dp_attention": True}, "with data-parallel attention"),
    ],
)
def test_other_drafts_are_refused_by_name(graphs, arguments, says):
    assert says in (refusal(runner(**{"algorithm": "EAGLE"} | arguments)) or "")


def test_graphs_of_whole_prompts_are_refused(graphs):
    graphs.backend = "full"
    assert "graphs of whole prompts" in (refusal(runner()) or "")
