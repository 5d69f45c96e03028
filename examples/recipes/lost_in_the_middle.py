"""Lost in the middle: which depths of a long context are lost, and can attention mend it?

Long tables, logs and tables strewn with prose are asked for a line at every depth. The model is
then asked again with an eighth of the lines: those that its attention points at, with and without
its habit of looking at some places more than at others, measured on other requests.
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
from kit.features import certainty
from kit.measure import auroc_figure, fitted_scores, halves, mean_figure
from kit.report import Report, Row
from kit.services import Services
from names import Draw
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import Layout
from pipeline.analysis import RawAttention, collect_entries, read_raw
from sidecar.notebook import LocalEngine, stored_rows

NAME = "lost_in_the_middle"
TASKS = ("table", "prose", "codename")
# Bins of depth, as in the layout `layered`; the depths that facts are of.
EIGHTHS, FIFTHS = 8, 5
HEADS = 4
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Question:
    """Lines, and a question about one of them."""

    task: str
    lines: list[str]
    question: str
    needed: int
    answer: str

    def prompt(self, kept: Mask | None = None) -> str:
        """The question after all lines, or after those that are kept."""
        lines = [line for place, line in enumerate(self.lines) if kept is None or kept[place]]
        return "\n".join([*lines, self.question])


def question(draw: Draw, task: str, depth: float) -> Question:
    """A question about the line at `depth` (0 to 1) of a context of about 1,900 tokens."""
    rng = draw.rng
    if task == "codename":
        people: dict[str, str] = {}
        while len(people) < 80:
            people.setdefault(draw.person(), draw.codename())
        table = list(people.items())
        lines = [
            f"[Entry {place:02d}] Agent: {agent}, Codename: '{code}'"
            for place, (agent, code) in enumerate(table, 1)
        ]
    else:
        count = 170 if task == "table" else 28
        numbers = [str(number) for number in rng.sample(range(1000, 10000), count)]
        table = list(zip(draw.names(count), numbers, strict=True))
        lines = [f"{name}: {number}" for name, number in table]
    asked = min(len(table) - 1, int(depth * len(table)))
    name, answer = table[asked]
    needed = asked
    if task == "prose":
        strewn: list[str] = []
        for place, line in enumerate(lines):
            needed = len(strewn) if place == asked else needed
            strewn += [line, *draw.filler(150).split("\n")]
        lines = strewn
    ask = f"Agent: {name}, Codename:" if task == "codename" else f"{name}:"
    return Question(task, lines, ask, needed, answer)


def is_right(answer: Answer, asked: Question) -> bool:
    return answer.text.strip().split("\n")[0].strip("' ") == asked.answer


@dataclass(frozen=True)
class Looked:
    """Where the row that begins the answer looked, of N lines.

    Attributes:
        right: whether the answer is.
        vector: float64[20], the fingerprint, of the layout `layered`.
        masses: float64[heads, N], what each head gives to a line, of the 64 keys it gives most.
        places: float64[N], where the middle of each line lies among the tokens, 0 to 1.
        sizes: float64[N], tokens of each line.
        answer: whole.
    """

    right: bool
    vector: NDArray[np.float64]
    masses: NDArray[np.float64]
    places: NDArray[np.float64]
    sizes: NDArray[np.float64]
    answer: Answer

    @property
    def eighths(self) -> NDArray[np.int64]:
        return np.minimum(EIGHTHS - 1, (self.places * EIGHTHS).astype(int))


def look(layered: Services, asked: Question) -> Looked:
    """Ask, and read lists of single heads from the answer, the fingerprint from the sidecar."""
    answer = layered.ask(
        asked.prompt(), max_tokens=7, stop="\n", top_k_attention=64,
        attention_capture_head_ids=list(range(HEADS)),
    )  # fmt: skip
    entries = [e for e in read_raw(collect_entries(answer.response)) if e.step == 0]
    rows = stored_rows(layered.sidecar.client, answer.response["id"], rows=1)
    first = min(rows, key=lambda row: row["position"])
    # Which line each token begins in; the first token is <|bos|>.
    texts = answer.prompt_tokens
    ends = np.cumsum([text.count("\n") for text in texts[1:]])
    owner = np.concatenate([[-1, 0], ends[:-1]])
    count = len(asked.lines)
    owner[owner >= count] = -1
    sizes = np.bincount(owner[owner >= 0], minlength=count).astype(float)
    middles = np.cumsum(sizes) - sizes / 2
    return Looked(
        is_right(answer, asked), np.array(first["vector"], np.float64),
        head_masses(entries, owner, count), middles / len(texts), sizes, answer,
    )  # fmt: skip


def head_masses(
    entries: list[RawAttention], owner: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """Mass of each head of each captured layer by line: float64[heads, lines]."""
    masses = []
    for entry in entries:
        for head in sorted(entry.heads):
            of = entry.heads[head]
            lines = owner[of.token_positions]
            inside = lines >= 0
            masses.append(np.bincount(lines[inside], of.probabilities[inside], minlength=count))
    return np.array(masses)


class Habit:
    """What the model gives to places of the context whatever stands there, measured on requests.

    It is subtracted, as "Found in the middle" (arXiv 2406.16008) does with a dummy document; here
    the lines that are not asked for are the dummies.
    """

    def __init__(self, looked: list[Looked], asked: list[Question]) -> None:
        self.bins = np.mean([one.vector[4:12] for one in looked], axis=0)
        sums = np.zeros((len(looked[0].masses), EIGHTHS))
        tokens = np.zeros(EIGHTHS)
        for one, of in zip(looked, asked, strict=True):
            others = np.arange(len(of.lines)) != of.needed
            for eighth in range(EIGHTHS):
                inside = others & (one.eighths == eighth)
                sums[:, eighth] += one.masses[:, inside].sum(1)
                tokens[eighth] += one.sizes[inside].sum()
        self.of_token = sums / tokens
        hits = [
            self.calibrated(one).argmax(1) == of.needed
            for one, of in zip(looked, asked, strict=True)
        ]
        self.best_head = int(np.mean(hits, axis=0).argmax())

    def calibrated(self, one: Looked) -> NDArray[np.float64]:
        """Masses of the lines beyond what their places get anyway: float64[heads, N]."""
        return one.masses - self.of_token[:, one.eighths] * one.sizes


def most(scores: NDArray[np.float64], one: Looked) -> Mask:
    """The best lines that fit into an eighth of the tokens, at least one: bool[N]."""
    order = np.argsort(-scores, kind="stable")
    fits = np.cumsum(one.sizes[order]) <= one.sizes.sum() / EIGHTHS
    kept = np.zeros(len(scores), bool)
    kept[order[: max(1, int(fits.argmin()) if not fits.all() else len(fits))]] = True
    return kept


def shares_words(one: Looked, of: Question) -> Mask:
    """Lines that hold the question's text, then the latest that fit: a search without a model."""
    found = np.array([of.question in line for line in of.lines], float)
    return most(found * len(found) + np.arange(len(found)) / len(found), one)


