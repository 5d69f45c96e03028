"""What requests may know of the served model: its facts, its captures' ids, its thinking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture_kernels.errors import OptionError
from pipeline.engines.revision import revision_of
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import ModelFacts
from pipeline.engines.serving.steps.served_model import WITH_DRAFTS, ServedModel

from .drafts import tokens_of_request
from .latent import LatentLayers
from .layers import arguments_of, attention_layers, kinds_of
from .lens import LensParts, LensTap, lens_parts, lens_refusal
from .routing import Routers, routers_of, routing_refusal
from .windows import WindowPool


class CapturedModel(ServedModel):
    """The model of a `ModelRunner`, and which of its layers are captured.

    Args:
        ranks: how many processes share the heads of each layer.

    Attributes:
        kinds: the captured layers, for `StepCapture`.
        score_kinds: the layers of full scores.
        facts: for the gate.
        latent: its latent attention.
        windows: where its layers with a window have their keys.
        tokens_of_request: in a step of generated tokens; more than one are drafts.
        first_layer: the number of the layer that begins a step: the first captured one, or where KV
            slots are mapped the first of all with attention.

    Raises:
        OptionError: layers that cannot be captured.
    """

    def __init__(self, runner: Any, options: ServeOptions, ranks: int = 1) -> None:
        arguments, config = arguments_of(runner), runner.model_config
        layers, self.latent = attention_layers(runner.model), LatentLayers(runner.model)
        self.windows = WindowPool(runner)
        self.tokens_of_request = tokens_of_request(runner)
        if not layers:
            raise OptionError("no layer has attention to capture")
        if options.fused_decode:
            raise OptionError("--attention-fused-decode is of vLLM alone: leave it out")
        super().__init__(
            arguments.served_model_name or arguments.model_path,
            revision_of(arguments.model_path, config.hf_config),
            options,
            windowed=any(layer.sliding_window_size > 0 for layer in layers.values()),
            parser=arguments.reasoning_parser,
        )
        chosen = options.choose_layers(list(layers), config.num_hidden_layers)
        own = self.windows.layers
        self.first_layer = min(layers if own else chosen)
        self.kinds = kinds_of({number: layers[number] for number in chosen}, own)
        heads = self.kinds[0].heads * ranks
        if ranks > 1 and heads != (given := own_heads(config)):
            raise OptionError(
                f"--tp-size {ranks} pads the {given} heads of the model to {heads}: choose one "
                "that divides its key heads"
            )
        reasons: dict[str, str] = {}
        if not options.hub_slots:
            reasons["attention_hubs"] = "start the server with --attention-hub-slots"
        if ranks > 1:
            of_heads = ("head_filtering", "attention_hubs", "attn_capture")
            reasons |= dict.fromkeys(of_heads, "with --tp-size the heads lie on several ranks")
        if self.tokens_of_request > 1:
            reasons |= dict.fromkeys(("attention_hubs", "attn_capture"), WITH_DRAFTS)
        self._lens = self._find_lens(runner, arguments, layers)
        if isinstance(self._lens, str):
            reasons["logit_lens"] = self._lens
        routers = routers_of(runner.model)
        self._routers = {number: routers[number] for number in chosen if number in routers}
        if routers and not self._routers:
            reasons["moe_routing"] = "the captured layers route no experts"
        elif routers and self.tokens_of_request > 1:
            reasons["moe_routing"] = WITH_DRAFTS
        elif routers and (reason := routing_refusal(arguments, self._routers)):
            reasons["moe_routing"] = reason
        scored: Sequence[int] = ()
        if ranks == 1 and self.tokens_of_request == 1:
            scored = options.choose_score_layers(list(layers), config.num_hidden_layers)
        self.score_kinds = kinds_of({number: layers[number] for number in scored}, own)
        self.facts = ModelFacts(
            name=self.name,
            num_layers=config.num_hidden_layers,
            layers=tuple(chosen),
            score_layers=tuple(scored),
            heads=heads,
            max_context=config.context_len,
            reasons=reasons,
            moe=bool(routers),
            capture_id=self.capture_id(chosen, None, options.mask_prefix),
        )

    def _find_lens(self, runner: Any, arguments: Any, layers: dict[int, Any]) -> LensParts | str:
        if not self._options.logit_lens:
            return "start the server with --attention-logit-lens"
        # Also where each rank has all heads of attention, as with --enable-dp-attention.
        if arguments.tp_size > 1:
            return "with --tp-size the head's vocabulary lies on several ranks"
        if self.tokens_of_request > 1:
            return WITH_DRAFTS
        parts = lens_parts(runner.model, layers, runner.model_config)
        return lens_refusal(arguments) or parts

    def routers(self, max_rows: int, device: torch.device | str) -> Routers | None:
        """The routers of the captured layers; None if there are none that can be captured."""
        if not self._routers or "moe_routing" in self.facts.reasons:
            return None
        return Routers(self._routers, max_rows, device)

    def lens(
        self, max_rows: int, device: torch.device | str, refused: Callable[[ModelFacts], None]
    ) -> LensTap:
        """What looks at hidden states after the captured layers.

        Args:
            refused: is given the facts that hold once the lens has turned out not to be one.
        """
        return LensTap(
            self._lens, self.facts.layers, max_rows=max_rows, device=device,
            text=lambda token: self._text(token), refuse=self.refuser("logit_lens", refused),
        )  # fmt: skip


def own_heads(config: Any) -> int:
    """Query heads of a layer, of SGLang's `ModelConfig`. On a CPU SGLang adds heads of zeros until
    every rank has as many key heads, and keeps the number as it was elsewhere
    (`adjust_config_with_unaligned_cpu_tp` in srt/configs/update_config.py)."""
    before = getattr(config.hf_text_config, "original_num_attention_heads", None)
    return int(before or config.num_attention_heads)
