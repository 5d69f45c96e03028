"""Token lift: which tokens a cluster's rows stand on more often than the run's do.

A row's token is the one whose attention it records. A token, or a kind of tokens, is named only if
the lower confidence bound of its lift is well above 1 and enough rows have it: rare tokens have
large lifts by chance.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles
from pipeline.token_text import BLANK, LINE_BREAK, TAB, TokenText

from .profiles import TokenCounts
from .ranges import joined

# Rows of one request are not independent, so the bound is a wide one: 3 standard deviations.
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
    """A token that a cluster has more often than the run.

    share: of the cluster's rows, in [0, 1]; lift: share divided by the token's share of the run.
    """

    token_id: int
    text: str | None
    share: float
    lift: float


class TokenGroup(NamedTuple):
    """One token or several with one phrase. `least_lift` is the lower bound of the lift."""

    phrase: str
    kind: str | None
    share: float
    lift: float
    least_lift: float


def kinds_of(text: str) -> list[str]:
    """The kinds of a token by its text as `pipeline.token_text.visible` shows it."""
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
    signs = {"opening_brackets": "([{", "closing_brackets": ")]}", "quotes": "\"'`“”‘’«»"}
    for kind, of_kind in signs.items():
        if all(sign in of_kind for sign in bare):
            return [kind, "punctuation"]
    return [] if "\\" in bare or bare.endswith("…") else ["punctuation"]


class RunTokens:
    """The tokens of a run with their texts and kinds, which clusters are compared with. `counts`
    are of the whole run; `token_text` as `pipeline.token_text.open_tokens` returns it."""

    def __init__(self, counts: TokenCounts, token_text: TokenText) -> None:
        self.counts = counts
        self.texts = [token_text(int(i)) for i in counts.ids]
        # What a label calls a token: its text, or its id where that is unknown.
        names = [
            f"token {token}" if text is None else f'"{text.strip(_BLANKS) or text}"'
            for token, text in zip(counts.ids, self.texts, strict=True)
        ]
        self._surfaces = list(dict.fromkeys(names))
        codes = {name: code for code, name in enumerate(self._surfaces)}
        self._surface = np.array([codes[name] for name in names], np.int64)
        kinds = [kinds_of(text) if text is not None else () for text in self.texts]
        self._kinds = np.array([[k in own for k in KINDS] for own in kinds], bool)
        self._kinds = self._kinds.reshape(-1, len(KINDS))

    def tokens(self, counts: TokenCounts) -> list[Token]:
        """The tokens that a cluster has clearly more often, most informative first; at most 8."""
        index = np.searchsorted(self.counts.ids, counts.ids)
        inside, outside = (c.astype(np.float64) for c in (counts.counts, self.counts.counts[index]))
        share, lift, least = self._lifts(inside, outside, counts.rows)
        support = max(LEAST_ROWS, LEAST_SHARE * counts.rows)
        chosen = np.flatnonzero((counts.counts >= support) & (least >= LEAST_LIFT))
        order = np.lexsort((counts.ids[chosen], -share[chosen] * np.log2(lift[chosen])))
        return [
            Token(int(counts.ids[i]), self.texts[index[i]], float(share[i]), float(lift[i]))
            for i in chosen[order][:MOST_TOKENS]
        ]

    def groups(self, counts: TokenCounts) -> list[TokenGroup]:
        """Kinds, single texts and pairs of texts that a cluster has, most informative first."""
        own = np.zeros(len(self.counts.ids), np.int64)
        own[np.searchsorted(self.counts.ids, counts.ids)] = counts.counts
        size = len(self._surfaces)
        surfaces = np.bincount(self._surface, own, size)
        run_surfaces = np.bincount(self._surface, self.counts.counts, size)
        most = np.argsort(-surfaces, kind="stable")[: 2 * MOST_TOKENS]
        # Phrase, kind, rows of the cluster and rows of the run.
        found: list[tuple[str, str | None, float, float]]
        found = [(f"on {self._surfaces[i]}", None, surfaces[i], run_surfaces[i]) for i in most]
        for one, other in combinations(most[:_PAIRED], 2):
            if surfaces[other] >= LEAST_OF_PAIR * surfaces[one]:
                # Sorted by name, so that a label does not change with the order of the counts.
                pair = joined(sorted((self._surfaces[one], self._surfaces[other])))
                rows, run_rows = (
                    rows_of[[one, other]].sum() for rows_of in (surfaces, run_surfaces)
                )
                found.append((f"on {pair}", None, rows, run_rows))
        for (kind, phrase), members in zip(KINDS.items(), self._kinds.T, strict=True):
            found.append((phrase, kind, own[members].sum(), self.counts.counts[members].sum()))
        phrases, kinds, inside, outside = zip(*found, strict=True)
        lifts = self._lifts(np.array(inside), np.array(outside), counts.rows)
        least_rows = max(LEAST_ROWS, LEAST_SHARE * counts.rows)
        groups = [
            TokenGroup(phrase, kind, *map(float, of_group))
            for phrase, kind, rows, *of_group in zip(phrases, kinds, inside, *lifts, strict=True)
            if rows >= least_rows
        ]
        # In bits a row: share times log2 of the lift.
        return sorted(groups, key=lambda g: (-g.share * np.log2(max(g.lift, 1e-9)), g.phrase))

    def _lifts(
        self, inside: Doubles, outside: Doubles, rows: int
    ) -> tuple[Doubles, Doubles, Doubles]:
        """Share, lift, and the lower bound of the lift (Wilson 1927), float64[m] each."""
        rows = max(rows, 1)
        share = inside / rows
        squared = DEVIATIONS**2 / rows
        middle = share + squared / 2
        half = np.sqrt(squared * (share * (1 - share) + squared / 4))
        low = np.maximum(middle - half, 0) / (1 + squared)
        usual = np.maximum(outside, 1e-9) / max(self.counts.rows, 1)
        return share, share / usual, low / usual
