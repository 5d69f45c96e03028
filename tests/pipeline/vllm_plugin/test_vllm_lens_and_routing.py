"""A logit lens and the routers' choices in a worker of vLLM."""

from __future__ import annotations

import math
from copy import copy
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_steps import LAYERS, VOCABULARY, Req, Steps  # noqa: E402

from pipeline.engines.hidden_states import NOT_THE_LENS  # noqa: E402
from pipeline.engines.serving.options import ServeOptions  # noqa: E402
from pipeline.engines.vllm import model_hooks  # noqa: E402
from pipeline.engines.vllm.model_process import layers as layers_module  # noqa: E402

WIDTH, EXPERTS, USED = 6, 5, 2


class Tokens:
    def decode(self, tokens: list[int], **_: Any) -> str:
        return f"<{tokens[0]}>"


class Model(torch.nn.Module):
    """As far as a lens looks at a model of vLLM's: it hands out hidden states after its layers."""

    def __init__(self, decoder: type) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.norm_weight = torch.rand(WIDTH, generator=generator) + 0.5
        self.head = torch.randn((VOCABULARY, WIDTH), generator=generator)
        self.model = decoder()
        self.model.norm = lambda hidden: hidden * self.norm_weight
        self.handed_out: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.handed_out = layers

    def compute_logits(self, hidden: Any) -> Any:
        return hidden @ self.head.T


class LensSteps(Steps):
    """Of a model whose hidden states are numbers of a position and a layer. wrong: whether its
    logits are of others than the last layer's."""

    wrong = False
    decoder: Any = None  # of the model; None for one that hands nothing out

    def __init__(self, *given: Any, **named: Any) -> None:
        self.states: dict[tuple[str, int, int], Any] = {}
        super().__init__(*given, **named)

    def made(self, runner: SimpleNamespace) -> None:
        runner.model = torch.nn.Module() if self.decoder is None else Model(self.decoder)
        runner.vllm_config.model_config.skip_tokenizer_init = False
        model_hooks.with_hidden_states(None, runner)

    def state(self, req: Req, position: int, number: int) -> Any:
        seed = crc32(f"{req.request_id} {position} {number}".encode())
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))

    def ran(self, at: list[tuple[Req, int]], padding: int) -> SimpleNamespace:
        model = self.runner.model
        after = []
        for number in (layer - 1 for layer in model.handed_out):
            rows = [self.state(req, position, number) for req, position in at]
            after.append(torch.stack([*rows, *[torch.full((WIDTH,), torch.nan)] * padding]))
        found = super().ran(at, padding)
        found.aux_hidden_states = after
        found.hidden_states = model.model.norm(after[0 if self.wrong else -1])
        return found

    def truth(self, req: Req, position: int, number: int) -> Any:  # type: ignore[override]
        model = self.runner.model
        hidden = model.model.norm(self.state(req, position, number))
        return model.compute_logits(hidden).double().log_softmax(-1)


@pytest.fixture
def lens(vllm, steps, monkeypatch):
    monkeypatch.setattr(LensSteps, "decoder", vllm.EagleModelMixin)

    def make(**options: Any) -> LensSteps:
        given = {"return_attention_tokens": True, "layers": "all", "logit_lens": True} | options
        monkeypatch.setattr(ServeOptions, "from_environment", lambda _: ServeOptions(**given))
        some = steps(kind=LensSteps, **given)
        some.recorder.model.use_tokenizer(Tokens())
        return some

    return make


def check_lens(some: LensSteps, req: Req, entries: list[dict[str, Any]], count: int) -> int:
    for entry in entries:
        position = entry["position"]
        expected = some.truth(req, position, entry["layer_id"])
        best = expected.topk(count)
        assert [one["token_id"] for one in entry["logit_lens"]] == best.indices.tolist()
        said = [one["logprob"] for one in entry["logit_lens"]]
        assert said == pytest.approx(best.values.tolist(), abs=1e-3)
        texts = [one["token"] for one in entry["logit_lens"]]
        assert texts == [f"<{token}>" for token in best.indices.tolist()]
    return len(entries)


