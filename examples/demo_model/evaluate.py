"""Measures the demo model on prompts that training never saw, and writes evaluation.json.

    python examples/demo_model/evaluate.py

An answer counts as right when greedy decoding gives it token for token. Greedy decoding is read
off one forward pass over prompt and answer: it gives the answer exactly if every token of the
answer is the likeliest one after the tokens before it.
"""

import argparse
import json
import platform
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import corpus
import tasks
import torch
import transformers
from names import Draw
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

HERE = Path(__file__).parent
_SEED = 20_260_110
_BATCH = 20


def load_model(folder: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 with attention that can be read, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.to(device)  # type: ignore[arg-type]  # the stub takes the wrapped function's self
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def fresh_needles(count: int, seed: int = _SEED, lines: int = 15) -> list[tasks.Needle]:
    """Needle prompts with held-out names only."""
    draw = Draw(random.Random(seed), evaluation=True)
    return [tasks.needle(draw, lines) for _ in range(count)]


def fresh_examples(task: str, count: int, seed: int = _SEED) -> list[tasks.Example]:
    """Examples of a generated task of 24 to 250 tokens, with held-out names only."""
    rng = random.Random(f"{seed}-{task}")
    draw = Draw(rng, evaluation=True)
    return [tasks.GENERATORS[task](draw, rng.randint(24, 250)) for _ in range(count)]


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Token ids int64 [rows, longest], padded on the right, where causal attention ignores it."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


@torch.inference_mode()
def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
    closed: bool,
) -> list[bool]:
    """Whether greedy decoding answers each (prompt, answer) exactly.

    `closed` also asks that the answer ends there: that a newline or <|eos|> comes next.
    """
    device = next(model.parameters()).device
    ends = {tokenizer.eos_token_id, *tokenizer("\n", add_special_tokens=False).input_ids}
    right: list[bool] = []
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        prompts = [tokenizer(prompt).input_ids for prompt, _ in batch]
        answers = [tokenizer(answer, add_special_tokens=False).input_ids for _, answer in batch]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        best = model(input_ids=_padded(rows, device), use_cache=False).logits.argmax(-1).tolist()
        for guess, prompt, answer in zip(best, prompts, answers, strict=True):
            last = len(prompt) + len(answer) - 1
            exact = guess[len(prompt) - 1 : last] == answer
            right.append(exact and (not closed or guess[last] in ends))
    return right


def needle_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, needles: Sequence[tasks.Needle]
) -> float:
    """Share of needle prompts answered with the number and nothing after it on the line."""
    right = answered(model, tokenizer, [(n.prompt, n.answer) for n in needles], closed=True)
    return sum(right) / len(right)


@torch.inference_mode()
def line_mass(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, needles: Sequence[tasks.Needle]
) -> torch.Tensor:
    """Attention mass of each prompt's last row on the line that holds the answer.

    float32 [prompts, layers, heads]: the exact softmax row of the final `:`, summed over the
    tokens of `name: number`, neither the newline before nor the one after.
    """
    device = next(model.parameters()).device
    masses: list[torch.Tensor] = []
    for start in range(0, len(needles), _BATCH):
        batch = needles[start : start + _BATCH]
        encoded = [tokenizer(n.prompt, return_offsets_mapping=True) for n in batch]
        ids = _padded([e.input_ids for e in encoded], device)
        layers = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        for place, (item, found) in enumerate(zip(batch, encoded, strict=True)):
            first, past = item.line_span
            inside = [
                token
                for token, (begin, end) in enumerate(found.offset_mapping)
                if begin < end and begin >= first and end <= past
            ]
            last = len(found.input_ids) - 1
            rows = torch.stack([layer[place, :, last] for layer in layers])
            masses.append(rows[..., inside].sum(-1).cpu())
    return torch.stack(masses)


@torch.inference_mode()
def bits_per_byte(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> float:
    """Cross-entropy of texts, each from <|bos|>, in bits per byte of UTF-8."""
    device = next(model.parameters()).device
    nats, size = 0.0, 0
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        rows = [tokenizer(text).input_ids for text in batch]
        ids = _padded(rows, device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(
            logits.transpose(1, 2).float(), ids[:, 1:], reduction="none"
        )
        for row, loss in zip(rows, losses, strict=True):
            nats += float(loss[: len(row) - 1].sum())
        size += sum(len(text.encode()) for text in batch)
    return nats / size / 0.693147180559945


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int = 500
) -> dict[str, object]:
    """All figures: `count` needle prompts, fewer of the other tasks, held-out library text."""
    needles = fresh_needles(count)
    figures: dict[str, object] = {
        "needle_prompts": count,
        "needle_accuracy": needle_accuracy(model, tokenizer, needles),
        "seed_needle_answered": needle_accuracy(model, tokenizer, [tasks.SEED_NEEDLE]) == 1.0,
    }
    for task in ("recall", "codename", "copy", "brackets", "counting", "table", "think"):
        examples = fresh_examples(task, 100)
        right = answered(model, tokenizer, [(e.prompt, e.answer) for e in examples], closed=False)
        figures[f"{task}_accuracy"] = sum(right) / len(right)
    held_out = corpus.load(held_out=True)
    chosen = random.Random(_SEED)
    for kind, texts in (("code", held_out.code), ("docstring", held_out.docstrings)):
        sample = [text[:1500] for text in chosen.sample(texts, min(60, len(texts)))]
        figures[f"held_out_{kind}_bits_per_byte"] = bits_per_byte(model, tokenizer, sample)
    mass = line_mass(model, tokenizer, needles)
    most = (mass > 0.5).float().mean(0)
    mean = mass.mean(0)
    layer, head = divmod(int((most + 1e-3 * mean).argmax()), most.shape[1])
    figures["best_head"] = {
        "layer": layer,
        "head": head,
        "share_of_prompts_with_most_mass_on_the_line": round(float(most[layer, head]), 4),
        "mean_mass_on_the_line": round(float(mean[layer, head]), 4),
    }
    figures["heads_share"] = [[round(float(v), 4) for v in row] for row in most]
    figures["heads_mean_mass"] = [[round(float(v), 4) for v in row] for row in mean]
    return figures


def _print(figures: dict[str, object]) -> None:
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"{name:<36} {value:.4f}")
        elif isinstance(value, dict):
            print(f"{name:<36} " + "  ".join(f"{key} {part}" for key, part in value.items()))
        elif isinstance(value, list):
            print(name)
            for layer, row in enumerate(value):
                print(f"  layer {layer}  " + "  ".join(f"{share:.3f}" for share in row))
        else:
            print(f"{name:<36} {value}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out prompts.")
    parser.add_argument("--model", type=Path, default=HERE, help="folder of the model")
    parser.add_argument("--out", type=Path, help="JSON to write (default: in the model's folder)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=500, help="needle prompts")
    parser.add_argument("--date", help="date to record (default: today, UTC)")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model, options.device)
    figures = measure(model, tokenizer, options.prompts)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    report = {
        "date": options.date or datetime.now(UTC).date().isoformat(),
        "device": name,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **figures,
    }
    _print(report)
    out = options.out or options.model / "evaluation.json"
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
