"""Clusters in words: a label, traits and a sentence, from the profile of each.

Labels are unique in a run and short. A label that a cluster had in the parent run is kept for as
long as it could still be given, were every threshold a little lower or higher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from capture_kernels.fingerprint.vector import LAYERED_BAND_EDGES, Layout
from pipeline.tokens import TokenText

from .claims import (
    BAND_TRAITS,
    LESSER,
    PHASE_WORDS,
    SUBJECTS,
    TRAITS,
    Claim,
    claims,
    place_phrase,
    place_phrases,
    unusual_mass,
)
from .profiles import ENTROPY, Profile, Profiles
from .tokens import LEAST_LIFT, RunTokens, Token, TokenGroup
from .words import bumps, joined, places_in_words, shape_bins, shortest_half, token_range

# Further words of a label, after its place, where the place alone is unique.
MOST_WORDS = 2


class Earlier(NamedTuple):
    """What the parent run said of the cluster that has the same id."""

    label: str
    traits: list[str]


class Described(NamedTuple):
    """A cluster in words. `traits` are names in `discovery.describe.claims.TRAITS`."""

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
        token_text: text of a token id, as `pipeline.tokens.open_tokens` gives it.
        earlier: what was said in the parent run, by index of the cluster in `profiles`; clusters
            whose id did not survive are left out.
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
    """Traits whose margin is 0, or -1 where the cluster had them; in the order of `TRAITS`."""
    had = set(earlier.traits) if earlier else set()
    made = {
        claim.trait for claim in claimed if claim.trait and claim.margin >= -(claim.trait in had)
    }
    if made.isdisjoint(BAND_TRAITS):
        made.add("mixed_range")
    return [trait for trait in TRAITS if trait in made]


def _labels(
    found: list[Profile],
    claimed: list[list[Claim]],
    layout: Layout,
    earlier: Mapping[int, Earlier],
) -> list[str]:
    labels: dict[int, str] = {}
    taken: dict[str, int] = {}
    for index in sorted(earlier):
        label = earlier[index].label
        if label not in taken and _still_describes(label, found[index], claimed[index], layout):
            labels[index] = label
            taken[label] = index
    # The largest cluster gets the shortest label.
    rest = (i for i in range(len(found)) if i not in labels)
    for index in sorted(rest, key=lambda i: (-found[i].size, i)):
        label = _new_label(found[index], claimed[index], layout, taken, claimed)
        labels[index] = label
        taken[label] = index
    return [labels[index] for index in range(len(found))]


def _still_describes(label: str, profile: Profile, claimed: list[Claim], layout: Layout) -> bool:
    """Whether a label is a place and claims that hold, with some slack, of this profile."""
    kept = {claim.phrase for claim in claimed if claim.phrase and claim.margin >= -1}

    def rest_holds(rest: str) -> bool:
        # A number that made the label unique says nothing that could be wrong.
        if not rest or (rest.startswith(" (") and rest[2:-1].isdecimal() and rest[-1] == ")"):
            return True
        return any(
            rest_holds(rest[len(words) :])
            for words in (f", {phrase}" for phrase in kept)
            if rest.startswith(words)
        )

    return any(
        rest_holds(label[len(place) :])
        for place in place_phrases(profile, layout)
        if label.startswith(place)
    )


def _new_label(
    profile: Profile,
    claimed: list[Claim],
    layout: Layout,
    taken: dict[str, int],
    all_claimed: list[list[Claim]],
) -> str:
    made = [claim for claim in claimed if claim.phrase and claim.margin >= 0]
    words: list[Claim] = []
    for subject in SUBJECTS:
        first = next((claim for claim in made if claim.subject == subject), None)
        if first and len(words) < MOST_WORDS:
            words.append(first)
    label = _joined(place_phrase(profile, layout), words)
    while label in taken:
        theirs = {c.phrase for c in all_claimed[taken[label]] if c.margin >= -1}
        said = {claim.subject for claim in words}
        # What tells it from the one that has this label; what both have would tell nothing.
        best = next((c for c in made if c.phrase not in theirs and _adds(c, said)), None)
        if best is None:
            break
        words.append(best)
        label = _joined(place_phrase(profile, layout), words)
    number = 2
    unique = label
    while unique in taken:
        unique = f"{label} ({number})"
        number += 1
    return unique


def _adds(claim: Claim, said: set[str]) -> bool:
    return claim.subject not in said and LESSER.get(claim.subject) not in said


def _joined(place: str, words: list[Claim]) -> str:
    return ", ".join([place, *(claim.phrase or "" for claim in words)])


def sentence(profile: Profile, run: Profile, groups: list[TokenGroup], layout: Layout) -> str:
    """What the cluster attends to, and how that differs from the run, in one sentence."""
    parts = [
        _where(profile, layout),
        *_more_and_less(profile, layout),
        *_start(profile),
        *_tokens(groups),
        *_phases(profile, run),
    ]
    return "; ".join(parts) + "."


def _where(profile: Profile, layout: Layout) -> str:
    mass = profile.centroid[shape_bins(layout)]
    half = shortest_half(mass)
    text = f"{half.mass(mass):.0%} of its attention lies {places_in_words([half], layout)}"
    if layout is Layout.LAYERED:
        text += f" ({profile.centroid[0]:.0%} within {LAYERED_BAND_EDGES[0]} tokens)"
    entropy, usual = profile.centroid[ENTROPY], profile.usual[ENTROPY]
    how = f"{usual:.2f} is usual" + (" with as much context" if layout is Layout.LOG16 else "")
    keys = 2**profile.log2_keys
    over = ""
    if layout is Layout.LOG16:
        over = "on one token" if keys < 1.5 else f"spread over about {_round(keys)} tokens"
        over += ", "
    return f"{text}, {over}entropy {entropy:.2f} ({how})"


def _round(number: float) -> str:
    """Two digits, which is more than a count of tokens as if evenly attended deserves."""
    digits = max(0, len(str(int(number))) - 2)
    return f"{round(number, -digits):,.0f}"


def _more_and_less(profile: Profile, layout: Layout) -> list[str]:
    """The places with more and with less mass than usual, where that is 3% of the mass or more."""
    bins = shape_bins(layout)
    mass, usual = profile.centroid[bins], profile.usual[bins]
    unusual = unusual_mass(profile, layout)
    said = []
    for word, heights in (("more than usual", unusual), ("less", -unusual)):
        places = [
            place
            for place in bumps(heights, 0.4, 2)
            if abs(place.mass(mass) - place.mass(usual)) >= 0.03
        ]
        if places:
            log16 = layout is Layout.LOG16
            cells = [
                f"{token_range(p) if log16 else places_in_words([p], layout)}"
                f" ({p.mass(mass):.0%}, usual {p.mass(usual):.0%})"
                for p in sorted(places)
            ]
            said.append(f"{word} {joined(cells)}{' tokens back' if log16 else ''}")
    return [", ".join(said)] if said else []


def _start(profile: Profile) -> list[str]:
    if profile.oldest - profile.usual_oldest < 0.08:
        return []
    return [
        f"{profile.oldest:.0%} on the oldest tokens it can see (usual {profile.usual_oldest:.0%})"
    ]


def _tokens(groups: list[TokenGroup]) -> list[str]:
    real = [g for g in groups if g.least_lift >= LEAST_LIFT and g.share >= 0.12]
    if not real:
        return []
    best = next((g for g in real if g.share >= 0.5), real[0])
    often = "mostly" if best.share >= 0.5 else "often"
    return [
        f"{often} {best.phrase} ({best.share:.0%} of its rows, {best.lift:.1f} times the run's)"
    ]


def _phases(profile: Profile, run: Profile) -> list[str]:
    said = []
    for phase, share in profile.phases.items():
        usual = run.phases[phase]
        if share - usual >= 0.2 or (share >= 0.1 and share >= 2 * usual):
            said.append(f"{share:.0%} of its rows {PHASE_WORDS[phase]} ({usual:.0%} of the run's)")
    return said
