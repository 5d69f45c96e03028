"""Capture from a causal language model of `transformers`, on a CPU or a GPU.

Prompts run one at a time, with a key-value cache and greedy decoding. Every token that is fed to
the model has a row: all of the prompt, and all generated tokens but the last, which is never fed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import DynamicCache

from capture_kernels.arrays import Floats, Ints, Mask
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint import eager
from pipeline.record import MEAN_LAYER, capture_id, make_batch

from .attention_scores import check_output, read_first_keys, read_scores
from .attention_tap import AttentionCall, AttentionTap, NeedsEagerError
from .captured import CapturedPrompt
from .options import CaptureOptions, PromptError

_NOT_ONCE = "it does not run its attention once over every token"
_NO_SOFTMAX = "it has no softmax attention"


def utc_now() -> datetime:
    return datetime.now(UTC)


class TransformersEngine:
    """Captures prompts with one loaded model.

    Args:
        model: a causal language model, loaded with sdpa or eager attention. It is set to eager
            if sdpa cannot compute its scores (soft caps, learned sinks).
        tokenizer: its tokenizer.
        options: what to capture.
        name: what the records call the model.
        revision: which weights these are.

    Raises:
        OptionError: the model, or a chosen layer, cannot be captured; the message names which.
    """

    def __init__(
        self, model: Any, tokenizer: Any, options: CaptureOptions, *, name: str, revision: str
    ) -> None:
        self.model, self.tokenizer, self.options = model.eval(), tokenizer, options
        self.name, self.revision = name, revision
        self.config = model.config.get_text_config()
        self.tags = think_tags(tokenizer) if options.think_tags else None
        accepted = inspect.signature(model.forward).parameters
        self._one_logit = "logits_to_keep" in accepted
        # Renamed in transformers 5.24, which warns of the old name.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        try:
            self.layers, self.heads = self._probe()
        except NeedsEagerError:
            self.model.set_attn_implementation("eager")
            self.layers, self.heads = self._probe()

    @cached_property
    def capture_id(self) -> str:
        """The hash of what makes this capture's vectors comparable with others."""
        options = self.options
        return capture_id(
            revision=self.revision,
            layers=self.layers,
            heads=self.heads,
            per_layer=options.per_layer,
            mask=options.mask_prefix,
            window=options.window,
            sinks=options.sink_tokens,
            layout=options.layout,
            windowed=any(DynamicCache(config=self.model.config).is_sliding),
        )

    @property
    def context(self) -> int | None:
        """The model's longest input in tokens; None if the config does not have it."""
        return getattr(self.config, "max_position_embeddings", None)

    def capture(
        self,
        prompt: str,
        *,
        request_id: str,
        session_id: str | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> CapturedPrompt:
        """Run one prompt, and make its records.

        Raises:
            PromptError: the prompt has no tokens, or more than the model's context.
            OptionError: the model did something with these tokens that cannot be captured.
        """
        tokens = list(self.tokenizer(prompt)["input_ids"])
        if not tokens:
            raise PromptError(f"prompt {request_id!r} has no tokens")
        if self.context is not None and len(tokens) > self.context:
            raise PromptError(
                f"prompt {request_id!r} has {len(tokens)} tokens, more than the model's "
                f"context of {self.context}"
            )
        steps: list[_Step] = []
        prompt_len = len(tokens)

        def observe(call: AttentionCall) -> None:
            if call.layer in self.layers:
                # The prompt and the first generated token take every path through the model's
                # code, so later steps need no check.
                self._observe(call, steps[-1], check=len(steps) <= 2)

        with torch.inference_mode(), AttentionTap(self.model, observe):
            new = self._generate(tokens, steps, clock)
        return self._records(tokens + new, prompt_len, steps, request_id, session_id)

    def _generate(
        self, prompt: list[int], steps: list[_Step], clock: Callable[[], datetime]
    ) -> list[int]:
        """Decode greedily and add a step for each forward pass; returns the generated tokens."""
        cache = DynamicCache(config=self.model.config)
        ends = self.end_tokens
        feed, begin, captured = prompt, 0, 0
        new: list[int] = []
        while True:
            wanted = np.arange(begin, begin + len(feed), dtype=np.int64)
            wanted = wanted[wanted % self.options.stride == 0]
            if begin > 0:
                if self.options.max_steps and captured >= self.options.max_steps:
                    wanted = wanted[:0]
                captured += len(wanted)
            steps.append(_Step(begin, len(feed), torch.from_numpy(wanted), clock()))
            token = int(self.forward(feed, cache)[-1].argmax())
            if missing := sorted(set(self.layers) - steps[-1].seen):
                raise self._refusal(missing[0], _NO_SOFTMAX)
            if len(new) < self.options.max_new_tokens:
                new.append(token)
            begin += len(feed)
            full = self.context is not None and begin >= self.context
            if len(new) == self.options.max_new_tokens or token in ends or full:
                return new
            feed = [token]

    def forward(self, tokens: list[int], cache: DynamicCache) -> Tensor:
        """Logits float[n, V]: of the last token, or of all if the model cannot choose."""
        device = self.model.device
        extra: dict[str, Any] = {self._cache_name: cache}
        if self._one_logit:
            # As indices: some models skip the other tokens' attention for a plain 1.
            extra["logits_to_keep"] = torch.tensor([len(tokens) - 1], device=device)
        ids = torch.tensor([tokens], device=device)
        return self.model(input_ids=ids, use_cache=True, **extra).logits[0]

    @cached_property
    def end_tokens(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            ends = self.tokenizer.eos_token_id
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    def _observe(self, call: AttentionCall, step: _Step, check: bool) -> None:
        """Take the statistics of one layer's wanted rows."""
        if call.layer in step.seen or call.query.shape[2] != step.tokens:
            raise self._refusal(call.layer, _NOT_ONCE)
        step.seen.add(call.layer)
        if not (check or len(step.wanted)):
            return
        scores = read_scores(call)
        offset = step.begin + step.tokens - call.key.shape[2]
        if offset < 0:
            raise self._refusal(call.layer, "it has keys that belong to no token")
        first, plan = step.plan(call, offset, self.options)
        if check:
            check_output(call, scores, 0 if first is None else int(first[-1]))
        if not plan.rows:
            return
        query = call.query[0].transpose(0, 1)
        if plan.rows < step.tokens:
            rows = (step.wanted - step.begin).to(query.device)
            query = query.index_select(0, rows)
        step.statistics[call.layer] = eager.layer_statistics(
            query,
            call.key[0].transpose(0, 1),
            plan,
            scale=scores.scale,
            heads=self.heads,
            soft_cap=scores.soft_cap,
        )

    def _refusal(self, layer: int, reason: str) -> OptionError:
        return OptionError(f"layer {layer} of {self.name} cannot be captured: {reason}")

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The layers and heads to capture, found by running two tokens."""
        heads: dict[int, int] = {}
        refusals: dict[int, OptionError] = {}

        def observe(call: AttentionCall) -> None:
            try:
                if call.layer in heads or call.query.shape[2] != 2:
                    raise self._refusal(call.layer, _NOT_ONCE)
                read_scores(call)
                read_first_keys(call, torch.arange(2))
                heads[call.layer] = call.query.shape[1]
            except OptionError as error:
                refusals[call.layer] = error

        with torch.inference_mode(), AttentionTap(self.model, observe):
            try:
                self.forward([0, 0], DynamicCache(config=self.model.config))
            # The model needs another kind of cache or input.
            except (TypeError, ValueError) as error:
                raise OptionError(f"{self.name} cannot be captured: {error}") from error
        capturable = sorted(set(heads) - set(refusals))
        if not capturable:
            reason = str(refusals[min(refusals)]) if refusals else "no layer has softmax attention"
            raise OptionError(f"{self.name} cannot be captured: {reason}")
        layers = self.options.choose_layers(capturable, self.config.num_hidden_layers)
        for layer in layers:
            if layer in refusals:
                raise refusals[layer]
            if layer not in heads:
                raise self._refusal(layer, _NO_SOFTMAX)
        return layers, self.options.choose_heads(min(heads[layer] for layer in layers))

    def _records(
        self,
        tokens: list[int],
        prompt_len: int,
        steps: list[_Step],
        request_id: str,
        session_id: str | None,
    ) -> CapturedPrompt:
        per_layer = self.options.per_layer
        captured = [step for step in steps if len(step.wanted)]
        ids = np.array(tokens, np.int32)
        phases = np.array(self._phases(tokens, prompt_len), dtype=object)
        times = pa.array(
            [step.time for step in captured for _ in range(len(step.wanted))],
            pa.timestamp("us", tz="UTC"),
        )
        # The first token is always captured: its position is a multiple of every stride.
        positions = np.concatenate([step.wanted.numpy() for step in captured])
        batches = []
        blind = 0
        for group in [(layer,) for layer in self.layers] if per_layer else [self.layers]:
            vector, sink_mass, valid = self._vectors(captured, positions, group)
            kept = positions[valid]
            blind += int((~valid).sum())
            columns = {
                "request_id": request_id,
                "session_id": session_id,
                "position": kept,
                "prompt_len": prompt_len,
                "layer": group[0] if per_layer else MEAN_LAYER,
                "captured_at": times.filter(pa.array(valid)),
                "model": self.name,
                "capture_id": self.capture_id,
                "layout": int(self.options.layout),
                "phase": phases[kept].tolist(),
                "token_id": ids[kept],
                "sink_mass": sink_mass[valid],
                "vector": vector[valid],
            }
            batches.append(make_batch(columns, len(kept)))
        return CapturedPrompt(pa.concat_batches(batches), prompt_len, tokens[prompt_len:], blind)

    def _vectors(
        self, steps: list[_Step], positions: Ints, group: tuple[int, ...]
    ) -> tuple[Floats, Floats, Mask]:
        """Vectors, sink masses and which rows see a key, of all steps, with one device transfer."""
        of_layers = [zip(*(step.statistics[i] for step in steps), strict=True) for i in group]
        layers = [eager.LayerStatistics(*map(torch.cat, columns)) for columns in of_layers]
        plan = eager.plan_rows(
            torch.from_numpy(positions),
            layers[0].entropy.device,
            layout=self.options.layout,
            visibility=self.options.visibility,
        )
        vector, sink_mass, valid = (column.cpu().numpy() for column in eager.combine(layers, plan))
        return vector, sink_mass, valid

    def _phases(self, tokens: list[int], prompt_len: int) -> list[str]:
        """The phase of every token. A thinking tag belongs to the text that it opens or closes."""
        opening, closing = self.tags or (None, None)
        phases, inside = [], False
        for position, token in enumerate(tokens):
            inside = inside or token == opening
            own = "think" if inside else "output"
            phases.append("prompt" if position < prompt_len else own)
            inside = inside and token != closing
        return phases


@dataclass
class _Step:
    """One forward pass: the rows to capture, and the statistics of its layers."""

    begin: int
    tokens: int
    wanted: Tensor  # int64[R] on the host: absolute positions
    time: datetime
    seen: set[int] = field(default_factory=set)
    statistics: dict[int, eager.LayerStatistics] = field(default_factory=dict)
    # Keyed by the mask's identity and the offset: layers of one kind share a mask. Holding the mask
    # keeps its id from being used again.
    _plans: dict[tuple[int, int], tuple[Tensor | None, Tensor | None, eager.RowPlan]] = field(
        default_factory=dict
    )

    def plan(
        self, call: AttentionCall, offset: int, options: CaptureOptions
    ) -> tuple[Tensor | None, eager.RowPlan]:
        """`read_first_keys` of the wanted rows and then of the last row, and the wanted rows' plan.

        Args:
            offset: the position of the call's first key.
        """
        key = (id(call.mask), offset)
        if key not in self._plans:
            queries = torch.cat([self.wanted - self.begin, torch.tensor([self.tokens - 1])])
            first = read_first_keys(call, queries)
            plan = eager.plan_rows(
                self.wanted,
                call.query.device,
                layout=options.layout,
                visibility=options.visibility,
                first_keys=None if first is None else first[:-1] + offset,
                key_offset=offset,
            )
            self._plans[key] = (call.mask, first, plan)
        return self._plans[key][1:]


def think_tags(tokenizer: Any) -> tuple[int, int]:
    """The tokens <think> and </think>. OptionError: the tokenizer has no such tokens."""
    vocabulary = tokenizer.get_vocab()
    try:
        return vocabulary["<think>"], vocabulary["</think>"]
    except KeyError as error:
        message = f"the tokenizer has no token {error.args[0]}: drop --think-tags"
        raise OptionError(message) from None
