"""Planted nights: behaviours that drift from night to night, and no row that two nights share.

A night is a list of behaviours in the manner of `planted.py`, each with the identity that it has
over the nights; its rows are drawn anew, so noise, overlap and context lengths are as there. A
behaviour that splits is one continuum on night 1, of which night 2 has the two ends; two that merge
move to one place between them. Which behaviours these are, and how far everything moves, is drawn
by the seed, until every two behaviours of a night lie as far apart as they must for a
nearest-neighbour vote that is told the truth to reach an adjusted Rand index of 0.97.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tests.planted import BEHAVIOURS, NOISE, planted, planted_batch

# The evening of the first night; the others follow a day apart.
FIRST_EVENING = dt.datetime(2026, 1, 9, 22, 0, tzinfo=dt.UTC)
# From the first row of a night to the moment at which its run is started.
UNTIL_RUN = dt.timedelta(hours=8)
ROWS_PER_REQUEST = 100

Bumps = tuple[tuple[float, float, float], ...]

# What the behaviours are drawn from: those of `planted.py`, and more that look at two places.
CATALOGUE: tuple[tuple[Bumps, float], ...] = (
    *BEHAVIOURS,
    (((0.0, 0.5, 0.5), (8.8, 0.5, 0.5)), 0.3),  # previous token and far back
    (((2.2, 0.4, 0.5), (7.4, 0.5, 0.5)), 0.15),  # this line and a page back
    (((4.2, 0.4, 0.5), (8.4, 0.6, 0.5)), 0.4),  # paragraph and document
    (((0.2, 0.5, 0.7), (5.4, 0.5, 0.3)), 0.15),  # mostly local, a glance at the paragraph
    (((3.2, 0.5, 0.35), (7.6, 0.6, 0.65)), 0.2),  # a page back, a glance at the line above
)
KEPT = 7
# Identities of the others: those of the first night, and those of the second.
SPLITS, LEFT, RIGHT, DIES, LARGER_PART, SMALLER_PART, WHOLE, BORN = range(KEPT, KEPT + 8)
# How far to either side, in bins, the two ends of a continuum lie, and the places in between.
APART = 1.0
RUNGS = np.linspace(-1.0, 1.0, 8)
# The two that merge end up this near to each other: one place.
TOGETHER = 0.2
# The larger of two parts.
LARGER = 0.6
# Smallest share of a night that any behaviour has.
SMALLEST = 0.045
# From one night to the next: bins that a bump moves, and the logarithm of a share.
MOVES, SWELLS = 0.08, 0.15
# A fortnight's nights are smaller steps, which never lead further from home than this.
NIGHTLY_MOVES, NIGHTLY_SWELLS = 0.04, 0.08
MOST_MOVED, MOST_SWELL = 0.25, 0.4
MOST_BUMPS = max(len(bumps) for bumps, _ in CATALOGUE)
# Distance between two behaviours' means, in standard deviations along the line between them.
SEPARATION = 4.2
# A fortnight has many chances to find two of them as one, so they lie further apart.
NIGHTLY_SEPARATION = 4.7
TRIES = 2_000


class Behaviour(NamedTuple):
    """Bumps (centre, width, share) in log2-distance bins, the spread within a bin, the share of
    the night's rows, and who it is. Behaviours of one identity are parts of one continuum."""

    bumps: Bumps
    spread: float
    share: float
    identity: int


class Night(NamedTuple):
    """One night's rows: vectors float32[n, 20], their identities int64[n] (-1: noise), and the
    same rows as records, in that order; `end` is when the night's run is started."""

    behaviours: tuple[Behaviour, ...]
    vectors: NDArray[np.float32]
    truth: NDArray[np.int64]
    records: pa.RecordBatch
    end: dt.datetime


class Origin(NamedTuple):
    """Where a behaviour of a later night comes from: the identities, largest first, that it was
    on the night before. Of a split, `larger` says whether it is the larger part."""

    kind: Literal["kept", "split", "merged", "born"]
    parents: tuple[int, ...] = ()
    larger: bool = True


