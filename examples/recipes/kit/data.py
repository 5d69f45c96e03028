"""Seeded data of the recipes, from the demo model's own task generators.

Names are held out: the model was trained on none of them.
"""

from __future__ import annotations

import random

import corpus
from names import Draw

from .lines import Context


def source(recipe: str, seed: int, prose: bool = False) -> Draw:
    """Names, numbers and randomness of a recipe; another seed draws other data.

    Args:
        prose: fill with lines of held-out docstrings of Python's library (read in a few seconds)
            rather than with random words.
    """
    lines = corpus.load(held_out=True).prose_lines() if prose else ()
    return Draw(random.Random(f"{recipe}-{seed}"), evaluation=True, prose=lines)


def library() -> corpus.Corpus:
    """Held-out text of Python's standard library, which the model was not trained on."""
    return corpus.load(held_out=True)


def make_context(draw: Draw, task: str, twin: bool = False) -> Context:
    """5 to 12 lines of a table or a log, and 6 to 14 lines of prose strewn between them.

    Args:
        draw: with prose.
        task: `needle` and `codename` ask for a line's value, `larger` for the larger of two.
        twin: one more line has the same value as the right answer, under another name.
    """
    rng = draw.rng
    count = rng.randint(5, 12)
    needed: tuple[int, ...]
    if task == "codename":
        people: dict[str, str] = {}
        while len(people) < count:
            people.setdefault(draw.person(), draw.codename())
        name, other = rng.sample(list(people), 2)
        if twin:
            people[other] = people[name]
        rows = [
            f"[Entry {place:02d}] Agent: {agent}, Codename: '{code}'"
            for place, (agent, code) in enumerate(people.items(), 1)
        ]
        needed, truth = (list(people).index(name),), f"'{people[name]}'"
        question = f"\nRequest: Retrieve the codename for Agent {name}.\nAgent: {name}, Codename:"
    else:
        table = {name: str(rng.randint(1000, 9999)) for name in draw.names(count)}
        names = list(table)
        first, second, other = rng.sample(names, 3)
        if task == "needle":
            needed, truth, question = (names.index(first),), table[first], f"{first}:"
        else:
            needed = (names.index(first), names.index(second))
            truth = max(table[first], table[second])
            question = f"Question: which is larger, {first} or {second}?\nAnswer:"
        if twin:
            table[other] = truth
        rows = [f"{name}: {number}" for name, number in table.items()]
    lines: list[tuple[int | None, str]] = list(enumerate(rows))
    for prose in rng.sample(list(draw.prose), rng.randint(6, 14)):
        lines.insert(rng.randint(0, len(lines)), (None, prose))
    places = {row: place for place, (row, _) in enumerate(lines) if row is not None}
    kept = tuple(places[row] for row in needed)
    return Context(task, tuple(line for _, line in lines), question, kept, truth)
