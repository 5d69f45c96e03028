"""Speculative-decoding debug: where does a draft fail, and does attention say so in time?

The draft is the demo model itself without its last layer. What it would propose after each token is
read from the attention API: the logit lens of the layer that it ends with. A proposal is accepted
where the whole model chose the same token. A detector sees only what the draft has before its
proposal is verified. Assisted generation of transformers, run with the same draft, checks that
this is what speculation does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from kit.answers import Answer
from kit.command import Settings, main, say
from kit.data import library, source
from kit.features import head_entropies, head_maxima
from kit.measure import Figure, auroc_figure, fitted_scores, group_rates, halves, interval, left_out
from kit.measure import mean_figure as mean_of
from kit.model import load_demo
from kit.report import Report, Row
from kit.services import Services
from names import Draw
from numpy.typing import NDArray
from scipy.stats import spearmanr
from tasks import GENERATORS

from pipeline.analysis import collect_entries

NAME = "speculative_debug"
TASKS = ("recall", "codename", "copy", "brackets", "counting", "table", "think", "code", "prose")
# The draft's layers; the whole model has one more. Those that the server captures fingerprints of.
LAYERS, CAPTURED = (0, 1, 2), (1, 2)
TOKENS = 24
# Tokens that the draft proposes before the whole model looks.
PROPOSED = 5
# Of the draft's next token, as many as the API names.
LENS = 20
# Of the prompts every fourth is run by assisted generation, too.
CHECKED = 4
# Share of accepted tokens that an early stop may give up on the requests that it is fitted on.
GIVEN_UP = 0.05


@dataclass(frozen=True)
class Drafted:
    """An answer, and what the draft would have proposed for each of its n tokens.

    Attributes:
        accepted: bool[n], whether the draft's likeliest token is the answer's.
        likeliest: float64[n, 2], natural log-probabilities of the draft's two likeliest tokens.
        entropy: float64[n], in nats, of the draft's named tokens and the rest as one.
    """

    task: str
    answer: Answer
    accepted: NDArray[np.bool_]
    likeliest: NDArray[np.float64]
    entropy: NDArray[np.float64]


def prompts(draw: Draw, each: int) -> list[tuple[str, str]]:
    """`each` prompts of every task, of 24 to 160 tokens: (task, prompt)."""
    text = library()
    made = []
    for task in TASKS:
        for _ in range(each):
            size = draw.rng.randint(24, 160)
            if task == "code":
                source_code = draw.rng.choice([file for file in text.code if len(file) > 2000])
                start = source_code.index("\n", draw.rng.randrange(len(source_code) - 1500))
                prompt = source_code[start + 1 : start + 1 + 3 * size].rstrip()
            elif task == "prose":
                prompt = draw.filler(3 * size).rstrip()
            else:
                prompt = GENERATORS[task](draw, size).prompt
            made.append((task, prompt))
    return made


def drafted(services: Services, task: str, prompt: str) -> Drafted:
    """Ask, with the logit lens of the draft's last layer."""
    answer = services.ask(
        prompt, max_tokens=TOKENS, scores=True, attention_logit_lens=LENS,
        attention_capture_layers=list(CAPTURED), attn_capture_layers=list(LAYERS),
    )  # fmt: skip
    lenses = [entry["logit_lens"][str(LAYERS[-1])] for entry in collect_entries(answer.response)]
    chosen = [token["id"] for token in answer.response["output_tokens"]]
    accepted = [lens[0]["token_id"] == token for lens, token in zip(lenses, chosen, strict=True)]
    named = np.array([[one["logprob"] for one in lens] for lens in lenses])
    rest = np.maximum(1 - np.exp(named).sum(1), 1e-12)
    entropy = -(np.exp(named) * named).sum(1) - rest * np.log(rest)
    return Drafted(task, answer, np.array(accepted), named[:, :2], entropy)


def head_features(answer: Answer) -> NDArray[np.float64]:
    """Entropy and largest weight of each of the draft's heads: float64[n, 24]."""
    rows = answer.rows()
    return np.concatenate([head_entropies(rows, answer.prompt_len), head_maxima(rows)], axis=1)


