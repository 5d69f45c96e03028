"""What one request wants captured: its fields in the body, checked, and their way to the engine.

A request may only narrow what the server was started with. What passed is signed: the engine takes
it from `custom_params`, where any client can write.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.options import choose_heads, choose_layers

from .body import ASKING, RequestError, asked_fields, asks, check_one_choice, is_no
from .options import INT32, MOST_TOP_K, ServeOptions

Mode = Literal["raw", "sketch", "fingerprint"]
# Where a request travels in the engine's `custom_params`.
CUSTOM_PARAM = "attn"
SKETCH_TOP_K = 32
# Tokens of a logit lens: by default, and the most, as of the OpenAI API's top_logprobs.
LENS_TOKENS, MOST_LENS_TOKENS = 5, 20
NO_EXPERTS = "moe_routing is not available: the model routes no experts"
# Text in a field is indices or a name.
MOST_TEXT = 1_024
MOST_ID_BYTES = 1_024
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAC_CHARACTERS = 32


class CaptureRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one request wants captured, as JSON inside custom_params["attn"] (DESIGN.md section 7).

    Args:
        mode: what an entry of the response holds.
        top_k: how many positions a raw entry names, 1..64.
        layers: model layer numbers, ascending, a subset of the server's.
        heads: query heads, ascending; None for all.
        mask_prefix: how many tokens at the start are hidden.
        mask_system: hide the system prompt, however many tokens it has.
        prompt_rows: how many of the prompt's last rows are wanted.
        prompt_stride: of these the ones whose positions are multiples of this.
        hubs: whether probabilities are added up by position over the request.
        routing: whether entries say which experts the token was routed to.
        lens: how many tokens of a logit lens entries name of each layer; 0 for no lens.
        scores: layers of which all probabilities are wanted; None for none.
        score_heads: how many heads these have together.
        stride: the generated rows whose positions are multiples of this.
        max_steps: the most generated rows; 0 for all.
        window: only the last `window` keys count; 0 for all.
        traceparent: W3C trace context of the request.
        session_id: at most 1 KiB of UTF-8.
        stream_entries: whether the response has entries; False if only records or scores are
            wanted.
        name_tokens: whether the response names the visible tokens.
        reply: where the engine's worker reports what it captured, if its engine has no way back.
        response_id: the response's `id`, where the engine has another for the request.
    """

    mode: Mode = "raw"
    top_k: int = 32
    layers: list[int]
    heads: list[int] | None = None
    mask_prefix: int = 0
    mask_system: bool = False
    prompt_rows: int = 0
    prompt_stride: int = 1
    hubs: bool = False
    routing: bool = False
    lens: int = 0
    scores: list[int] | None = None
    score_heads: int = 0
    stride: int = 1
    max_steps: int = 0
    window: int = 0
    traceparent: str | None = None
    session_id: str | None = None
    stream_entries: bool = True
    name_tokens: bool = False
    reply: str | None = None
    response_id: str | None = None

    def answered(self, response_id: str, reply: str | None) -> CaptureRequest:
        """This request once it is known which response it has, and where reports of it go."""
        return msgspec.structs.replace(self, response_id=response_id, reply=reply)

    def with_mask(self, tokens: int) -> CaptureRequest:
        """This request once it is known how many tokens are hidden."""
        return msgspec.structs.replace(self, mask_prefix=tokens, mask_system=False)

    def signed(self, secret: str) -> str:
        """This request as the text that the engine is given: JSON behind its signature. Text,
        because SGLang's custom_params hold no nested lists."""
        text = msgspec.json.encode(self).decode()
        return _mac(text, secret) + text

    @classmethod
    def from_custom_params(cls, params: object, secret: str) -> CaptureRequest | None:
        """The request in the engine's `custom_params`; None without one, and for one that a client
        made, which no guardrail has seen."""
        signed = params.get(CUSTOM_PARAM) if isinstance(params, dict) else None
        if not isinstance(signed, str) or not signed.isascii():
            return None
        mac, text = signed[:_MAC_CHARACTERS], signed[_MAC_CHARACTERS:]
        if not hmac.compare_digest(mac, _mac(text, secret)):
            return None
        return msgspec.json.decode(text, type=cls)


