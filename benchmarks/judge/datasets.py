"""The data sets of a half, by name, and what each has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .kinds import Half, plant, recipes
from .measures import (
    Figures,
    between_halves,
    between_seeds,
    facts_of,
    found_by,
    mean_of,
    of_all,
    of_planted,
    task_ceiling,
)
from .real import MANY_EACH, fresh_captures, sample_half, tied_lengths, whole_sample
from .rows import Rows

FIRST_SEED = 42
# Where real rows come from. The whole sample, develop's half in it, is a figure of held_out only.
SOURCES: dict[Half, tuple[str, ...]] = {
    "develop": ("sample", "fresh"),
    "held_out": ("sample", "fresh", "whole sample"),
}
TIED = " tied and mixed"
# Captures of 2,016 requests: only where asked for, as they take half an hour to make.
MANY = "many"


@dataclass(frozen=True)
class Task:
    """One data set to judge methods on, for a process of its own."""

    name: str
    half: Half
    rows: int
    seeds: int
    methods: tuple[str, ...]
    prompts_each: int


def names_of(half: Half) -> list[str]:
    """All data sets of a half, those that take longest first."""
    real = [name for source in SOURCES[half] for name in (source, source + TIED)]
    return [
        MANY,
        *(n for n in real if n != "whole sample" + TIED),
        *(r.kind for r in recipes(half)),
    ]


def real_rows(task: Task) -> Rows:
    source = task.name.removesuffix(TIED)
    if source == MANY:
        return fresh_captures(task.half, MANY_EACH)
    if source == "fresh":
        return fresh_captures(task.half, task.prompts_each)
    return sample_half(task.half) if source == "sample" else whole_sample()


def judge(task: Task) -> Figures:
    """A data set's figures: its `facts`, and by method its `methods`."""
    if task.name.endswith(TIED):
        return judge_tied(task)
    if task.name in (MANY, *SOURCES[task.half]):
        return judge_real(task)
    return judge_planted(task)


def judge_planted(task: Task) -> Figures:
    (recipe,) = recipes(task.half, [task.name])
    rows = plant(recipe, task.rows)
    done = found_by(task.methods, rows, FIRST_SEED)
    return {
        "facts": facts_of(rows),
        "methods": {name: of_planted(one, rows) for name, one in done.items()},
    }


def judge_real(task: Task) -> Figures:
    """Means over the seeds, and how far seeds and halves of the requests agree."""
    rows, seeds = real_rows(task), range(FIRST_SEED, FIRST_SEED + task.seeds)
    done = {seed: found_by(task.methods, rows, seed) for seed in seeds}
    halves = [between_halves(task.methods, rows, seed) for seed in seeds]
    facts = {**facts_of(rows), "task_ceiling": task_ceiling(rows)}
    figures: Figures = {"facts": facts, "methods": {}}
    for name in task.methods:
        one = mean_of([of_all(done[seed][name], rows) for seed in seeds])
        one["seeds"] = between_seeds([done[seed][name].found.labels for seed in seeds])
        one["halves"] = mean_of([half[name] for half in halves])
        figures["methods"][name] = one
    return figures


def judge_tied(task: Task) -> Figures:
    """Five tasks at lengths of their own, and mixed; each seed deals the octaves anew."""
    rows = real_rows(task)
    facts: list[Figures] = []
    found: dict[str, list[Figures]] = {name: [] for name in task.methods}
    for turn in range(task.seeds):
        both = tied_lengths(rows, task.half, turn, FIRST_SEED + turn)
        ways = dict(zip(("tied", "mixed"), both, strict=True))
        facts.append({way: facts_of(own) for way, own in ways.items()})
        done = {way: found_by(task.methods, own, FIRST_SEED + turn) for way, own in ways.items()}
        for name in task.methods:
            found[name].append({way: of_all(done[way][name], ways[way]) for way in ways})
    return {
        "facts": mean_of(facts),
        "methods": {name: mean_of(each) for name, each in found.items()},
    }


def tasks_of(
    half: Half,
    names: Sequence[str],
    rows: int,
    seeds: int,
    methods: Sequence[str],
    prompts_each: int,
) -> list[Task]:
    return [Task(name, half, rows, seeds, tuple(methods), prompts_each) for name in names]
