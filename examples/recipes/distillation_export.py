"""Distillation export: do records of attention make a better student than answers alone?

The demo model answers, and what the API says of each answer (tokens, log-probabilities, what each
head looks at) is exported with the fingerprints that the sidecar stored. Students are the same
model with half of the neurons of each MLP taken out, after which it gives no right answer. They
are mended on the exported files: on the answers alone, on the teacher's log-probabilities as well,
or on what its rows looked at, all in the same number of steps on the same examples. Each is then
asked what it has not seen.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from kit.command import Settings, main, say
from kit.data import source
from kit.measure import interval, mean_figure
from kit.model import load_demo
from kit.report import Report, Row
from kit.services import Services
from names import Draw
from numpy.typing import NDArray
from tasks import GENERATORS, needle
from torch import Tensor
from torch.nn import functional

from pipeline.analysis import collect_entries, read_raw
from sidecar.notebook import stored_rows

NAME = "distillation_export"
# Share of the neurons of each MLP that a student has, and the layers whose attention is exported.
KEPT, CAPTURED = 0.5, (2, 3)
HEADS, TOP = 4, 64
BATCH, RATE = 8, 5e-4
# Log-probabilities of the teacher that are exported of each token.
NAMED = 20
Loss = Callable[["Batch", Any], Tensor]


def prompts(draw: Draw, count: int) -> list[str]:
    """Needle prompts of 8 lines and logs of 4 agents, in turn."""
    return [
        needle(draw, 8).prompt if place % 2 else GENERATORS["codename"](draw, 96).prompt
        for place in range(count)
    ]


def export(services: Services, asked: list[str], folder: Path) -> tuple[Path, Path]:
    """Ask the teacher, and write two files: examples, and what the rows of their answers looked at.

    Returns:
        examples.parquet: request_id, tokens of prompt and answer, the teacher's likeliest tokens
        and their log-probabilities. attention.parquet: a row for each layer and head of each row
        of an answer, with its keys and probabilities, and the row's fingerprint.
    """
    examples, attention = [], []
    for prompt in asked:
        answer = services.ask(
            prompt, max_tokens=10, stop="\n", logprobs=NAMED, top_k_attention=TOP,
            attention_capture_head_ids=list(range(HEADS)), attention_capture_layers=list(CAPTURED),
        )  # fmt: skip
        response = answer.response
        count = len(answer.tokens)
        examples.append({
            "request_id": response["id"], "prompt": prompt, "answer": answer.text,
            "tokens": [token["id"] for token in response["prompt_tokens"]],
            "answer_tokens": [token["id"] for token in response["output_tokens"]],
            "likeliest": [
                [{"token": token, "logprob": value} for token, value in top.items()]
                for top in response["choices"][0]["logprobs"]["top_logprobs"]
            ],
        })  # fmt: skip
        stored = stored_rows(services.sidecar.client, response["id"], rows=count)
        vectors = {row["position"]: row["vector"] for row in stored}
        for entry in read_raw(collect_entries(response)):
            for head, of in entry.heads.items():
                attention.append({
                    "request_id": response["id"], "position": entry.position,
                    "layer": entry.layer, "head": head, "keys": of.token_positions.tolist(),
                    "probabilities": of.probabilities.tolist(),
                    "vector": vectors[entry.position],
                })  # fmt: skip
    files = folder / "examples.parquet", folder / "attention.parquet"
    for path, rows in zip(files, (examples, attention), strict=True):
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    return files


@dataclass
class Lesson:
    """An exported example, as the student is taught it.

    Attributes:
        tokens: int64[T], the prompt and all of the answer but its last token.
        answer: int64[n], what the last n rows have to predict.
        seen: float32[n, layers, heads, T], what the teacher's heads gave to each key.
        vectors: float32[n, 20], fingerprints.
        soft: float32[n, V], the teacher's probabilities.
    """

    tokens: Tensor
    answer: Tensor
    seen: Tensor
    vectors: Tensor
    soft: Tensor


def read_lessons(files: tuple[Path, Path], tokenizer: Any, vocabulary: int) -> list[Lesson]:
    by_request: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(files[1]).to_pylist():
        by_request.setdefault(row["request_id"], []).append(row)
    lessons = []
    for row in pq.read_table(files[0]).to_pylist():
        prompt, answer = row["tokens"], row["answer_tokens"]
        tokens = torch.tensor(prompt + answer[:-1])
        rows, first = len(answer), len(prompt) - 1
        seen = torch.zeros(rows, len(CAPTURED), HEADS, len(tokens))
        vectors = torch.zeros(rows, 20)
        for of in by_request[row["request_id"]]:
            place, layer = of["position"] - first, CAPTURED.index(of["layer"])
            seen[place, layer, of["head"], of["keys"]] = torch.tensor(of["probabilities"])
            vectors[place] = torch.tensor(of["vector"])
        soft = torch.zeros(rows, vocabulary)
        for place, top in enumerate(row["likeliest"]):
            for one in top:
                # A text that stands for no single token, such as half a character, is left out.
                ids = tokenizer(one["token"], add_special_tokens=False).input_ids
                if len(ids) == 1:
                    soft[place, ids[0]] = np.exp(one["logprob"])
        soft /= soft.sum(1, keepdim=True).clamp(min=1e-9)
        lessons.append(Lesson(tokens, torch.tensor(answer), seen, vectors, soft))
    return lessons


@dataclass
class Batch:
    """Lessons, and of each the logits float[n, V] and attention float[n, layers, heads, T]."""

    lessons: list[Lesson]
    logits: list[Tensor]
    attention: list[Tensor]


def of_answers(batch: Batch) -> Tensor:
    return functional.cross_entropy(
        torch.cat(batch.logits), torch.cat([one.answer for one in batch.lessons])
    )


def of_logprobs(batch: Batch) -> Tensor:
    logits, soft = torch.cat(batch.logits), torch.cat([one.soft for one in batch.lessons])
    return -(soft * logits.log_softmax(-1)).sum(-1).mean()


def of_heads(batch: Batch) -> Tensor:
    """Kullback-Leibler divergence of the student's heads from the teacher's, mean over heads."""
    losses = []
    for lesson, found in zip(batch.lessons, batch.attention, strict=True):
        known = lesson.seen > 0
        terms = lesson.seen * (lesson.seen.clamp(min=1e-9).log() - found.clamp(min=1e-9).log())
        losses.append(torch.where(known, terms, 0.0).sum(-1).mean())
    return torch.stack(losses).mean()


def of_fingerprints(batch: Batch) -> Tensor:
    """The same of the histograms over distance: the student's, of all heads, from the recorded."""
    losses = []
    for lesson, found in zip(batch.lessons, batch.attention, strict=True):
        rows, length = found.shape[0], found.shape[-1]
        places = torch.arange(length - rows, length)[:, None] - torch.arange(length)
        bins = places.clamp(min=1).float().log2().long().clamp(max=15)
        # As a fingerprint is made: without the first token, each head's row summing to 1.
        visible = found[..., 1:] / found[..., 1:].sum(-1, keepdim=True).clamp(min=1e-9)
        mean = torch.where(places[:, 1:] >= 0, visible.mean((1, 2)), 0.0)
        made = torch.zeros(rows, 16).scatter_add(1, bins[:, 1:], mean)
        given = lesson.vectors[:, 4:]
        terms = given * (given.clamp(min=1e-9).log() - made.clamp(min=1e-9).log())
        losses.append(terms.sum(-1).mean())
    return torch.stack(losses).mean()


