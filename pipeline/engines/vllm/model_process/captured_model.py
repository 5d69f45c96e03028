"""What requests may know of a model that vLLM serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capture_kernels.errors import OptionError
from pipeline.engines.revision import revision_of
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import ModelFacts
from pipeline.engines.serving.steps.served_model import WITH_DRAFTS, ServedModel

from .layers import LATENT_BACKENDS, attention_layers, is_latent
from .lens import LensTap, lens_refusal
from .routing import Routers, routers_of, routing_refusal

# vLLM's other names of what `PARSERS` has: the same parser, or one derived from it with its tags
# (vLLM 0.33.0, vllm/reasoning/__init__.py, vllm/parser).
SAME_TAGS = {
    "deepseek_r1": "deepseek-r1", "deepseek_v3": "deepseek-v3", "holo2": "deepseek-v3",
    "glm47": "glm45", "ling3": "glm45", "step3p5": "step3",
    "minimax_m2": "minimax", "minimax_m2_append_think": "minimax",
    "mimo": "qwen3", "nemotron_v3": "qwen3", "granite_thinking_parser": "qwen3",
}  # fmt: skip


class CapturedModel(ServedModel):
    """The model of a `GPUModelRunner`, and which of its layers are captured.

    Args:
        ranks: how many processes share the heads of each layer.

    Attributes:
        layers: the captured ones' `Attention` or `MLAAttention`, by number; score_layers: those of
            full scores; tapped: all of these.
        handed_out: after which layers a logit lens needs the hidden states; empty for no lens.
        facts: for the gate.

    Raises:
        OptionError: layers that cannot be captured.
    """

    def __init__(self, runner: Any, options: ServeOptions, ranks: int = 1) -> None:
        config = runner.vllm_config.model_config
        found = attention_layers(runner)
        if not found:
            raise OptionError(
                "no layer has attention to capture: it needs --attention-backend FLASH_ATTN or "
                f"TRITON_ATTN, with latent keys (MLA) {', '.join(LATENT_BACKENDS)}, and no sparse "
                "attention"
            )
        served = config.served_model_name
        super().__init__(
            served if isinstance(served, str) else (served or [config.model])[0],
            revision_of(config.model, config.hf_config),
            options,
            windowed=any(layer.sliding_window for layer in found.values()),
            parser=parser_of(runner.vllm_config.structured_outputs_config.reasoning_parser),
        )
        count = config.hf_text_config.num_hidden_layers
        chosen = options.choose_layers(list(found), count)
        self.layers = {number: found[number] for number in chosen}
        drafts = runner.decode_query_len > 1
        if options.fused_decode and any(map(is_latent, self.layers.values())):
            raise OptionError("--attention-fused-decode does not run latent keys (MLA)")
        if options.fused_decode and drafts:
            raise OptionError("--attention-fused-decode does not run speculative decoding")
        has_scores = ranks == 1 and not drafts
        scored = options.choose_score_layers(list(found), count) if has_scores else ()
        self.score_layers = {number: found[number] for number in scored}
        self.tapped = self.layers | self.score_layers
        reasons: dict[str, str] = {}
        if not options.hub_slots:
            reasons["attention_hubs"] = "start the server with --attention-hub-slots"
        if ranks > 1:
            several = "with tensor parallelism the heads lie on several ranks"
            of_heads = ("head_filtering", "attention_hubs", "attn_capture")
            reasons |= dict.fromkeys(of_heads, several)
        if drafts:
            reasons |= dict.fromkeys(("attention_hubs", "attn_capture"), WITH_DRAFTS)
        lensless: str | None = "start the server with --attention-logit-lens"
        if options.logit_lens:
            lensless = lens_refusal(runner, ranks)
        self.handed_out: tuple[int, ...] = ()
        if lensless:
            reasons["logit_lens"] = lensless
        else:
            self.handed_out = tuple(sorted({*chosen, count - 1}))
        routers = routers_of(runner.model)
        self._routers = {number: routers[number] for number in chosen if number in routers}
        if routers and not self._routers:
            reasons["moe_routing"] = "the captured layers route no experts"
        elif reason := routing_refusal(self._routers):
            reasons["moe_routing"] = reason
        self.facts = ModelFacts(
            name=self.name,
            num_layers=count,
            layers=tuple(chosen),
            score_layers=tuple(scored),
            heads=self.layers[chosen[0]].num_heads * ranks,
            max_context=runner.max_model_len,
            reasons=reasons,
            moe=bool(routers),
            capture_id=self.capture_id(chosen, None, options.mask_prefix),
        )

    def routers(self, runner: Any) -> Routers | None:
        """The routers of the captured layers; None if there are none that can be captured."""
        if not self._routers or "moe_routing" in self.facts.reasons:
            return None
        of_layers = {number: own for number, (own,) in self._routers.items()}
        return Routers(of_layers, runner.max_num_tokens, runner.device)

    def lens(self, runner: Any, refused: Callable[[ModelFacts], None]) -> LensTap | None:
        """What looks at hidden states after the captured layers; None without a lens.

        Args:
            refused: is given the facts that hold once the lens has turned out not to be one.
        """
        if not self.handed_out:
            return None
        return LensTap(
            runner.model, self.facts.layers, self.handed_out, vocabulary=runner.vocab_size,
            text=lambda token: self._text(token), refuse=self.refuser("logit_lens", refused),
        )  # fmt: skip


def parser_of(name: str) -> str | None:
    """What `PARSERS` calls vLLM's --reasoning-parser; None without one."""
    return SAME_TAGS.get(name, name) or None
