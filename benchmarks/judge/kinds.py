"""Planted rows of several kinds, in a half to develop methods on and a half that is only reported.

Each `Recipe` is a data set: `plant(recipe, rows)` draws it, the same each time. The halves were
fixed before a method was chosen ("very crowded" when clusters had been divided by valleys, before
it was drawn). They have no recipe, seed or behaviour in common, and other numbers of behaviours,
lengths, shares and noise. Whoever develops a method looks at `develop` only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from capture_kernels.fingerprint.vector import Layout
from tests.planted import planted

from .attention import LONGEST, Behaviour, vector_of
from .draws import draw_behaviour, draw_behaviours
from .rows import NOISE, Codes, Rows, checked

Half = Literal["develop", "held_out"]
HALVES: tuple[Half, ...] = ("develop", "held_out")
# How far a request, and a row, moves a behaviour's centres, in octaves.
OF_REQUEST, OF_ROW = 0.08, 0.12


@dataclass(frozen=True)
class Recipe:
    """A data set: what is drawn, from which seed.

    kind: its name. shortest, longest: context lengths, log-uniform between. shares: the ratio of
    the largest behaviour to the smallest. tasks: behaviours are dealt to so many; a request is of
    one. tied: each task has an octave of its own, from `shortest` up. decoding: a request's rows
    are steps at one length, as those of tied ones are; else they go through its context, as
    captures of prompts do. least_apart: see `draw_behaviours`. tests_planted: the rows of
    tests/planted.py, which today's method was tuned on.
    """

    kind: str
    seed: int
    behaviours: int = 10
    shortest: int = 1024
    longest: int = 8192
    noise: float = 0.05
    shares: float = 4.0
    sparse: bool = False
    families: int = 0
    drift: float = 0.0
    diffuse: bool = False
    tasks: int = 5
    tied: bool = False
    layered: bool = False
    least_apart: float = 0.25
    rows_per_request: int = 40
    decoding: bool = False
    tests_planted: bool = False

    @property
    def layout(self) -> Layout:
        return Layout.LAYERED if self.layered else Layout.LOG16


_TIED_DEVELOP = Recipe("tied to lengths", 1031, 10, shortest=512, longest=16_383, shares=2.0)
_TIED_HELD_OUT = Recipe(
    "tied to lengths", 2031, 12, shortest=256, longest=16_383, shares=3.0, tasks=6, noise=0.08
)


def _both_lengths(recipe: Recipe) -> tuple[Recipe, Recipe]:
    """The same behaviours and counts, tied to lengths and mixed."""
    fields = recipe.__dict__
    return Recipe(**{**fields, "tied": True}), Recipe(**{**fields, "kind": "mixed lengths"})


SPLITS: dict[Half, tuple[Recipe, ...]] = {
    "develop": (
        Recipe("long rows", 1011, 10, shortest=4096, longest=32_000),
        Recipe("sparse", 1021, 10, shortest=128, longest=4096, sparse=True, least_apart=0.4),
        *_both_lengths(_TIED_DEVELOP),
        Recipe(
            "families", 1041, 7, shortest=1024, longest=16_384, shares=2.0,
            families=3, drift=3.0, diffuse=True, least_apart=0.2,
        ),
        Recipe("few", 1051, 3, shortest=512, longest=8192, shares=2.0, tasks=2),
        Recipe(
            "crowded", 1052, 60, decoding=True, shortest=1024, longest=8192, shares=3.0,
            least_apart=0.2,
        ),
        Recipe(
            "very crowded", 1053, 52, decoding=True, shortest=512, longest=16_384, shares=2.0,
            least_apart=0.2,
        ),
        Recipe("uneven", 1061, 9, shortest=512, longest=8192, shares=80.0),
        Recipe("clean", 1071, 12, decoding=True, shortest=512, longest=8192, noise=0.0),
        Recipe("noisy", 1072, 10, shortest=512, longest=8192, noise=0.30),
        Recipe("layered", 1081, 24, shortest=256, longest=4096, layered=True),
        Recipe("tests/planted.py", 1091, 12, tests_planted=True),
    ),
    "held_out": (
        Recipe("long rows", 2011, 14, shortest=6000, longest=28_000, shares=6.0, noise=0.08),
        Recipe(
            "sparse", 2021, 13, shortest=64, longest=8192, sparse=True, noise=0.03, least_apart=0.4
        ),
        *_both_lengths(_TIED_HELD_OUT),
        Recipe(
            "families", 2041, 8, shortest=512, longest=30_000, shares=3.0,
            families=3, drift=2.6, diffuse=True, least_apart=0.2, noise=0.02,
        ),
        Recipe("few", 2051, 4, shortest=256, longest=16_384, shares=3.0, tasks=3),
        Recipe(
            "crowded", 2052, 45, decoding=True, shortest=2048, longest=16_384, shares=4.0,
            least_apart=0.2,
        ),
        Recipe(
            "very crowded", 2053, 60, decoding=True, shortest=1024, longest=8192, shares=3.0,
            least_apart=0.2,
        ),
        Recipe("uneven", 2061, 10, shortest=1024, longest=4096, shares=80.0, noise=0.03),
        Recipe("clean", 2071, 8, decoding=True, shortest=256, longest=4096, noise=0.0, shares=5.0),
        Recipe("noisy", 2072, 13, shortest=1024, longest=16_384, noise=0.25),
        Recipe("layered", 2081, 30, shortest=128, longest=8192, layered=True, noise=0.1),
        Recipe("tests/planted.py", 2091, 12, tests_planted=True, noise=0.12),
    ),
}  # fmt: skip


@functools.cache
def behaviours_of(recipe: Recipe) -> tuple[Behaviour, ...]:
    """The recipe's behaviours, largest first; those of two recipes that differ in `tied` or in
    their number of rows are the same."""
    drawn = draw_behaviours(
        np.random.default_rng([recipe.seed, 0]),
        recipe.behaviours,
        shortest=recipe.shortest,
        longest=recipe.longest,
        least_apart=recipe.least_apart,
        layout=recipe.layout,
        sparse=recipe.sparse,
        families=recipe.families,
        drift=recipe.drift,
        diffuse=recipe.diffuse,
    )
    return tuple(drawn)


def plant(recipe: Recipe, rows: int) -> Rows:
    """`rows` rows of the recipe, no two of one key.

    Raises:
        WrongAnswerError: a row breaks an invariant of fingerprints.
    """
    if recipe.tests_planted:
        return _of_tests(recipe, rows)
    rng = np.random.default_rng([recipe.seed, 1])
    shares = np.geomspace(recipe.shares, 1.0, recipe.behaviours)
    truth = rng.choice(recipe.behaviours, rows, p=shares / shares.sum())
    # A noise row is of the task of the behaviour that it was drawn in place of.
    task = rng.permutation(recipe.behaviours)[truth] % recipe.tasks
    truth[rng.random(rows) < recipe.noise] = NOISE
    order = np.argsort(task, kind="stable")
    truth, task = truth[order], task[order]
    request, step = _requests(task, recipe.rows_per_request)
    positions = _lengths(recipe, rng, task, request, step)
    vectors = _vectors(recipe, rng, truth, request, positions)
    return checked(
        Rows(
            vectors,
            positions,
            np.array([f"task{t}-{r:05d}" for t, r in zip(task, request, strict=True)], str),
            recipe.layout,
            truth.astype(np.int64),
            np.array([f"task{t}" for t in task], str),
        )
    )


def _requests(task: Codes, size: int) -> tuple[Codes, Codes]:
    """The request of each row, and its number in it; tasks are in order."""
    within = np.arange(len(task)) - np.searchsorted(task, task)
    _, request = np.unique(task * len(task) + within // size, return_inverse=True)
    return request.astype(np.int64), within % size


def _lengths(
    recipe: Recipe, rng: np.random.Generator, task: Codes, request: Codes, step: Codes
) -> Codes:
    """The position of each row; those of a request rise."""
    count = int(request.max(initial=-1)) + 1
    low, high = np.full(count, np.log2(recipe.shortest)), np.full(count, np.log2(recipe.longest))
    if recipe.tied:
        of_request = np.zeros(count)
        of_request[request] = task
        low = low + (high - low) / recipe.tasks * of_request
        high = low + (np.log2(recipe.longest) - np.log2(recipe.shortest)) / recipe.tasks
    length = np.floor(2.0 ** rng.uniform(low, high)).astype(np.int64)
    if recipe.decoding or recipe.tied:
        return length[request] + step
    last = recipe.rows_per_request - 1
    stride = np.maximum((length - recipe.shortest) // last, 1)
    # Of a context shorter than that its rows go on past its end.
    first = np.maximum(length - stride * last, recipe.shortest)
    return first[request] + stride[request] * step


def _vectors(
    recipe: Recipe, rng: np.random.Generator, truth: Codes, request: Codes, positions: Codes
) -> np.ndarray:
    """float32[n, 20]. Of a row at position t the t keys after the sink token are visible."""
    behaviours, vectors = behaviours_of(recipe), np.empty((len(truth), 20), np.float32)
    requests = int(request.max(initial=-1)) + 1
    of_request = rng.normal(0, OF_REQUEST, (requests, len(behaviours) + 1))
    reach = float(np.log2(recipe.shortest)) - 0.5
    for row, (one, own, position) in enumerate(zip(truth, request, positions, strict=True)):
        octaves = of_request[own, one] + rng.normal(0, OF_ROW)
        if one == NOISE:
            behaviour = draw_behaviour(rng, reach, recipe.layout, recipe.sparse)
        else:
            behaviour = behaviours[one]
            octaves += behaviour.drift * rng.uniform(-0.5, 0.5)
        n = min(int(position), LONGEST)
        vectors[row] = vector_of(behaviour, n, recipe.layout, rng, octaves)
    return vectors


def _of_tests(recipe: Recipe, rows: int) -> Rows:
    """Rows of tests/planted.py: 100 a request; their position, of which that knows nothing, is the
    middle of the octave that their last bin with mass is of."""
    vectors, truth = planted(rows, recipe.seed, noise=recipe.noise)
    reached = 15 - (vectors[:, :3:-1] > 0).argmax(axis=1)
    index = np.arange(rows)
    positions = (1.4 * 2.0**reached).astype(np.int64) + index % 100
    requests = np.array([f"planted-{i // 100:05d}" for i in index], str)
    return checked(Rows(vectors, positions, requests, Layout.LOG16, truth.astype(np.int64)))


def recipes(half: Half, kinds: Sequence[str] = ()) -> tuple[Recipe, ...]:
    """The half's recipes, of these kinds or all."""
    return tuple(recipe for recipe in SPLITS[half] if not kinds or recipe.kind in kinds)
