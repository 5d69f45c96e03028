"""Full attention scores out of a response: `attn_capture_data`.

Each layer is base64 of gzip of float16 [T, H, T], query x head x key. What is unpacked is
bounded by the shape that stands beside it, and that by `max_bytes`, so that a small message cannot
fill the memory.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import zlib
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from .responses import ResponseError, as_dict, convert

_MAX_BYTES = 2 << 30
# Deflate makes at most 1,032 bytes of one (zlib.net/zlib_tech.html).
_BYTES_OF_ONE = 1032
# float16 rounds a probability of 1 to 1; a sum over heads or a wrong type goes far beyond.
_MOST = 1.001
_Length = Annotated[int, Meta(ge=1, le=1 << 31)]


class _Layer(msgspec.Struct):
    layer_idx: int
    data: str
    shape: tuple[_Length, _Length, _Length]
    token_meta: dict[str, Any] = {}


def extract_attention_from_response(
    response: Any, *, max_bytes: int = _MAX_BYTES
) -> dict[int, dict[str, Any]] | None:
    """The full attention scores of a response, by layer; None if it has none.

    Args:
        response: a dictionary, or an object of the OpenAI client.
        max_bytes: of one layer's float16 scores; a layer that says that it is larger is refused.

    Returns:
        For each layer a dictionary of `scores` (float32[T, H, T], probabilities: query x head x
        key, rows of a causal model end at the query), `token_meta`, `model` and `layer`.

    Raises:
        ResponseError: base64, gzip, shape or values are damaged, a layer is larger than
            `max_bytes`, or a layer comes twice.
    """
    response = as_dict(response)
    items = response.get("attn_capture_data")
    if items is None or items == []:
        return None
    found: dict[int, dict[str, Any]] = {}
    for number, item in enumerate(convert(items, list[Any], "attn_capture_data")):
        layer = convert(item, _Layer, f"attn_capture_data[{number}]")
        if layer.layer_idx in found:
            raise ResponseError(f"attn_capture_data has layer {layer.layer_idx} twice")
        found[layer.layer_idx] = {
            "scores": _unpack(layer, max_bytes),
            "token_meta": layer.token_meta,
            "model": response.get("model"),
            "layer": layer.layer_idx,
        }
    return found


def _unpack(layer: _Layer, max_bytes: int) -> NDArray[np.float32]:
    name = f"layer {layer.layer_idx} of attn_capture_data"
    queries, _, keys = layer.shape
    if queries != keys:
        raise ResponseError(f"{name} has shape {list(layer.shape)}: expected [T, H, T]")
    expected = 2 * prod(layer.shape)
    if expected > max_bytes:
        raise ResponseError(
            f"{name} has shape {list(layer.shape)}, {expected:,} bytes: send a shorter prompt, "
            f"or raise max_bytes (now {max_bytes:,})"
        )
    try:
        packed = base64.b64decode(layer.data, validate=True)
        if expected > _BYTES_OF_ONE * len(packed):
            raise ValueError(f"{len(packed):,} bytes cannot hold shape {list(layer.shape)}")
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            content = file.read(expected)
            more = file.read(1)  # at the end the checksum is compared
    except (binascii.Error, ValueError, OSError, EOFError, zlib.error) as error:
        raise ResponseError(f"{name} is damaged: {error}") from None
    if len(content) != expected or more:
        size = "more" if more else f"{len(content):,}"
        raise ResponseError(
            f"{name} has {size} bytes where shape {list(layer.shape)} needs {expected:,}"
        )
    scores = np.frombuffer(content, dtype="<f2").astype(np.float32).reshape(layer.shape)
    # False for NaN as well.
    if not (scores.min() >= 0 and scores.max() <= _MOST):
        raise ResponseError(f"{name} has values that are not probabilities")
    return scores
