"""Claims: what may be said of a cluster, each with how far it is from not being true.

A claim is made where its margin is at least 0. One that was made before is kept down to a margin
of -1, so that small drift changes neither label nor traits.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import DEPTHS, HIST_BINS, LAYERED_BAND_EDGES, Layout
from capture_kernels.fingerprint.zones import ripple
from pipeline.record import PHASES

from .profiles import ENTROPY, Profile
from .tokens import TokenGroup
from .words import Bins, bumps, named_distance, named_places, shape_bins, tokens_back

FOCUSED, DIFFUSE = 0.3, 0.7
# Share of the mass that makes a band a trait of the cluster.
BAND_SHARE = 0.5
RIPPLE_SHARE = 0.6
BAND_TRAITS = ("local_attention", "retrieval_heavy", "context_aware")
# A bump goes on while a bin is this much of the highest.
PLACE_CUT = 0.4
# How thresholds may shift before a label that was given is given up.
CUT_SHIFTS = (-0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2)
EASES = (-1.0, -0.5, 0.0, 0.5, 1.0)
# What every label may say after its place, the most telling first.
SUBJECTS = ("tokens", "start", "band", "width", "phase", "depth")

# Every trait, and what it says of the cluster's mean row. "Usual" is the mean of the run's rows
# with as much context.
TRAITS = {
    "local_attention": "half of the mass or more is local (log16: the last 8 tokens)",
    "retrieval_heavy": "half of the mass or more is in the middle band (log16: 8-255 tokens back)",
    "context_aware": "half of the mass or more is far (log16: 256 or more tokens back)",
    "mixed_range": "no band has half of the mass",
    "focused": "entropy of at most 0.3",
    "diffuse": "entropy of at least 0.7",
    "narrow": "entropy clearly below the usual",
    "wide": "entropy clearly above the usual",
    "periodic": "several places, evenly apart: low ripples are most of the histogram's spectrum",
    "reaches_back": "looks farther back than usual",
    "stays_near": "looks less far back than usual",
    "start_of_context": "more mass than usual on the oldest tokens that are visible (log16)",
    "short_context": "its rows see a quarter of the run's context or less, on average (log16)",
    "long_context": "its rows see four times the run's context or more, on average (log16)",
    **{f"{phase}_phase": f"mostly {phase} rows, far more than the run" for phase in PHASES},
    "on_line_breaks": "mostly rows of line breaks, more than the run; so are all that follow",
    "on_blanks": "of blanks and tabs",
    "on_digits": "of digits",
    "on_number_starts": "of digits after a blank",
    "on_words": "of letters",
    "on_word_starts": "of letters after a blank",
    "on_word_parts": "of letters without a blank before them",
    "on_opening_brackets": "of ( [ {",
    "on_closing_brackets": "of ) ] }",
    "on_quotes": "of quotes",
    "on_punctuation": "of any other signs than letters and digits, brackets and quotes included",
    "on_markers": "of special tokens, as <|eos|>",
}
PHASE_WORDS = {"prompt": "in the prompt", "think": "while thinking", "output": "in the answer"}
# A lesser subject is no news where the label has the greater one.
LESSER = {"often": "tokens", "rather": "width"}


class Claim(NamedTuple):
    """Something that may be said: its words in a label, its trait, or both."""

    subject: str
    phrase: str | None
    trait: str | None
    margin: float


def place_phrase(profile: Profile, layout: Layout) -> str:
    """Where the mean row looks, in the words that a label begins with.

    Up to three narrow places that hold most of the mass, and more than usual, are named as they
    are; else those with clearly more mass than usual are what the rows "lean" to.
    """
    return _places(profile, layout, 0.0, 0.0)[0]


def place_phrases(profile: Profile, layout: Layout) -> set[str]:
    """What `place_phrase` says if its limits are a little lower or higher."""
    said = {
        words
        for shift in CUT_SHIFTS
        for ease in EASES
        for words in _places(profile, layout, shift, ease)
    }
    if any(words.startswith("leans ") for words in said):
        said |= {leaning(p, layout) for p in _near_bumps(unusual_mass(profile, layout))}
    return said


def _near_bumps(heights: NDArray[np.float64]) -> list[list[Bins]]:
    """One place or two that hold every high bin and none that is low: the bumps, whichever of the
    bins near the cut are counted in."""
    top = float(heights.max())
    must, may = (heights >= (PLACE_CUT + shift) * top for shift in (CUT_SHIFTS[-1], CUT_SHIFTS[0]))
    size = len(heights)
    ones = [
        Bins(low, high)
        for low in range(size)
        for high in range(low, size)
        if may[low : high + 1].all()
    ]
    twos = [[a, b] for a, b in combinations(ones, 2) if a.high + 1 < b.low]
    wanted = int(must.sum())
    return [
        places
        for places in ([[one] for one in ones] + twos)
        if sum(int(must[p.low : p.high + 1].sum()) for p in places) == wanted
    ]


def _places(profile: Profile, layout: Layout, shift: float, ease: float) -> list[str]:
    """The places to name, all as good as each other but for the slack.

    Args:
        shift: added to the cuts that end a bump.
        ease: in units of the slack that each limit has, taken off the limits.
    """
    bins = shape_bins(layout)
    mass, usual = profile.centroid[bins], profile.usual[bins]
    halves = [b for b in _narrow(mass.size) if b.mass(mass) >= 0.5 - 0.04 * ease]
    halves.sort(key=lambda b: (b.width, -b.mass(mass)))
    best = halves[0].mass(mass) if halves else 0.0
    halves = [b for b in halves if b.width == halves[0].width]
    halves = [b for b in halves if b.mass(mass) >= best - max(0.08 * ease, 0.0)]
    unusual = [
        b
        for b in halves
        if b.mass(mass - usual) >= 0.25 - 0.04 * ease or b.mass(mass) >= 0.85 - 0.04 * ease
    ]
    if unusual:
        return [held_places([b], layout) for b in unusual]
    several = bumps(mass, PLACE_CUT + shift, 4)
    if (
        2 <= len(several) <= 3
        and all(b.width <= 2 for b in several)
        and sum(b.mass(mass) for b in several) >= 0.6 - 0.04 * ease
        and sum(b.mass(mass - usual) for b in several) >= 0.25 - 0.04 * ease
    ):
        return [held_places(several, layout)]
    excess = unusual_mass(profile, layout)
    leans = [
        b
        for b in bumps(excess, PLACE_CUT + shift, 2)
        if b.mass(mass - usual) >= 0.02 - 0.007 * ease
    ]
    if leans and excess.max() >= 0.04 - 0.01 * ease:
        # Where one more place is come or gone, the chief one is as right as before.
        fewer = [leaning(leans[:1], layout)] if ease > 0 else []
        return [leaning(leans, layout), *fewer]
    if halves:
        return [held_places([b], layout) for b in halves]
    if profile.centroid[ENTROPY] >= DIFFUSE - 0.05 * ease:
        return ["whole context"]
    return ["no one distance" if layout is Layout.LOG16 else "no one place"]


def _narrow(size: int) -> list[Bins]:
    return [Bins(low, low + more) for more in (0, 1) for low in range(size - more)]


def unusual_mass(profile: Profile, layout: Layout) -> NDArray[np.float64]:
    """Where the mean row looks more than usual, float64[16 or 8]: the difference of square roots,
    in which the space of the clusters is measured too."""
    bins = shape_bins(layout)
    roots = np.sqrt(np.maximum([profile.centroid[bins], profile.usual[bins]], 0))
    # Less than rounding is nothing.
    return np.asarray(np.round(roots[0] - roots[1], 6), np.float64)


def held_places(places: list[Bins], layout: Layout) -> str:
    if layout is not Layout.LOG16:
        return named_places(places)
    return named_distance(places[0]) if len(places) == 1 else tokens_back(places)


def leaning(places: list[Bins], layout: Layout) -> str:
    if layout is not Layout.LOG16:
        words = named_places(places)
        return f"leans {words}" if words[0].isdigit() else f"leans to {words}"
    if len(places) > 1:
        return f"leans {tokens_back(places)}"
    words = named_distance(places[0])
    if words.startswith("previous"):
        words = f"the {words}"
    return f"leans on {words}" if words.startswith("the ") else f"leans {words}"


def claims(profile: Profile, run: Profile, groups: list[TokenGroup], layout: Layout) -> list[Claim]:
    """All claims of a label's further words and of the traits, whatever their margin; of one
    subject the more telling first."""
    return [
        *_token_claims(groups),
        *_shape_claims(profile, run, layout),
        *_width_claims(profile),
        *_band_claims(profile, layout),
        *_phase_claims(profile, run),
        *(_depth_claims(profile) if layout is Layout.LAYERED else ()),
        *_lesser_claims(profile, run, groups, layout),
    ]


def _token_claims(groups: list[TokenGroup]) -> list[Claim]:
    return [
        Claim(
            "tokens",
            group.phrase,
            group.kind and f"on_{group.kind}",
            min((group.share - 0.5) / 0.1, (group.least_lift - 1.8) / 0.3),
        )
        for group in groups
    ]


def _shape_claims(profile: Profile, run: Profile, layout: Layout) -> list[Claim]:
    found: list[Claim] = []
    centroid = profile.centroid.astype(np.float32)[None]
    bins = shape_bins(layout)
    # One bump alone is a low ripple too.
    wave = float(ripple(centroid, layout)[0])
    if len(bumps(profile.centroid[bins], PLACE_CUT - 0.1, 2)) < 2:
        wave = 0.0
    found.append(Claim("ripple", "in waves", "periodic", (wave - RIPPLE_SHARE) / 0.05))
    steps = np.arange(bins.stop - bins.start) * (1 if layout is Layout.LOG16 else -0.5)
    farther = float(steps @ (profile.centroid[bins] - profile.usual[bins]))
    found.append(Claim("reach", None, "reaches_back", (farther - 0.5) / 0.15))
    found.append(Claim("reach", None, "stays_near", (-farther - 0.5) / 0.15))
    if layout is Layout.LOG16:
        oldest = (profile.oldest - profile.usual_oldest - 0.08) / 0.03
        words = "toward the start of the context"
        found.append(Claim("start", words, "start_of_context", oldest))
        longer = float(np.arange(HIST_BINS) @ (profile.octaves - run.octaves))
        found.append(Claim("context", None, "short_context", (-longer - 2) / 0.3))
        found.append(Claim("context", None, "long_context", (longer - 2) / 0.3))
    return found


def _width_claims(profile: Profile) -> list[Claim]:
    entropy, usual = float(profile.centroid[ENTROPY]), float(profile.usual[ENTROPY])
    return [
        Claim("width", "sharp", "focused", (FOCUSED - entropy) / 0.03),
        Claim("width", "diffuse", "diffuse", (entropy - DIFFUSE) / 0.05),
        Claim("width", "wide", "wide", (entropy - usual - 0.08) / 0.03),
        Claim("width", "narrow", "narrow", (usual - entropy - 0.08) / 0.03),
    ]


def _band_claims(profile: Profile, layout: Layout) -> list[Claim]:
    near, far = LAYERED_BAND_EDGES
    # In log16 the place says it already.
    words: tuple[str | None, ...] = (None, None, None)
    if layout is Layout.LAYERED:
        words = (
            f"within {near} tokens",
            f"{near}-{far - 1} tokens back",
            f"{far} or more tokens back",
        )
    found = []
    for at, trait in enumerate(BAND_TRAITS):
        share = float(profile.centroid[at])
        unusual = share - float(profile.usual[at])
        found.append(Claim("bands", None, trait, (share - BAND_SHARE) / 0.03))
        if (phrase := words[at]) is not None:
            margin = min((share - BAND_SHARE) / 0.05, (unusual - 0.15) / 0.05)
            found.append(Claim("band", phrase, None, margin))
    return found


def _phase_claims(profile: Profile, run: Profile) -> list[Claim]:
    return [
        Claim(
            "phase",
            PHASE_WORDS[phase],
            f"{phase}_phase",
            min((share - 0.5) / 0.08, (share - run.phases[phase] - 0.2) / 0.08),
        )
        for phase, share in profile.phases.items()
    ]


def _depth_claims(profile: Profile) -> list[Claim]:
    """Wider than usual in one half of the layers, narrower in the other."""
    unusual = (profile.centroid - profile.usual)[-DEPTHS:]
    tilt = float(unusual[: DEPTHS // 2].mean() - unusual[DEPTHS // 2 :].mean())
    return [
        Claim("depth", "widest in the early layers", None, (tilt - 0.1) / 0.03),
        Claim("depth", "widest in the late layers", None, (-tilt - 0.1) / 0.03),
    ]


def _lesser_claims(
    profile: Profile, run: Profile, groups: list[TokenGroup], layout: Layout
) -> list[Claim]:
    """What is said only to tell two clusters apart, the more telling first."""
    found = [
        Claim(
            "often",
            f"often {group.phrase}",
            None,
            min((group.share - 0.12) / 0.04, (group.least_lift - 1.7) / 0.3),
        )
        for group in groups
    ]
    bins = shape_bins(layout)
    mass, usual = profile.centroid[bins], profile.usual[bins]
    for place in bumps(-unusual_mass(profile, layout), 0.5, 2):
        lack = place.mass(usual) - place.mass(mass)
        where = tokens_back([place]) if layout is Layout.LOG16 else named_places([place])
        found.append(Claim("lack", f"hardly {where}", None, (lack - 0.06) / 0.02))
    if layout is Layout.LOG16:
        first = int(np.argmax(profile.octaves[:-1] + profile.octaves[1:]))
        share = float(profile.octaves[first : first + 2].sum())
        unusual = share - float(run.octaves[first : first + 2].sum())
        words = f"in contexts of {token_range_of_context(first)} tokens"
        found.append(Claim("context", words, None, min((share - 0.7) / 0.1, (unusual - 0.3) / 0.1)))
    entropy = float(profile.centroid[ENTROPY] - profile.usual[ENTROPY])
    found.append(Claim("rather", "rather wide", None, (entropy - 0.03) / 0.015))
    found.append(Claim("rather", "rather narrow", None, (-entropy - 0.03) / 0.015))
    return found


def token_range_of_context(first: int) -> str:
    """How many tokens the rows of two neighbouring octaves see."""
    low = 1 if first == 0 else 2**first + 1
    return f"{low:,} or more" if first + 1 == HIST_BINS - 1 else f"{low:,}-{2 ** (first + 2):,}"