class TwoNights(NamedTuple):
    """Two nights, the origin of every identity of the second, and those of the first that died."""

    first: Night
    second: Night
    origins: dict[int, Origin]
    died: tuple[int, ...]


def two_nights(seed: int, rows: int = 10_000) -> TwoNights:
    """Two nights on which everything drifts a little, one behaviour dies, one is born, one splits
    and two merge."""
    rng = np.random.default_rng([seed, 2])
    for _ in range(TRIES):
        before, after = _cast(rng)
        # What is born is like nothing that was there, and what died like nothing that is.
        born = [behaviour for behaviour in after if behaviour.identity == BORN]
        died = [behaviour for behaviour in before if behaviour.identity == DIES]
        both = ([*before, *born], [*after, *died])
        if all(_apart(night, rng, SEPARATION) for night in both):
            break
    else:
        raise RuntimeError(f"seed {seed}: no two nights with every behaviour apart")
    origins = {identity: Origin("kept", (identity,)) for identity in range(KEPT)}
    origins[LARGER_PART] = Origin("split", (SPLITS,), larger=True)
    origins[SMALLER_PART] = Origin("split", (SPLITS,), larger=False)
    origins[WHOLE] = Origin("merged", (LEFT, RIGHT))
    origins[BORN] = Origin("born")
    first, second = _draw(before, rows, seed, 0), _draw(after, rows, seed, 1)
    return TwoNights(first, second, origins, (DIES,))


def fortnight(seed: int, nights: int = 14, rows: int = 8_000) -> list[Night]:
    """Nights on which the same behaviours wander in place and share, and none is born or dies."""
    rng = np.random.default_rng([seed, 14])
    for _ in range(TRIES):
        walked = _walk(nights, rng)
        if all(_apart(night, rng, NIGHTLY_SEPARATION) for night in walked):
            return [_draw(night, rows, seed, number) for number, night in enumerate(walked)]
    raise RuntimeError(f"seed {seed}: no nights with every behaviour apart")


def _walk(nights: int, rng: np.random.Generator) -> list[list[Behaviour]]:
    """Behaviours whose bumps and shares take a small step from each night to the next."""
    chosen = [CATALOGUE[i] for i in rng.permutation(len(CATALOGUE))[: KEPT + 4]]
    homes = rng.uniform(SMALLEST, 3 * SMALLEST, len(chosen))
    moves, swells = np.zeros((len(chosen), MOST_BUMPS)), np.zeros(len(chosen))
    walked = []
    for _ in range(nights):
        night = []
        for who, (bumps, spread) in enumerate(chosen):
            moved = tuple((c + moves[who, i], w, s) for i, (c, w, s) in enumerate(bumps))
            night.append(Behaviour(moved, spread, homes[who] * np.exp(swells[who]), who))
        walked.append(night)
        moves = (moves + rng.normal(0, NIGHTLY_MOVES, moves.shape)).clip(-MOST_MOVED, MOST_MOVED)
        swells = (swells + rng.normal(0, NIGHTLY_SWELLS, len(swells))).clip(-MOST_SWELL, MOST_SWELL)
    return walked


