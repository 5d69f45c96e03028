"""The options of an offline capture, and the layers and heads that they choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from capture_kernels.errors import AttnError, OptionError
from capture_kernels.fingerprint.vector import Layout, Visibility


class Engine(StrEnum):
    """What runs the model."""

    SGLANG = "sglang"
    TRANSFORMERS = "transformers"


class PromptError(AttnError):
    """A prompt that this model cannot take; the other prompts can still run."""


@dataclass(frozen=True)
class CaptureOptions:
    """What one capture captures.

    Args:
        layers: `last`, `auto` (4 layers spread over the depth), `all`, or indices as `2,18,27`. The
            three names choose among the layers that have attention to capture.
        layout: what the 20 numbers mean; layered needs several layers.
        max_new_tokens: maximum number of tokens to generate; 0 for the prompt alone. The last one
            is never fed to the model, so N tokens give N - 1 generated rows.
        stride: capture the positions that are multiples of this.
        max_steps: maximum number of generated rows captured per prompt; 0 for all.
        window: only the last `window` keys of a row count; 0 for all.
        mask_prefix: how many tokens at the start are masked.
        sink_tokens: how many tokens at the start count as sink mass only.
        heads: query heads to average over, as `0,3`; None for all.
        per_layer: one record per captured layer instead of one for their mean.
        think_tags: rows from <think> to </think> in the generated text get the phase `think`.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        OptionError: a value, or a combination, that cannot be used.
    """

    layers: str = "last"
    layout: Layout = Layout.LOG16
    max_new_tokens: int = 64
    stride: int = 1
    max_steps: int = 0
    window: int = 0
    mask_prefix: int = 0
    sink_tokens: int = 1
    heads: str | None = None
    per_layer: bool = False
    think_tags: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("stride", 1), ("max_new_tokens", 0), ("max_steps", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.layout is Layout.LAYERED and self.per_layer:
            raise OptionError("layout layered puts several layers in one record: drop --per-layer")
        _ = self.visibility

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.sink_tokens, self.mask_prefix, self.window)

    def choose_layers(self, capturable: Sequence[int], layers: int) -> tuple[int, ...]:
        """The layers to capture, shallowest first.

        Args:
            capturable: the layers that have attention to capture, ascending; at least one.
            layers: how many layers the model has.
        """
        chosen = choose_layers(self.layers, capturable, layers)
        if self.layout is Layout.LAYERED and len(chosen) < 2:
            raise OptionError("layout layered needs several layers: try --layers auto")
        return chosen

    def choose_heads(self, heads: int) -> tuple[int, ...] | None:
        """The query heads to average over, None for all of `heads`."""
        if self.heads is None:
            return None
        return choose_heads(self.heads, heads)


def choose_layers(text: str, capturable: Sequence[int], layers: int) -> tuple[int, ...]:
    """The layers that `last`, `auto`, `all` or indices as `2,18,27` choose, shallowest first.

    Args:
        capturable: the layers that have attention to capture, ascending; at least one.
        layers: how many layers the model has.

    Raises:
        OptionError: neither a name nor indices, or no layer of the model.
    """
    count = len(capturable)
    if text == "all":
        chosen = list(capturable)
    elif text == "last":
        chosen = [capturable[-1]]
    elif text == "auto":
        quarters = (count // 4, count // 2, 3 * count // 4, count - 1)
        chosen = [capturable[i] for i in quarters]
    else:
        chosen = _numbers("layer", text, "last, auto, all or indices such as 2,18,27", layers)
    return tuple(sorted(set(chosen)))


def choose_heads(text: str, heads: int) -> tuple[int, ...]:
    """The query heads that indices as `0,3` choose, ascending, of `heads`. OptionError: as of
    `choose_layers`."""
    return tuple(sorted(set(_numbers("head", text, "indices such as 0,3", heads))))


def _numbers(name: str, text: str, usage: str, count: int) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise OptionError(f"{name}s {text!r} is not supported: use {usage}") from None
    for number in numbers:
        if not 0 <= number < count:
            raise OptionError(f"there is no {name} {number}: {name}s are 0..{count - 1}")
    return numbers
