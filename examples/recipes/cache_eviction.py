"""Smart cache eviction: which keys can be dropped, by what attention says of their positions?

Each request is a table, a log or a comparison with prose strewn between its lines. The model reads
it, keys and values of most positions are taken out of its cache, and it has to answer from what is
left. The rules see what the attention API says of the prompt; those of kvpress are computed from
it. Only the context is cut. The question is read from what is left of it, and a rule sees the
context alone, as kvpress measures it, or has seen the model read the question as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kit.command import Settings, main, say
from kit.data import source
from kit.measure import Figure, halves, mean_figure
from kit.model import load_demo
from kit.report import Report, Row, shown
from kit.services import Services
from names import Draw
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from transformers import DynamicCache

from pipeline.analysis import (
    collect_entries,
    extract_attention_from_response,
    read_fingerprints,
    read_hubs,
)

NAME = "cache_eviction"
TASKS = ("table", "codename", "comparison")
SETTINGS = ("question after", "question known")
BUDGETS = {"a half": 1 / 2, "a quarter": 1 / 4, "an eighth": 1 / 8}
# What the table of the page is of; the facts have all settings and budgets.
QUOTED = ("question after", "a half")
# First positions that every rule keeps; the last rows of a context that some look at, fewer than
# kvpress has, as these prompts are shorter; the pooling of SnapKV.
SINKS, WINDOW, POOL = 4, 16, 5
FUTURE = 512
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A prompt in two parts, its answer, and the character ranges of the lines that it needs."""

    task: str
    context: str
    question: str
    answer: str
    needed: list[tuple[int, int]]


def case(draw: Draw, task: str) -> Case:
    """Six to twelve lines with a sentence or two after each, about 350 tokens."""
    rng = draw.rng
    count = rng.randint(4, 6) if task == "codename" else rng.randint(8, 12)
    keys = [draw.person() for _ in range(count)] if task == "codename" else draw.names(count)
    keys = list(dict.fromkeys(keys))
    if task == "codename":
        values = [draw.codename() for _ in keys]
        lines = [
            f"[Entry {place:02d}] Agent: {key}, Codename: '{value}'"
            for place, (key, value) in enumerate(zip(keys, values, strict=True), 1)
        ]
    else:
        values = [str(number) for number in rng.sample(range(1000, 10000), len(keys))]
        lines = [f"{key}: {value}" for key, value in zip(keys, values, strict=True)]
    text, spans = "", []
    for line in lines:
        spans.append((len(text), len(text) + len(line)))
        text += f"{line}\n{draw.filler(60)}\n"
    first, second = rng.sample(range(len(keys)), 2)
    if task == "codename":
        question, answer = f"\nAgent: {keys[first]}, Codename:", f" '{values[first]}'"
    elif task == "table":
        question, answer = f"\n{keys[first]}:", f" {values[first]}"
    else:
        result = max(values[first], values[second])
        question = f"\nQuestion: which is larger, {keys[first]} or {keys[second]}?\nAnswer:"
        working = " ".join(f"{keys[place]}: {values[place]}" for place in (first, second))
        answer = f"<think> {working} larger: {result} </think> {result}"
    needed = [spans[first], *([spans[second]] if task == "comparison" else [])]
    return Case(task, text.rstrip("\n"), question, answer, needed)


@dataclass(frozen=True)
class Seen:
    """What a rule may look at: of the context's P positions, and the R >= P rows so far.

    Attributes:
        attention: float32[R, 16, P], full scores of the API, layer by layer.
        window: last rows, those of the question if it is known.
        fingerprints: float32[window, 20], of these rows.
        hubs: positions that the API reports as hubs, the most attended first.
        keys, values: of the cache, float32[L, key heads, P, D].
        hidden: what each layer's queries are made of, float32[L, R, width].
        seed: of chance.
    """

    attention: NDArray[np.float32]
    window: int
    fingerprints: NDArray[np.float32]
    hubs: NDArray[np.int64]
    keys: Tensor
    values: Tensor
    hidden: Tensor
    seed: int

    @property
    def positions(self) -> int:
        return self.attention.shape[2]

    def by_key_head(self, by_head: Scores) -> Scores:
        """Means over the query heads that share keys: [16, P] -> [L, key heads, P]."""
        layers, key_heads = self.keys.shape[:2]
        return by_head.reshape(layers, key_heads, -1, by_head.shape[-1]).mean(2)


def latest(seen: Seen) -> Scores:
    return np.arange(seen.positions, dtype=float)