def _cast(rng: np.random.Generator) -> tuple[list[Behaviour], list[Behaviour]]:
    """The behaviours of two nights, by the identities that `two_nights` gives them."""
    chosen = [CATALOGUE[i] for i in rng.permutation(len(CATALOGUE))[: KEPT + 4]]
    shares = rng.uniform(SMALLEST, 3 * SMALLEST, KEPT + 4)
    shares[KEPT : KEPT + 2] = rng.uniform(2.6 * SMALLEST, 4 * SMALLEST, 2)
    later = shares * np.exp(rng.normal(0, SWELLS, len(shares)))
    before, after = [], []
    for who in range(KEPT):
        bumps, spread = chosen[who]
        before.append(Behaviour(bumps, spread, shares[who], who))
        after.append(Behaviour(*_moved(bumps, spread, rng), later[who], who))

    bumps, spread = chosen[KEPT]
    index, sign = int(rng.integers(len(bumps))), float(rng.choice([-1.0, 1.0]))
    for rung in RUNGS:
        part = _shifted(bumps, index, APART * rung)
        before.append(Behaviour(part, spread, shares[KEPT] / len(RUNGS), SPLITS))
    moved, spread = _moved(bumps, spread, rng)
    for who, side, part_share in ((LARGER_PART, sign, LARGER), (SMALLER_PART, -sign, 1 - LARGER)):
        part = _shifted(moved, index, APART * side)
        after.append(Behaviour(part, spread, later[KEPT] * part_share, who))

    bumps, spread = chosen[KEPT + 1]
    index, sign = int(rng.integers(len(bumps))), float(rng.choice([-1.0, 1.0]))
    moved, later_spread = _moved(bumps, spread, rng)
    for who, side, part_share in ((LEFT, sign, LARGER), (RIGHT, -sign, 1 - LARGER)):
        part = _shifted(bumps, index, APART * side)
        before.append(Behaviour(part, spread, shares[KEPT + 1] * part_share, who))
        part = _shifted(moved, index, TOGETHER * side)
        after.append(Behaviour(part, later_spread, later[KEPT + 1] * part_share, WHOLE))

    bumps, spread = chosen[KEPT + 2]
    before.append(Behaviour(bumps, spread, shares[KEPT + 2], DIES))
    bumps, spread = chosen[KEPT + 3]
    after.append(Behaviour(bumps, spread, shares[KEPT + 3], BORN))
    return before, after


def _shifted(bumps: Bumps, index: int, by: float) -> Bumps:
    """The bumps with one of them moved by so many bins."""
    return tuple((c + by if i == index else c, w, s) for i, (c, w, s) in enumerate(bumps))


def _moved(bumps: Bumps, spread: float, rng: np.random.Generator) -> tuple[Bumps, float]:
    """A night's drift of one behaviour."""
    moved = tuple((c + rng.normal(0, MOVES), w, s) for c, w, s in bumps)
    return moved, float(np.clip(spread + rng.normal(0, 0.02), 0.0, 1.0))


def _rows(
    behaviours: Sequence[Behaviour], rows: int, seed: int, noise: float
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Rows of a night and the numbers of their behaviours, drawn as `planted` draws its own."""
    shares = np.array([b.share for b in behaviours])
    return planted(rows, seed, noise, shares, [(b.bumps, b.spread) for b in behaviours])


def _apart(behaviours: Sequence[Behaviour], rng: np.random.Generator, least: float) -> bool:
    return closest(behaviours, int(rng.integers(2**32))) >= least


def closest(behaviours: Sequence[Behaviour], seed: int) -> float:
    """The smallest distance between the means of two behaviours' square-rooted rows, in standard
    deviations (the mean of both's) along the line between them; parts of one identity aside."""
    even = [b._replace(share=1.0) for b in behaviours]
    vectors, index = _rows(even, 150 * len(even), seed, 0.0)
    roots = np.sqrt(vectors.astype(np.float64))
    groups = [(b.identity, roots[index == i]) for i, b in enumerate(behaviours)]
    least = np.inf
    for i, (who, a) in enumerate(groups):
        for other, b in groups[:i]:
            if other == who:
                continue
            line = a.mean(axis=0) - b.mean(axis=0)
            line /= np.linalg.norm(line)
            one, two = a @ line, b @ line
            least = min(least, 2 * (one.mean() - two.mean()) / (one.std() + two.std()))
    return float(least)


def _draw(behaviours: Sequence[Behaviour], rows: int, seed: int, number: int) -> Night:
    """The rows of night `number`, 0 the first."""
    drawn = int(np.random.default_rng([seed, number, 1]).integers(2**32))
    vectors, index = _rows(behaviours, rows, drawn, 0.05)
    # Noise is -1, which picks the last element.
    truth = np.array([*(b.identity for b in behaviours), NOISE])[index]
    start = FIRST_EVENING + number * dt.timedelta(days=1)
    records = planted_batch(vectors, start, f"night{number:02d}", ROWS_PER_REQUEST)
    return Night(tuple(behaviours), vectors, truth, records, start + UNTIL_RUN)
