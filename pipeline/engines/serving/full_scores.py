"""All probabilities of one request, as its rows come: what `attn_capture` asks for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .body import RequestError
from .responses import Ranges, capture_data, named_ranges, ranges_of

Halves = NDArray[np.float16]
# What the full scores of one request may take, as float16.
SCORES_BYTES = 256 << 20
# How the error of a request that takes more begins.
TOO_LARGE = "attn_capture of "


def salted(salt: str | None) -> str:
    """A client's `cache_salt`, made unlike all others: full scores need every row of the prompt,
    and rows whose keys are in the prefix cache do not pass through the model."""
    return (salt or "") + secrets.token_hex(16)


def check_room(tokens: int, heads: int) -> None:
    """RequestError if the scores [T, H, T] of so many tokens take more than a request may have.

    Args:
        heads: of all layers together.
    """
    if 2 * heads * tokens * tokens > SCORES_BYTES:
        raise RequestError(
            f"{TOO_LARGE}{tokens} tokens takes more than {SCORES_BYTES >> 20} MiB: name fewer "
            "attn_capture_layers or attention_capture_head_ids, or set max_tokens",
            "attn_capture",
        )


class ScoreBlock(NamedTuple):
    """Rows of a layer at positions `begin` and after: float16[R, H, begin + R]."""

    layer: int
    begin: int
    rows: Halves

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.begin + len(self.rows)

    def before(self, end: int) -> ScoreBlock:
        """Its rows before a position."""
        if self.end <= end:
            return self
        kept = self.rows[: end - self.begin, :, :end]
        return ScoreBlock(self.layer, self.begin, np.ascontiguousarray(kept))


class FullScores:
    """The scores of some layers of one request.

    Args:
        heads: how many query heads are taken, of all layers together.
        hidden: tokens of the masked prefix, which no answer holds.
        vision, audio: positions of the prompt's images, videos and sounds.
    """

    def __init__(
        self, layers: Sequence[int], *, heads: int, hidden: int, vision: Ranges = (),
        audio: Ranges = (),
    ) -> None:  # fmt: skip
        self._heads, self._hidden, self._vision, self._audio = heads, hidden, vision, audio
        # By layer: the position of the first row, and rows float16[R, H, that + R].
        self._rows: dict[int, list[tuple[int, Halves]]] = {layer: [] for layer in layers}

    def __repr__(self) -> str:
        # SGLang may log what a request is answered.
        return f"FullScores(layers={self.layers}, nbytes={self.nbytes})"

    @property
    def layers(self) -> list[int]:
        return list(self._rows)

    @property
    def nbytes(self) -> int:
        """What its rows take."""
        return sum(rows.nbytes for own in self._rows.values() for _, rows in own)

    def reserve(self, tokens: int) -> None:
        """RequestError if the scores of so many tokens take more than a request may have."""
        check_room(tokens, self._heads)

    def add(self, layer: int, begin: int, rows: Halves) -> None:
        """Add the rows of a layer at positions `begin` and after: float16[R, H, begin + R]."""
        self._rows[layer].append((begin, rows))

    def end_at(self, tokens: int) -> None:
        """Leave out rows past so many tokens: an engine may go on past what ends an answer."""
        for layer, own in self._rows.items():
            blocks = [ScoreBlock(layer, begin, rows) for begin, rows in own if begin < tokens]
            self._rows[layer] = [(block.begin, block.before(tokens).rows) for block in blocks]

    def missing(self, tokens: int) -> list[tuple[int, int]]:
        """Where a row of some layer never came: ranges of positions, without their ends, among
        those of so many tokens, counted from the end of the masked prefix."""
        there = np.ones(max(tokens, self._hidden), bool)
        for own in self._rows.values():
            of_layer = np.zeros_like(there)
            for begin, rows in own:
                of_layer[begin : begin + len(rows)] = True
            there &= of_layer
        return ranges_of(~there[self._hidden :])

    def entries(self, tokens: int, prompt_len: int) -> list[dict[str, Any]]:
        """`attn_capture_data` of a response, with T as far as rows came; those that did not are 0,
        and `token_meta` names them. A layer without any row has no entry.

        Compresses, which takes its time.

        Args:
            tokens: that were fed to the model.
            prompt_len: tokens of the prompt.
        """
        missing = named_ranges(self.missing(tokens))
        vision, audio = self._shown(self._vision), self._shown(self._audio)
        prompt = max(0, prompt_len - self._hidden)
        found = []
        for layer, own in self._rows.items():
            if not own:
                continue
            entry = capture_data(layer, self._whole(own), prompt, vision, audio)
            if missing:
                entry["token_meta"]["missing_rows"] = missing
            found.append(entry)
        return found

    def _shown(self, ranges: Ranges) -> list[tuple[int, int]]:
        """What the masked prefix leaves of ranges, counted from its end."""
        left = ((max(0, begin - self._hidden), end - self._hidden) for begin, end in ranges)
        return [(begin, end) for begin, end in left if begin < end]

    def _whole(self, own: list[tuple[int, Halves]]) -> Halves:
        """float16[T, H, T] without the masked prefix."""
        total = max(begin + len(rows) for rest in self._rows.values() for begin, rows in rest)
        whole = np.zeros((total, own[0][1].shape[1], total), np.float16)
        for begin, rows in own:
            whole[begin : begin + len(rows), :, : rows.shape[2]] = rows
        return whole[self._hidden :, :, self._hidden :]
