"""What an example prints: for each layer and head, the tokens that the answer was read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from pipeline.analysis import AttentionAnalyzer, ResponseError, find_tokens, generated_tokens
from pipeline.token_text import visible

from .prompts import Example

MARK = "◀"
WIDTH = 120
# A head shows the line if one of the tokens it attends to most has more than this.
SHOWN_FROM = 0.15
_TOP_AVERAGE, _TOP_HEAD = 5, 3


@dataclass(frozen=True)
class Reading:
    """An answer with what is needed to print it.

    Attributes:
        example: that was asked.
        layers: of `extract_attention_from_response`.
        texts: token texts by index.
        prompt_len: tokens of the prompt.
        query: the row that predicts the first token of the answer, or of what came instead of it.
        line: the tokens of the example's line in the prompt; empty if their texts are unknown.
    """

    example: Example
    layers: dict[int, dict[str, Any]]
    texts: Mapping[int, str]
    prompt_len: int
    query: int
    line: frozenset[int]


def read(
    example: Example, response: dict[str, Any], layers: dict[int, dict[str, Any]],
    texts: Mapping[int, str], prompt_len: int,
) -> Reading:  # fmt: skip
    """Finds the row of the answer and the tokens of the line it stands in.

    Raises:
        ResponseError: the server hides that row.
    """
    query = prompt_len - 1 + _first_token(generated_tokens(response), example.answer)
    if query < 0:
        raise ResponseError(
            "the server hides the whole prompt, and with it what predicts the answer"
        )
    line = frozenset(find_tokens(texts, example.line, 0, prompt_len))
    return Reading(example, layers, texts, prompt_len, query, line)


def layer_lines(reading: Reading) -> Iterator[tuple[str, bool]]:
    """The lines of all layers, each with whether a head shows the example's line in it.

    Raises:
        ResponseError: the scores end before the row of the answer.
    """
    for number in sorted(reading.layers):
        layer = reading.layers[number]
        analyzer = AttentionAnalyzer(layer["scores"], layer["token_meta"])
        tokens, heads, _ = analyzer.scores.shape
        if reading.query >= tokens:
            raise ResponseError(
                f"layer {number} has the scores of {tokens} tokens; the answer is predicted at "
                f"token {reading.query}"
            )
        yield "", False
        yield (
            f"── L{number} (T={tokens} H={heads} prompt={reading.prompt_len} "
            f"row={_label(reading, reading.query)}) ──",
            False,
        )
        average = analyzer.top_attended_tokens(reading.query, top_k=_TOP_AVERAGE, avg_heads=True)
        yield _row(reading, "avg", average, marked=True), False
        for head in range(heads):
            top = analyzer.top_attended_tokens(reading.query, head, _TOP_HEAD)
            shown = any(key in reading.line and p > SHOWN_FROM for key, p, _ in top)
            yield _row(reading, f"h{head}", top, marked=shown), shown


def strongest(reading: Reading) -> str:
    """The head that looks at the example's line most, in a line."""
    best, layer, head = 0.0, 0, 0
    keys = sorted(reading.line)
    for number in sorted(reading.layers):
        scores: NDArray[np.float32] = reading.layers[number]["scores"]
        masses = scores[reading.query][:, keys].sum(1)
        if masses.max() > best:
            best, layer, head = float(masses.max()), number, int(masses.argmax())
    return (
        f"L{layer} h{head} has {best:.2f} of its attention on {reading.example.line!r} "
        f"(tokens {keys[0]} to {keys[-1]})"
    )


def _row(reading: Reading, name: str, top: list[tuple[int, float, str]], marked: bool) -> str:
    line = f"  {name:<4}"
    for key, probability, _ in top:
        mark = MARK if marked and key in reading.line else ""
        longer = f"{line} {_label(reading, key)}={probability:.2f}{mark}"
        if cell_len(longer) > WIDTH:
            break
        line = longer
    return line


def _label(reading: Reading, key: int) -> str:
    text = reading.texts.get(key, "?")
    return f"{visible(text.strip() or text)}({key})"


def _first_token(generated: list[str], answer: str) -> int:
    """The generated token in which the answer begins; the first one if it does not occur."""
    at = "".join(generated).casefold().find(answer.casefold())
    end = 0
    for number, text in enumerate(generated):
        end += len(text)
        if at < end:
            return number if at >= 0 else 0
    return 0
