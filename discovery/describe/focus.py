"""Where the mean row of a cluster looks, in the words that a label begins with."""

from __future__ import annotations

from itertools import chain, combinations, combinations_with_replacement, product

import numpy as np

from capture_kernels.arrays import Doubles
from capture_kernels.fingerprint.vector import Layout

from .profiles import ENTROPY, Profile
from .ranges import Bins, bumps, named_distance, named_positions, shape_bins, tokens_back

# Entropy from which a row without a preferred range is said to see all of the context.
DIFFUSE = 0.7
# A bump extends while a bin has this share of the highest one.
BUMP_CUT = 0.4
# How thresholds may shift before a label that was given is given up.
CUT_SHIFTS = (-0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2)
EASES = (-1.0, -0.5, 0.0, 0.5, 1.0)


def eased_phrases(profile: Profile, layout: Layout) -> set[str]:
    """All that `focus_phrases` returns with its limits a little lower or higher."""
    eased = (focus_phrases(profile, layout, *by) for by in product(CUT_SHIFTS, EASES))
    found = set(chain.from_iterable(eased))
    if any(words.startswith("leans ") for words in found):
        found |= {leaning(p, layout) for p in _near_bumps(unusual_mass(profile, layout))}
    return found


def _near_bumps(heights: Doubles) -> list[list[Bins]]:
    """One range or two that hold every high bin and no low one: the bumps, whichever of the bins
    near the cut are included."""
    top = float(heights.max())
    must, may = (heights >= (BUMP_CUT + shift) * top for shift in (CUT_SHIFTS[-1], CUT_SHIFTS[0]))
    pairs = (Bins(*ends) for ends in combinations_with_replacement(range(len(heights)), 2))
    ones = [b for b in pairs if may[b.low : b.high + 1].all()]
    twos = [[a, b] for a, b in combinations(ones, 2) if a.high + 1 < b.low]
    candidates = [[one] for one in ones] + twos
    return [c for c in candidates if sum(b.mass(must) for b in c) == must.sum()]


def focus_phrases(
    profile: Profile, layout: Layout, shift: float = 0.0, ease: float = 0.0
) -> list[str]:
    """Where the mean row looks, in equally good phrases; the first is the one to use.

    Up to three narrow ranges that hold most of the mass, and more than usual, are named as they
    are; otherwise those with clearly more mass than usual are what the rows "lean" to.

    Args:
        shift: added to the cuts that end a bump.
        ease: taken off the limits, in units of each limit's slack.
    """
    bins = shape_bins(layout)
    mass = profile.centroid[bins]
    more = mass - profile.usual[bins]
    narrow = [Bins(low, low + wide) for wide in (0, 1) for low in range(mass.size - wide)]
    halves = [b for b in narrow if b.mass(mass) >= 0.5 - 0.04 * ease]
    halves.sort(key=lambda b: (b.width, -b.mass(mass)))
    least = halves[0].mass(mass) - max(0.08 * ease, 0.0) if halves else 0.0
    halves = [b for b in halves if b.width == halves[0].width and b.mass(mass) >= least]
    slack = 0.04 * ease
    unusual = [b for b in halves if b.mass(more) >= 0.25 - slack or b.mass(mass) >= 0.85 - slack]
    if unusual:
        return [holding([b], layout) for b in unusual]
    several = bumps(mass, BUMP_CUT + shift, 4)
    if (
        2 <= len(several) <= 3
        and all(b.width <= 2 for b in several)
        and sum(b.mass(mass) for b in several) >= 0.6 - slack
        and sum(b.mass(more) for b in several) >= 0.25 - slack
    ):
        return [holding(several, layout)]
    excess = unusual_mass(profile, layout)
    leans = bumps(excess, BUMP_CUT + shift, 2)
    leans = [b for b in leans if b.mass(more) >= 0.02 - 0.007 * ease]
    if leans and excess.max() >= 0.04 - 0.01 * ease:
        # Where a second range has come or gone, the first alone is as right as before.
        fewer = [leaning(leans[:1], layout)] if ease > 0 else []
        return [leaning(leans, layout), *fewer]
    if halves:
        return [holding([b], layout) for b in halves]
    if profile.centroid[ENTROPY] >= DIFFUSE - 0.05 * ease:
        return ["whole context"]
    return ["no one distance" if layout is Layout.LOG16 else "no one place"]


def unusual_mass(profile: Profile, layout: Layout) -> Doubles:
    """How much more than usual the mean row looks at each bin, float64[16 or 8].

    It is a difference of square roots, as in the PCA that the clusters are found in.
    """
    bins = shape_bins(layout)
    roots = np.sqrt(np.maximum([profile.centroid[bins], profile.usual[bins]], 0))
    # Rounding errors must not make a bump.
    return np.asarray(np.round(roots[0] - roots[1], 6), np.float64)


def holding(ranges: list[Bins], layout: Layout) -> str:
    """Ranges that hold most of the mass: "a line back (8-15 tokens)"."""
    if layout is not Layout.LOG16:
        return named_positions(ranges)
    return named_distance(ranges[0]) if len(ranges) == 1 else tokens_back(ranges)


def leaning(ranges: list[Bins], layout: Layout) -> str:
    """Ranges with more mass than usual: "leans a line back (8-15 tokens)"."""
    words = holding(ranges, layout)
    if layout is not Layout.LOG16:
        return f"leans {words}" if words[0].isdigit() else f"leans to {words}"
    words = words.replace("previous", "the previous")
    return f"leans on {words}" if words.startswith("the ") else f"leans {words}"
