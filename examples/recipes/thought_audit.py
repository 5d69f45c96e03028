"""Chain-of-thought audit: which step of a working does its result rest on, and which is wrong?

The model is asked which of two numbers of a table is larger, or smaller. It looks up one, then the
other, then says the result, all between <think> and </think>. A looked-up number is changed in the
working and the model goes on from there: if its result changes, the result rests on that step. What
attention says of the two steps is compared with that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from kit.answers import Answer
from kit.command import Settings, main, say
from kit.data import source
from kit.features import head_entropies, head_maxima
from kit.lines import distance_densities
from kit.measure import auroc_figure, fitted_scores, halves, left_out, mean_figure
from kit.report import Kind, Report, Row
from kit.services import Services
from names import Draw
from numpy.typing import NDArray
from scipy.stats import kurtosis

NAME = "thought_audit"
TASKS = ("larger", "smaller")
ANCHOR = (
    "Thought Anchors: receiver heads, by the kurtosis of what their tokens receive (2506.19143)"
)
TRACE = re.compile(r"<think> \S+:( \d+) \S+:( \d+) \w+:( \d+) </think>( \d+)")
RECEIVERS = 3
# Rows so near to a token look at it for its nearness; the publication leaves out four sentences.
NEAR = 4


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    values: tuple[str, str]

    @property
    def result(self) -> str:
        pick = max if self.task == "larger" else min
        return pick(self.values, key=int)


@dataclass(frozen=True)
class Trace:
    """A working of three steps: two numbers looked up, and the result.

    Attributes:
        answer: as it came.
        steps: first and past-the-last generated token of the number of each step.
        received: float64[2, heads], from the rows that led to the result, to each looked-up number.
        by_distance: float64[2], the same from the 20 numbers.
        numbers: float64[3, 20], mean fingerprint of the rows that led to each step's number.
        heads: float64[3, 32], entropy and largest weight of each head there.
        peaks: float64[heads], kurtosis of what the tokens of the working receive.
        rests: bool[2], whether the result changes with the looked-up number.
        wrong: bool[3], whether the step's number is not what it should be.
    """

    answer: Answer
    task: str
    steps: tuple[tuple[int, int], ...]
    received: NDArray[np.float64]
    by_distance: NDArray[np.float64]
    numbers: NDArray[np.float64]
    heads: NDArray[np.float64]
    peaks: NDArray[np.float64]
    rests: NDArray[np.bool_]
    wrong: NDArray[np.bool_]


def make(draw: Draw, task: str) -> Question:
    names = draw.names(draw.rng.randint(4, 14))
    table = {name: str(draw.rng.randint(1000, 9999)) for name in names}
    first, second = draw.rng.sample(names, 2)
    rows = [f"{name}: {number}" for name, number in table.items()]
    question = f"Question: which is {task}, {first} or {second}?"
    prompt = "\n".join([*rows, question, "Answer:"])
    return Question(task, prompt, (table[first], table[second]))


def generated(answer: Answer, start: int, end: int) -> tuple[int, int]:
    """The generated tokens that hold characters of the answer: first and past-the-last."""
    ends = np.cumsum([len(token) for token in answer.tokens])
    first, last = np.searchsorted(ends, [start, end - 1], side="right")
    return int(first), int(last) + 1


def changed(number: str, draw: Draw) -> str:
    """The number with another last digit."""
    return number[:-1] + draw.rng.choice([digit for digit in "0123456789" if digit != number[-1]])


def peaks(answer: Answer) -> NDArray[np.float64]:
    """Kurtosis of the mean attention that each generated token gets from rows well after it."""
    n, prompt = len(answer.tokens), answer.prompt_len
    rows = answer.rows()
    # Row i stands at position prompt - 1 + i; token j at prompt + j.
    means = [rows[j + 1 + NEAR :, :, prompt + j].mean(0) for j in range(n - NEAR - 1)]
    return np.asarray(kurtosis(np.array(means, np.float64), axis=0))


def look(services: Services, draw: Draw, question: Question) -> Trace | None:
    """The trace of a question, and what changes of it change; None if it has another form."""
    answer = services.ask(question.prompt, max_tokens=60, stop="\n", scores=True)
    found = TRACE.search(answer.text)
    if found is None:
        return None
    spans = [generated(answer, found.start(k), found.end(k)) for k in (1, 2, 3)]
    rows, prompt = answer.rows(), answer.prompt_len
    result = rows[slice(*spans[2])].mean(0, dtype=np.float64)
    densities = [
        distance_densities(vector, prompt - 1 + place)
        for place, vector in enumerate(answer.fingerprints)
    ][slice(*spans[2])]
    keys = [np.arange(prompt + first, prompt + last) for first, last in spans[:2]]
    rests = []
    for k in (1, 2):
        other = " " + changed(found[k].strip(), draw)
        end = found.start(3)
        text = answer.text[: found.start(k)] + other + answer.text[found.end(k) : end]
        again = services.ask(question.prompt + text, max_tokens=5, stop=["\n", " </"])
        rests.append(again.text.strip() != found[3].strip())
    values = [found[k].strip() for k in (1, 2, 3)]
    pick = max if question.task == "larger" else min
    should = [*question.values, pick(values[:2], key=int)]
    entropies, maxima = head_entropies(rows, prompt), head_maxima(rows)
    return Trace(
        answer.light(), question.task, tuple(spans),
        np.array([result[:, of].mean(-1) for of in keys]),
        np.array([np.mean([density[of] for density in densities]) for of in keys]),
        np.array([answer.fingerprints[slice(*span)].mean(0) for span in spans]),
        np.array([
            np.concatenate([entropies[slice(*span)].mean(0), maxima[slice(*span)].mean(0)])
            for span in spans
        ]),
        peaks(answer), np.array(rests), np.array(values) != np.array(should),
    )  # fmt: skip


Score = Callable[[NDArray[np.bool_]], NDArray[np.float64]]


def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed)
    each = settings.count(70, 6)
    say(f"asking {2 * each} questions, each working again with either number changed")
    asked = [look(services, draw, make(draw, task)) for _ in range(each) for task in TASKS]
    traces = [trace for trace in asked if trace is not None]
    report = Report(NAME, "AUROC", ANCHOR, requests=len(asked) + 2 * len(traces))
    say(f"{len(traces)} workings of three steps; a step is a row, fitting on half of the requests")

    # Two rows a trace, one for each looked-up number.
    rests = np.concatenate([trace.rests for trace in traces])
    requests = np.repeat(np.arange(len(traces)), 2)
    tasks = [trace.task for trace in traces for _ in "ab"]
    held = halves(requests, settings.seed)
    received = np.array([trace.received for trace in traces])

    def add(kind: Kind, name: str, score: Score, is_fitted: bool = True) -> None:
        scores = score(~held)
        figure = auroc_figure(rests[held], scores[held], requests[held], settings.seed)
        other = left_out(score, rests, tasks, requests, settings.seed) if is_fitted else None
        report.rows.append(Row(name, kind, figure, other))

    def against(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Features of a step against the other one of its trace: [traces, 2, d] -> [rows, d]."""
        return (values - values[:, ::-1]).reshape(len(rests), -1)

    def receivers(train: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Share of what the heads with the sharpest peaks give to the two steps."""
        known = [trace.peaks for trace, of in zip(traces, train[::2], strict=True) if of]
        heads = np.argsort(-np.mean(known, 0), kind="stable")[:RECEIVERS]
        mass = received[..., heads].mean(-1)
        return (mass / np.maximum(mass.sum(1, keepdims=True), 1e-12)).reshape(-1)

    result = np.array([trace.numbers[2] for trace in traces])

    def by_result(train: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Fitted on the result's fingerprint, which has its sign turned for the second step."""
        centred = result - result[train[::2]].mean(0)
        return fitted_scores(np.stack([centred, -centred], 1).reshape(len(rests), -1), rests, train)

    add("20 numbers", "fingerprint of the result's rows", by_result)
    distances = against(np.array([trace.by_distance for trace in traces])[..., None])[:, 0]
    add("20 numbers", "mass by distance", lambda train: distances, is_fitted=False)
    add("per head", f"{RECEIVERS} receiver heads, by kurtosis", receivers)
    shares = against(np.log(np.maximum(received, 1e-6)))
    add("per head", "mass on the step, fitted", partial(fitted_scores, shares, rests))
    sure = np.array([
        trace.answer.logprobs[slice(*span)].mean() for trace in traces for span in trace.steps[:2]
    ])  # fmt: skip
    add("baseline", "log-probability of the step", lambda train: -sure, is_fitted=False)
    last = np.tile([0.0, 1.0], len(traces))
    add("baseline", "the later step", lambda train: last, is_fitted=False)
    same = np.array([
        float(_text(trace, step) == _text(trace, 2)) for trace in traces for step in (0, 1)
    ])  # fmt: skip
    add("baseline", "its number is the result's", lambda train: same, is_fitted=False)

    report.facts["workings of three steps"] = f"{len(traces)} of {len(asked)}"
    exactly_one = [trace.rests.sum() == 1 for trace in traces]
    report.facts["workings whose result rests on one of the two"] = (
        f"{sum(map(int, exactly_one))} of {len(traces)}"
    )
    _add_errors(report, traces, held[::2], settings.seed)
    return report


def _text(trace: Trace, step: int) -> str:
    return "".join(trace.answer.tokens[slice(*trace.steps[step])])


def _add_errors(report: Report, traces: list[Trace], held: NDArray[np.bool_], seed: int) -> None:
    """The other question of an audit: which of the three steps is wrong. Three rows a trace."""
    wrong = np.concatenate([trace.wrong for trace in traces])
    requests = np.repeat(np.arange(len(traces)), 3)
    out = np.repeat(held, 3)
    steps = np.tile(np.eye(3), (len(traces), 1))
    sure = [
        [trace.answer.logprobs[slice(*s)].mean(), trace.answer.logprobs[slice(*s)].min()]
        for trace in traces
        for s in trace.steps
    ]
    # Which step it is stands in all of them: the third goes wrong most often.
    for name, values in (
        ("20 numbers", np.concatenate([trace.numbers for trace in traces])),
        ("entropy and largest weight of each head", np.concatenate([t.heads for t in traces])),
        ("log-probabilities", np.array(sure)),
        ("which step it is", np.empty((len(wrong), 0))),
    ):
        scores = fitted_scores(np.hstack([values, steps]), wrong, ~out)
        figure = auroc_figure(wrong[out], scores[out], requests[out], seed)
        report.facts[f"AUROC of wrong steps, {name}"] = asdict(figure)
    for step, name in enumerate(("first number", "second number", "result")):
        share = mean_figure([trace.wrong[step] for trace in traces], np.arange(len(traces)), seed)
        report.facts[f"share of workings with a wrong {name}"] = asdict(share)


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