def by_chance(seen: Seen) -> Scores:
    return np.random.default_rng(seen.seed).random(seen.positions)


def key_norm(seen: Seen) -> Scores:
    """Small keys are attended to (kvpress: KnormPress)."""
    return -seen.keys.norm(dim=-1).double().numpy()


def observed(seen: Seen) -> Scores:
    """What each key got of all rows, by the rows that saw it: H2O as kvpress computes it
    (ObservedAttentionPress): float64[16, P]."""
    rows, positions = len(seen.attention), seen.positions
    return seen.attention.sum(0, dtype=np.float64) / (rows - np.arange(positions))


def received(seen: Seen) -> Scores:
    """Plain sums over all rows, as in H2O's paper (arXiv 2306.14048): float64[16, P]."""
    return seen.attention.sum(0, dtype=np.float64)


def in_window(seen: Seen) -> Scores:
    """SnapKV (arXiv 2404.14469): means over the last rows, smoothed: float64[16, P]."""
    means = seen.attention[-seen.window :].mean(0, dtype=np.float64)
    kernel = np.ones(POOL) / POOL
    return np.array([np.convolve(head, kernel, mode="same") for head in means])


def keep_window(seen: Seen, scores: Scores) -> Scores:
    """The same with the positions of the window's own rows kept, as far as they can be cut."""
    kept = scores.copy()
    kept[..., len(seen.attention) - seen.window :] = np.inf
    return kept


def hubs_then_latest(seen: Seen) -> Scores:
    scores = latest(seen)
    for rank, hub in enumerate(seen.hubs):
        if hub < len(scores):
            scores[hub] = 2 * len(scores) - rank
    return scores


def distance_profile(seen: Seen) -> Scores:
    """What the histograms of the last rows say of each distance, spread evenly over its keys."""
    rows, positions = len(seen.attention), seen.positions
    scores = np.zeros(positions)
    for place, vector in enumerate(seen.fingerprints, rows - len(seen.fingerprints)):
        distances = place - np.arange(min(place + 1, positions))
        bins = np.minimum(15, np.log2(np.maximum(distances, 1)).astype(int))
        counts = np.bincount(bins, minlength=16)
        scores[: len(bins)] += vector[4:][bins] / counts[bins]
    return scores


def expected(seen: Seen, model: Any) -> Scores:
    """ExpectedAttention (arXiv 2510.00636): softmax of the mean logit of Gaussian queries at the
    next positions, times the length of the value: float64[L, key heads, P]."""
    rows, positions = seen.hidden.shape[1], seen.positions
    found: list[Tensor] = []
    for layer, hidden in zip(model.model.layers, seen.hidden, strict=True):
        depth = layer.self_attn.head_dim
        queries = layer.self_attn.q_proj(hidden[SINKS:]).view(rows - SINKS, -1, depth)
        mean = queries.mean(0)  # [H, D]
        spread = torch.einsum("rhi,rhj->hij", queries - mean, queries - mean) / len(queries)
        ahead = torch.arange(rows, rows + FUTURE)[None]
        cos, sin = (part[0].mean(0) for part in model.model.rotary_emb(queries, ahead))
        half = depth // 2
        turn = torch.diag(cos)
        # As rotate_half does: the first half gets minus the second, the second the first.
        turn[:half, half:] -= torch.diag(sin[:half])
        turn[half:, :half] += torch.diag(sin[half:])
        mean, spread = mean @ turn.T, turn @ spread @ turn.T
        keys = seen.keys[len(found)].repeat_interleave(len(mean) // seen.keys.shape[1], 0)
        logits = torch.einsum("hd,hpd->hp", mean, keys) / depth**0.5
        logits += torch.einsum("hpi,hij,hpj->hp", keys, spread, keys) / depth / 2
        logits[:, :SINKS] = -torch.inf
        shares = logits.softmax(-1).view(seen.keys.shape[1], -1, positions).mean(1)
        found.append(shares * seen.values[len(found)].norm(dim=-1))
    return torch.stack(found).double().numpy()


def head_features(seen: Seen) -> Scores:
    """Logarithms of what each head gave each position, over all rows and the last: [P, 32]."""
    both = np.concatenate([observed(seen), in_window(seen)])
    return np.log(both + 1e-6).T


def kept_positions(scores: Scores, layers: int, key_heads: int, count: int) -> Tensor:
    """The `count` best positions of each layer and key head, in order: int64[L, key heads, count].

    The first ones are always among them.
    """
    full = np.broadcast_to(scores, (layers, key_heads, scores.shape[-1])).copy()
    full[..., :SINKS] = np.inf
    best = np.argsort(-full, axis=-1, kind="stable")[..., :count]
    return torch.from_numpy(np.sort(best, axis=-1))


class Reader:
    """The model itself, whose cache is cut. Everything runs without gradients."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load_demo()

    def tokens(self, text: str, *, start: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=start).input_ids)

    def read(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the cache after some tokens, and what the queries are made of."""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=True)
        layers = out.past_key_values.layers
        hidden = [
            layer.input_layernorm(states[0])
            for layer, states in zip(self.model.model.layers, out.hidden_states, strict=False)
        ]
        keys, values = (torch.stack([getattr(one, name)[0] for one in layers])
                        for name in ("keys", "values"))  # fmt: skip
        return keys, values, torch.stack(hidden)

    def answers(
        self, keys: Tensor, values: Tensor, kept: Tensor, tail: list[int], answer: list[int]
    ) -> list[bool]:
        """Whether the answer follows token for token, for each of N ways to cut the cache.

        Args:
            keys, values: [L, key heads, P, D].
            kept: [N, L, key heads, n].
            tail: what is read after the cut, before the answer.
        """
        cuts, depth = kept.shape[0], keys.shape[-1]
        cache = DynamicCache(config=self.model.config)
        for layer in range(len(keys)):
            places = kept[:, layer, :, :, None].expand(-1, -1, -1, depth)
            cut = [
                whole[layer].expand(cuts, -1, -1, -1).gather(2, places) for whole in (keys, values)
            ]
            cache.update(cut[0], cut[1], layer)
        tokens = torch.tensor([tail + answer]).expand(cuts, -1)
        positions = keys.shape[2] + torch.arange(tokens.shape[1])
        out = self.model(tokens, cache=cache, position_ids=positions[None])
        best = out.logits[:, len(tail) - 1 : -1].argmax(-1)
        return (best == torch.tensor(answer)).all(1).tolist()