# What a student is taught besides the answers.
ARMS: tuple[tuple[str, str, Callable[[Batch], Tensor] | None], ...] = (
    ("20 numbers", "answers and fingerprints of their rows", of_fingerprints),
    ("per head", "answers and what each head looked at", of_heads),
    ("baseline", "answers alone", None),
    ("baseline", "answers and log-probabilities", of_logprobs),
)


def make_student(teacher: Any) -> Any:
    """The teacher with the neurons of each MLP that have the largest weights (by the product of the
    norms of what goes in and out)."""
    student = copy.deepcopy(teacher)
    student.set_attn_implementation("eager")
    for layer in student.model.layers:
        mlp = layer.mlp
        ways = ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1))
        norms = torch.stack([way.weight.norm(dim=1 - dim) for way, dim in ways])
        kept = norms.prod(0).topk(round(KEPT * norms.shape[1])).indices
        for way, dim in ways:
            way.weight = torch.nn.Parameter(way.weight.index_select(dim, kept).detach().clone())
    return student


def run_batch(student: Any, lessons: list[Lesson]) -> Batch:
    longest = max(len(one.tokens) for one in lessons)
    tokens = torch.stack([functional.pad(one.tokens, (0, longest - len(one.tokens)))
                          for one in lessons])  # fmt: skip
    out = student(tokens, output_attentions=True, use_cache=False)
    layers = torch.stack([out.attentions[layer] for layer in CAPTURED], 1)
    logits, attention = [], []
    for place, one in enumerate(lessons):
        end = len(one.tokens)
        rows = slice(end - len(one.answer), end)
        logits.append(out.logits[place, rows])
        attention.append(layers[place, :, :, rows, :end].permute(2, 0, 1, 3))
    return Batch(lessons, logits, attention)


