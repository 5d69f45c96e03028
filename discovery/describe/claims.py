"""Claims: what may be said of a cluster, each with its margin from not being true.

A claim is made where its margin is at least 0. One that was made in the parent run is kept down to
a margin of -1, so that small drift changes neither label nor traits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from capture_kernels.fingerprint.vector import DEPTHS, HIST_BINS, LAYERED_BAND_EDGES, Layout
from capture_kernels.fingerprint.zones import ripple
from pipeline.record import PHASES

from .focus import BUMP_CUT, DIFFUSE, unusual_mass
from .profiles import ENTROPY, Profile
from .ranges import bumps, named_positions, shape_bins, tokens_back
from .token_lift import KINDS, TokenGroup

FOCUSED = 0.3
# Share of the mass that makes a band a trait of the cluster.
BAND_SHARE = 0.5
RIPPLE_SHARE = 0.6
BAND_TRAITS = ("local_attention", "retrieval_heavy", "context_aware")
# What any label may add to where the rows look, most informative first.
SUBJECTS = ("tokens", "start", "band", "width", "phase", "depth")
# A weaker subject adds nothing where the label has the stronger one.
WEAKER = {"often": "tokens", "rather": "width"}
PHASE_WORDS = {"prompt": "in the prompt", "think": "while thinking", "output": "in the answer"}

# Every trait, and what it means for the cluster's mean row. "Usual" is the mean of the run's rows
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
    "periodic": "several ranges, evenly spaced: low ripples are most of the histogram's spectrum",
    "reaches_back": "looks farther back than usual",
    "stays_near": "looks less far back than usual",
    "start_of_context": "more mass than usual on the oldest tokens that are visible (log16)",
    "short_context": "its rows see a quarter of the run's context or less, on average (log16)",
    "long_context": "its rows see four times the run's context or more, on average (log16)",
    **{f"{phase}_phase": f"mostly {phase} rows, far more than the run" for phase in PHASES},
    **{f"on_{kind}": f"mostly rows {phrase}, more than the run" for kind, phrase in KINDS.items()},
}


class Claim(NamedTuple):
    """Something that may be said: its words in a label, its trait, or both."""

    subject: str
    phrase: str | None
    trait: str | None
    margin: float


def claims(
    profile: Profile, run: Profile, groups: list[TokenGroup], layout: Layout
) -> Iterator[Claim]:
    """All claims of a label's further words and of the traits, whatever their margin; of one
    subject the most informative first. `run` is the profile of all rows."""
    for group in groups:
        margin = min((group.share - 0.5) / 0.1, (group.least_lift - 1.8) / 0.3)
        yield Claim("tokens", group.phrase, group.kind and f"on_{group.kind}", margin)

    bins = shape_bins(layout)
    wave = float(ripple(profile.centroid.astype(np.float32)[None], layout)[0])
    # A single bump is a low ripple too.
    if len(bumps(profile.centroid[bins], BUMP_CUT - 0.1, 2)) < 2:
        wave = 0.0
    yield Claim("ripple", "in waves", "periodic", (wave - RIPPLE_SHARE) / 0.05)
    steps = np.arange(bins.stop - bins.start) * (1 if layout is Layout.LOG16 else -0.5)
    farther = float(steps @ (profile.centroid[bins] - profile.usual[bins]))
    yield Claim("reach", None, "reaches_back", (farther - 0.5) / 0.15)
    yield Claim("reach", None, "stays_near", (-farther - 0.5) / 0.15)
    if layout is Layout.LOG16:
        oldest = (profile.oldest - profile.usual_oldest - 0.08) / 0.03
        yield Claim("start", "toward the start of the context", "start_of_context", oldest)
        longer = float(np.arange(HIST_BINS) @ (profile.octaves - run.octaves))
        yield Claim("context", None, "short_context", (-longer - 2) / 0.3)
        yield Claim("context", None, "long_context", (longer - 2) / 0.3)

    entropy, usual = float(profile.centroid[ENTROPY]), float(profile.usual[ENTROPY])
    yield Claim("width", "sharp", "focused", (FOCUSED - entropy) / 0.03)
    yield Claim("width", "diffuse", "diffuse", (entropy - DIFFUSE) / 0.05)
    wider = entropy - usual
    yield Claim("width", "wide", "wide", (wider - 0.08) / 0.03)
    yield Claim("width", "narrow", "narrow", (-wider - 0.08) / 0.03)

    near, far = LAYERED_BAND_EDGES
    words = (f"within {near} tokens", f"{near}-{far - 1} tokens back", f"{far} or more tokens back")
    for band, (trait, phrase) in enumerate(zip(BAND_TRAITS, words, strict=True)):
        share = float(profile.centroid[band])
        yield Claim("bands", None, trait, (share - BAND_SHARE) / 0.03)
        # In log16 the label begins with a distance already.
        if layout is Layout.LAYERED:
            unusual = share - float(profile.usual[band])
            margin = min((share - BAND_SHARE) / 0.05, (unusual - 0.15) / 0.05)
            yield Claim("band", phrase, None, margin)

    for phase, share in profile.phases.items():
        margin = min((share - 0.5) / 0.08, (share - run.phases[phase] - 0.2) / 0.08)
        yield Claim("phase", PHASE_WORDS[phase], f"{phase}_phase", margin)

    if layout is Layout.LAYERED:
        # Wider than usual in one half of the layers, narrower in the other.
        unusual_depths = (profile.centroid - profile.usual)[-DEPTHS:]
        early, late = unusual_depths.reshape(2, -1).mean(axis=1)
        tilt = float(early - late)
        yield Claim("depth", "widest in the early layers", None, (tilt - 0.1) / 0.03)
        yield Claim("depth", "widest in the late layers", None, (-tilt - 0.1) / 0.03)

    # What is used only to distinguish two clusters.
    for group in groups:
        margin = min((group.share - 0.12) / 0.04, (group.least_lift - 1.7) / 0.3)
        yield Claim("often", f"often {group.phrase}", None, margin)
    for gap in bumps(-unusual_mass(profile, layout), 0.5, 2):
        lack = gap.mass(profile.usual[bins]) - gap.mass(profile.centroid[bins])
        where = tokens_back([gap]) if layout is Layout.LOG16 else named_positions([gap])
        yield Claim("lack", f"hardly {where}", None, (lack - 0.06) / 0.02)
    if layout is Layout.LOG16:
        first = int(np.argmax(profile.octaves[:-1] + profile.octaves[1:]))
        share, usual = (float(p.octaves[first : first + 2].sum()) for p in (profile, run))
        margin = min((share - 0.7) / 0.1, (share - usual - 0.3) / 0.1)
        low = f"{1 if first == 0 else 2**first + 1:,}"
        seen = f"{low}-{2 ** (first + 2):,}" if first < HIST_BINS - 2 else f"{low} or more"
        yield Claim("context", f"in contexts of {seen} tokens", None, margin)
    yield Claim("rather", "rather wide", None, (wider - 0.03) / 0.015)
    yield Claim("rather", "rather narrow", None, (-wider - 0.03) / 0.015)
