"""Behaviours drawn at random, each far enough from the others that rows can show which it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import Layout

from .attention import Behaviour, Form, Head, Part, vector_of

# Steps along a family that are looked at.
STEPS = 7
# Draws after which a recipe asks for more behaviours than there is room for.
MOST_DRAWS = 6_000
LAYERS = 4


def draw_behaviour(
    rng: np.random.Generator, reach: float, layout: Layout, sparse: bool, drift: float = 0.0
) -> Behaviour:
    """A behaviour of one or two heads whose centres lie within 2^reach tokens.

    Args:
        drift: of a family; one of that kind has one part that matters, which the family moves.
    """
    if layout is Layout.LAYERED:
        return Behaviour(tuple((draw_head(rng, reach, layout),) for _ in range(LAYERS)), drift)
    if drift:
        centre = rng.uniform(0.5 * drift, reach - 0.5 * drift)
        form: Form = "bump" if rng.random() < 0.6 else "decay"
        part = Part(form, centre, float(rng.uniform(0.3, 0.8)), 0.97)
        heads = [Head((part, Part("flat", 0.0, 0.0, 0.03)), float(rng.uniform(0.2, 0.8)))]
    else:
        heads = [draw_head(rng, reach, layout) for _ in range(int(rng.integers(1, 3)))]
    return Behaviour((tuple(heads),), drift, int(rng.integers(4, 13)) if sparse else None)


def draw_head(rng: np.random.Generator, reach: float, layout: Layout) -> Head:
    """One to three parts, and a thin tail over all keys, as a softmax leaves it."""
    count = int(rng.integers(1, 4))
    tail = 10.0 ** rng.uniform(-4, -1.5)
    shares = rng.dirichlet(np.full(count, 2.0)) * (1.0 - tail)
    parts = [draw_part(rng, reach, layout, float(share)) for share in shares]
    return Head((*parts, Part("flat", 0.0, 0.0, tail)), float(rng.uniform(0.2, 1.2)))


def draw_part(rng: np.random.Generator, reach: float, layout: Layout, share: float) -> Part:
    # The layered layout sees relative places; log16 sees distances.
    weights = (4, 1, 1, 1, 1) if layout is Layout.LOG16 else (2, 1, 0, 5, 1)
    forms: tuple[Form, ...] = ("bump", "decay", "comb", "place", "flat")
    form = forms[int(rng.choice(len(forms), p=np.array(weights) / sum(weights)))]
    if form == "bump":
        return Part(form, float(rng.uniform(0, reach)), float(rng.uniform(0.25, 1.2)), share)
    if form == "decay":
        return Part(form, float(rng.uniform(0, reach - 1.5)), 0.0, share)
    if form == "comb":
        centre = float(rng.uniform(1, min(6, reach - 1)))
        return Part(form, centre, float(rng.uniform(0.5, 3)), share)
    if form == "place":
        return Part(form, float(rng.uniform(0.05, 0.95)), float(rng.uniform(0.02, 0.1)), share)
    return Part("flat", 0.0, 0.0, share)


def variants(behaviour: Behaviour, lengths: Sequence[int], layout: Layout) -> NDArray[np.float64]:
    """The rows that a behaviour is expected to have, along its drift, by length: float64[v, 20]."""
    steps = np.linspace(-0.5, 0.5, STEPS) * behaviour.drift if behaviour.drift else [0.0]
    return np.array([vector_of(behaviour, n, layout, octaves=s) for n in lengths for s in steps])


def apart(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """How far the two nearest of two sets of vectors float64[v, 20] are from each other: half the
    sum of the absolute differences of shares, which are in no other measure's unit, and of
    entropies."""
    return float(0.5 * np.abs(a[:, None, 3:] - b[None, :, 3:]).sum(axis=2).min())


def draw_behaviours(
    rng: np.random.Generator,
    count: int,
    *,
    shortest: int,
    longest: int,
    least_apart: float,
    layout: Layout = Layout.LOG16,
    sparse: bool = False,
    families: int = 0,
    drift: float = 4.0,
    diffuse: bool = False,
) -> list[Behaviour]:
    """`count` behaviours, the first `families` of which are families; rows of two of them differ by
    `least_apart` at least, at any lengths from `shortest` to `longest`.

    Args:
        diffuse: one of the families is attention to all keys alike, which the length alone moves.

    Raises:
        ValueError: there is no room for so many.
    """
    lengths = sorted({shortest, round(math.sqrt(shortest * longest)), longest})
    reach = math.log2(shortest) - 0.5
    kept: list[Behaviour] = []
    seen: list[NDArray[np.float64]] = []
    if diffuse:
        kept.append(Behaviour(((Head((Part("flat", 0.0, 0.0, 1.0),), 0.6),),)))
        # Every octave of lengths between: a family of its own kind.
        many = np.geomspace(shortest, longest, STEPS).astype(int).tolist()
        seen.append(variants(kept[0], many, layout))
    for _ in range(MOST_DRAWS):
        if len(kept) == count:
            return kept
        own = drift if len(kept) < families else 0.0
        one = draw_behaviour(rng, reach, layout, sparse, own)
        found = variants(one, lengths, layout)
        if all(apart(found, other) >= least_apart for other in seen):
            kept.append(one)
            seen.append(found)
    if len(kept) == count:
        return kept
    raise ValueError(f"room for {len(kept)} of {count} behaviours that are {least_apart} apart")
