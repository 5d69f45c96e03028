"""Clusters in words: a label, traits and a sentence, from the profile of each.

Labels are short and unique in a run. A label that a cluster had in the parent run is kept for as
long as it could still be given, were every threshold a little lower or higher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from capture_kernels.fingerprint.vector import Layout
from pipeline.token_text import TokenText

from .claims import BAND_TRAITS, SUBJECTS, TRAITS, WEAKER, Claim, claims
from .focus import focus_phrase, focus_phrases
from .profiles import Profile, Profiles
from .sentence import sentence
from .token_lift import RunTokens, Token

# Most claims of a label that is unique with them.
MOST_WORDS = 2


class Earlier(NamedTuple):
    """Label and traits of the parent run's cluster with the same id."""

    label: str
    traits: list[str]


class Described(NamedTuple):
    """A cluster in words. `traits` are keys of `discovery.describe.claims.TRAITS`."""

    label: str
    traits: list[str]
    says: str
    tokens: list[Token]


def describe_clusters(
    profiles: Profiles, token_text: TokenText, earlier: Mapping[int, Earlier]
) -> list[Described]:
    """Words for every cluster of a run, in the order of the profiles.

    Args:
        profiles: of all rows of the run.
        token_text: text of a token id, as `pipeline.token_text.open_tokens` returns it.
        earlier: by index of the cluster in `profiles`; clusters without a predecessor are absent.
    """
    layout, run = profiles.layout, profiles.run()
    run_tokens = RunTokens(run.tokens, token_text)
    found = [profiles.cluster(index) for index in range(profiles.clusters)]
    groups = [run_tokens.groups(profile.tokens) for profile in found]
    claimed = [
        claims(profile, run, own, layout) for profile, own in zip(found, groups, strict=True)
    ]
    labels = _labels(found, claimed, layout, earlier)
    return [
        Described(
            labels[index],
            _traits(claimed[index], earlier.get(index)),
            sentence(profile, run, groups[index], layout),
            run_tokens.tokens(profile.tokens),
        )
        for index, profile in enumerate(found)
    ]


def _traits(claimed: list[Claim], earlier: Earlier | None) -> list[str]:
    """Traits with a margin of 0, or -1 where the cluster had them; in the order of `TRAITS`."""
    had = set(earlier.traits) if earlier else set()
    made = {c.trait for c in claimed if c.trait and c.margin >= -(c.trait in had)}
    if made.isdisjoint(BAND_TRAITS):
        made.add("mixed_range")
    return [trait for trait in TRAITS if trait in made]


def _labels(
    found: list[Profile],
    claimed: list[list[Claim]],
    layout: Layout,
    earlier: Mapping[int, Earlier],
) -> list[str]:
    taken: dict[str, int] = {}
    for index in sorted(earlier):
        label = earlier[index].label
        if label not in taken and _still_describes(label, found[index], claimed[index], layout):
            taken[label] = index
    # The largest cluster gets the shortest label.
    rest = set(range(len(found))) - set(taken.values())
    for index in sorted(rest, key=lambda i: (-found[i].size, i)):
        focus = focus_phrase(found[index], layout)
        taken[_new_label(focus, claimed[index], taken, claimed)] = index
    return sorted(taken, key=taken.__getitem__)


def _still_describes(label: str, profile: Profile, claimed: list[Claim], layout: Layout) -> bool:
    """Whether a label is a focus and claims that hold, with some slack, for this profile."""
    phrases = {f", {c.phrase}" for c in claimed if c.phrase and c.margin >= -1}

    def rest_holds(rest: str) -> bool:
        # A number that made the label unique claims nothing.
        if not rest or (rest.startswith(" (") and rest[2:-1].isdecimal() and rest[-1] == ")"):
            return True
        return _holds_after(rest, phrases)

    def _holds_after(text: str, starts: Iterable[str]) -> bool:
        return any(rest_holds(text[len(words) :]) for words in starts if text.startswith(words))

    return _holds_after(label, focus_phrases(profile, layout))


def _new_label(
    focus: str, claimed: list[Claim], taken: Mapping[str, int], all_claimed: list[list[Claim]]
) -> str:
    made = [claim for claim in claimed if claim.phrase and claim.margin >= 0]
    first = (next((c for c in made if c.subject == subject), None) for subject in SUBJECTS)
    words = [claim for claim in first if claim][:MOST_WORDS]
    while (label := ", ".join([focus, *(c.phrase or "" for c in words)])) in taken:
        theirs = {c.phrase for c in all_claimed[taken[label]] if c.margin >= -1}
        used = {claim.subject for claim in words}
        # What both clusters have would not distinguish them.
        fresh = (c for c in made if c.phrase not in theirs and c.subject not in used)
        best = next((c for c in fresh if WEAKER.get(c.subject) not in used), None)
        if best is None:
            break
        words.append(best)
    unique, number = label, 2
    while unique in taken:
        unique = f"{label} ({number})"
        number += 1
    return unique
