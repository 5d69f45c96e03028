"""Position bias: does a verdict hang on the order in which two options are named?

The model is asked which of two numbers of a table is larger or smaller, once with each option
named first. It is no judge of texts: this is the nearest thing that it can do. The working is given
up to the verdict. A pair is inconsistent if the verdict changes with the order. A detector sees
one of the two orders, and says whether the verdict would change in the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from kit.answers import Answer
from kit.command import Settings, main, say
from kit.data import source
from kit.features import head_entropies, head_maxima, mass_on
from kit.measure import auroc, auroc_figure, fitted_scores, group_rates, halves, left_out
from kit.measure import mean_figure as mean_of
from kit.report import Report, Row
from kit.services import Services
from names import Draw
from numpy.typing import NDArray

NAME = "position_bias"
TASKS = ("larger", "smaller", "strewn")
LINES, DIGITS = 10, 4
# Leading digits that the two numbers share, in turn: what makes the comparison hard.
SHARED = (0, 1, 2)


@dataclass(frozen=True)
class Pair:
    """A table and two of its names, whose numbers have the first `shared` digits in common."""

    task: str
    shared: int
    text: str
    names: tuple[str, str]
    numbers: tuple[str, str]

    @property
    def word(self) -> str:
        return "smaller" if self.task == "smaller" else "larger"

    @property
    def right(self) -> int:
        """Which of the two is right."""
        first, second = map(int, self.numbers)
        return int((first < second) == (self.word == "larger"))

    def prompt(self, order: tuple[int, int]) -> str:
        """The question with the options in this order, and the working up to the verdict."""
        first, second = (self.names[option] for option in order)
        working = " ".join(f"{self.names[o]}: {self.numbers[o]}" for o in order)
        return (
            f"{self.text}\nQuestion: which is {self.word}, {first} or {second}?\n"
            f"Answer:<think> {working} {self.word}:"
        )


def pair(draw: Draw, task: str, shared: int) -> Pair:
    rng = draw.rng
    head = str(rng.randint(10 ** (shared - 1), 10**shared - 1)) if shared else ""
    digits = rng.sample(range(0 if shared else 1, 10), 2)
    numbers = [
        head + str(digit) + "".join(str(rng.randrange(10)) for _ in range(DIGITS - shared - 1))
        for digit in digits
    ]
    names = draw.names(LINES)
    values = [str(rng.randint(1000, 9999)) for _ in names]
    places = rng.sample(range(LINES), 2)
    for place, number in zip(places, numbers, strict=True):
        values[place] = number
    lines = [f"{name}: {value}" for name, value in zip(names, values, strict=True)]
    if task == "strewn":
        lines = [text for line in lines for text in (line, draw.filler(40))]
    first, second = places
    return Pair(
        task, shared, "\n".join(lines), (names[first], names[second]), (numbers[0], numbers[1])
    )


@dataclass(frozen=True)
class Verdict:
    """The verdict on a pair in one order.

    Attributes:
        chosen: the option, 0 or 1; -1 for another number.
        lead: how much likelier option 0 is than option 1 at the digit that tells them apart, in
            nats; NaN where one of them is not among the ten likeliest.
        masses: float64[2, heads], what each head gives at that digit to the first-named and to the
            second-named option, in the table and in the working.
    """

    of: Pair
    order: tuple[int, int]
    answer: Answer
    chosen: int
    lead: float
    masses: NDArray[np.float64]

    @property
    def row(self) -> int:
        """The row that chose: that of the first digit that differs."""
        return self.of.shared


def verdict(services: Services, of: Pair, order: tuple[int, int]) -> Verdict:
    prompt = of.prompt(order)
    answer = services.ask(prompt, max_tokens=DIGITS + 1, scores=True, logprobs=10)
    said = answer.text.split()[0] if answer.text.split() else ""
    top = answer.response["choices"][0]["logprobs"]["top_logprobs"][of.shared]
    by_digit = {token.strip(): value for token, value in top.items()}
    digits = [by_digit.get(number[of.shared], np.nan) for number in of.numbers]
    rows = answer.rows()[of.shared]
    masses = []
    for option in order:
        line = f"{of.names[option]}: {of.numbers[option]}"
        places = [prompt.index(line), prompt.rindex(line)]
        keys = [answer.tokens_of(place, place + len(line)) for place in places]
        masses.append(mass_on(rows, np.unique(np.concatenate(keys))))
    chosen = of.numbers.index(said) if said in of.numbers else -1
    return Verdict(of, order, answer, chosen, digits[0] - digits[1], np.array(masses))


def evenness(one: Verdict) -> NDArray[np.float64]:
    """How unequally each head looks at the two options: |difference| by sum: float64[heads]."""
    first, second = one.masses
    return np.abs(first - second) / np.maximum(first + second, 1e-9)


def head_shape(one: Verdict) -> NDArray[np.float64]:
    rows, keys = one.answer.rows()[one.row][None], one.answer.prompt_len + one.row
    return np.concatenate([head_entropies(rows, keys)[0], head_maxima(rows)[0]])


FITTED: tuple[tuple[str, str, Callable[[Verdict], NDArray[Any]]], ...] = (
    ("20 numbers", "fingerprint of the row that chose", lambda v: v.answer.fingerprints[v.row]),
    ("20 numbers", "mean fingerprint of the verdict", lambda v: v.answer.fingerprints.mean(0)),
    ("per head", "how unequally each head looks at the options", evenness),
    ("per head", "entropy and largest weight", head_shape),
)


def conflict(draw: Draw) -> tuple[list[str], str, tuple[str, str]]:
    """A table in which one name stands twice: two prompts, with its numbers swapped in the second,
    and the numbers in the order of the first."""
    names = draw.names(LINES - 1)
    values = [str(number) for number in draw.rng.sample(range(1000, 10000), LINES)]
    places = sorted(draw.rng.sample(range(LINES), 2))
    names.insert(places[1], names[places[0]])
    prompts = []
    for _ in range(2):
        rows = [f"{name}: {value}" for name, value in zip(names, values, strict=True)]
        prompts.append("\n".join([*rows, f"{names[places[0]]}:"]))
        values[places[0]], values[places[1]] = values[places[1]], values[places[0]]
    return prompts, names[places[0]], (values[places[0]], values[places[1]])


def ask_conflicts(services: Services, draw: Draw, count: int, seed: int) -> dict[str, Any]:
    """Which of two numbers of one name the model repeats, and what the row that begins gives
    to the two lines, mean over heads."""
    picked, said, masses = [], [], []
    for _ in range(count):
        prompts, name, numbers = conflict(draw)
        for prompt, (first, last) in zip(prompts, (numbers, numbers[::-1]), strict=True):
            answer = services.ask(prompt, max_tokens=DIGITS + 1, scores=True)
            said.append(answer.text.strip().split("\n")[0])
            picked.append({first: "first", last: "last"}.get(said[-1], "neither"))
            lines = [f"{name}: {number}" for number in (first, last)]
            starts = [prompt.index(line) for line in lines]
            keys = [
                answer.tokens_of(start, start + len(line))
                for start, line in zip(starts, lines, strict=True)
            ]
            masses.append([mass_on(answer.rows()[0], of).mean() for of in keys])
    requests = np.repeat(np.arange(count), 2)
    both = np.array(masses)
    found = {
        f"one name twice, takes the {which}": asdict(
            mean_of(np.array(picked) == which, requests, seed)
        )
        for which in ("first", "last", "neither")
    }
    found["one name twice, same number if the two are swapped"] = asdict(
        mean_of(np.array(said[::2]) == np.array(said[1::2]), np.arange(count), seed)
    )
    for place, which in enumerate(("first", "last")):
        found[f"one name twice, mass on the {which} line"] = asdict(
            mean_of(both[:, place], requests, seed)
        )
    return found


def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed, prose=True)
    each = settings.count(48, 6)
    pairs = [
        pair(draw, task, SHARED[place % len(SHARED)]) for task in TASKS for place in range(each)
    ]
    say(f"asking {len(pairs)} pairs in both orders")
    verdicts = [verdict(services, of, order) for of in pairs for order in ((0, 1), (1, 0))]
    requests = np.repeat(np.arange(len(pairs)), 2)
    chosen = np.array([one.chosen for one in verdicts])
    flips = np.repeat(chosen[::2] != chosen[1::2], 2)
    say(f"{flips.sum() // 2} verdicts change with the order")
    tasks = [one.of.task for one in verdicts]
    held = halves(requests, settings.seed)
    report = Report(
        NAME, "AUROC",
        "over 150,000 judgements by 15 models, no detector (arXiv 2406.07791)",
        requests=len(verdicts),
    )  # fmt: skip

    def add(
        kind: Any, name: str, score: Callable[[NDArray[np.bool_]], NDArray[np.float64]]
    ) -> None:
        scores = score(~held)
        figure = auroc_figure(flips[held], scores[held], requests[held], settings.seed)
        other = left_out(score, flips, tasks, requests, settings.seed)
        report.rows.append(Row(name, kind, figure, other))

    for kind, name, features in FITTED:
        values = np.array([features(one) for one in verdicts])
        add(kind, name, lambda train, v=values: fitted_scores(v, flips, train))  # type: ignore[misc]
    vectors = np.array([one.answer.fingerprints[one.row] for one in verdicts])
    zones = [manifold.zone for manifold in services.classified(vectors)]
    add("run", "zone", lambda train: group_rates(zones, flips, train))
    best = np.array([one.answer.alternatives[one.row] for one in verdicts])
    add(
        "baseline",
        "margin of the digit that tells them apart",
        lambda train: best[:, 1] - best[:, 0],
    )
    add("baseline", "its log-probability", lambda train: -best[:, 0])
    shared = np.array([float(one.of.shared) for one in verdicts])
    add("baseline", "digits that the numbers share, known", lambda train: shared)

    report.facts |= preferences(verdicts, requests, held, settings.seed)
    say("asking for names that stand twice")
    count = settings.count(40, 3)
    report.facts |= ask_conflicts(services, draw, count, settings.seed)
    report.requests += 2 * count
    return report


def preferences(
    verdicts: list[Verdict], requests: NDArray[np.int64], held: NDArray[np.bool_], seed: int
) -> dict[str, Any]:
    """How often verdicts agree, which option they prefer, and what attention says of that."""
    chosen = np.array([one.chosen for one in verdicts])
    right = np.array([one.of.right for one in verdicts]) == chosen
    named_first = np.array([one.order[0] for one in verdicts])
    pairs = np.arange(len(verdicts) // 2)
    same = chosen[::2] == chosen[1::2]
    facts: dict[str, Any] = {
        "verdicts that are one of the two": asdict(mean_of(chosen >= 0, requests, seed))
    }
    for task in TASKS:
        inside = np.array([one.of.task == task for one in verdicts[::2]])
        facts[f"same verdict in both orders, {task}"] = asdict(
            mean_of(same[inside], pairs[inside], seed)
        )
    for shared in SHARED:
        inside = np.array([one.of.shared == shared for one in verdicts[::2]])
        facts[f"same verdict in both orders, digits shared: {shared}"] = asdict(
            mean_of(same[inside], pairs[inside], seed)
        )
    facts["takes the option named first"] = asdict(mean_of(chosen == named_first, requests, seed))
    for first in (True, False):
        inside = (np.array([one.of.right for one in verdicts]) == named_first) == first
        facts[f"right, if the right one is named {'first' if first else 'second'}"] = asdict(
            mean_of(right[inside], requests[inside], seed)
        )
    leads = np.array([one.lead for one in verdicts])
    summed = leads[::2] + leads[1::2]
    truth = np.array([one.of.right for one in verdicts[::2]])
    facts["right, one order"] = asdict(mean_of(right, requests, seed))
    facts["right, both orders' log-probabilities added"] = asdict(
        mean_of(np.where(np.isfinite(summed), (summed < 0) == truth, False), pairs, seed)
    )
    # Of the heads the one that tells best which option is taken, chosen on the other half.
    leans = np.array([one.masses[0] - one.masses[1] for one in verdicts])
    takes_first = chosen == named_first
    by_head = [auroc(takes_first[~held], leans[~held, head]) for head in range(leans.shape[1])]
    head = int(np.argmax(np.abs(np.array(by_head) - 0.5)))
    sign = 1 if by_head[head] >= 0.5 else -1
    facts[
        f"AUROC of the option taken, by what head {head % 4} of layer {head // 4} gives to each"
    ] = asdict(auroc_figure(takes_first[held], sign * leans[held, head], requests[held], seed))
    facts["AUROC of the option taken, by all heads' mean"] = asdict(
        auroc_figure(takes_first[held], leans[held].mean(1), requests[held], seed)
    )
    return facts


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