RULES: tuple[tuple[str, str, Callable[[Seen, Reader], Scores]], ...] = (
    ("20 numbers", "distance profile of the last rows", lambda s, r: distance_profile(s)),
    ("per head", "SnapKV", lambda s, r: keep_window(s, s.by_key_head(in_window(s)))),
    ("per head", "H2O, by the rows that saw a key", lambda s, r: s.by_key_head(observed(s))),
    ("per head", "H2O, plain sums", lambda s, r: s.by_key_head(received(s))),
    ("per head", "ExpectedAttention", lambda s, r: expected(s, r.model)),
    ("mean head", "hubness: sums over all rows", lambda s, r: received(s).mean(0)),
    ("mean head", "the API's 32 hubs, then the latest", lambda s, r: hubs_then_latest(s)),
    ("mean head", "SnapKV of the mean head", lambda s, r: keep_window(s, in_window(s).mean(0))),
    ("baseline", "the latest (StreamingLLM)", lambda s, r: latest(s)),
    ("baseline", "chance", lambda s, r: by_chance(s)),
    ("baseline", "small keys (Knorm)", lambda s, r: key_norm(s)),
)  # fmt: skip
FITTED = "weights of the heads, fitted"


def observe(
    services: Services, reader: Reader, one: Case, setting: str, seed: int
) -> tuple[Seen, list[int]]:
    """Ask for the attention of what the model has read, and read it here as well.

    Returns:
        What rules see, and the tokens of the question.
    """
    known = setting == "question known"
    text = one.context + one.question
    context, tokens = reader.tokens(one.context, start=True), reader.tokens(text, start=True)
    positions, question = len(context), tokens[len(context) :]
    rows = len(tokens) if known else positions
    response = services.engine.ask(
        text if known else one.context, max_tokens=1, attn_capture=1, attn_capture_layers="all",
        attention_fingerprint_mode=True, attention_hubs=True, include_prompt_attention=rows,
    )  # fmt: skip
    layers = extract_attention_from_response(response)
    hubs = read_hubs(response)
    assert layers is not None and hubs is not None
    scores = np.concatenate([layers[layer]["scores"] for layer in sorted(layers)], axis=1)
    window = len(question) if known else WINDOW
    vectors = read_fingerprints(collect_entries(response)).vectors
    keys, values, hidden = reader.read(tokens[:rows])
    return Seen(
        scores[:rows, :, :positions], window, vectors[-window:], hubs[0],
        keys[:, :, :positions], values[:, :, :positions], hidden, seed,
    ), question  # fmt: skip


