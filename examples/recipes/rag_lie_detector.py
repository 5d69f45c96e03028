"""RAG lie detector: is the answer read from the context, or made up?

Each request is a table or a log and a question about one line of it. In half of them the line is
there. In a quarter it was taken out, so that whatever the model answers is made up. In a quarter
it was replaced by a line whose name differs in one letter, which invites the model to answer with
that line's value. An answer is a lie if it is not the value of the name that was asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from kit.answers import Answer
from kit.command import Settings, main, say
from kit.data import source
from kit.features import certainty, first_mean, head_entropies, head_maxima, lookback_ratios
from kit.measure import auroc_figure, auroc_gain, fitted_scores, group_rates, halves, left_out
from kit.report import Kind, Report, Row
from kit.services import Services
from names import Draw
from numpy.typing import NDArray

NAME = "rag_lie_detector"
TASKS = ("needle", "equals", "codename")
# What was done to the line that is asked for, and how often of four.
CONDITIONS = ("present", "absent", "present", "near")
# The first tokens of an answer that a detector sees; a number has up to five, with its line's end.
TOKENS = 5
ANCHOR = (
    "Lookback Lens, Llama-2-7B: AUROC 0.914 in its domain, 0.853 transferred (arXiv 2407.07071)"
)
# Rows whose figures are also given by condition.
QUOTED: tuple[tuple[Kind, str], ...] = (
    ("20 numbers", "fingerprints, first row and mean"),
    ("per head", "lookback ratios"),
    ("baseline", "log-probabilities, together"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Question:
    """A prompt whose context holds the answer, or does not."""

    task: str
    condition: str
    prompt: str
    truth: str


def near(draw: Draw, name: str, taken: set[str]) -> str:
    """The name with one of its letters changed, in the same case."""
    while True:
        place = draw.rng.randrange(len(name))
        letter = draw.rng.choice(LETTERS)
        letter = letter.upper() if name[place].isupper() else letter
        changed = name[:place] + letter + name[place + 1 :]
        if changed.casefold() not in taken:
            return changed


def question(draw: Draw, task: str, condition: str) -> Question:
    """A question of 6 to 40 lines, of held-out names."""
    lines = draw.rng.randint(6, 40 if task != "codename" else 14)
    if task == "codename":
        people: dict[str, str] = {}
        while len(people) < lines:
            people.setdefault(draw.person(), draw.codename())
        table = list(people.items())
    else:
        numbers = (str(draw.rng.randint(1000, 9999)) for _ in range(lines))
        table = list(zip(draw.names(lines), numbers, strict=True))
    asked = draw.rng.randrange(lines)
    name, truth = table[asked]
    # A value that comes twice could be right by chance.
    table = [row for row in table if row[0] == name or row[1] != truth]
    place = [row[0] for row in table].index(name)
    if condition == "absent":
        del table[place]
    elif condition == "near":
        changed = near(draw, name, {row[0].casefold() for row in table})
        other = truth
        while other == truth:
            other = draw.codename() if task == "codename" else str(draw.rng.randint(1000, 9999))
        table[place] = (changed, other)
    return Question(task, condition, written(task, table, name), truth)


def written(task: str, table: list[tuple[str, str]], name: str) -> str:
    """The prompt in the form that the model was trained on."""
    if task == "codename":
        rows = [
            f"[Entry {place:02d}] Agent: {agent}, Codename: '{code}'"
            for place, (agent, code) in enumerate(table, 1)
        ]
        head = "Security Log: Agent Codename Retrieval\n\n"
        return head + "\n".join(rows) + f"\n\nAgent: {name}, Codename:"
    between = ":" if task == "needle" else " ="
    rows = [f"{key}{between} {value}" for key, value in table]
    return "\n".join([*rows, f"{name}{between}"])


def is_lie(answer: Answer, truth: str) -> bool:
    """Whether the first line of the answer is another value than the true one."""
    return answer.text.strip().split("\n")[0].strip("'\" ") != truth


def head_features(answer: Answer) -> NDArray[np.float64]:
    """Entropy and largest weight of each head: of the first row, and the mean of all."""
    rows = answer.rows(TOKENS)
    return np.concatenate(
        [first_mean(head_entropies(rows, answer.prompt_len)), first_mean(head_maxima(rows))]
    )


def numbers(answer: Answer) -> NDArray[np.float64]:
    """The fingerprint of the first row, and the mean of all."""
    return first_mean(answer.fingerprints[:TOKENS])


def surely(answer: Answer) -> NDArray[np.float64]:
    """What the log-probabilities say."""
    return np.array(list(certainty(answer, TOKENS).values()))


# What is fitted on: the first of a kind is the one that the table of all recipes quotes.
Look = Callable[[Answer], NDArray[np.float64]]
FITTED: tuple[tuple[Kind, str, Look], ...] = (
    ("20 numbers", "fingerprints, first row and mean", numbers),
    ("20 numbers", "and log-probabilities", lambda a: np.concatenate([numbers(a), surely(a)])),
    ("per head", "lookback ratios", lambda a: lookback_ratios(a, TOKENS).mean(0)),
    ("per head", "entropy and largest weight", head_features),
    ("per head", "mass on the first token", lambda a: first_mean(a.rows(TOKENS)[..., 0])),
    ("baseline", "log-probabilities, together", surely),
)


def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed)
    each = settings.count(100, 4)
    questions = [
        question(draw, task, CONDITIONS[place % len(CONDITIONS)])
        for task in TASKS
        for place in range(each)
    ]
    say(f"asking {len(questions)} questions about lines that are there, absent, or nearly there")
    answers, features = [], []
    for each_question in questions:
        answer = services.ask(each_question.prompt, max_tokens=8, stop="\n", scores=True)
        features.append([look(answer) for _, _, look in FITTED])
        answers.append(answer.light())
    lies = np.array([is_lie(a, q.truth) for a, q in zip(answers, questions, strict=True)])
    say(f"{int(lies.sum())} of {len(lies)} answers are lies; fitting on half of the requests")

    tasks = [q.task for q in questions]
    requests = np.arange(len(questions))
    held = halves(requests, settings.seed)
    report = Report(NAME, "AUROC", ANCHOR, requests=len(questions))
    conditions = np.array([q.condition for q in questions])
    told: dict[tuple[str, str], NDArray[np.float64]] = {}

    def add(
        kind: Kind, name: str, score: Callable[[NDArray[np.bool_]], NDArray[np.float64]]
    ) -> None:
        scores = told[kind, name] = score(~held)
        figure = auroc_figure(lies[held], scores[held], requests[held], settings.seed)
        other = left_out(score, lies, tasks, requests, settings.seed)
        report.rows.append(Row(name, kind, figure, other))

    def add_fitted(kind: Kind, name: str, values: NDArray[np.float64]) -> None:
        add(kind, name, lambda train: fitted_scores(values, lies, train))

    for place, (kind, name, _) in enumerate(FITTED):
        add_fitted(kind, name, np.array([found[place] for found in features]))
    for place, name in enumerate(certainty(answers[0])):
        values = -np.array([surely(answer)[place] for answer in answers])
        add("baseline", f"log-probability, {name}", lambda train, values=values: values)  # type: ignore[misc]
    lengths = np.array([answer.prompt_len for answer in answers], float)
    add("baseline", "length of the prompt", lambda train: lengths)
    first = np.array([answer.fingerprints[0] for answer in answers])
    clusters = [found.cluster_id for found in services.classified(first)]
    add("run", "cluster of the first row", lambda train: group_rates(clusters, lies, train))

    for condition in ("absent", "near"):
        inside = held & (np.where(lies, conditions == condition, conditions == "present"))
        for key in QUOTED:
            of = auroc_figure(lies[inside], told[key][inside], requests[inside], settings.seed)
            report.facts[f"{', '.join(key)}: against lies where the line is {condition}"] = asdict(
                of
            )
    gain = auroc_gain(
        lies[held], told[QUOTED[0]][held], told[QUOTED[-1]][held], requests[held], settings.seed
    )
    report.facts["AUROC of the 20 numbers less that of the log-probabilities"] = asdict(gain)
    for condition in ("present", "absent", "near"):
        inside = conditions == condition
        report.facts[f"lies where the line is {condition}"] = (
            f"{int(lies[inside].sum())} of {int(inside.sum())}"
        )
    return report


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