def test_it_names_the_most_likely_tokens_of_prompts_and_of_generated_ones(lens):
    some = lens()
    req = some.request("r", 9, lens=3, prompt_rows=4)
    other, silent = some.request("o", 5, lens=1), some.request("s", 3, prompt_rows=1)
    some.run((req, 6), (silent, 3), padding=1)()
    some.run((req, 3), (other, 5), (silent, 1))()
    for _ in range(3):
        some.decode(req, silent, other, padding=1)
    for one in (req, other, silent):
        some.end(one)
    some.run()
    found = {one.request_id: some.said(one) for one in (req, other, silent)}
    assert check_lens(some, req, found["r"][0], 3) == LAYERS * (4 + 3)
    assert check_lens(some, other, found["o"][0], 1) == LAYERS * 3
    assert not any("logit_lens" in entry for entry in found["s"][0])
    assert not any("rows_without_logit_lens" in usage for _, usage in found.values())


def test_of_one_captured_layer_the_last_one_is_handed_out_for_the_check(lens):
    some = lens(layers="0")
    assert some.runner.model.handed_out == (1, LAYERS)
    assert some.runner.vllm_config.additional_config == {"attn_logit_lens": [0, LAYERS - 1]}
    req = some.request("r", 4, lens=2, layers=[0])
    some.answer(req, tokens=3)
    entries, _ = some.ended(req)
    assert check_lens(some, req, entries, 2) == 2


def test_it_is_compared_with_the_models_logits_until_it_was_right_once(lens, monkeypatch):
    some, rows = lens(), list[int]()
    own = Model.compute_logits

    def counted(model: Model, hidden: Any) -> Any:
        rows.append(len(hidden))
        return own(model, hidden)

    monkeypatch.setattr(Model, "compute_logits", counted)
    req = some.request("r", 4, lens=2)
    some.answer(req, tokens=4)
    some.run()
    # The lens of both layers in three steps, and in the first two logits more.
    assert rows == [LAYERS, 1, 1, LAYERS, LAYERS]


def test_what_is_not_the_models_lens_is_never_shown(lens):
    some = lens()
    some.wrong = True
    req = some.request("r", 4, lens=2)
    some.answer(req, tokens=4)
    entries, usage = some.ended(req)
    assert entries and not any("logit_lens" in entry for entry in entries)
    assert usage["rows_without_logit_lens"] == 3
    assert some.facts[-1].reasons["logit_lens"] == NOT_THE_LENS


@pytest.mark.parametrize("decoder", [None, SimpleNamespace], ids=["none", "by inheritance alone"])
def test_a_model_that_hands_nothing_out_has_no_lens(lens, monkeypatch, decoder):
    monkeypatch.setattr(LensSteps, "decoder", decoder)
    some = lens()
    reason = some.recorder.model.facts.reasons["logit_lens"]
    assert reason == "vLLM's class of this model does not hand out hidden states of its layers"
    assert some.runner.vllm_config.additional_config == {}


def test_of_a_server_that_cannot_be_captured_nothing_is_handed_out(lens, monkeypatch):
    monkeypatch.setattr(layers_module, "refusal", lambda runner: "pipeline parallelism")
    assert lens().runner.model.handed_out == ()


def test_a_server_that_starts_without_the_option_has_no_lens(lens):
    some = lens(logit_lens=False)
    assert some.runner.model.handed_out == ()
    reason = some.recorder.model.facts.reasons["logit_lens"]
    assert reason == "start the server with --attention-logit-lens"


class Router:
    """As far as the plug-in looks at vLLM's `BaseRouter`."""

    top_k = USED

    def _compute_routing(
        self, hidden_states: Any, router_logits: Any, indices_type: Any, *, input_ids: Any = None
    ) -> tuple[Any, Any]:
        best = router_logits.softmax(-1).topk(USED)
        # The smallest weight first: the plug-in has to put them in order.
        return best.values.flip(-1), best.indices.flip(-1)