def rounds(accepted: NDArray[np.bool_], stop: NDArray[np.bool_]) -> tuple[int, int, int]:
    """Speculation over an answer: (calls of the whole model, proposed tokens, accepted tokens).

    A call verifies up to `PROPOSED` tokens, and gives one more. The draft stops before a token that
    `stop` (bool[n]) marks, and never proposes the answer's last one, as transformers does not.
    """
    place, calls, proposed, kept = 0, 0, 0, 0
    while place < len(accepted):
        most = min(PROPOSED, len(accepted) - place - 1)
        run = stop[place : place + most]
        most = int(run.argmax()) if run.any() else most
        right = accepted[place : place + most]
        good = most if right.all() else int(right.argmin())
        calls, proposed, kept = calls + 1, proposed + most, kept + good
        place += good + 1
    return calls, proposed, kept


@torch.inference_mode()
def assisted_calls(found: list[Drafted]) -> tuple[list[int], int]:
    """Calls of the whole model by assisted generation of transformers, for each answer, and how
    many of its outputs are the engine's answer, token for token."""
    model, tokenizer = load_demo()
    layers = model.config.num_hidden_layers
    counted = [0]

    def count(module: Any, arguments: Any, given: Any) -> None:
        counted[0] += module.config.num_hidden_layers == layers

    model.model.register_forward_pre_hook(count, with_kwargs=True)
    model.generation_config.num_assistant_tokens = PROPOSED
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    calls, same = [], 0
    for one in found:
        counted[0] = 0
        given = tokenizer(one.answer.prompt, return_tensors="pt")
        made = model.generate(
            **given, assistant_early_exit=len(LAYERS), do_sample=False,
            max_new_tokens=len(one.accepted),
        )  # fmt: skip
        calls.append(counted[0])
        chosen = [token["id"] for token in one.answer.response["output_tokens"]]
        same += made[0, given.input_ids.shape[1] :].tolist() == chosen
    return calls, same


def early_stop(
    found: list[Drafted],
    scores: NDArray[np.float64],
    requests: NDArray[np.int64],
    held: NDArray[np.bool_],
    seed: int,
) -> tuple[Figure, Figure]:
    """What stopping the draft at high scores does on the held-out requests.

    The threshold is the lowest of 40 quantiles that gives up at most `GIVEN_UP` of the tokens that
    are accepted on the other requests.

    Returns:
        The share of proposed tokens that are rejected, and the tokens of an answer per call.
    """
    own = [scores[requests == place] for place in range(len(found))]
    is_held = np.array([held[requests == place][0] for place in range(len(found))])

    def totals(threshold: float, places: NDArray[np.int64]) -> NDArray[np.float64]:
        tried = [rounds(found[place].accepted, own[place] > threshold) for place in places]
        return np.array(tried, np.float64)

    fitted_on, asked = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    without = totals(np.inf, fitted_on)[:, 2].sum()
    chosen = np.inf
    for threshold in np.quantile(scores[~held], np.linspace(0.99, 0.01, 40)):
        if totals(threshold, fitted_on)[:, 2].sum() < (1 - GIVEN_UP) * without:
            break
        chosen = threshold
    table = totals(chosen, asked)
    lengths = np.array([len(found[place].accepted) for place in asked])

    def wasted(rows: NDArray[np.int64]) -> float:
        return float(1 - table[rows, 2].sum() / max(table[rows, 1].sum(), 1))

    def per_call(rows: NDArray[np.int64]) -> float:
        return float(lengths[rows].sum() / table[rows, 0].sum())

    return interval(wasted, asked, seed), interval(per_call, asked, seed)


