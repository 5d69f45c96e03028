"""Clusters in words: a label, traits and a sentence, from the profile of each.

Labels are short and unique in a run. A label that a cluster had in the parent run is kept for as
long as it could still be given, were every threshold a little lower or higher.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, count
from typing import Any, NamedTuple

from capture_kernels.fingerprint.vector import LAYERED_BAND_EDGES, Layout
from pipeline.token_text import TokenText

from .claims import BAND_TRAITS, PHASE_WORDS, SUBJECTS, TRAITS, WEAKER, Claim, claims
from .focus import eased_phrases, focus_phrases, unusual_mass
from .profiles import ENTROPY, Profile, Profiles
from .ranges import bumps, joined, ranges_in_words, shape_bins, shortest_half, token_range
from .token_lift import LEAST_LIFT, RunTokens, Token, TokenGroup

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
        token_text: text of a token id, as `pipeline.token_text.open_tokens` returns it.
        earlier: by index of the cluster in `profiles`; clusters without a predecessor are absent.
    """
    layout, run = profiles.layout, profiles.run()
    run_tokens = RunTokens(run.tokens, token_text)
    found = [profiles.cluster(index) for index in range(profiles.clusters)]
    groups = [run_tokens.groups(profile.tokens) for profile in found]
    claimed = [list(claims(found[i], run, own, layout)) for i, own in enumerate(groups)]
    labels = _labels(found, claimed, layout, earlier)
    return [
        Described(
            labels[index],
            traits_of(claimed[index], earlier[index].traits if index in earlier else ()),
            sentence(profile, run, groups[index], layout),
            run_tokens.tokens(profile.tokens),
        )
        for index, profile in enumerate(found)
    ]


def traits_of(claimed: list[Claim], had: Collection[str] = ()) -> list[str]:
    """Traits with a margin of 0, or -1 for one that it `had`; in the order of `TRAITS`."""
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
        focus = focus_phrases(found[index], layout)[0]
        taken[_new_label(focus, claimed[index], taken, claimed)] = index
    return sorted(taken, key=taken.__getitem__)


def _still_describes(label: str, profile: Profile, claimed: list[Claim], layout: Layout) -> bool:
    """Whether a label is a focus and claims that hold, with some slack, for this profile."""
    focus = "|".join(map(re.escape, eased_phrases(profile, layout)))
    phrases = "|".join(re.escape(f", {c.phrase}") for c in claimed if c.phrase and c.margin >= -1)
    # A number that made the label unique claims nothing.
    return bool(re.fullmatch(rf"({focus})({phrases})*( \(\d+\))?", label))


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
    numbered = (f"{label} ({number})" for number in count(2))
    return next(unique for unique in chain([label], numbered) if unique not in taken)


def sentence(profile: Profile, run: Profile, groups: list[TokenGroup], layout: Layout) -> str:
    """One cluster: where and how widely it looks, what is unusual in that, its tokens and phases;
    `run` is the profile of all rows."""
    parts = [_focus(profile, layout), ", ".join(_unusual_ranges(profile, layout))]
    if profile.oldest - profile.usual_oldest >= 0.08:
        parts.append(
            f"{profile.oldest:.0%} on the oldest tokens it can see "
            f"(usual {profile.usual_oldest:.0%})"
        )
    parts += [*_tokens(groups), *_phases(profile, run)]
    return "; ".join(filter(None, parts)) + "."


def _focus(profile: Profile, layout: Layout) -> str:
    mass = profile.centroid[shape_bins(layout)]
    half = shortest_half(mass)
    text = f"{half.mass(mass):.0%} of its attention lies {ranges_in_words([half], layout)}"
    entropy, usual = profile.centroid[ENTROPY], profile.usual[ENTROPY]
    if layout is Layout.LAYERED:
        text += f" ({profile.centroid[0]:.0%} within {LAYERED_BAND_EDGES[0]} tokens)"
        return f"{text}, entropy {entropy:.2f} ({usual:.2f} is usual)"
    keys = 2**profile.log2_keys
    # Two digits are more than an effective number of tokens deserves.
    rounded = round(keys, min(0, 2 - len(str(int(keys)))))
    over = "on one token" if keys < 1.5 else f"spread over about {rounded:,.0f} tokens"
    context = f"{usual:.2f} is usual with as much context"
    return f"{text}, {over}, entropy {entropy:.2f} ({context})"


