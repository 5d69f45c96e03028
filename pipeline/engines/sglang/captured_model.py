"""What requests may know of the served model: its facts, its captures' ids, its thinking."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from capture_kernels.errors import OptionError
from pipeline.engines.revision import revision_of
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.phases import (
    PARSERS,
    PhaseTracker,
    ThinkTags,
    starts_inside,
    think_tags,
)
from pipeline.engines.serving.request import ModelFacts
from pipeline.record import capture_id

from .layers import attention_layers, kinds_of

LOG = logging.getLogger("attn.capture")


class CapturedModel:
    """The model of a `ModelRunner`, and which of its layers are captured.

    Attributes:
        name: of the model in records and responses.
        kinds: the captured layers, for `StepCapture`.
        facts: for the gate.

    Raises:
        OptionError: layers that cannot be captured.
    """

    def __init__(self, runner: Any, options: ServeOptions) -> None:
        arguments, config = runner.server_args, runner.model_config
        self.name = arguments.served_model_name or arguments.model_path
        layers = attention_layers(runner.model)
        if not layers:
            raise OptionError("no layer has attention to capture")
        self._options = options
        self._revision = revision_of(arguments.model_path, config.hf_config)
        self._windowed = any(layer.sliding_window_size > 0 for layer in layers.values())
        chosen = options.choose_layers(list(layers), config.num_hidden_layers)
        self.kinds = kinds_of({number: layers[number] for number in chosen})
        later = "the SGLang plug-in does not have it yet"
        reasons = dict.fromkeys(
            ("head_filtering", "attention_hubs", "attn_capture", "moe_routing", "logit_lens"), later
        )
        self.facts = ModelFacts(
            name=self.name,
            num_layers=config.num_hidden_layers,
            layers=tuple(chosen),
            heads=self.kinds[0].heads,
            max_context=config.context_len,
            reasons=reasons,
            capture_id=self.capture_id(chosen, options.mask_prefix),
        )
        self._parser = arguments.reasoning_parser
        self._tags: ThinkTags | None = None
        self._decode: Callable[..., str] | None = None

    def capture_id(self, layers: Sequence[int], mask: int) -> str:
        """Of records of some layers, with so many hidden tokens."""
        options = self._options
        return capture_id(
            revision=self._revision,
            layers=layers,
            mask=mask,
            window=options.tokens_window,
            sinks=options.sink_tokens,
            layout=options.layout,
            windowed=self._windowed,
        )

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Find the tags of --reasoning-parser in the model's tokens."""
        if tokenizer is None or self._parser not in PARSERS:
            if self._parser:
                LOG.warning("phases of --reasoning-parser %s are not known here", self._parser)
            return

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        def decode(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

        self._tags, self._decode = think_tags(self._parser, encode, decode), decode

    def phases(self, prompt: Sequence[int], *, is_thinking: bool) -> PhaseTracker:
        """Of the tokens that follow a prompt.

        Args:
            is_thinking: whether SGLang takes the answer's start for thinking, tag or not, as it
                does in a chat with a model that thinks unless told otherwise.
        """
        if self._tags is None or self._decode is None:
            return PhaseTracker(None)
        inside = is_thinking or starts_inside(self._tags.rule, prompt, self._decode)
        return PhaseTracker(self._tags, inside=inside)
