"""The logit lens of captured rows (`attention_logit_lens`): the tokens that the model's last norm
and its head find most likely in the hidden state after each captured layer.

vLLM's models hand out the hidden states after chosen layers, for drafts of EAGLE 3, from CUDA
graphs too (`aux_hidden_states`). That is chosen as the model is loaded, before it is compiled.

The hidden state after the last layer must lead to the logits that the model itself samples from.
Nothing is said before that was seen once, and nothing at all if it is not so.

Source: vLLM 0.33.0, model_executor/models/interfaces.py and v1/worker/gpu/model_runner.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from capture_kernels.transfers import to_device
from pipeline.engines.hidden_states import LENS_TOLERANCE, NOT_THE_LENS, last_norm
from pipeline.engines.serving.rows import Lens
from pipeline.engines.serving.steps.lens import deviation_of, likely_tokens
from pipeline.engines.serving.steps.served_model import WITH_DRAFTS
from pipeline.engines.serving.steps.states import NotedRow

from .states import LensStep

# Of vLLM's `additional_config`, from which the name of what it has compiled is made: a model that
# hands out hidden states is another.
CONFIG_KEY = "attn_logit_lens"


class LensTap:
    """Looks at the hidden states of rows whose request asks for a lens.

    Args:
        model: vLLM's, which hands out hidden states after `numbers`.
        layers: the captured ones.
        numbers: these and the last one, ascending.
        text: of a token.
        refuse: is given why nothing is said any more.
    """

    def __init__(
        self, model: Any, layers: Sequence[int], numbers: Sequence[int], *, vocabulary: int,
        text: Callable[[int], str], refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._model, self._layers, self._numbers = model, layers, numbers
        self._norm = last_norm(decoder_of(model))
        self._vocabulary, self._text, self._refuse = vocabulary, text, refuse
        self._is_refused = self._is_verified = False

    def of_step(
        self, noted: Sequence[NotedRow], tokens: Sequence[int], hidden: Tensor,
        after_layers: Sequence[Tensor],
    ) -> LensStep | None:  # fmt: skip
        """The lens of a step's rows; None if nobody asks.

        Args:
            tokens: which of the step's tokens the noted rows are.
            hidden: [T, D], what the model makes its logits of; after_layers: the same after each
                of `numbers`.
        """
        if self._is_refused:
            return None
        asked = [(at, note) for at, note in enumerate(noted) if note.state.collector.request.lens]
        if not asked:
            return None
        began = time.perf_counter()
        if len(after_layers) != len(self._numbers):
            self._give_up("the model hands out other hidden states than it was asked for")
            return None
        of_layer = {number: after_layers[i] for i, number in enumerate(self._numbers)}
        # All asked rows of one layer, then of the next, as `by_row` takes them.
        rows = to_device([tokens[at] for at, _ in asked], hidden.device)
        states = [of_layer[self._layers[layer]][rows] for layer in self._asked_layers(asked)]
        count = max(note.state.collector.request.lens for _, note in asked)
        likely = likely_tokens(torch.cat(states), self._logits, count, self._vocabulary)
        deviation = None
        if not self._is_verified:
            last = of_layer[self._numbers[-1]][rows[:1]]
            own = self._model.compute_logits(hidden[rows[:1]])
            deviation = deviation_of(self._logits(last)[0], own[0])
        return LensStep(asked, likely, deviation, time.perf_counter() - began)

    def by_row(self, step: LensStep | None) -> dict[int, dict[int, Lens]]:
        """The lens of each row by layer, of results on the host, by the row's number among the
        noted ones."""
        if step is None or self._is_refused:
            return {}
        if step.deviation is not None:
            self._is_verified |= float(step.deviation) <= LENS_TOLERANCE
        if not self._is_verified:
            self._give_up(NOT_THE_LENS)
            return {}
        order, rows = self._asked_layers(step.noted), len(step.noted)
        found: dict[int, dict[int, Lens]] = {}
        for place, (at, note) in enumerate(step.noted):
            request = note.state.collector.request
            note.state.collector.add_seconds(step.seconds / rows)
            found[at] = {
                self._layers[layer]: step.likely.lens(
                    order.index(layer) * rows + place, request.lens, self._text
                )
                for layer in note.state.layers
            }
        return found

    @staticmethod
    def _asked_layers(asked: Sequence[tuple[int, NotedRow]]) -> list[int]:
        return sorted({layer for _, note in asked for layer in note.state.layers})

    def _give_up(self, reason: str) -> None:
        self._is_refused = True
        self._refuse(reason)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32[R, V] of [R, D], as the model computes its own."""
        found: Tensor = self._model.compute_logits(self._norm(hidden))
        return found.float()


def decoder_of(model: Any) -> Any:
    """The part of a model that has its layers, as vLLM finds it for EAGLE 3."""
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    elif hasattr(model, "language_model"):
        model = model.language_model
    return getattr(model, "model", model)


def lens_refusal(runner: Any, ranks: int) -> str | None:
    """Why there is no lens of this model; None if there is one."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if ranks > 1:
        return "with tensor parallelism the head's vocabulary lies on several ranks"
    if runner.vllm_config.speculative_config is not None:
        return WITH_DRAFTS
    if runner.vllm_config.model_config.skip_tokenizer_init:
        return "--skip-tokenizer-init leaves tokens without a text"
    if not isinstance(runner.vllm_config.additional_config, dict):
        return "--additional-config is no dictionary"
    # Some classes have the first by inheritance, and others' layers. Of those that do, some are
    # `EagleModelMixin`s, and some (DeepSeek V2's) do the same themselves.
    hands_out = supports_eagle3(runner.model)
    if not (hands_out and hasattr(decoder_of(runner.model), "aux_hidden_state_layers")):
        return "vLLM's class of this model does not hand out hidden states of its layers"
    if last_norm(decoder_of(runner.model)) is None:
        return "the model has no norm after its layers"
    return None


def hand_out(runner: Any, layers: Sequence[int]) -> None:
    """Have a model that was just loaded hand out the hidden states after some layers."""
    # Of a layer vLLM hands out what it is given.
    runner.model.set_aux_hidden_state_layers(tuple(number + 1 for number in layers))
    runner.use_aux_hidden_state_outputs = True
    config = runner.vllm_config.additional_config
    config[CONFIG_KEY] = list(layers)