Rule = Callable[[Looked, Question, Habit, np.random.Generator], Mask]
# Whether a rule is fitted is said by its use of the habit.
RULES: tuple[tuple[str, str, bool, Rule], ...] = (
    ("20 numbers", "the eighth that the place bins point at, less the habit", True,
     lambda one, of, habit, rng: one.eighths == (one.vector[4:12] - habit.bins).argmax()),
    ("20 numbers", "the eighth that the place bins point at", False,
     lambda one, of, habit, rng: one.eighths == one.vector[4:12].argmax()),
    ("per head", "lines by the best head, less the habit", True,
     lambda one, of, habit, rng: most(habit.calibrated(one)[habit.best_head], one)),
    ("mean head", "lines by all heads, less the habit", True,
     lambda one, of, habit, rng: most(habit.calibrated(one).mean(0), one)),
    ("mean head", "lines by all heads", False,
     lambda one, of, habit, rng: most(one.masses.mean(0), one)),
    ("baseline", "the last eighth", False,
     lambda one, of, habit, rng: most(one.places, one)),
    ("baseline", "an eighth by chance", False,
     lambda one, of, habit, rng: most(rng.random(len(one.places)), one)),
    ("baseline", "lines that hold the question's text", False,
     lambda one, of, habit, rng: shares_words(one, of)),
)  # fmt: skip


class Asked:
    """Questions asked again with some of their lines; what was asked already is not asked twice."""

    def __init__(self, services: Services, questions: list[Question]) -> None:
        self.services, self.questions = services, questions
        self.known: dict[tuple[int, bytes], bool] = {}

    def right(self, place: int, kept: Mask) -> bool:
        key = place, kept.tobytes()
        if key not in self.known:
            of = self.questions[place]
            answer = self.services.ask(of.prompt(kept), max_tokens=7, stop="\n")
            self.known[key] = is_right(answer, of)
        return self.known[key]


