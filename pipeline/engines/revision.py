"""Which weights a model has: the same answer for every engine, so that their vectors are compared.

Weights of hundreds of gigabytes are not read for it. Of a file that is not read whole, enough is
read that another training shows: it changes most numbers of every tensor that it touches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.durable import HASH_THREADS, Facts, file_facts

_WEIGHTS = ("*.safetensors", "*.bin")
# Larger files are not read whole, but a block of each tensor; or so many blocks of a file whose
# tensors are not listed.
WHOLE_BYTES = 256 << 20
BLOCK_BYTES, BLOCKS = 16 << 10, 1_024
# What the format allows of a header of safetensors.
_HEADER_BYTES = 100_000_000


def revision_of(name: str, config: Any) -> str:
    """The revision of a model, as capture ids have it (docs/formats.md): `local_revision` of a
    folder, the commit of a model of the Hugging Face hub.

    Args:
        name: folder or hub name.
        config: of `transformers`, loaded from there.
    """
    folder = Path(name)
    if folder.is_dir():
        return local_revision(folder)
    return str(getattr(config, "_commit_hash", None) or name)


def local_revision(folder: Path, whole_bytes: int = WHOLE_BYTES) -> str:
    """A hash of a local checkpoint, of its config and its weight files: 16 hexadecimal digits.

    Args:
        whole_bytes: files of at most so many bytes are read whole.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    paths = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))

    def facts(path: Path) -> Facts:
        return file_facts(path) if path.stat().st_size <= whole_bytes else sampled_facts(path)

    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as readers:
        for path, found in zip(paths, readers.map(facts, paths), strict=True):
            digest.update(json.dumps([path.name, found]).encode())
    return digest.hexdigest()[:16]


def sampled_facts(path: Path) -> Facts:
    """Size of a weight file, and sha256 of its blocks: of safetensors the header and the middle
    of each tensor, else blocks at even distances from the first to the last."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for begin, length in _blocks(file.fileno(), size):
            digest.update(os.pread(file.fileno(), length, begin))
    return {"bytes": size, "sampled_sha256": digest.hexdigest()}


def _blocks(handle: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the blocks of a file begin, and how long they are."""
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    if length <= min(size - 8, _HEADER_BYTES):
        header = os.pread(handle, length, 8)
        if (spans := _tensors(header)) is not None:
            yield 0, 8 + length
            for begin, end in spans:
                taken = min(BLOCK_BYTES, end - begin)
                yield 8 + length + begin + (end - begin - taken) // 2, taken
            return
    for number in range(BLOCKS):
        yield number * max(0, size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES


def _tensors(header: bytes) -> list[tuple[int, int]] | None:
    """First byte of each tensor and the one after its last, ascending; None if this is not a header
    of safetensors."""
    try:
        tensors = json.loads(header)
        spans = [
            tuple(map(int, tensor["data_offsets"]))
            for name, tensor in tensors.items()
            if name != "__metadata__"
        ]
        return sorted((begin, end) for begin, end in spans if 0 <= begin < end)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