def recipe(services: Services, settings: Settings) -> Report:
    asked = prompts(source(NAME, settings.seed, prose=True), settings.count(24, 3))
    say(f"asking {len(asked)} prompts of {len(TASKS)} tasks, with the draft's logit lens")
    found = [drafted(services, task, prompt) for task, prompt in asked]
    accepted = np.concatenate([one.accepted for one in found])
    rejected = ~accepted
    requests = np.repeat(np.arange(len(found)), [len(one.accepted) for one in found])
    tasks = [found[request].task for request in requests]
    held = halves(requests, settings.seed)
    say(f"the draft would have been right {accepted.sum()} times of {len(accepted)}")

    vectors = np.concatenate([one.answer.fingerprints for one in found])
    heads = np.concatenate([head_features(one.answer) for one in found])
    likeliest = np.concatenate([one.likeliest for one in found])
    unsure, margin = -likeliest[:, 0], likeliest[:, 0] - likeliest[:, 1]
    zones = [manifold.zone for manifold in services.classified(vectors)]
    before = np.concatenate([[False, *one.accepted[:-1]] for one in found])
    lengths = np.concatenate(
        [np.arange(len(one.accepted)) + one.answer.prompt_len for one in found]
    )
    report = Report(
        NAME, "AUROC",
        "entropy and acceptance, rho -0.20 to -0.15 (arXiv 2604.14682); no AUROC published",
        requests=len(found),
    )  # fmt: skip
    by_name: dict[str, NDArray[np.float64]] = {}

    def add(
        kind: Any, name: str, score: Callable[[NDArray[np.bool_]], NDArray[np.float64]],
        leave_out: bool = True,
    ) -> None:  # fmt: skip
        scores = by_name[name] = score(~held)
        figure = auroc_figure(rejected[held], scores[held], requests[held], settings.seed)
        other = left_out(score, rejected, tasks, requests, settings.seed)
        report.rows.append(Row(name, kind, figure, other if leave_out else None))

    def fitted(values: NDArray[np.float64]) -> Callable[[NDArray[np.bool_]], NDArray[np.float64]]:
        return lambda train: fitted_scores(values, rejected, train)

    both = np.column_stack([unsure, margin])
    add("20 numbers", "fingerprint of the draft's layers", fitted(vectors))
    add("20 numbers", "attention entropy alone", lambda train: vectors[:, 3].astype(float))
    add("20 numbers", "fingerprint and what the draft says", fitted(np.hstack([vectors, both])))
    add("per head", "entropy and largest weight of the draft's heads", fitted(heads))
    add("per head", "the same and what the draft says", fitted(np.hstack([heads, both])))
    add("run", "zone", lambda train: group_rates(zones, rejected, train))
    add("baseline", "log-probability of the draft's token", lambda train: unsure)
    add("baseline", "the draft's margin", lambda train: -margin)
    add("baseline", "both, fitted (what the draft says)", fitted(both))
    add("baseline", "whether the last token was rejected", lambda train: 1.0 - before)
    add("baseline", "length of the context", lambda train: lengths.astype(float))
    add("baseline", "kind of task, known", lambda train: group_rates(tasks, rejected, train), False)

    entropy = np.concatenate([one.entropy for one in found])
    for name, values in (("attention entropy", vectors[:, 3]), ("the draft's entropy", entropy)):
        report.facts[f"Spearman's rho, {name} and acceptance"] = asdict(
            interval(lambda rows, v=values: rho(v[rows], accepted[rows]), requests, settings.seed)  # type: ignore[misc]
        )
    report.facts["accepted"] = asdict(mean_of(accepted, requests, settings.seed))
    for task in TASKS:
        inside = np.array(tasks) == task
        report.facts[f"accepted, {task}"] = asdict(
            mean_of(accepted[inside], requests[inside], settings.seed)
        )
    for zone in sorted(set(zones)):
        inside = np.array(zones) == zone
        report.facts[f"accepted, zone {zone}"] = (
            f"{accepted[inside].mean():.2f} of {inside.sum()} tokens"
        )

    none = np.zeros(len(accepted))
    stops = {"never": none} | {
        name: by_name[name]
        for name in (
            "fingerprint of the draft's layers",
            "entropy and largest weight of the draft's heads",
            "log-probability of the draft's token",
        )
    }
    for name, scores in stops.items():
        wasted, per_call = early_stop(found, scores, requests, held, settings.seed)
        report.facts[f"proposals wasted, stop by {name}"] = asdict(wasted)
        report.facts[f"tokens per call, stop by {name}"] = asdict(per_call)

    checked = found[::CHECKED]
    say(f"{len(checked)} of them by assisted generation of transformers")
    calls, same = assisted_calls(checked)
    expected = [rounds(one.accepted, np.zeros(len(one.accepted), bool))[0] for one in checked]
    report.facts["calls of the whole model, by transformers"] = sum(calls)
    report.facts["calls of the whole model, as the lens says"] = sum(expected)
    report.facts["answers with as many calls as the lens says"] = (
        f"{sum(a == b for a, b in zip(calls, expected, strict=True))} of {len(checked)}"
    )
    report.facts["assisted outputs that are the engine's"] = f"{same} of {len(checked)}"
    return report


def rho(values: NDArray[np.floating[Any]], accepted: NDArray[np.bool_]) -> float:
    """Spearman's rank correlation; NaN where one of the two is constant."""
    if accepted.all() or not accepted.any() or np.ptp(values) == 0:
        return float("nan")
    return float(spearmanr(values, accepted)[0])


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
