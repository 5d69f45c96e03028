"""One sentence on a cluster: what it attends to, and how that differs from the run."""

from __future__ import annotations

from collections.abc import Iterator

from capture_kernels.fingerprint.vector import LAYERED_BAND_EDGES, Layout

from .claims import PHASE_WORDS
from .focus import unusual_mass
from .profiles import ENTROPY, Profile
from .ranges import bumps, joined, ranges_in_words, shape_bins, shortest_half, token_range
from .token_lift import LEAST_LIFT, TokenGroup


def sentence(profile: Profile, run: Profile, groups: list[TokenGroup], layout: Layout) -> str:
    """Where and how widely the cluster looks, what is unusual in that, its tokens and phases.

    Args:
        profile, run: of the cluster, and of all rows.
        groups: the cluster's tokens, from `RunTokens.groups`.
    """
    parts = [
        _focus(profile, layout),
        ", ".join(_unusual_ranges(profile, layout)),
        _oldest(profile),
        _tokens(groups),
        *_phases(profile, run),
    ]
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
    over = "on one token" if keys < 1.5 else f"spread over about {_round(keys)} tokens"
    context = f"{usual:.2f} is usual with as much context"
    return f"{text}, {over}, entropy {entropy:.2f} ({context})"


def _round(number: float) -> str:
    """Two digits, which is more than an effective number of tokens deserves."""
    digits = max(0, len(str(int(number))) - 2)
    return f"{round(number, -digits):,.0f}"


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


def _oldest(profile: Profile) -> str | None:
    if profile.oldest - profile.usual_oldest < 0.08:
        return None
    return (
        f"{profile.oldest:.0%} on the oldest tokens it can see (usual {profile.usual_oldest:.0%})"
    )


def _tokens(groups: list[TokenGroup]) -> str | None:
    real = [g for g in groups if g.least_lift >= LEAST_LIFT and g.share >= 0.12]
    if not real:
        return None
    best = next((g for g in real if g.share >= 0.5), real[0])
    often = "mostly" if best.share >= 0.5 else "often"
    return f"{often} {best.phrase} ({best.share:.0%} of its rows, {best.lift:.1f} times the run's)"


def _phases(profile: Profile, run: Profile) -> Iterator[str]:
    for phase, share in profile.phases.items():
        usual = run.phases[phase]
        if share - usual >= 0.2 or (share >= 0.1 and share >= 2 * usual):
            yield f"{share:.0%} of its rows {PHASE_WORDS[phase]} ({usual:.0%} of the run's)"
