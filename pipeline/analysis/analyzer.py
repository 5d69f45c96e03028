"""Questions to the full attention scores of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from capture_kernels.errors import OptionError

from .responses import ResponseError, convert

_Index = Annotated[int, Meta(ge=0, le=1 << 31)]


class _Range(msgspec.Struct):
    start: _Index
    end: _Index


class _TokenMeta(msgspec.Struct):
    prompt_len: _Index | None = None
    vision_ranges: list[_Range] = []
    lang_ranges: list[_Range] = []


class AttentionAnalyzer:
    """The attention scores of a layer, with the types of its tokens.

    Args:
        scores: [T, H, T], probabilities: query x head x key.
        token_meta: `prompt_len`, and `vision_ranges` and `lang_ranges` as lists of
            {"start", "end"}, `end` excluded; what is left out is unknown.

    Attributes:
        scores: float32[T, H, T].
        prompt_len: tokens of the prompt; None if unknown.

    Raises:
        ResponseError: the scores are not [T, H, T], or the meta data cannot be read.
    """

    def __init__(self, scores: ArrayLike, token_meta: Mapping[str, Any]) -> None:
        self.scores = np.asarray(scores, np.float32)
        if self.scores.ndim != 3 or self.scores.shape[0] != self.scores.shape[2]:
            raise ResponseError(f"scores have shape {self.scores.shape}: expected [T, H, T]")
        meta = convert(dict(token_meta), _TokenMeta, "token_meta")
        self.prompt_len = meta.prompt_len
        self._vision = self._tokens(meta.vision_ranges)
        self._language = self._tokens(meta.lang_ranges)

    def token_type(self, token_idx: int) -> str:
        """`vision` or `language` by the ranges, `generated` after the prompt, else `unknown`."""
        token_idx = self._checked(token_idx, self.scores.shape[0], "token_idx")
        if self.prompt_len is not None and token_idx >= self.prompt_len:
            return "generated"
        if self._vision[token_idx]:
            return "vision"
        return "language" if self._language[token_idx] else "unknown"

    def attention_for_token(
        self, token_idx: int, head_idx: int | None = None, avg_heads: bool = False
    ) -> NDArray[np.float32]:
        """What a query attends to.

        Args:
            token_idx: the query; negative ones count from the end.
            head_idx: the head, not needed with `avg_heads`.
            avg_heads: average over the heads.

        Returns:
            float32[T], probabilities by key; without a head and without averaging float32[H, T].

        Raises:
            OptionError: there is no such token or head.
        """
        row = self.scores[self._checked(token_idx, self.scores.shape[0], "token_idx")]
        if avg_heads:
            return row.mean(0)
        if head_idx is None:
            return row
        return row[self._checked(head_idx, self.scores.shape[1], "head_idx")]

    def top_attended_tokens(
        self, token_idx: int, head_idx: int | None = None, top_k: int = 5, avg_heads: bool = False
    ) -> list[tuple[int, float, str]]:
        """The keys that a query attends to most: (key, probability, token type), the largest first.

        Of equal ones the first key comes first; keys with probability 0 (all after the query) are
        left out.

        Raises:
            OptionError: there is no such token or head, or neither a head nor averaging was asked.
        """
        if top_k < 1:
            raise OptionError(f"top_k is {top_k}: it must be at least 1")
        self._one_head(head_idx, avg_heads)
        weights = self.attention_for_token(token_idx, head_idx, avg_heads)
        best = np.argsort(-weights, kind="stable")[:top_k].tolist()
        return [(k, float(weights[k]), self.token_type(k)) for k in best if weights[k] > 0]

    def cross_modal_attention(self, head_idx: int | None = None, avg_heads: bool = False) -> float:
        """The share of the attention of vision tokens that language tokens of the prompt get.

        0 where there are no vision tokens, no language tokens, or no attention.

        Raises:
            OptionError: there is no such head, or neither a head nor averaging was asked.
        """
        self._one_head(head_idx, avg_heads)
        if not self._vision.any() or not self._language.any():
            return 0.0
        if avg_heads:
            received = self.scores[self._vision].sum((0, 1), dtype=np.float64)
        else:
            head = self._checked(head_idx or 0, self.scores.shape[1], "head_idx")
            received = self.scores[self._vision, head].sum(0, dtype=np.float64)
        total = received.sum()
        return float(received[self._language].sum() / total) if total else 0.0

    def _tokens(self, ranges: list[_Range]) -> NDArray[np.bool_]:
        """Which tokens lie in some of the ranges: bool[T]."""
        inside = np.zeros(self.scores.shape[0], bool)
        for each in ranges:
            inside[each.start : each.end] = True
        return inside

    def _one_head(self, head_idx: int | None, avg_heads: bool) -> None:
        if head_idx is None and not avg_heads:
            raise OptionError("give head_idx, or avg_heads=True")

    def _checked(self, index: int, size: int, name: str) -> int:
        """An index from 0 on."""
        if not -size <= index < size:
            raise OptionError(f"{name} is {index}: it must be from {-size} to {size - 1}")
        return index % size