def needed_tokens(reader: Reader, one: Case, positions: int) -> NDArray[np.bool_]:
    """Which of the positions hold some of the lines that the answer needs: bool[P]."""
    given = reader.tokenizer(one.context, return_offsets_mapping=True)
    spans = given.offset_mapping[:positions]
    inside = [
        any(begin < end and begin < past and end > first for first, past in one.needed)
        for begin, end in spans
    ]
    return np.array(inside)


def fitted_weights(features: list[Scores], labels: list[NDArray[np.bool_]]) -> Any:
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return model.fit(np.concatenate(features), np.concatenate(labels))


@dataclass
class Outcome:
    """Of a setting: for each rule and budget, whether each case was answered: bool[cases]."""

    right: dict[tuple[str, str], list[bool]]
    whole: list[bool]


def run(
    services: Services, cases: list[Case], held: NDArray[np.bool_], setting: str, seed: int
) -> Outcome:
    reader = Reader()
    both = [
        observe(services, reader, one, setting, seed + place) for place, one in enumerate(cases)
    ]
    seen = [one for one, _ in both]
    features = [head_features(one) for one in seen]
    labels = [
        needed_tokens(reader, case, one.positions) for case, one in zip(cases, seen, strict=True)
    ]

    def fit(chosen: NDArray[np.bool_]) -> Any:
        places = np.flatnonzero(chosen)
        return fitted_weights([features[p] for p in places], [labels[p] for p in places])

    tasks = np.array([one.task for one in cases])
    # Each half of the requests is scored by what was fitted on the other.
    halves_fit = {True: fit(~held), False: fit(held)}
    others = {task: fit(tasks != task) for task in TASKS}
    outcome = Outcome({}, [])
    for place, (one, at) in enumerate(zip(cases, seen, strict=True)):
        scores = {name: rule(at, reader) for _, name, rule in RULES}
        scores[FITTED] = halves_fit[bool(held[place])].decision_function(features[place])
        scores[f"{FITTED}, left out"] = others[one.task].decision_function(features[place])
        tail, answer = both[place][1], reader.tokens(one.answer)
        layers, key_heads, positions = at.keys.shape[:3]

        def answered(kept: Tensor, at: Seen = at, tail: Any = tail, answer: Any = answer) -> Any:
            return reader.answers(at.keys, at.values, kept, tail, answer)

        everything = torch.arange(positions).expand(1, layers, key_heads, -1)
        outcome.whole += answered(everything)
        for budget, share in BUDGETS.items():
            count = max(SINKS + 1, round(share * positions))
            kept = [kept_positions(by, layers, key_heads, count) for by in scores.values()]
            right = answered(torch.stack(kept))
            for name, is_right in zip(scores, right, strict=True):
                outcome.right.setdefault((name, budget), []).append(is_right)
    return outcome


@torch.inference_mode()
def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed, prose=True)
    cases = [case(draw, task) for _ in range(settings.count(20, 2)) for task in TASKS]
    requests = np.arange(len(cases))
    held = halves(requests, settings.seed)
    outcomes = {}
    for setting in SETTINGS:
        say(f"{len(cases)} prompts, {setting}: attention, rules, and answers from cut caches")
        outcomes[setting] = run(services, cases, held, setting, settings.seed)

    def figure(values: list[bool]) -> Figure:
        return mean_figure(np.array(values), requests, settings.seed)

    report = Report(
        NAME, f"accuracy with {QUOTED[1]} of the cache, {QUOTED[0]}",
        "kvpress: a leaderboard on RULER-4096 with 8B models, nothing of this size",
        requests=2 * len(cases),
    )  # fmt: skip
    quoted = outcomes[QUOTED[0]].right
    kinds: list[tuple[Any, str]] = [(kind, name) for kind, name, _ in RULES]
    kinds.insert(2, ("per head", FITTED))
    for kind, name in kinds:
        left = None
        if name == FITTED:
            left = figure(quoted[f"{FITTED}, left out", QUOTED[1]])
        report.rows.append(Row(name, kind, figure(quoted[name, QUOTED[1]]), left))
    for setting, outcome in outcomes.items():
        report.facts[f"the whole cache, {setting}"] = shown(figure(outcome.whole))
    for setting, outcome in outcomes.items():
        for _, name in kinds:
            found = [
                f"{figure(outcome.right[name, budget]).value:.2f} with {budget}"
                for budget in BUDGETS
            ]
            report.facts[f"{name}, {setting}"] = ", ".join(found)
    return report


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
