"""What looks at hidden states after a step: which rows it says something of, and what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pipeline.engines.serving.steps import lens as steps_lens  # noqa: E402
from pipeline.engines.serving.steps.states import NotedRow  # noqa: E402
from pipeline.engines.sglang.model_process.lens import LensParts, LensTap  # noqa: E402

SIZE, VOCABULARY, MOST_ROWS, LAYERS = 8, 40, 6, 3
PLAIN = SimpleNamespace(
    acc_additive_penalties=None, acc_scaling_penalties=None, penalizer_orchestrator=None
)


class Processor(torch.nn.Module):
    def forward(self, ids, hidden, lm_head):
        return hidden @ lm_head


class Model:
    """Three layers, of which 0 and 1 are captured, and steps over them.

    Args:
        shift: added to the logits that it samples from.
    """

    def __init__(self, shift: float = 0.0) -> None:
        torch.manual_seed(0)
        self.layers = [torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)]
        self.norm, self.head = torch.nn.LayerNorm(SIZE), torch.randn(SIZE, VOCABULARY)
        self.processor, self.shift, self.refused = Processor(), shift, []
        parts = LensParts(
            self.layers, self.norm, self.processor, torch.matmul, VOCABULARY, SIZE, torch.float32
        )
        self.tap = LensTap(
            parts, [0, 1], max_rows=MOST_ROWS, device="cpu", text=str, refuse=self.refused.append
        )
        self.tap.observed_by(self.tap.take)

    @torch.no_grad()
    def step(self, tokens: int, wanted: dict[int, int], *, without: int | None = None,
             sampling_info=PLAIN):  # fmt: skip
        """Over so many tokens, of which `wanted` are asked for, by number of tokens named. Gives
        the lens of each, and the expected log-probabilities float[L, T, V]."""
        noted = [
            NotedRow(0, row, state_of(count), 100 + row, None) for row, count in wanted.items()
        ]
        self.tap.begin()
        self.tap.note(noted, list(wanted), (tokens - 1, 99 + tokens))
        hidden = torch.randn(tokens, SIZE)
        expected = []
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden) if number != without else layer.forward(hidden)
            expected.append((self.norm(hidden) @ self.head).double().log_softmax(-1))
        logits = self.processor(None, self.norm(hidden)[-1:], self.head) + self.shift * torch.rand(
            1, VOCABULARY
        )
        self.tap.check(logits, sampling_info)
        step = self.tap.end()
        found = self.tap.by_row(step and step.copied(torch.clone))
        return {list(wanted)[at]: lenses for at, lenses in found.items()}, torch.stack(expected)


def state_of(count: int):
    collector = SimpleNamespace(
        request=SimpleNamespace(lens=count), add_seconds=lambda seconds: None
    )
    return SimpleNamespace(layers=(0, 1), collector=collector)


def check(found, expected, wanted: dict[int, int]) -> None:
    assert found.keys() == wanted.keys()
    for row, lenses in found.items():
        assert list(lenses) == [0, 1]
        for layer, one in lenses.items():
            best = expected[layer, row].topk(wanted[row])
            assert one.tokens == best.indices.tolist()
            assert one.texts == [str(token) for token in one.tokens]
            assert one.logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("rows_at_once", [1, 3, 1000])
def test_it_names_the_most_likely_tokens_of_the_asked_rows(monkeypatch, rows_at_once):
    monkeypatch.setattr(steps_lens, "LOGITS_BYTES", 4 * VOCABULARY * rows_at_once)
    wanted = {1: 3, 4: 20, 8: 1}
    check(*Model().step(9, wanted), wanted)


def test_a_short_step_after_a_long_one():
    model = Model()
    for tokens, wanted in ((50, {40: 2, 44: 2, 49: 2}), (1, {0: 4}), (5, {3: 2})):
        check(*model.step(tokens, wanted), wanted)


def test_who_does_not_ask_has_none():
    assert Model().step(4, {1: 0, 2: 0})[0] == {}


def test_a_layer_that_no_hook_has_seen_is_not_taken_for_another_steps():
    model = Model()
    check(*model.step(4, {2: 3}), {2: 3})
    assert model.step(4, {2: 3}, without=1)[0] == {}
    assert model.refused == []


def test_nothing_is_said_until_the_models_own_logits_were_seen():
    model = Model()
    penalised = SimpleNamespace(**{**vars(PLAIN), "acc_additive_penalties": torch.ones(1)})
    assert model.step(4, {2: 3}, sampling_info=penalised)[0] == {}
    check(*model.step(4, {2: 3}), {2: 3})
    check(*model.step(4, {2: 3}, sampling_info=penalised), {2: 3})


def test_a_lens_that_does_not_lead_to_the_models_logits_says_nothing_any_more():
    model = Model(shift=3.0)
    assert model.step(4, {2: 3})[0] == {}
    model.shift = 0.0
    assert model.step(4, {2: 3})[0] == {}
    assert len(model.refused) == 1
    assert "not its head over its last norm" in model.refused[0]


def test_a_layer_that_leaves_no_hidden_state_yet_ends_the_lens():
    model = Model()
    model.layers[1].register_forward_hook(lambda *_: (torch.zeros(4, SIZE),) * 3, prepend=True)
    model.tap.take(0, torch.zeros(4, SIZE), None)  # nobody asks
    assert model.refused == []
    model.tap.begin()
    model.tap.note([NotedRow(0, 2, state_of(3), 102, None)], None, (3, 103))
    model.layers[1](torch.zeros(4, SIZE))
    assert model.refused == ["what layer 1 leaves is not a hidden state yet"]
    assert model.tap.end() is None