def _unusual_ranges(profile: Profile, layout: Layout) -> Iterator[str]:
    """The ranges with more and with less mass than usual, from a difference of 3% of the mass."""
    log16 = layout is Layout.LOG16
    bins = shape_bins(layout)
    mass, usual = profile.centroid[bins], profile.usual[bins]
    unusual = unusual_mass(profile, layout)
    for word, heights in (("more than usual", unusual), ("less", -unusual)):
        ranges = [r for r in bumps(heights, 0.4, 2) if abs(r.mass(mass) - r.mass(usual)) >= 0.03]
        cells = [
            f"{token_range(r) if log16 else ranges_in_words([r], layout)}"
            f" ({r.mass(mass):.0%}, usual {r.mass(usual):.0%})"
            for r in sorted(ranges)
        ]
        if cells:
            yield f"{word} {joined(cells)}{' tokens back' if log16 else ''}"


def _tokens(groups: list[TokenGroup]) -> Iterator[str]:
    real = [g for g in groups if g.least_lift >= LEAST_LIFT and g.share >= 0.12]
    # The first that most of the rows have, or else the most informative.
    for best in sorted(real, key=lambda g: g.share < 0.5)[:1]:
        often = "mostly" if best.share >= 0.5 else "often"
        lift = f"{best.lift:.1f} times the run's"
        yield f"{often} {best.phrase} ({best.share:.0%} of its rows, {lift})"


def _phases(profile: Profile, run: Profile) -> Iterator[str]:
    for phase, share in profile.phases.items():
        usual = run.phases[phase]
        if share - usual >= 0.2 or (share >= 0.1 and share >= 2 * usual):
            yield f"{share:.0%} of its rows {PHASE_WORDS[phase]} ({usual:.0%} of the run's)"


def event_in_words(
    event: Mapping[str, Any], labels: Mapping[int, str], parent_labels: Mapping[int, str]
) -> str:
    """One of `discovery.algorithms.lineage.events` as a sentence, with the labels by id of this
    run's clusters and of the parent's, and whether it may be chance."""
    kind, cluster = event["event"], event["cluster_id"]
    gone = kind in ("died", "absorbed")
    name = f"{cluster} ({(parent_labels if gone else labels)[cluster]})"
    parents = [f"{parent} ({parent_labels[parent]})" for parent in event["parents"]]
    children = [f"{child} ({labels[child]})" for child in event["children"]]
    words = {
        "kept": "went on",
        "thinned": f"lost a part: hardly any rows are where {event.get('lost', 0):.0%} of it was",
        "merged": f"took in {' and '.join(parents[1:])}",
        "split": f"came off {''.join(parents[:1])}",
        "born": "is new",
        "absorbed": f"is now part of {''.join(children)}",
        "died": "is gone",
    }
    uncertain = ""
    if event.get("perhaps_chance"):
        rests = f"of {event['requests']:g} requests"
        if event["stability"] is not None:
            rests += f", stability {event['stability']:.2f}"
        uncertain = f", perhaps by chance ({rests})"
    return f"{name} {words[kind]}{uncertain}"


def what_clusters_are(stage: Mapping[str, Any]) -> str:
    """A sentence on what the clusters of a run are, of the manifest's summary of its stage; empty
    where that does not say how far trees of two halves of the requests agree."""
    agree = stage.get("halves_agree")
    if agree is None:
        return ""
    if stage.get("regions"):
        families = " Families are what the same requests do." if stage.get("by_requests") else ""
        return (
            "Clusters are regions of a continuum: groupings of two halves of the requests agree by "
            f"{agree:.2f} only (1 is the same).{families}"
        )
    return (
        "Clusters are groups that other requests have as well: groupings of two halves of them "
        f"agree by {agree:.2f} (1 is the same)."
    )