class RoutedSteps(Steps):
    """Of a model whose second layer routes each token."""

    sequence_parallel, monolithic, several, ranks_of_data = False, False, False, 1

    def __init__(self, *given: Any, runner_type: Any, **named: Any) -> None:
        self._type = runner_type
        super().__init__(*given, **named)

    def made(self, runner: SimpleNamespace) -> None:
        moe = self._type()
        moe.layer_id, moe.router, moe.is_monolithic = 1, Router(), self.monolithic
        moe.moe_config = SimpleNamespace(
            is_sequence_parallel=self.sequence_parallel, dp_size=self.ranks_of_data
        )
        others = [copy(moe)] if self.several else []
        runner.model = torch.nn.ModuleList([moe, *others])

    def logits(self, req: Req, position: int) -> Any:
        generator = torch.Generator().manual_seed(crc32(f"{req.request_id} {position}".encode()))
        return torch.randn(EXPERTS, generator=generator)

    def ran(self, at: list[tuple[Req, int]], padding: int) -> SimpleNamespace:
        logits = [self.logits(req, position) for req, position in at]
        logits += [torch.full((EXPERTS,), torch.nan)] * padding
        moe = self.runner.model[0]
        moe.router._compute_routing(None, torch.stack(logits), None)
        return super().ran(at, padding)


@pytest.fixture
def routed(vllm, steps):
    def make(kind: type[RoutedSteps] = RoutedSteps, **options: Any) -> RoutedSteps:
        def made(*given: Any, **named: Any) -> RoutedSteps:
            return kind(*given, runner_type=vllm.MoERunner, **named)

        return steps(kind=made, **options)

    return make


def test_experts_are_those_of_the_rows_tokens(routed):
    some = routed()
    assert some.recorder.model.facts.moe
    req, other = (
        some.request("r", 9, routing=True, prompt_rows=3),
        some.request("o", 4, routing=True),
    )
    some.run((req, 7), padding=2)()
    some.run((req, 2), (other, 4))()
    some.decode(other, req, times=3, padding=1)
    for one in (req, other):
        some.end(one)
    some.run()
    seen = 0
    for one in (req, other):
        for entry in some.said(one)[0]:
            if entry["layer_id"] == 0:
                assert "top_experts" not in entry
                continue
            p = some.logits(one, entry["position"]).double().softmax(-1).numpy()
            assert entry["top_experts"] == np.argsort(-p)[:USED].tolist()
            entropy = -(p * np.log(p)).sum() / math.log(EXPERTS)
            assert entry["router_entropy"] == pytest.approx(entropy, abs=1e-3)
            seen += 1
    assert seen == 3 + 3 + 3


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("monolithic", True, "the experts of layer 1 are chosen where no hook sees it"),
        ("sequence_parallel", True, "ranks route tokens of their own"),
        ("several", True, "layer 1 has several routers, of tokens of several kinds"),
        ("ranks_of_data", 2, "with data parallelism ranks route tokens of each other"),
    ],
)
def test_experts_that_no_hook_sees_are_refused_by_name(routed, field, value, reason):
    some = routed(type("Other", (RoutedSteps,), {field: value}))
    assert reason in some.recorder.model.facts.reasons["moe_routing"]
    assert "_compute_routing" not in vars(some.runner.model[0].router)


def test_a_graph_that_is_captured_while_nobody_asks_keeps_them(routed):
    """vLLM captures its graphs over tokens of no request, with nothing of ours called before."""
    some = routed()
    logits = torch.randn((3, EXPERTS))
    some.runner.model[0].router._compute_routing(None, logits, None)
    found = some.recorder._routers.on_host(some.recorder._routers.results(3))
    for row, own in enumerate(logits):
        expected = own.topk(USED).indices.tolist()
        assert found.of_row(row)[1].experts.tolist() == expected


def test_of_a_router_that_did_not_run_nothing_is_known(routed):
    some = routed()
    req = some.request("r", 5, routing=True)
    some.run((req, 5))()
    some.decode(req)
    some.ran = lambda at, padding: Steps.ran(some, at, padding)
    some.decode(req, times=2)
    some.end(req)
    entries, _ = some.ended(req)
    of_layer = [entry for entry in entries if entry["layer_id"] == 1]
    assert ["top_experts" in entry for entry in of_layer] == [True, False, False]


def test_of_layers_that_are_not_captured_experts_are_not_known(routed):
    reasons = routed(layers="0").recorder.model.facts.reasons
    assert reasons["moe_routing"] == "the captured layers route no experts"
