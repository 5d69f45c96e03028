"""What requests may know of a model that vLLM serves."""

from __future__ import annotations

from typing import Any

from capture_kernels.errors import OptionError
from pipeline.engines.revision import revision_of
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import ModelFacts
from pipeline.engines.serving.steps.served_model import ServedModel

from .layers import attention_layers

NOT_YET = "not with vLLM yet"
# What SGLang's plug-in and `attn serve` have besides.
MISSING = ("attn_capture", "logit_lens", "moe_routing")

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
        layers: the captured ones' `Attention`, by number.
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
                "TRITON_ATTN, and no latent keys (MLA)"
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
        reasons = dict.fromkeys(MISSING, NOT_YET)
        if not options.hub_slots:
            reasons["attention_hubs"] = "start the server with --attention-hub-slots"
        if ranks > 1:
            several = "with tensor parallelism the heads lie on several ranks"
            reasons |= dict.fromkeys(("head_filtering", "attention_hubs"), several)
        self.facts = ModelFacts(
            name=self.name,
            num_layers=count,
            layers=tuple(chosen),
            heads=self.layers[chosen[0]].num_heads * ranks,
            max_context=runner.max_model_len,
            reasons=reasons,
            capture_id=self.capture_id(chosen, None, options.mask_prefix),
        )


def parser_of(name: str) -> str | None:
    """What `PARSERS` calls vLLM's --reasoning-parser; None without one."""
    return SAME_TAGS.get(name, name) or None
