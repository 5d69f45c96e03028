"""The logit lens of captured rows (`attention_logit_lens`): the tokens that the model's last norm
and its head find most likely in the hidden state after each captured layer.

A step may be a CUDA graph's, in which no Python runs. So which tokens are wanted stands in a buffer
before the step, hooks on the layers keep their hidden states in another, and norm and head run on
these after the step. With each hidden state its row's number of keys is kept: where that is not the
step's, the buffer was not written, and nothing is taken of it.

The hidden state after the last layer must lead to the logits that the model itself samples from.
Nothing is said before that was seen once, and nothing at all if it is not so.

Source: SGLang 0.5.23, srt/models, srt/layers/logits_processor.py and srt/layers/layer_boundary.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capture_kernels.transfers import to_device
from pipeline.engines.hidden_states import LENS_TOLERANCE, NOT_THE_LENS, last_norm
from pipeline.engines.serving.rows import Lens
from pipeline.engines.serving.steps.lens import deviation_of, likely_tokens
from pipeline.engines.serving.steps.states import NotedRow

from .device_step import LensRows, LensStep


class LensParts(NamedTuple):
    """The modules of a model that a lens needs."""

    layers: list[nn.Module]  # all that decode, by number
    norm: nn.Module
    processor: nn.Module  # SGLang's `LogitsProcessor`, which is given the head
    # Of normed hidden states [R, D] and that head: float[R, V].
    logits: Callable[[Tensor, Any], Tensor]
    vocabulary: int
    hidden_size: int
    dtype: torch.dtype  # of hidden states


class LensTap:
    """Keeps hidden states of rows whose request asks for a lens, and looks at them after the step.

    It takes [M, 1 + max_rows, D] of the model's type, of M layers: the captured ones, and the last.

    Args:
        parts: of the model; why there is no lens, if there is none.
        layers: the captured ones.
        max_rows: the most rows of a step.
        text: of a token.

        refuse: is given why nothing is said any more.
    """

    def __init__(
        self, parts: LensParts | str, layers: Sequence[int], *, max_rows: int,
        device: torch.device | str, text: Callable[[int], str], refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._text, self._refuse = text, refuse
        # Of this step.
        self._noted: list[tuple[int, NotedRow]] = []
        self._keys = 0
        self._deviation: Tensor | None = None
        self._is_refused = isinstance(parts, str)
        if isinstance(parts, str):
            return
        self._parts = parts
        self._of = {number: parts.layers[number] for number in (*layers, len(parts.layers) - 1)}
        self._numbers = list(self._of)
        slots = 1 + max_rows
        shape = (len(self._of), slots, parts.hidden_size)
        self._kept = torch.zeros(shape, dtype=parts.dtype, device=device)
        self._written = torch.zeros((len(self._of), slots), dtype=torch.int64, device=device)
        # Of each slot: which token of the step is wanted, and its row's number of keys.
        self._wanted = torch.zeros((2, slots), dtype=torch.int64, device=device)
        self._head: Any = None
        self._is_verified = False

    def observed_by(self, observe: Callable[[int, Any, Any], None]) -> None:
        """Have `observe` called with the index, the output and the `ResidualStream` of each layer
        after it has run."""
        if self._is_refused:
            return
        for index, layer in enumerate(self._of.values()):
            layer.register_forward_hook(
                lambda module, given, named, output, index=index: observe(
                    index, output, stream_of(given, named)
                ),
                with_kwargs=True,
            )

        def keep_head(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._head = named["lm_head"] if "lm_head" in named else given[2]

        self._parts.processor.register_forward_pre_hook(keep_head, with_kwargs=True)

    def begin(self) -> None:
        """Begin a step, of which nothing is noted yet."""
        self._noted, self._deviation = [], None

    def note(
        self, noted: Sequence[NotedRow], tokens: Sequence[int] | None, check: tuple[int, int]
    ) -> None:
        """Note the rows of the step that are asked for.

        Args:
            noted: its captured rows.
            tokens: which of the step's tokens they are; None: as their rows are numbered.
            check: the token that the first row of the step's logits comes from, and its keys.
        """
        if self._is_refused:
            return
        self._noted = [(at, note) for at, note in enumerate(noted)
                       if note.state.collector.request.lens]  # fmt: skip
        if not self._noted:
            return
        self._keys = check[1]
        columns = [
            [check[0], *(note.row if tokens is None else tokens[at] for at, note in self._noted)],
            [check[1], *(note.position + 1 for _, note in self._noted)],
        ]
        self._wanted[:, : len(columns[0])].copy_(to_device(columns, self._wanted.device))
        self._written.zero_()

    def take(self, index: int, output: Any, stream: Any) -> None:
        """Keep the hidden states after a layer. It neither waits nor copies to the host, so that a
        CUDA graph can hold it."""
        if self._is_refused or not (self._noted or is_capturing(self._kept)):
            return
        try:
            hidden, residual = hidden_states(output, stream)
        except NotImplementedError:
            self._give_up(f"what layer {self._numbers[index]} leaves is not a hidden state yet")
            return
        # One slot is the check's, whose token may be wanted by another as well.
        wanted = self._wanted[:, : len(hidden) + 1]
        # Slots that this step does not use hold tokens of another, which it may not have.
        rows = wanted[0].clamp(max=len(hidden) - 1)
        taken = hidden[rows] if residual is None else hidden[rows] + residual[rows]
        self._kept[index, : len(taken)].copy_(taken)
        self._written[index, : len(taken)].copy_(wanted[1])

    def check(self, logits: Tensor, sampling_info: Any) -> None:
        """Compare the lens after the last layer with the step's own logits float[B, V], which no
        penalty may have changed."""
        if not self._noted or self._is_verified or is_penalised(sampling_info):
            return
        last = self._numbers.index(max(self._numbers))
        self._deviation = deviation_of(self._logits(self._kept[last, :1])[0], logits[0])

    def end(self) -> LensStep | None:
        """What the step's lens found; None if nobody asks."""
        if not self._noted or self._head is None:
            return None
        began = time.perf_counter()
        slots = self._kept.shape[1]
        pairs = [layer * slots + slot for slot, (_, note) in enumerate(self._noted, 1)
                 for layer in note.state.layers]  # fmt: skip
        count = max(note.state.collector.request.lens for _, note in self._noted)
        places = to_device(pairs, self._kept.device)
        hidden = self._kept.flatten(0, 1)
        likely = likely_tokens(hidden[places], self._logits, count, self._parts.vocabulary)
        deviation = self._deviation
        if deviation is None:
            deviation = torch.full((), math.nan, device=hidden.device)
        written = self._written[:, : 1 + len(self._noted)].clone()
        rows = LensRows(*likely, written, deviation)
        return LensStep(self._noted, self._keys, rows, time.perf_counter() - began)

    def by_row(self, step: LensStep | None) -> dict[int, dict[int, Lens]]:
        """The lens of each row by layer, of results on the host, by the row's number among the
        noted ones; without rows whose hidden states are not known."""
        if step is None:
            return {}
        written = step.rows.written.numpy()
        last = self._numbers.index(max(self._numbers))
        deviation = float(step.rows.deviation)
        if not math.isnan(deviation) and written[last, 0] == step.keys:
            self._is_verified |= deviation <= LENS_TOLERANCE
            if deviation > LENS_TOLERANCE and not self._is_refused:
                self._give_up(NOT_THE_LENS)
        found: dict[int, dict[int, Lens]] = {}
        pair = 0
        for slot, (at, note) in enumerate(step.noted, 1):
            layers, request = note.state.layers, note.state.collector.request
            begin, pair = pair, pair + len(layers)
            note.state.collector.add_seconds(step.seconds / len(step.noted))
            is_there = all(written[layer, slot] == note.position + 1 for layer in layers)
            if self._is_refused or not self._is_verified or not is_there:
                continue
            found[at] = {
                self._numbers[layer]: step.rows.likely.lens(place, request.lens, self._text)
                for place, layer in enumerate(layers, begin)
            }
        return found

    def _give_up(self, reason: str) -> None:
        self._is_refused, self._noted = True, []
        self._refuse(reason)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32[R, V] of float[R, D], as the model computes its own."""
        return self._parts.logits(self._parts.norm(hidden), self._head).float()


def hidden_states(output: Any, stream: Any) -> tuple[Tensor, Tensor | None]:
    """Hidden states [T, D] after a layer, as two parts to be added, of which the second may be
    None.

    A layer returns them, or what is to be added to the residual with that residual, or leaves the
    residual in the batch's `ResidualStream`.

    Raises:
        NotImplementedError: the layer leaves something else.
    """
    if isinstance(output, tuple):
        if len(output) != 2:
            raise NotImplementedError
        return output
    if stream is None or stream.pending is None:
        return output, None
    if stream.pending.owed is not None or not stream.pending.update.is_plain_add:
        return stream.snapshot(output), None
    return stream.pending.value, stream.residual


def lens_parts(model: Any, attention: dict[int, Any], config: Any) -> LensParts | str:
    """What a lens needs of a model, or why there is none.

    Args:
        attention: the `RadixAttention` of layers, by number.
        config: SGLang's `ModelConfig`.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessor

    count = config.num_hidden_layers
    processors = [each for each in model.modules() if isinstance(each, LogitsProcessor)]
    if len(processors) != 1:
        return "the model computes its logits in a way that is not known here"
    if "use_logits_buffer" not in inspect.signature(processors[0]._get_logits).parameters:
        return "this SGLang computes logits in another way: 0.5.23 was seen to work"
    for owner in model.modules():
        for found in owner.children():
            if not isinstance(found, nn.ModuleList) or len(found) < count:
                continue
            layers = list(found[:count])
            if all(any(inner is own for inner in layers[number].modules())
                   for number, own in attention.items()):  # fmt: skip
                norm = last_norm(owner)
                if norm is None:
                    return "the model has no norm after its layers"
                return LensParts(
                    layers, norm, processors[0], partial(model_logits, processors[0]),
                    processors[0].vocab_size, config.hidden_size, config.dtype,
                )  # fmt: skip
    return "the model's layers are not a list"


