"""What engines know alike of the logit lens: a model's last norm and head over a hidden state.

Source of the lens: nostalgebraist, "interpreting GPT: the logit lens", 2020.
"""

from __future__ import annotations

from typing import Any

# What models call the norm before their head.
NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")
# Of the lens after the last layer and the model's own logits: the most that they may deviate, as a
# share of the largest logit. In half precision they are rounded in another order.
LENS_TOLERANCE = 1e-2
NOT_THE_LENS = "the model's logits are not its head over its last norm over its last layer"


def last_norm(decoder: Any) -> Any:
    """The norm after the layers of a decoder, by its name; None if there is none."""
    return next(filter(None, (getattr(decoder, name, None) for name in NORMS)), None)
