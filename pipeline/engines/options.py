"""The options of an offline capture, and the layers and heads that they choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capture_kernels.errors import AttnError, OptionError
from capture_kernels.fingerprint.vector import Layout, Visibility

DTYPES = ("auto", "float32", "bfloat16", "float16")


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
        prompt_rows: capture the rows of the prompt too.
        device: auto, cpu, cuda or cuda:N.
        dtype: auto (that of the checkpoint), float32, bfloat16 or float16.

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
    prompt_rows: bool = True
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise OptionError(f"stride must be 1 or more, got {self.stride}")
        for name in ("max_new_tokens", "max_steps"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.layout is Layout.LAYERED and self.per_layer:
            raise OptionError("layout layered puts several layers in one record: drop --per-layer")
        if self.dtype not in DTYPES:
            raise OptionError(f"unknown dtype {self.dtype!r}: use {', '.join(DTYPES)}")
        if not self.prompt_rows and self.max_new_tokens < 2:
            raise OptionError("without prompt rows, max_new_tokens must be 2 or more")
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
        count = len(capturable)
        if self.layers == "all":
            chosen = list(capturable)
        elif self.layers == "last":
            chosen = [capturable[-1]]
        elif self.layers == "auto":
            quarters = (count // 4, count // 2, 3 * count // 4, count - 1)
            chosen = [capturable[i] for i in quarters]
        else:
            chosen = _numbers("layers", self.layers, "last, auto, all or indices such as 2,18,27")
            for layer in chosen:
                if not 0 <= layer < layers:
                    raise OptionError(f"there is no layer {layer}: layers are 0..{layers - 1}")
        chosen = sorted(set(chosen))
        if self.layout is Layout.LAYERED and len(chosen) < 2:
            raise OptionError("layout layered needs several layers: try --layers auto")
        return tuple(chosen)

    def choose_heads(self, heads: int) -> tuple[int, ...] | None:
        """The query heads to average over, None for all of `heads`."""
        if self.heads is None:
            return None
        chosen = _numbers("heads", self.heads, "indices such as 0,3")
        for head in chosen:
            if not 0 <= head < heads:
                raise OptionError(f"there is no head {head}: heads are 0..{heads - 1}")
        return tuple(sorted(set(chosen)))


def _numbers(name: str, text: str, usage: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise OptionError(f"{name} {text!r} is not supported: use {usage}") from None