def _mac(text: str, secret: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()[:_MAC_CHARACTERS]


@dataclass(frozen=True)
class ModelFacts:
    """What requests may ask of the served model.

    Args:
        layers: captured by the server, ascending.
        heads: query heads of a layer.
        reasons: feature -> why it is not available: a mode, `include_prompt_attention`,
            `head_filtering`, `attention_hubs`, `prompt_tokens`, `attn_capture`, `moe_routing`,
            `logit_lens`, or `capture` for all.
        score_layers: layers of attn_capture, ascending.
        capture_id: of the records.
    """

    name: str
    num_layers: int
    layers: tuple[int, ...]
    heads: int
    max_context: int | None
    reasons: dict[str, str] = field(default_factory=dict)
    moe: bool = False
    score_layers: tuple[int, ...] = ()
    capture_id: str | None = None


def parse_request(
    body: dict[str, Any], headers: Mapping[str, str], options: ServeOptions, facts: ModelFacts
) -> CaptureRequest | None:
    """What a request wants captured; None if it asks for nothing.

    Args:
        body: of a chat completion, a completion or a `/generate`.
        headers: names in lower case.

    Raises:
        RequestError: a field has a value that it cannot have, asks for more than the server was
            started with, or for what this model has not.
    """
    fields = asked_fields(body)
    if not asks(fields):
        return None
    return _Reader(fields, options, facts).read(body, headers)


def sampled_request(
    body: dict[str, Any], headers: Mapping[str, str], options: ServeOptions, facts: ModelFacts
) -> CaptureRequest | None:
    """What is recorded of a request that asked for nothing; None if it cannot be."""
    if not facts.layers or not facts.reasons.keys().isdisjoint(("capture", "fingerprint")):
        return None
    try:
        check_one_choice(body)
    except RequestError:
        return None
    return CaptureRequest(
        mode="fingerprint",
        layers=list(facts.layers),
        stream_entries=False,
        **_common(body, headers, options, "fingerprint"),
    )


class _Reader:
    """Checks the fields of one request."""

    def __init__(self, fields: dict[str, Any], options: ServeOptions, facts: ModelFacts) -> None:
        self.fields, self.options, self.facts = fields, options, facts

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> CaptureRequest:
        entries = self.flag("return_attention_tokens")
        scores = self.flag("attn_capture", numbers=True)
        if not entries and not scores:
            stray = next(name for name in self.fields if not is_no(self.fields[name]))
            ask = "attn_capture: 1" if stray == "attn_capture_layers" else (
                "return_attention_tokens: true")  # fmt: skip
            raise RequestError(f"{stray} needs {ask}", stray)
        if not self.options.is_on:
            raise RequestError(
                "this server captures no attention: start it with --return-attention-tokens",
                ASKING[0] if entries else ASKING[1],
                code="attention_unavailable",
            )
        self.available("capture", ASKING[0] if entries else ASKING[1])
        mode, heads = self.mode(entries), self.heads()
        scored = self.scores(body) if scores else None
        each = self.facts.heads if heads is None else len(heads)
        request = CaptureRequest(
            mode=mode,
            top_k=self.top_k(mode),
            layers=self.layers("attention_capture_layers", self.facts.layers),
            heads=heads,
            prompt_rows=self.prompt_rows(),
            hubs=self.hubs(),
            routing=self.routing(),
            lens=self.lens(),
            scores=scored,
            score_heads=each * len(scored or ()),
            stream_entries=entries,
            name_tokens=self.names(),
            **_common(body, headers, self.options, mode)
            | {"mask_prefix": max(self.mask_prefix(), self.options.mask_prefix)},
        )
        check_one_choice(body)
        layered = mode == "fingerprint" and self.options.layout is Layout.LAYERED
        if layered and len(request.layers) < 2:
            raise RequestError(
                "fingerprints of layout layered need several layers", "attention_capture_layers"
            )
        return request

    def mode(self, entries: bool) -> Mode:
        sketch = self.flag("attention_sketch_mode")
        fingerprint = self.flag("attention_fingerprint_mode")
        if sketch and fingerprint:
            raise RequestError(
                "attention_sketch_mode and attention_fingerprint_mode exclude each other",
                "attention_sketch_mode",
            )
        modes = self.options.modes
        if not entries:
            return "fingerprint"
        if not modes:
            raise RequestError(
                "responses of this server have no attention: start it with "
                "--return-attention-tokens",
                ASKING[0],
                code="attention_unavailable",
            )
        asked = "sketch" if sketch else "fingerprint" if fingerprint else None
        param = f"attention_{asked}_mode" if asked else ASKING[0]
        if asked is not None and asked not in modes:
            raise RequestError(f"this server gives {modes[0]} entries only", param)
        chosen: Any = asked or modes[0]
        self.available(chosen, param)
        return chosen

    def top_k(self, mode: Mode) -> int:
        default = SKETCH_TOP_K if mode == "sketch" else self.options.tokens_top_k
        return self.number("top_k_attention", default, 1, MOST_TOP_K)

    def layers(self, name: str, allowed: tuple[int, ...]) -> list[int]:
        """Layers of `allowed` that a field chooses: a name, indices as text or in a list."""
        given = self.fields.get(name)
        if given is None:
            return list(allowed)
        text = self.indices(name, given)
        if not allowed:
            raise RequestError("no layer is captured here", name, code="attention_unavailable")
        try:
            chosen = choose_layers(text, allowed, self.facts.num_layers)
        except OptionError as error:
            raise RequestError(str(error), name) from None
        if outside := sorted(set(chosen).difference(allowed)):
            shown = ",".join(map(str, allowed))
            raise RequestError(f"layer {outside[0]} is not captured here, only {shown}", name)
        return list(chosen)

    def heads(self) -> list[int] | None:
        name = "attention_capture_head_ids"
        given = self.fields.get(name)
        if given is None:
            return None
        self.available("head_filtering", name)
        try:
            return list(choose_heads(self.indices(name, given), self.facts.heads))
        except OptionError as error:
            raise RequestError(str(error), name) from None

    def indices(self, name: str, given: object) -> str:
        """A field with indices as the text that options have: `2,18` or a name."""
        values = given if isinstance(given, list) else [given]
        if values and len(values) <= MOST_TEXT and all(type(v) is int and abs(v) <= INT32
                                                       for v in values):  # fmt: skip
            return ",".join(map(str, values))
        if isinstance(given, str) and 0 < len(given) <= MOST_TEXT and given.isascii():
            return given
        raise self.wrong(name, given, "a list of whole numbers, or text such as 2,18")

    def prompt_rows(self) -> int:
        name = "include_prompt_attention"
        most = self.options.tokens_max or INT32
        given = self.fields.get(name)
        rows = int(given) if isinstance(given, bool) else self.number(name, 0, 0, most)
        if rows:
            self.available(name, name)
        return rows

    def mask_prefix(self) -> int:
        return self.number("attention_mask_prefix", 0, 0, INT32)

    def hubs(self) -> bool:
        wanted = self.flag("attention_hubs")
        if wanted:
            self.available("attention_hubs", "attention_hubs")
        return wanted

    def routing(self) -> bool:
        name = "attention_moe_routing"
        wanted = self.flag(name)
        if wanted:
            self.available("moe_routing", name)
            if not self.facts.moe:
                raise RequestError(NO_EXPERTS, name, code="attention_unavailable")
        return wanted

    def lens(self) -> int:
        name = "attention_logit_lens"
        given = self.fields.get(name)
        if isinstance(given, bool):
            tokens = LENS_TOKENS if given else 0
        else:
            tokens = self.number(name, 0, 0, MOST_LENS_TOKENS)
        if tokens:
            self.available("logit_lens", name)
        return tokens

    def names(self) -> bool:
        wanted = self.flag("return_prompt_tokens")
        if wanted:
            self.available("prompt_tokens", "return_prompt_tokens")
        return wanted

    def scores(self, body: dict[str, Any]) -> list[int]:
        if not self.options.enable_attention_instrumentation:
            raise RequestError(
                "this server gives no full scores: start it with "
                "--enable-attention-instrumentation",
                "attn_capture",
                code="attention_unavailable",
            )
        self.available("attn_capture", "attn_capture")
        if body.get("stream"):
            raise RequestError("attn_capture is answered without stream only", "stream")
        return self.layers("attn_capture_layers", self.facts.score_layers)

    def available(self, feature: str, param: str) -> None:
        if reason := self.facts.reasons.get(feature):
            raise RequestError(
                f"{feature} is not available: {reason}", param, code="attention_unavailable"
            )

    def flag(self, name: str, *, numbers: bool = False) -> bool:
        given = self.fields.get(name, False)
        if isinstance(given, bool):
            return given
        if numbers and type(given) is int and given in (0, 1):
            return given == 1
        raise self.wrong(name, given, "0 or 1" if numbers else "true or false")

    def number(self, name: str, default: int, low: int, high: int) -> int:
        given = self.fields.get(name)
        if given is None:
            return default
        if type(given) is not int or not low <= given <= high:
            raise self.wrong(name, given, f"a whole number between {low} and {high}")
        return given

    @staticmethod
    def wrong(name: str, given: object, what: str) -> RequestError:
        kinds: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
        shown = kinds.get(type(given), str(given).lower())
        return RequestError(f"{name} must be {what}, got {shown[:40]}", name)


def _common(
    body: dict[str, Any], headers: Mapping[str, str], options: ServeOptions, mode: Mode
) -> dict[str, Any]:
    """What a request has from the server's options and from its own head."""
    most = [options.tokens_max]
    if mode == "fingerprint":
        most.append(options.fingerprint_max_steps)
    trace = headers.get("traceparent", "")
    return {
        "mask_prefix": options.mask_prefix,
        # A template may add a system prompt of its own: a chat need not bring one.
        "mask_system": options.mask_system_prompt and "messages" in body,
        "stride": options.tokens_stride,
        "window": options.tokens_window,
        "max_steps": min(filter(None, most), default=0),
        "traceparent": trace if _TRACEPARENT.fullmatch(trace) else None,
        "session_id": _session(body.get("session_id"), headers.get("x-session-id")),
    }


def _session(*found: object) -> str | None:
    for value in found:
        if isinstance(value, str) and value and len(value) <= MOST_ID_BYTES:
            encoded = value.encode(errors="replace")
            if encoded.decode() == value and len(encoded) <= MOST_ID_BYTES:
                return value
    return None
