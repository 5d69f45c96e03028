"""Writes held-out prompts over all kinds of task, as JSON lines, for the capture command.

    python examples/demo_model/prompts.py --out prompts.jsonl

Every kind spans the same range of lengths, evenly on a log scale, so that what tells the kinds
apart is what the model does and not how long its context is.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import corpus
from names import Draw
from tasks import GENERATORS, needles
from tokenizers import Tokenizer

HERE = Path(__file__).parent
KINDS = ("recall", "codename", "copy", "brackets", "counting", "table", "think", "code", "prose")
SHORTEST, LONGEST = 20, 1800
_SEED = 71
_ATTEMPTS = 40


@dataclass(frozen=True)
class Prompt:
    id: str
    task: str
    prompt: str


def _slice(tokenizer: Tokenizer, text: str, size: int, rng: random.Random) -> str:
    """About `size` tokens of `text` from the start of a line, ending after a whole word."""
    starts = [0, *(place + 1 for place, letter in enumerate(text) if letter == "\n")]
    start = rng.choice([place for place in starts if len(text) - place > 5 * size] or [0])
    offsets = tokenizer.encode(text[start : start + 8 * size], add_special_tokens=False).offsets
    end = offsets[min(size, len(offsets)) - 1][1]
    return text[start : start + end].rstrip()


def _generate(tokenizer: Tokenizer, task: str, size: int, rng: random.Random, draw: Draw) -> str:
    """The prompt of a generated task that comes closest to `size` tokens in a few attempts."""
    generators = (GENERATORS[task], needles) if task == "recall" else (GENERATORS[task],)
    best, distance = "", math.inf
    asked = float(size)
    for _ in range(_ATTEMPTS):
        prompt = rng.choice(generators)(draw, max(4, int(asked))).prompt
        length = len(tokenizer.encode(prompt).ids)
        off = abs(math.log(length / size))
        if off < distance and length <= LONGEST:
            best, distance = prompt, off
        if distance < 0.1:
            break
        # Half a step: one draw's length says only so much about the next one's.
        asked = min(4.0 * size, max(4.0, asked * math.sqrt(size / length)))
    return best


def make_prompts(tokenizer: Tokenizer, each: int = 28, seed: int = _SEED) -> Iterator[Prompt]:
    """`each` prompts of every kind, of `SHORTEST` to `LONGEST` tokens; names and files held out."""
    text = corpus.load(held_out=True)
    prose = text.prose_lines()
    documents = "\n\n".join(text.docstrings)
    spread = math.log(0.95 * LONGEST / SHORTEST)
    for task in KINDS:
        rng = random.Random(f"{seed}-{task}")
        draw = Draw(rng, evaluation=True, prose=prose)
        for place in range(each):
            size = int(SHORTEST * math.exp(spread * (place + rng.random()) / each))
            if task == "code":
                prompt = _slice(tokenizer, rng.choice(text.code), size, rng)
            elif task == "prose":
                prompt = _slice(tokenizer, documents, size, rng)
            else:
                prompt = _generate(tokenizer, task, size, rng, draw)
            yield Prompt(f"{task}-{place + 1:04d}", task, prompt)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write held-out prompts as JSON lines.")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--model", type=Path, default=HERE, help="folder of the tokenizer")
    parser.add_argument("--each", type=int, default=28, help="prompts of every kind")
    parser.add_argument("--seed", type=int, default=_SEED)
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with options.out.open("w", encoding="utf-8") as out:
        for prompt in make_prompts(tokenizer, options.each, options.seed):
            out.write(json.dumps(asdict(prompt)) + "\n")


if __name__ == "__main__":
    main()
