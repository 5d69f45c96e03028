"""Reading attention that a server puts into OpenAI-style responses: a client library.

`extract_attention_from_response` and `AttentionAnalyzer` read full scores (`attn_capture_data`),
`collect_entries` and `read_raw`, `read_sketches`, `read_fingerprints` what came with each token
(`attention_tokens`), `read_hubs` what a whole request attended to. `build_token_map` names the
tokens. The formats are in DESIGN.md, section 7.

Needs numpy and msgspec; a tokenizer, `transformers`. Takes responses as dictionaries and as objects
of the OpenAI client alike.
"""

from .analyzer import AttentionAnalyzer
from .entries import (
    Fingerprints,
    HeadAttention,
    RawAttention,
    Sketch,
    read_fingerprints,
    read_hubs,
    read_raw,
    read_sketches,
)
from .responses import ResponseError, collect_entries
from .scores import extract_attention_from_response
from .tokens import build_token_map, find_tokens, generated_tokens

__all__ = [
    "AttentionAnalyzer",
    "Fingerprints",
    "HeadAttention",
    "RawAttention",
    "ResponseError",
    "Sketch",
    "build_token_map",
    "collect_entries",
    "extract_attention_from_response",
    "find_tokens",
    "generated_tokens",
    "read_fingerprints",
    "read_hubs",
    "read_raw",
    "read_sketches",
]
