"""What requests may know of a served model beside its layers: its captures' ids, its thinking."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.phases import (
    PARSERS,
    PhaseTracker,
    ThinkTags,
    starts_inside,
    think_tags,
)
from pipeline.engines.serving.request import ModelFacts
from pipeline.record import capture_id

LOG = logging.getLogger("attn.capture")
# Tokens whose text is kept: a lens names the same ones again and again.
MOST_TEXTS = 1 << 16


# Why requests cannot ask for some things beside drafts.
WITH_DRAFTS = "with speculative decoding not all rows of a step are kept"


class ServedModel:
    """A model that an engine serves.

    Args:
        name: of the model in records and responses.
        revision: of its weights (`revision_of`).
        windowed: whether a layer has a sliding window.
        parser: of --reasoning-parser.

    Attributes:
        facts: for the gate.
    """

    facts: ModelFacts

    def __init__(
        self, name: str, revision: str, options: ServeOptions, *, windowed: bool,
        parser: str | None,
    ) -> None:  # fmt: skip
        self.name, self._options = name, options
        self._revision, self._windowed, self._parser = revision, windowed, parser
        self._tags: ThinkTags | None = None
        self._decode: Callable[..., str] | None = None
        self._text: Callable[[int], str] = str

    def capture_id(self, layers: Sequence[int], heads: list[int] | None, mask: int) -> str:
        """Of records of some layers and heads, with so many hidden tokens."""
        options = self._options
        return capture_id(
            revision=self._revision,
            layers=layers,
            heads=heads,
            mask=mask,
            window=options.tokens_window,
            sinks=options.sink_tokens,
            layout=options.layout,
            windowed=self._windowed,
        )

    def refuser(self, feature: str, said: Callable[[ModelFacts], None]) -> Callable[[str], None]:
        """What is to be called with the reason once a feature has turned out not to be available.

        Args:
            said: is given the facts that hold then.
        """

        def refuse(reason: str) -> None:
            LOG.warning("%s is not available: %s", feature, reason)
            reasons = {**self.facts.reasons, feature: reason}
            self.facts = dataclasses.replace(self.facts, reasons=reasons)
            said(self.facts)

        return refuse

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Find the tags of --reasoning-parser in the model's tokens, and have texts of tokens."""

        @lru_cache(MOST_TEXTS)
        def text(token: int) -> str:
            found: str = tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return found

        self._text = str if tokenizer is None else text
        if tokenizer is None or self._parser not in PARSERS:
            if self._parser:
                LOG.warning("phases of --reasoning-parser %s are not known here", self._parser)
            return

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        def decode(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

        self._tags, self._decode = think_tags(self._parser, encode, decode), decode

    def phases(self, prompt: Sequence[int], *, is_thinking: bool) -> PhaseTracker:
        """Of the tokens that follow a prompt.

        Args:
            is_thinking: whether the engine takes the answer's start for thinking, tag or not, as in
                a chat with a model that thinks by default.
        """
        if self._tags is None or self._decode is None:
            return PhaseTracker(None)
        inside = is_thinking or starts_inside(self._tags.rule, prompt, self._decode)
        return PhaseTracker(self._tags, inside=inside)
