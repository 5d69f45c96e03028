"""A response of the engine as arrays: texts, log-probabilities, fingerprints, full scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.errors import AttnError
from pipeline.analysis import (
    collect_entries,
    extract_attention_from_response,
    generated_tokens,
    read_fingerprints,
)


class UnexpectedAnswerError(AttnError):
    """An answer is not what the recipe asked for."""


@dataclass(frozen=True)
class Answer:
    """What the model answered, and where each token of the answer was read from.

    The row of generated token i is the one that predicted it: row 0 is the prompt's last.

    Attributes:
        prompt: as it was asked.
        text: of the answer.
        prompt_tokens: texts of the prompt's tokens; <|bos|> is the first.
        tokens: texts of the n generated tokens.
        logprobs: float64[n], natural, of the generated tokens.
        alternatives: float64[n, 3], natural, of the three likeliest tokens, the likeliest first.
        fingerprints: float32[n, 20], of each generated token's row, the mean over heads and layers;
            float32[0, 20] if the request asked for entries of another mode.
        scores: float32[T, 16, T], probabilities: query x layer-and-head x key. Head h of layer l is
            4 l + h. None if the request did not ask for them.
        response: the whole of it.
    """

    prompt: str
    text: str
    prompt_tokens: list[str]
    tokens: list[str]
    logprobs: NDArray[np.float64]
    alternatives: NDArray[np.float64]
    fingerprints: NDArray[np.float32]
    scores: NDArray[np.float32] | None
    response: dict[str, Any]

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_tokens)

    def light(self) -> Answer:
        """The same without scores and response, which are megabytes: to keep many answers."""
        return replace(self, scores=None, response={})

    def rows(self, count: int | None = None) -> NDArray[np.float32]:
        """The rows that predicted the first `count` generated tokens: float32[n, heads, T].

        Raises:
            UnexpectedAnswerError: the request did not ask for full scores.
        """
        if self.scores is None:
            raise UnexpectedAnswerError("the answer has no full scores: ask with scores=True")
        n = len(self.tokens) if count is None else min(count, len(self.tokens))
        return self.scores[self.prompt_len - 1 : self.prompt_len - 1 + n]

    def tokens_of(self, start: int, end: int) -> NDArray[np.int64]:
        """The prompt's tokens that hold some of its characters `start` to `end` (excluded)."""
        # <|bos|> is no part of the text.
        lengths = [0, *map(len, self.prompt_tokens[1:])]
        ends = np.cumsum(lengths)
        begins = ends - lengths
        return np.flatnonzero((begins < end) & (ends > start) & (ends > begins))


def read_answer(prompt: str, response: dict[str, Any]) -> Answer:
    """An answer of the engine, asked as `Services.ask` does.

    Raises:
        UnexpectedAnswerError: the tokens do not make up the prompt, or rows are missing.
        ResponseError: it cannot be read.
    """
    prompt_tokens = [token["text"] for token in response["prompt_tokens"]]
    if "".join(prompt_tokens[1:]) != prompt:
        raise UnexpectedAnswerError("the tokens of the answer do not make up the prompt")
    choice = response["choices"][0]
    tokens = generated_tokens(response)
    layers = extract_attention_from_response(response)
    scores = None
    if layers is not None:
        scores = np.concatenate([layers[layer]["scores"] for layer in sorted(layers)], axis=1)
    vectors = read_fingerprints(collect_entries(response)).vectors
    if len(vectors) not in (0, len(tokens)):
        raise UnexpectedAnswerError(f"{len(vectors)} fingerprints of {len(tokens)} tokens")
    best = [sorted(top.values(), reverse=True)[:3] for top in choice["logprobs"]["top_logprobs"]]
    return Answer(
        prompt, choice["text"], prompt_tokens, tokens,
        np.array(choice["logprobs"]["token_logprobs"], np.float64),
        np.array(best, np.float64).reshape(-1, 3), vectors, scores, response,
    )  # fmt: skip