def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed, prose=True)
    each = settings.count(36, 2)
    questions = [
        question(draw, task, (place + draw.rng.random()) / each)
        for task in TASKS
        for place in range(each)
    ]
    say(f"asking {len(questions)} questions of long contexts, with fingerprints of layout layered")
    with LocalEngine(services.sidecar, layout=Layout.LAYERED) as engine:
        looked = [look(Services(engine, services.sidecar), of) for of in questions]
    right = np.array([one.right for one in looked])
    say(f"{right.sum()} right; asking again with an eighth of the lines")
    requests = np.arange(len(questions))
    held = halves(requests, settings.seed)
    tasks = np.array([of.task for of in questions])

    def habit_of(chosen: Mask) -> Habit:
        places = np.flatnonzero(chosen)
        return Habit([looked[p] for p in places], [questions[p] for p in places])

    own, others = habit_of(~held), {task: habit_of(tasks != task) for task in TASKS}
    asked = Asked(services, questions)
    report = Report(
        NAME, "accuracy, asked again with an eighth of the context",
        "a drop of over 20 points in the middle (arXiv 2307.03172), calibration up to +15 "
        "(2406.16008)",
    )  # fmt: skip

    def figure(values: NDArray[Any], chosen: Mask) -> Any:
        return mean_figure(values[chosen], requests[chosen], settings.seed)

    every = np.ones(len(questions), bool)
    for kind, name, is_fitted, rule in RULES:
        again = {}
        for split in ("own", "others") if is_fitted else ("own",):
            rng = np.random.default_rng(settings.seed)
            # Without a fit on other tasks only the held-out requests are quoted.
            again[split] = np.array([
                (split == "others" or held[p])
                and asked.right(int(p), rule(looked[p], questions[p],
                                        own if split == "own" else others[questions[p].task], rng))
                for p in requests
            ])  # fmt: skip
        left = figure(again["others"], every) if is_fitted else None
        report.rows.append(Row(name, kind, figure(again["own"], held), left))  # type: ignore[arg-type]
    report.rows.append(Row("asked once, with all lines", "baseline", figure(right, held)))

    depths = np.array([of.needed / len(of.lines) for of in questions])
    for task in TASKS:
        inside = tasks == task
        report.facts[f"tokens, {task}"] = round(
            np.mean([one.answer.prompt_len for one, of in zip(looked, inside, strict=True) if of])
        )
        for fifth in range(FIFTHS):
            chosen = inside & (np.minimum(FIFTHS - 1, (depths * FIFTHS).astype(int)) == fifth)
            if chosen.any():
                report.facts[f"accuracy, {task}, depth {fifth * 20} to {fifth * 20 + 20}%"] = (
                    asdict(figure(right, chosen))
                )
    report.facts["most mass on the needed line, best head"] = asdict(
        figure(np.array([one.masses[own.best_head].argmax() == of.needed
                         for one, of in zip(looked, questions, strict=True)]), held)
    )  # fmt: skip
    report.facts["the same, less the habit"] = asdict(
        figure(np.array([own.calibrated(one)[own.best_head].argmax() == of.needed
                         for one, of in zip(looked, questions, strict=True)]), held)
    )  # fmt: skip
    for name, bins in (("all", every), ("right", right), ("wrong", ~right)):
        of_these = np.array([one.vector[4:12] for one in looked])[bins]
        if len(of_these):
            report.facts[f"place bins, oldest first, {name} answers"] = " ".join(
                f"{share:.2f}" for share in of_these.mean(0)
            )
    detected = wrongness(looked, right, held) if len(set(right[~held])) == 2 else {}
    for name, scores in detected.items():
        report.facts[f"AUROC of a wrong answer by {name}"] = asdict(
            auroc_figure(~right[held], scores[held], requests[held], settings.seed)
        )
    report.requests = len(questions) + len(asked.known)
    return report


def wrongness(
    looked: list[Looked], right: NDArray[np.bool_], held: NDArray[np.bool_]
) -> dict[str, NDArray[np.float64]]:
    """Scores of each answer, larger if it looks wrong, by what they look at."""
    heads = np.array([np.concatenate([o.masses.max(1), o.masses.sum(1)]) for o in looked])
    found = {
        "the 20 numbers": fitted_scores(np.array([o.vector for o in looked]), ~right, ~held),
        "each head's largest line and mass": fitted_scores(heads, ~right, ~held),
    }
    for name in ("first", "lowest"):
        found[f"log-probability, {name}"] = -np.array([certainty(o.answer)[name] for o in looked])
    return found


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
