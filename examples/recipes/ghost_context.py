"""Ghost-context pruning: drop the lines that the answer does not look at, and ask again.

A context of useful lines among lines of prose is asked once. The lines that the answer's rows
attended to most are kept, up to a sixth of the tokens, and the same question is asked of them
alone. A way to choose lines is measured by how often the answer is still right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from kit.answers import Answer
from kit.command import Settings, main, say
from kit.data import make_context, source
from kit.lines import MOST_TOKENS, Context, best_heads, distance_masses, head_masses, shared_words
from kit.measure import halves, mean_figure
from kit.report import Kind, Report, Row
from kit.services import Services
from numpy.typing import NDArray

NAME = "ghost_context"
TASKS = ("needle", "codename", "larger")
# The kept share of the context's tokens.
KEPT = 1 / 6
HEADS = 3
NAMED = f"{HEADS} heads, chosen on the other half"
WORDS = "words of the question"
ANCHOR = (
    "AttentionRAG: 6.3 times shorter contexts, about 10% better than LLMLingua (arXiv 2503.10720)"
)


@dataclass(frozen=True)
class Asked:
    """What was found when the whole context was asked."""

    context: Context
    tokens: list[int]
    masses: NDArray[np.float64]
    distances: NDArray[np.float64]
    is_right: bool


Score = Callable[[Asked], NDArray[np.float64]]


def words(asked: Asked) -> NDArray[np.float64]:
    """How many of the question's words each line has."""
    return shared_words(asked.context.lines, asked.context.question)


def shortest(scores: NDArray[np.float64], tokens: list[int]) -> list[int]:
    """The best lines, as many as a sixth of the tokens holds; one in any case."""
    budget = KEPT * sum(tokens)
    kept: list[int] = []
    for place in np.argsort(-scores, kind="stable"):
        if not kept or sum(tokens[k] for k in kept) + tokens[place] <= budget:
            kept.append(int(place))
    return kept


def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed, prose=True)
    each = settings.count(36, 2)
    contexts = [make_context(draw, task) for _ in range(each) for task in TASKS]
    report = Report(NAME, "accuracy with a sixth of the context", ANCHOR)

    def ask(context: Context, prompt: str, scores: bool = False) -> Answer:
        report.requests += 1
        return services.ask(prompt, max_tokens=MOST_TOKENS[context.task], stop="\n", scores=scores)

    say(f"asking {len(contexts)} questions with their whole context")
    asked = []
    for context in contexts:
        answer = ask(context, context.prompt, scores=True)
        tokens = context.tokens(answer)
        asked.append(
            Asked(
                context, [len(line) + 1 for line in tokens], head_masses(answer, tokens),
                distance_masses(answer, tokens), context.is_right(answer),
            )
        )  # fmt: skip
    held = halves(np.arange(len(asked)), settings.seed)
    train = [one for one, out in zip(asked, held, strict=True) if not out]
    test = [one for one, out in zip(asked, held, strict=True) if out]
    requests = np.arange(len(test))
    rng = np.random.default_rng(settings.seed)

    def heads(given: list[Asked]) -> NDArray[np.int64]:
        return best_heads([o.masses for o in given], [o.context.needed for o in given], HEADS)

    def pruned(score: Score) -> tuple[list[bool], list[bool], float]:
        """Of the held-out requests: right answers, needed lines kept, the mean kept share."""
        right, whole, shares = [], [], []
        for one in test:
            kept = shortest(score(one), one.tokens)
            answer = ask(one.context, one.context.with_lines(kept))
            right.append(one.context.is_right(answer))
            whole.append(set(one.context.needed) <= set(kept))
            shares.append(sum(one.tokens[place] for place in kept) / sum(one.tokens))
        return right, whole, float(np.mean(shares))

    chosen = heads(train)
    of_others = {task: heads([o for o in train if o.context.task != task]) for task in TASKS}
    ways: tuple[tuple[Kind, str, Score], ...] = (
        ("20 numbers", "mass by distance", lambda o: o.distances),
        ("per head", NAMED, lambda o: o.masses[:, chosen].mean(1)),
        ("per head", "mean of all heads", lambda o: o.masses.mean(1)),
        ("baseline", WORDS, words),
        ("baseline", "last lines", lambda o: np.arange(len(o.tokens), dtype=float)),
        ("baseline", "random lines", lambda o: rng.random(len(o.tokens))),
    )  # fmt: skip
    shares: list[float] = []
    rights: dict[str, NDArray[np.float64]] = {}
    for kind, name, score in ways:
        say(f"{kind}, {name}: asking {len(test)} held-out questions with what is kept")
        right, whole, share = pruned(score)
        other = None
        if name == NAMED:
            fits, _, _ = pruned(lambda o: o.masses[:, of_others[o.context.task]].mean(1))
            other = mean_figure(fits, requests, settings.seed)
        report.rows.append(Row(name, kind, mean_figure(right, requests, settings.seed), other))
        report.facts[f"{kind}, {name}: all needed lines kept"] = asdict(
            mean_figure(whole, requests, settings.seed)
        )
        shares.append(share)
        rights[name] = np.array(right, float)
    report.facts["mean share of the tokens kept, over all ways"] = float(np.mean(shares))
    gain = rights[NAMED] - rights[WORDS]
    report.facts["accuracy of the chosen heads less that of the question's words"] = asdict(
        mean_figure(gain, requests, settings.seed)
    )
    report.facts["accuracy with the whole context"] = asdict(
        mean_figure([one.is_right for one in test], requests, settings.seed)
    )
    report.facts["heads, chosen on the other half"] = ", ".join(
        f"{head % 4} of layer {head // 4}" for head in chosen
    )
    report.facts["mean tokens of a context"] = float(np.mean([sum(one.tokens) for one in test]))
    return report


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