def model_logits(processor: Any, normed: Tensor, head: Any) -> Tensor:
    """Logits float[R, V] by SGLang's own way from hidden states to them."""
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    metadata = LogitsMetadata(forward_mode=ForwardMode.DECODE)
    logits: Tensor = processor._get_logits(normed, head, metadata, use_logits_buffer=False)
    return logits


def lens_refusal(arguments: Any) -> str | None:
    """Why there is no lens with these of SGLang's arguments (`arguments_of`); None if there is
    one."""
    reasons = {
        "--enable-torch-compile was not tried with hooks on layers": arguments.enable_torch_compile,
        "--skip-tokenizer-init leaves tokens without a text": arguments.skip_tokenizer_init,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def stream_of(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The `ResidualStream` of the `ForwardBatch` among a layer's arguments; None without one."""
    arguments = (*given, *named.values())
    return next(filter(None, (getattr(each, "residual_stream", None) for each in arguments)), None)


def is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_penalised(sampling_info: Any) -> bool:
    """Whether the logits of some request of a batch are not the model's own."""
    penalizer = sampling_info.penalizer_orchestrator
    return (
        sampling_info.acc_additive_penalties is not None
        or sampling_info.acc_scaling_penalties is not None
        or bool(penalizer and penalizer.is_required)
    )
