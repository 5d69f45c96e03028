"""Which lines of a prompt the rows of an answer read, by what a detector may look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import HIST_BINS, log2_bins

from .answers import Answer

# Of an answer at most, by task; a larger number is named after <think>.
MOST_TOKENS = {"needle": 8, "codename": 12, "larger": 48}


@dataclass(frozen=True)
class Context:
    """A prompt of lines and a question after them.

    Attributes:
        task: what is asked.
        lines: of the context, without line breaks.
        question: what follows the context's last line break.
        needed: numbers of the lines that the right answer is read from.
        truth: the right answer.
    """

    task: str
    lines: tuple[str, ...]
    question: str
    needed: tuple[int, ...]
    truth: str

    @property
    def prompt(self) -> str:
        return self.with_lines(range(len(self.lines)))

    def with_lines(self, kept: Sequence[int]) -> str:
        """The prompt with some of its lines only, in their order."""
        return "\n".join([*(self.lines[place] for place in sorted(kept)), self.question])

    def is_right(self, answer: Answer) -> bool:
        """Whether an answer, after any thinking, is the right one."""
        return answer.text.split("</think>")[-1].strip().split("\n")[0] == self.truth

    def tokens(self, answer: Answer) -> list[NDArray[np.int64]]:
        """The tokens of each line, of an answer to `prompt`; line breaks are in none."""
        starts = np.cumsum([0, *(len(line) + 1 for line in self.lines)])
        return [
            answer.tokens_of(int(start), int(start) + len(line))
            for start, line in zip(starts, self.lines, strict=False)
        ]


def head_masses(answer: Answer, tokens: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Attention of each head to each line, the mean over the answer's rows: float64[lines, heads].

    As a share of the line's tokens, so that a long line does not win by its length.
    """
    p = answer.rows().mean(0, dtype=np.float64)
    return np.array([p[:, line].mean(-1) for line in tokens])


def distance_densities(vector: NDArray[np.float32], position: int) -> NDArray[np.float64]:
    """What the 20 numbers (layout log16) of a row say of each key up to it: float64[position + 1].

    A fingerprint gives the mass at distances 0-1, 2-3, 4-7, ...; a key's share of it is that of its
    bin, spread evenly over the bin's keys. The first token of a sequence is in no bin.
    """
    bins = log2_bins(position - np.arange(1, position + 1))
    keys = np.bincount(bins, minlength=HIST_BINS)
    masses = vector[-HIST_BINS:]
    return np.concatenate([[0.0], (masses / np.maximum(keys, 1))[bins]])


def distance_masses(answer: Answer, tokens: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """What the answer's 20 numbers say of each line, the mean over its rows: float64[lines]."""
    total = np.zeros(len(tokens))
    for step, vector in enumerate(answer.fingerprints):
        density = distance_densities(vector, answer.prompt_len - 1 + step)
        total += [density[line].mean() for line in tokens]
    return total / len(answer.fingerprints)


def shared_words(lines: Sequence[str], text: str) -> NDArray[np.float64]:
    """How many of a text's words each line has, rare ones counting more: float64[lines].

    A word's weight is ln(lines / lines that have it), the IDF of a keyword search.
    """
    words = [set(re.findall(r"\w+", line.casefold())) for line in lines]
    wanted = set(re.findall(r"\w+", text.casefold()))
    found = {word: sum(word in line for line in words) for word in wanted}
    weight = {word: np.log(len(lines) / count) for word, count in found.items() if count}
    return np.array([sum(weight.get(word, 0.0) for word in line) for line in words])


def best_heads(
    masses: Sequence[NDArray[np.float64]], needed: Sequence[Sequence[int]], count: int
) -> NDArray[np.int64]:
    """The heads that give most of their attention to lines to the needed ones: int64[count].

    Args:
        masses: of each request, float64[lines, heads].
        needed: of each request, the numbers of the needed lines.
    """
    shares = [
        of[list(lines)].sum(0) / np.maximum(of.sum(0), 1e-12)
        for of, lines in zip(masses, needed, strict=True)
    ]
    return np.argsort(-np.mean(shares, 0), kind="stable")[:count]
