"""What of SGLang cannot be captured, by its arguments and its model's runner."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pipeline.engines.sglang.model_process.layers import arguments_of, refusal  # noqa: E402
from pipeline.engines.sglang.model_process.lens import lens_refusal  # noqa: E402
from pipeline.engines.sglang.model_process.routing import routing_refusal  # noqa: E402

# What SGLang makes of its arguments for drafts.
AS_USUAL = {
    "enable_multi_layer_eagle": False, "speculative_eagle_topk": 1, "speculative_adaptive": False,
    "attn_dp_size": 1,
}  # fmt: skip
SPEC = SimpleNamespace()


class EAGLEWorkerV2:
    def verify(self):
        pass


class Inherits(EAGLEWorkerV2):
    pass


class Another:
    def verify(self):
        pass


@pytest.fixture
def graphs(monkeypatch) -> SimpleNamespace:
    """SGLang's settings of CUDA graphs of prompts."""
    prefill = SimpleNamespace(backend="breakable")
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    context = SimpleNamespace(
        get_exec=lambda: SimpleNamespace(graph=graph), get_spec=lambda: SPEC,
        get_parallel=lambda: SPEC,
    )  # fmt: skip
    vars(SPEC).update(AS_USUAL)
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    overrides = SimpleNamespace(
        resolved_view=lambda raw: SimpleNamespace(**vars(raw) | vars(raw).get("decided", {}))
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    module = SimpleNamespace(EAGLEWorkerV2=EAGLEWorkerV2)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.eagle_worker_v2", module)
    return prefill


def runner(**arguments: object) -> SimpleNamespace:
    """decided: what SGLang makes of its arguments, without a change of them."""
    usual = {
        "enable_two_batch_overlap": False, "attn_cp_size": 1, "pp_size": 1, "attn_dp_size": 1,
        "enable_eplb": False, "init_expert_location": "trivial", "moe_a2a_backend": "none",
        "enable_torch_compile": False, "skip_tokenizer_init": False,
    }  # fmt: skip
    algorithm, worker = arguments.pop("algorithm", None), arguments.pop("worker", Inherits)
    return SimpleNamespace(
        server_args=SimpleNamespace(**usual | arguments),
        use_mla_backend=False,
        spec_algorithm=SimpleNamespace(
            is_none=lambda: algorithm is None,
            name=algorithm,
            create_worker=lambda arguments: worker,
        ),
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
@pytest.mark.parametrize("by_sglang", [False, True])
def test_what_splits_steps_is_refused_by_name(graphs, arguments, says, by_sglang):
    given = {"decided": arguments} if by_sglang else arguments
    assert says in (refusal(runner(**given)) or "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"attn_dp_size": 2}, "--attn-dp-size"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"init_expert_location": "random"}, "--init-expert-location"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
    ],
)
@pytest.mark.parametrize("by_sglang", [False, True])
def test_experts_that_move_or_route_other_tokens_are_refused(graphs, arguments, says, by_sglang):
    assert routing_refusal(arguments_of(runner()), {}) is None
    given = {"decided": arguments} if by_sglang else arguments
    assert says in (routing_refusal(arguments_of(runner(**given)), {}) or "")


@pytest.mark.parametrize("argument", ["enable_torch_compile", "skip_tokenizer_init"])
@pytest.mark.parametrize("by_sglang", [False, True])
def test_arguments_without_a_lens(graphs, argument, by_sglang):
    assert lens_refusal(arguments_of(runner())) is None
    given = {"decided": {argument: True}} if by_sglang else {argument: True}
    said = lens_refusal(arguments_of(runner(**given))) or ""
    assert "--" + argument.replace("_", "-") in said


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_drafts_of_one_chain_are_captured(graphs, algorithm):
    assert refusal(runner(algorithm=algorithm)) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"algorithm": "NGRAM"}, "--speculative-algorithm NGRAM was not tried: use EAGLE, EAGLE3"),
        ({"worker": Another}, "verifies drafts in another way"),
        ({"enable_multi_layer_eagle": True}, "(multi-layer EAGLE) was not tried"),
        ({"speculative_eagle_topk": 4}, "use --speculative-eagle-topk 1"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"attn_dp_size": 2}, "with data-parallel attention"),
    ],
)
def test_other_drafts_are_refused_by_name(graphs, arguments, says):
    own = {name: arguments[name] for name in ("algorithm", "worker") if name in arguments}
    vars(SPEC).update({name: arguments[name] for name in arguments if name not in own})
    assert says in (refusal(runner(**{"algorithm": "EAGLE"} | own)) or "")


def test_graphs_of_whole_prompts_are_refused(graphs):
    graphs.backend = "full"
    assert "graphs of whole prompts" in (refusal(runner()) or "")
