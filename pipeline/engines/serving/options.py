"""What a server with attention in its API is started with."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout, Visibility
from pipeline.api_keys import ApiKeys, check_key, read_keys
from pipeline.engines.options import choose_layers

from .option_table import PREFIX, Option, option, option_of

# `option` makes a dataclass field.
# ruff: noqa: RUF009

MOST_TOP_K = 64
INT32 = (1 << 31) - 1
# Modes of entries, from the one that says most to the one that says least.
MODES = ("raw", "sketch", "fingerprint")
# What a machine is for: the first of these that is set, and the values that are no production.
DEPLOYMENT_VARIABLES = ("ATTN_ENV", "ENV")
DEVELOPMENT = ("development", "dev", "debug", "local", "test", "testing")
# Of --attention-chunk-size, so that its default is the kernels' own of 288 MiB: the logits of one
# key for 1,117 rows of 32 heads and their mean.
CHUNK_BYTES = 144 << 10
SECRET_VARIABLE = PREFIX + "SECRET"
_LAYERS = re.compile(r"last|auto|all|\d{1,6}(,\d{1,6})*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@,]+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `attn serve` and of the engines' plug-ins; docs/guide.md describes each.

    Args:
        deployment: what the environment says that this machine is for.
        secret: with which a request that passed the guardrails is signed on its way to the engine;
            processes of one server must share it.

    Raises:
        OptionError: a value, or a combination, that cannot be used.
    """

    return_attention_tokens: bool = option(
        "--return-attention-tokens", "Let clients ask for attention in responses.", bool, False
    )
    tokens_top_k: int = option(
        "--attention-tokens-top-k", "Positions in a raw entry, unless a request says otherwise.",
        int, 32, low=1, high=MOST_TOP_K,
    )  # fmt: skip
    tokens_max: int = option(
        "--attention-tokens-max", "Most captured rows of a request; 0 for all.",
        int, 4096, low=0, high=INT32,
    )  # fmt: skip
    tokens_stride: int = option(
        "--attention-tokens-stride --attention-capture-stride", "Capture every Nth position.",
        int, 1, low=1, high=INT32,
    )  # fmt: skip
    tokens_window: int = option(
        "--attention-tokens-window", "Count only the last N keys; 0 for all.",
        int, 0, low=0, high=INT32,
    )  # fmt: skip
    layers: str = option(
        "--attention-capture-layers", "last, auto (4 over the depth), all, or indices: 2,18,27.",
        str, "last",
    )  # fmt: skip
    sketch_mode: bool = option(
        "--attention-sketch-mode", "Entries are sketches or fingerprints, never raw.", bool, False
    )
    fingerprint_mode: bool = option(
        "--attention-fingerprint-mode", "Entries are fingerprints only.", bool, False
    )
    fingerprint_max_steps: int = option(
        "--attention-fingerprint-max-steps", "Most fingerprints of a request; 0 for all.",
        int, 256, low=0, high=INT32,
    )  # fmt: skip
    chunk_size: int = option(
        "--attention-chunk-size",
        "Room for logits, in 144 KiB: less memory, but long contexts are read twice.",
        int, 2048, low=0, high=1 << 20,
    )  # fmt: skip
    sidecar_url: str | None = option(
        "--attention-sidecar-url", "Address of a sidecar that fingerprints are sent to.", str
    )
    store: Path | None = option(
        "--attention-store", "Store that fingerprints are written to: a .db file or a folder.", Path
    )
    curve_keys: Path | None = option(
        "--attention-curve-keys", "Folder of CURVE keys, for a sidecar on another machine.", Path
    )
    mask_system_prompt: bool = option(
        "--attention-mask-system-prompt", "Hide the system prompt of chats.", bool, False
    )
    mask_prefix: int = option(
        "--attention-mask-prefix", "Hide the first N tokens of every request.",
        int, 0, low=0, high=INT32,
    )  # fmt: skip
    api_key: str | None = option(
        "--attention-api-key", "Key that a request for attention needs.", str
    )
    api_key_file: Path | None = option(
        "--attention-api-key-file", "File with the keys of requests for attention, one a line.",
        Path,
    )  # fmt: skip
    cors_origins: tuple[str, ...] = option(
        "--attention-cors-origins", "Origin whose pages may ask; repeatable. Default: any.",
        tuple, ("*",),
    )  # fmt: skip
    max_concurrent_capture: int = option(
        "--attention-max-concurrent-capture", "Requests with attention at once; 0 for no limit.",
        int, 0, low=0, high=INT32,
    )  # fmt: skip
    disable_in_production: bool = option(
        "--attention-disable-in-production", "No capture unless ATTN_ENV or ENV is development.",
        bool, False,
    )  # fmt: skip
    sample_rate: float = option(
        "--attention-sample-rate", "Share of the other requests whose fingerprints are recorded.",
        float, 1.0, low=0, high=1,
    )  # fmt: skip
    overhead_budget: float | None = option(
        "--attention-overhead-budget", "Percent of decode time past which capture is switched off.",
        float, low=0.01, high=1000,
    )  # fmt: skip
    enable_attention_instrumentation: bool = option(
        "--enable-attention-instrumentation", "Let clients ask for full scores (attn_capture).",
        bool, False,
    )  # fmt: skip
    instrumentation_layers: str = option(
        "--attention-instrumentation-layers", "Layers of attn_capture: as the capture layers.",
        str, "last",
    )  # fmt: skip
    hub_slots: int = option(
        "--attention-hub-slots", "Requests that may add up attention_hubs at once (SGLang, vLLM).",
        int, 0, low=0, high=4096,
    )  # fmt: skip
    head_lists: bool = option(
        "--attention-head-lists",
        "Raw entries list each head that a request chooses (SGLang, vLLM).", bool, False,
    )  # fmt: skip
    fused_decode: bool = option(
        "--attention-fused-decode",
        "Captured layers decode with attn's kernel: keys are read once, not twice (vLLM).",
        bool, False,
    )  # fmt: skip
    logit_lens: bool = option(
        "--attention-logit-lens", "Let clients ask for attention_logit_lens (SGLang, vLLM).",
        bool, False,
    )  # fmt: skip
    layout: Layout = option(
        "--attention-layout", "Vector layout: log16 or layered.", Layout, Layout.LOG16
    )
    sink_tokens: int = option(
        "--attention-sink-tokens", "First N tokens count as sink mass only.",
        int, 1, low=0, high=INT32,
    )  # fmt: skip
    max_body_mb: int = option(
        "--attention-max-body-mb", "Most MiB of a request's body.", int, 64, low=1, high=4096
    )
    deployment: str = ""
    secret: str = field(default_factory=lambda: secrets.token_hex(16), compare=False, repr=False)

    def __post_init__(self) -> None:
        for known in TABLE:
            known.check(getattr(self, known.field))
        for name in ("layers", "instrumentation_layers"):
            if not _LAYERS.fullmatch(text := getattr(self, name)):
                raise OptionError(
                    f"{_named(name)} {text[:60]!r} is not supported: use last, auto, all or "
                    "indices such as 2,18,27"
                )
        if self.layout is Layout.LAYERED and (self.layers == "last" or self.layers.isdecimal()):
            raise OptionError(
                "--attention-layout layered needs several layers: try "
                "--attention-capture-layers auto"
            )
        if self.sketch_mode and self.fingerprint_mode:
            raise OptionError(
                "--attention-sketch-mode and --attention-fingerprint-mode exclude each other: "
                "give one"
            )
        if self.sidecar_url is not None and self.store is not None:
            raise OptionError(
                "fingerprints go to one place: give --attention-sidecar-url or --attention-store"
            )
        if self.curve_keys is not None and self.sidecar_url is None:
            raise OptionError("--attention-curve-keys is for --attention-sidecar-url, not given")
        if self.api_key is not None and self.api_key_file is not None:
            raise OptionError("give one of --attention-api-key and --attention-api-key-file")
        if self.api_key is not None:
            check_key(self.api_key.encode(), "what --attention-api-key holds")
        if not self.enable_attention_instrumentation and self.instrumentation_layers != "last":
            raise OptionError(
                "--attention-instrumentation-layers needs --enable-attention-instrumentation"
            )
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise OptionError(
                    f"--attention-cors-origins {origin[:80]!r} is no origin: use one such as "
                    "https://example.org, without a path, or *"
                )
        if self.sidecar_url is not None:
            # Loads ZMQ, which a server without a sidecar does without.
            from pipeline.stream.curve import check_address

            check_address(self.sidecar_url, has_keys=self.curve_keys is not None)
        _ = self.visibility

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **given: Any) -> ServeOptions:
        """The options of ATTN_CAPTURE_* variables, but those `given` by the name of a field.

        Raises:
            OptionError: a value, a combination, or a variable of that prefix that does not exist.
        """
        known = {one.variable: one for one in TABLE}
        chosen: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX) or variable == SECRET_VARIABLE:
                continue
            if variable not in known:
                raise OptionError(f"there is no {variable}: the guide lists the variables")
            one = known[variable]
            if text.strip() and one.field not in given:
                chosen[one.field] = one.parse(text)
        if secret := environment.get(SECRET_VARIABLE):
            chosen["secret"] = secret
        deployments = (environment.get(name, "") for name in DEPLOYMENT_VARIABLES)
        chosen["deployment"] = next(filter(None, deployments), "")
        return cls(**chosen | given)

    def environment(self) -> dict[str, str]:
        """The variables of which `from_environment` makes these options in another process: those
        that are not at their defaults, and the secret."""
        texts = {SECRET_VARIABLE: self.secret}
        for one in TABLE:
            if (value := getattr(self, one.field)) != one.default:
                texts[one.variable] = one.text(value)
        return texts

    @property
    def in_production(self) -> bool:
        return self.deployment.strip().lower() not in DEVELOPMENT

    @property
    def turned_off(self) -> bool:
        """Whether --attention-disable-in-production turns capture off here."""
        return self.disable_in_production and self.in_production

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of entries that a request may ask for, the default first; none without responses.
        A request may narrow what the server gives, so that a mode allows those that say less."""
        if self.fingerprint_mode:
            return MODES[2:]
        if self.sketch_mode:
            return MODES[1:]
        return MODES if self.return_attention_tokens else ()

    @property
    def records(self) -> bool:
        """Whether fingerprints go to a sidecar or a store."""
        return self.sidecar_url is not None or self.store is not None

    @property
    def is_on(self) -> bool:
        """Whether anything is captured at all."""
        asked = bool(self.modes) or self.records or self.enable_attention_instrumentation
        return asked and not self.turned_off

    @property
    def has_keys(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    @property
    def scratch_bytes(self) -> int:
        """What capture on a GPU may keep of pending layers (`StatisticsPlan.scratch_bytes`)."""
        return self.chunk_size * CHUNK_BYTES

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.sink_tokens, self.mask_prefix, self.tokens_window)

    def keys(self) -> ApiKeys | None:
        """The keys that a request for attention needs; None if it needs none. OptionError: the file
        cannot be used."""
        if self.api_key_file is not None:
            return read_keys(self.api_key_file, "--attention-api-key-file")
        return ApiKeys([self.api_key.encode()]) if self.api_key is not None else None

    def check_files(self) -> None:
        """Try what the options name, before a model is loaded: the keys, the store. An AttnError
        says what cannot be used."""
        self.keys()
        if self.curve_keys is not None:
            from pipeline.stream.curve import client_keys

            client_keys(self.curve_keys)
        if self.store is not None:
            from pipeline.store.open import open_store

            open_store(self.store, create=True).close()

    def choose_layers(self, capturable: Sequence[int], layers: int) -> tuple[int, ...]:
        """The layers to capture, shallowest first.

        Args:
            capturable: the layers that have attention to capture, ascending; at least one.
            layers: how many layers the model has.

        Raises:
            OptionError: a layer does not exist or cannot be captured, or the layout needs more.
        """
        chosen = _chosen("layers", self.layers, capturable, layers)
        if self.layout is Layout.LAYERED and len(chosen) < 2:
            raise OptionError("--attention-layout layered needs several captured layers")
        return chosen

    def choose_score_layers(self, capturable: Sequence[int], layers: int) -> tuple[int, ...]:
        """The layers of attn_capture, as `choose_layers`; none if it is not enabled."""
        if not self.enable_attention_instrumentation:
            return ()
        text = self.instrumentation_layers
        return _chosen("instrumentation_layers", text, capturable, layers)


def _chosen(name: str, text: str, capturable: Sequence[int], layers: int) -> tuple[int, ...]:
    chosen = choose_layers(text, capturable, layers)
    if refused := sorted(set(chosen).difference(capturable)):
        raise OptionError(f"{_named(name)}: layer {refused[0]} has no attention to capture")
    return chosen


def _named(field_name: str) -> str:
    return next(one.name for one in TABLE if one.field == field_name)


# Every option, in the order in which they are shown.
TABLE: tuple[Option, ...] = tuple(
    found for one in fields(ServeOptions) if (found := option_of(one)) is not None
)
