"""Words for tokens: which tokens a cluster's rows stand on more than the run's do.

A row's token is the one that does the looking. Nothing is said of a token, or of a kind of tokens,
unless the lower confidence bound of its lift is well above 1 and enough rows have it: rare tokens
have large lifts by chance.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.tokens import BLANK, LINE_BREAK, TAB, TokenText

from .profiles import TokenCounts
from .words import joined

# Rows of one request are no independent draws, so the bound is a wide one: 3 deviations.
DEVIATIONS = 3.0
LEAST_ROWS, LEAST_SHARE = 10, 0.01
LEAST_LIFT = 1.5
# A pair is named where the rarer has this share of the commoner's rows.
LEAST_OF_PAIR = 0.25
MOST_TOKENS = 8
_PAIRED = 4
_BLANKS = BLANK + TAB
# Kinds of tokens, in the words of a label ("on digits"); traits are on_<kind>.
KINDS = {
    "line_breaks": "at line breaks",
    "blanks": "on blanks",
    "digits": "on digits",
    "number_starts": "on digits after a blank",
    "words": "on words",
    "word_starts": "on word starts",
    "word_parts": "inside words",
    "opening_brackets": "on opening brackets",
    "closing_brackets": "on closing brackets",
    "quotes": "on quotes",
    "punctuation": "on punctuation",
    "markers": "on special tokens",
}


class Token(NamedTuple):
    """A token that a cluster has more of than the run; share is of the cluster's rows, in [0, 1],
    and lift is that by the token's share of the run."""

    token_id: int
    text: str | None
    share: float
    lift: float


class TokenGroup(NamedTuple):
    """One token or several that say one thing. `least_lift` is the lower bound of the lift."""

    phrase: str
    kind: str | None
    share: float
    lift: float
    least_lift: float

    @property
    def tells(self) -> float:
        """How much the group says of the cluster: its part of the information in bits."""
        return self.share * float(np.log2(max(self.lift, 1e-9)))


def kinds_of(text: str) -> list[str]:
    """The kinds of a token by its text as `pipeline.tokens.visible` shows it."""
    bare = text.strip(_BLANKS + LINE_BREAK)
    after_blank = text[:1] in _BLANKS
    if not bare:
        return ["line_breaks" if LINE_BREAK in text else "blanks"] if text else []
    if len(bare) > 2 and bare[0] + bare[-1] in ("<>", "[]") and any(map(str.isalpha, bare)):
        return ["markers"]
    if bare.isdecimal():
        return ["digits", "number_starts"] if after_blank else ["digits"]
    if bare[0].isalnum() or bare[0] == "_":
        return ["words", "word_starts" if after_blank else "word_parts"]
    for kind, signs in (
        ("opening_brackets", "([{"),
        ("closing_brackets", ")]}"),
        ("quotes", "\"'`“”‘’«»"),
    ):
        if all(sign in signs for sign in bare):
            return [kind, "punctuation"]
    return [] if "\\" in bare or bare.endswith("…") else ["punctuation"]


class RunTokens:
    """The tokens of a run, each with its text and kinds, against which clusters are held.

    Args:
        counts: of the whole run.
        token_text: text of a token id as `pipeline.tokens.visible` shows it, or None.
    """

    def __init__(self, counts: TokenCounts, token_text: TokenText) -> None:
        self.counts = counts
        self.texts = [token_text(int(i)) for i in counts.ids]
        self._kinds = np.zeros((len(counts.ids), len(KINDS)), bool)
        order = list(KINDS)
        codes: dict[str, int] = {}
        self._surface = np.empty(len(counts.ids), np.int64)
        for at, text in enumerate(self.texts):
            for kind in kinds_of(text) if text is not None else ():
                self._kinds[at, order.index(kind)] = True
            self._surface[at] = codes.setdefault(self._name(at), len(codes))
        self._surfaces = list(codes)

    def _name(self, at: int) -> str:
        """What a label calls a token: its text, or its id where that is not known."""
        text = self.texts[at]
        if text is None:
            return f"token {self.counts.ids[at]}"
        return f'"{text.strip(_BLANKS) or text}"'

    def tokens(self, counts: TokenCounts) -> list[Token]:
        """The tokens that a cluster has clearly more of, most telling first; at most 8."""
        at = np.searchsorted(self.counts.ids, counts.ids)
        inside, outside = (c.astype(np.float64) for c in (counts.counts, self.counts.counts[at]))
        share, lift, least = self._lifts(inside, outside, counts.rows)
        support = max(LEAST_ROWS, LEAST_SHARE * counts.rows)
        chosen = np.flatnonzero((counts.counts >= support) & (least >= LEAST_LIFT))
        order = np.lexsort((counts.ids[chosen], -share[chosen] * np.log2(lift[chosen])))
        return [
            Token(int(counts.ids[i]), self.texts[at[i]], float(share[i]), float(lift[i]))
            for i in chosen[order][:MOST_TOKENS]
        ]

    def groups(self, counts: TokenCounts) -> list[TokenGroup]:
        """Kinds, single texts and pairs of texts that a cluster has, most telling first."""
        own = np.zeros(len(self.counts.ids), np.int64)
        own[np.searchsorted(self.counts.ids, counts.ids)] = counts.counts
        size = len(self._surfaces)
        surfaces = np.bincount(self._surface, own, size)
        run_surfaces = np.bincount(self._surface, self.counts.counts, size)
        most = np.argsort(-surfaces, kind="stable")[: 2 * MOST_TOKENS]
        names: list[tuple[str, str | None]] = [(f"on {self._surfaces[i]}", None) for i in most]
        inside, outside = list(surfaces[most]), list(run_surfaces[most])
        for one, other in combinations(most[:_PAIRED], 2):
            if surfaces[other] < LEAST_OF_PAIR * surfaces[one]:
                continue
            # In the order of their names, so that a label does not turn with the counts.
            pair = joined(sorted((self._surfaces[one], self._surfaces[other])))
            names.append((f"on {pair}", None))
            inside.append(surfaces[one] + surfaces[other])
            outside.append(run_surfaces[one] + run_surfaces[other])
        for at, (kind, phrase) in enumerate(KINDS.items()):
            names.append((phrase, kind))
            inside.append(own[self._kinds[:, at]].sum())
            outside.append(self.counts.counts[self._kinds[:, at]].sum())
        share, lift, least = self._lifts(np.array(inside), np.array(outside), counts.rows)
        found = [
            TokenGroup(phrase, kind, float(share[i]), float(lift[i]), float(least[i]))
            for i, (phrase, kind) in enumerate(names)
            if inside[i] >= max(LEAST_ROWS, LEAST_SHARE * counts.rows)
        ]
        return sorted(found, key=lambda group: (-group.tells, group.phrase))

    def _lifts(
        self, inside: NDArray[np.float64], outside: NDArray[np.float64], rows: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Share, lift, and the lower bound of the lift (Wilson's interval)."""
        rows = max(rows, 1)
        share = inside / rows
        squared = DEVIATIONS**2 / rows
        middle = share + squared / 2
        half = np.sqrt(squared * (share * (1 - share) + squared / 4))
        low = np.maximum(middle - half, 0) / (1 + squared)
        usual = np.maximum(outside, 1e-9) / max(self.counts.rows, 1)
        return share, share / usual, low / usual
