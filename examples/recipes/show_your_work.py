"""Show your work: which line of the context did the answer come from?

The context has useful lines among lines of prose, and a twin: a line with the same value as the
right answer, under another name, so that looking for the answer's text finds two lines. Of right
answers the lines that the attention of the answer's rows names first are compared with those that
the question is about. Taking those lines out shows that the answer does come from them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from kit.command import Settings, main, say
from kit.data import make_context, source
from kit.lines import (
    MOST_TOKENS,
    Context,
    best_heads,
    distance_masses,
    head_masses,
    shared_words,
)
from kit.measure import halves, mean_figure
from kit.report import Kind, Report, Row
from kit.services import Services
from numpy.typing import NDArray

NAME = "show_your_work"
TASKS = ("needle", "codename", "larger")
HEADS = 3
NAMED = f"{HEADS} heads, chosen on the other half"
ANCHOR = "AttnTrace: 10 to 20 seconds a trace (arXiv 2508.03793)"


@dataclass(frozen=True)
class Traced:
    """A right answer, and what may say where it comes from."""

    context: Context
    text: str
    masses: NDArray[np.float64]
    distances: NDArray[np.float64]


Score = Callable[[Traced], NDArray[np.float64]]


def of_answer(one: Traced) -> NDArray[np.float64]:
    """How many words of the answer each line has."""
    return shared_words(one.context.lines, one.text)


def of_both(one: Traced) -> NDArray[np.float64]:
    """How many words of question and answer each line has."""
    return shared_words(one.context.lines, f"{one.context.question} {one.text}")


def found_share(scores: NDArray[np.float64], needed: tuple[int, ...]) -> float:
    """Share of the needed lines among as many of the first: of equal ones the last line counts
    first, as it is the nearest."""
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], -place))
    return len(set(order[: len(needed)]) & set(needed)) / len(needed)


def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed, prose=True)
    each = settings.count(40, 4)
    contexts = [make_context(draw, task, twin=True) for _ in range(each) for task in TASKS]
    report = Report(NAME, "share of the needed lines named first", ANCHOR, requests=len(contexts))
    say(f"asking {len(contexts)} questions")
    traced = []
    for context in contexts:
        most = MOST_TOKENS[context.task]
        answer = services.ask(context.prompt, max_tokens=most, stop="\n", scores=True)
        if context.is_right(answer):
            lines = context.tokens(answer)
            masses, distances = head_masses(answer, lines), distance_masses(answer, lines)
            traced.append(Traced(context, answer.text, masses, distances))
    report.facts["right answers, which are traced"] = f"{len(traced)} of {len(contexts)}"
    held = halves(np.arange(len(traced)), settings.seed)
    train = [one for one, out in zip(traced, held, strict=True) if not out]
    test = [one for one, out in zip(traced, held, strict=True) if out]
    requests = np.arange(len(test))

    def heads(given: list[Traced]) -> NDArray[np.int64]:
        return best_heads([o.masses for o in given], [o.context.needed for o in given], HEADS)

    def shares(score: Score) -> list[float]:
        return [found_share(score(one), one.context.needed) for one in test]

    chosen = heads(train)
    of_others = {task: heads([o for o in train if o.context.task != task]) for task in TASKS}
    ways: tuple[tuple[Kind, str, Score], ...] = (
        ("20 numbers", "mass by distance", lambda o: o.distances),
        ("per head", NAMED, lambda o: o.masses[:, chosen].mean(1)),
        ("per head", "mean of all heads", lambda o: o.masses.mean(1)),
        ("baseline", "words of the answer", of_answer),
        ("baseline", "words of question and answer", of_both),
        ("baseline", "last lines", lambda o: np.zeros(len(o.distances))),
    )
    for kind, name, score in ways:
        other = None
        if name == NAMED:
            left = shares(lambda o: o.masses[:, of_others[o.context.task]].mean(1))
            other = mean_figure(left, requests, settings.seed)
        figure = mean_figure(shares(score), requests, settings.seed)
        report.rows.append(Row(name, kind, figure, other))
    report.facts["heads, chosen on the other half"] = ", ".join(
        f"{head % 4} of layer {head // 4}" for head in chosen
    )

    say(f"asking {len(test)} questions again without the needed lines")
    changed = []
    for one in test:
        rest = [place for place in range(len(one.context.lines)) if place not in one.context.needed]
        prompt = one.context.with_lines(rest)
        answer = services.ask(prompt, max_tokens=MOST_TOKENS[one.context.task], stop="\n")
        changed.append(not one.context.is_right(answer))
    report.requests += len(test)
    report.facts["answers that change without the needed lines"] = asdict(
        mean_figure(changed, requests, settings.seed)
    )
    return report


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