def teach(
    teacher: Any,
    lessons: list[Lesson],
    more: Callable[[Batch], Tensor] | None,
    steps: int,
    seed: int,
) -> Any:
    """A student after so many steps; the seed draws the batches."""
    student = make_student(teacher)
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE)
    rng = random.Random(seed)
    for _ in range(steps):
        batch = run_batch(student, rng.sample(lessons, min(BATCH, len(lessons))))
        loss = of_answers(batch) + (0.0 if more is None else more(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student


@torch.inference_mode()
def examine(student: Any, exam: list[Lesson]) -> NDArray[np.bool_]:
    """Whether each answer is the teacher's, token for token, greedily: bool[lessons]."""
    right: list[bool] = []
    for start in range(0, len(exam), BATCH):
        batch = run_batch(student, exam[start : start + BATCH])
        right += [
            bool((logits.argmax(-1) == one.answer).all())
            for logits, one in zip(batch.logits, batch.lessons, strict=True)
        ]
    return np.array(right)


def recipe(services: Services, settings: Settings) -> Report:
    draw = source(NAME, settings.seed)
    taught, asked, repeats = (settings.count(*of) for of in ((96, 12), (80, 6), (2, 1)))
    steps = settings.count(100, 3)
    texts = prompts(draw, taught + asked)
    teacher, tokenizer = load_demo()
    size = teacher.config.vocab_size
    with TemporaryDirectory() as made:
        folders = [Path(made) / name for name in ("taught", "asked")]
        for folder in folders:
            folder.mkdir()
        say(f"asking the teacher {len(texts)} prompts, and exporting {taught} of the answers")
        files = export(services, texts[:taught], folders[0])
        bytes_ = [path.stat().st_size for path in files]
        lessons = read_lessons(files, tokenizer, size)
        exam = read_lessons(export(services, texts[taught:], folders[1]), tokenizer, size)
    report = Report(
        NAME, "share of answers that are the teacher's",
        "no published table found", requests=len(texts),
    )  # fmt: skip
    before = examine(make_student(teacher), exam)
    requests = np.tile(np.arange(asked), repeats)
    right: dict[str, NDArray[np.bool_]] = {}
    for kind, name, more in ARMS:
        found = []
        for repeat in range(repeats):
            student = teach(teacher, lessons, more, steps, settings.seed + repeat)
            found.append(examine(student, exam))
        right[name] = np.concatenate(found)
        figure = mean_figure(right[name], requests, settings.seed)
        report.rows.append(Row(name, kind, figure))  # type: ignore[arg-type]
        say(f"{name}: {figure.value:.2f}")
    without = right["answers alone"].astype(float)
    for _, name, more in ARMS:
        if more is not None:
            gain = right[name] - without
            report.facts[f"{name}, less answers alone"] = asdict(
                interval(lambda rows, g=gain: float(g[rows].mean()), requests, settings.seed)  # type: ignore[misc]
            )
    report.facts["of students that are taught nothing"] = asdict(
        mean_figure(before, np.arange(asked), settings.seed)
    )
    rows = sum(len(one.answer) for one in lessons)
    report.facts["exported, bytes of an answer's row without attention"] = round(bytes_[0] / rows)
    report.facts["exported, bytes of its attention"] = round(bytes_[1] / rows)
    return report


if __name__ == "__main__":
    sys.exit(main(NAME, __doc__.splitlines()[0], recipe))
