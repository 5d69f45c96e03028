"""Packs tasks and text into training rows, in worker processes, so that the GPU never waits.

A row is `length + 1` token ids and, for each, how much its prediction counts (`LEVELS`). Every row
begins with <|bos|> and a document; documents follow each other until the row is full.
"""

import math
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

import numpy as np
from names import Draw
from tasks import GENERATORS, SHARES, Example
from tokenizer import BOS, EOS
from tokenizers import Tokenizer

# What a token counts in the loss: the prompts of tasks are random, so they count for little.
PROMPT, TEXT, ANSWER = 0, 1, 2
LEVELS = (0.1, 1.0, 4.0)
_ROWS_PER_CHUNK_TOKENS = 32_768
_SMALLEST = 12


@dataclass(frozen=True)
class Recipe:
    """What rows are made of: row lengths in tokens with their shares, and the tasks' shares.

    `text` is the chance that a document is text; `tasks` weighs the generators against each other.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    length_shares: tuple[float, ...] = (0.7, 0.3)
    text: float = 0.3
    tasks: tuple[tuple[str, float], ...] = tuple(SHARES.items())


@dataclass(frozen=True)
class Chunk:
    """Rows of one length: token ids uint16 [rows, length + 1] and levels uint8 alike."""

    tokens: np.ndarray
    levels: np.ndarray

    @property
    def length(self) -> int:
        return self.tokens.shape[1] - 1


class Packer:
    """Makes rows, for ever; the same seed and recipe give the same rows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        streams: Sequence[np.ndarray],
        prose: Sequence[str],
        recipe: Recipe,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._rng = random.Random(seed)
        self._draw = Draw(self._rng, prose=prose)
        self._bos, self._eos, newline = tokenizer.encode(
            f"{BOS}{EOS}\n", add_special_tokens=False
        ).ids
        self._streams = streams
        self._line_ends = [np.flatnonzero(np.asarray(s) == newline) for s in streams]

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """Token ids of an example, <|bos|> to <|eos|>, and the level of each."""
        pieces = [piece for turn in example.turns for piece in turn]
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        ids, levels = [self._bos], [PROMPT]
        for place, piece in enumerate(encoded):
            ids += piece.ids
            levels += [ANSWER if place % 2 else PROMPT] * len(piece.ids)
        return [*ids, self._eos], [*levels, ANSWER]

    def _text(self, size: int) -> tuple[list[int], list[int]]:
        """A slice of a stream from the start of a line, at most to the end of its document."""
        which = self._rng.randrange(len(self._streams))
        start = int(self._line_ends[which][self._rng.randrange(len(self._line_ends[which]))]) + 1
        ids = [self._bos, *self._streams[which][start : start + size].tolist()]
        if self._eos in ids:
            ids = ids[: ids.index(self._eos) + 1]
        return ids, [PROMPT] + [TEXT] * (len(ids) - 1)

    def _document(self, room: int) -> tuple[list[int], list[int]]:
        rng = self._rng
        if room < 4 * _SMALLEST or rng.random() < self._recipe.text:
            return self._text(rng.randint(min(room, 64), room))
        most = int(room * 0.65)
        if rng.random() < 0.35:
            size = rng.randint(_SMALLEST, most)
        else:
            size = int(math.exp(rng.uniform(math.log(_SMALLEST), math.log(most))))
        names, weights = zip(*self._recipe.tasks, strict=True)
        return self.encode(GENERATORS[rng.choices(names, weights)[0]](self._draw, size))

    def _row(self, length: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        levels: list[int] = []
        while len(ids) <= length:
            more, weighed = self._document(length + 1 - len(ids))
            ids += more
            levels += weighed
        return ids[: length + 1], levels[: length + 1]

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of rows, each of one length drawn by the recipe's shares of tokens."""
        while True:
            length = self._rng.choices(self._recipe.lengths, self._recipe.length_shares)[0]
            rows = [self._row(length) for _ in range(max(1, _ROWS_PER_CHUNK_TOKENS // length))]
            yield Chunk(
                np.array([ids for ids, _ in rows], dtype=np.uint16),
                np.array([levels for _, levels in rows], dtype=np.uint8),
            )


def encode_stream(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """All documents as one run of token ids, uint16, with <|eos|> after each."""
    eos = tokenizer.token_to_id(EOS)
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 256):
        batch = tokenizer.encode_batch_fast(
            list(documents[start : start + 256]), add_special_tokens=False
        )
        parts += [np.array([*encoding.ids, eos], dtype=np.uint16) for encoding in batch]
    return np.concatenate(parts)


def _work(
    queue: "Queue[Chunk]", tokenizer: str, folder: str, prose: list[str], recipe: Recipe, seed: int
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    streams = [np.load(path, mmap_mode="r") for path in sorted(Path(folder).glob("*.npy"))]
    packer = Packer(Tokenizer.from_file(tokenizer), streams, prose, recipe, seed)
    for chunk in packer.chunks():
        queue.put(chunk)


class Workers:
    """Processes that pack rows; `take` gives what is ready. A context manager: leaving ends them.

    Which chunk comes when depends on their speed, so only `count` 0 (packing inline) is exactly
    reproducible.
    """

    def __init__(
        self, count: int, tokenizer: Path, folder: Path, prose: list[str], recipe: Recipe, seed: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Queue[Chunk] = context.Queue(maxsize=256)
        self._inline: Iterator[Chunk] | None = None
        if count == 0:
            streams = [np.load(path) for path in sorted(folder.glob("*.npy"))]
            self._inline = Packer(
                Tokenizer.from_file(str(tokenizer)), streams, prose, recipe, seed
            ).chunks()
        self._processes = [
            context.Process(
                target=_work,
                args=(self._queue, str(tokenizer), str(folder), prose, recipe, seed + 1 + place),
                daemon=True,
            )
            for place in range(count)
        ]

    def __enter__(self) -> "Workers":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def take(self, at_most: int, wait: float = 0.0) -> list[Chunk]:
        """Up to `at_most` chunks that are ready; waits `wait` seconds for the first."""
        if self._inline is not None:
            return [next(self._inline)]
        if any(process.exitcode for process in self._processes):
            raise RuntimeError("a packing process has died; its error is printed above")
        found: list[Chunk] = []
        try:
            while len(found) < at_most:
                found.append(self._queue.get(block=wait > 0 and not found, timeout=wait or None))
        except Empty:
            pass
        return found
