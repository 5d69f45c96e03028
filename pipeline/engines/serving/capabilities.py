"""What GET /v1/attention/capabilities answers: what a request may ask of this server."""

from __future__ import annotations

from typing import Any

from .options import MOST_TOP_K, ServeOptions
from .request import ModelFacts

# Features that a request asks for by a field, and whether a server may have them at all.
FEATURES = ("include_prompt_attention", "head_filtering", "attention_hubs", "prompt_tokens")


def capabilities(options: ServeOptions, facts: ModelFacts) -> dict[str, Any]:
    """The payload, JSON-able. `reasons` says of all that is refused why."""
    reasons = refusals(options, facts)
    modes = [mode for mode in options.modes if mode not in reasons] if options.is_on else []
    supported = options.is_on and "capture" not in reasons
    features = {name: bool(modes) and name not in reasons for name in FEATURES}
    features["attn_capture"] = "attn_capture" not in reasons
    features["moe_routing"] = bool(modes) and facts.moe and "moe_routing" not in reasons
    features["logit_lens"] = bool(modes) and "logit_lens" not in reasons
    if not supported:
        modes, features = [], dict.fromkeys(features, False)
    return {
        "supported": supported,
        "modes": modes,
        "max_top_k": MOST_TOP_K,
        "max_layers": len(facts.layers),
        "features": features,
        "guardrails": {
            "max_concurrent_capture": options.max_concurrent_capture or None,
            "requires_api_key": options.has_keys,
            "system_prompt_masked": options.mask_system_prompt,
            "mask_prefix": options.mask_prefix,
            "disabled_in_production": options.disable_in_production,
        },
        "model": facts.name,
        "num_layers": facts.num_layers,
        "layers": list(facts.layers),
        "score_layers": list(facts.score_layers),
        "heads": facts.heads,
        "max_context": facts.max_context,
        "top_k": options.tokens_top_k,
        "stride": options.tokens_stride,
        "window": options.tokens_window,
        "layout": options.layout.label,
        "capture_id": facts.capture_id,
        "reasons": reasons,
    }


def refusals(options: ServeOptions, facts: ModelFacts) -> dict[str, str]:
    """Feature -> why a request for it is refused: the engine's reasons, and the options'."""
    found = dict(facts.reasons)
    if options.turned_off:
        found["capture"] = (
            "--attention-disable-in-production: neither ATTN_ENV nor ENV says development"
        )
    elif not options.is_on:
        found["capture"] = "the server was started without --return-attention-tokens"
    if options.modes:
        for mode in {"raw", "sketch"}.difference(options.modes):
            found.setdefault(mode, f"the server gives {options.modes[0]} entries only")
    else:
        found.setdefault("raw", "the server was started without --return-attention-tokens")
    if not options.enable_attention_instrumentation:
        found.setdefault("attn_capture", "needs --enable-attention-instrumentation")
    if not facts.moe:
        found.setdefault("moe_routing", "the model routes no experts")
    return dict(sorted(found.items()))
