"""Loading a model of `transformers`: its weights, its device, and which weights they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from capture_kernels.errors import MissingExtraError, OptionError

from .options import CaptureOptions
from .transformers import TransformersEngine

_BLOCK = 4096
_BLOCKS_PER_FILE = 64
_WEIGHTS = ("*.safetensors", "*.bin")


def load_engine(name: str, options: CaptureOptions) -> TransformersEngine:
    """The engine of a model by its folder or hub name.

    Raises:
        OptionError: the model cannot be found or read, or cannot be captured.
        MissingExtraError: the device does not answer, or the checkpoint needs another package.
    """
    device = _device(options.device)
    try:
        config = AutoConfig.from_pretrained(name)
        if config.is_encoder_decoder:
            raise OptionError(f"{name} is an encoder-decoder model, which cannot be captured")
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise MissingExtraError(f"model {name!r}: {_first_line(error)}") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot load model {name!r}: {_first_line(error)}") from None
    folder = Path(name)
    revision = local_revision(folder) if folder.is_dir() else str(config._commit_hash)
    return TransformersEngine(model.to(device), tokenizer, options, name=name, revision=revision)


def local_revision(folder: Path) -> str:
    """A hash of a local checkpoint: 16 hexadecimal digits.

    It covers the config, and of every weight file the size, the first block (the header of a
    safetensors file) and 64 evenly spaced blocks: fine-tunes of one model have the same header, and
    reading all the bytes of a large checkpoint would take longer than a capture.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(p for pattern in _WEIGHTS for p in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_BLOCKS_PER_FILE + 1):
                file.seek(i * max(0, size - _BLOCK) // _BLOCKS_PER_FILE)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise MissingExtraError("no CUDA device is available: use --device cpu")
        if device.index is not None and device.index >= torch.cuda.device_count():
            available = torch.cuda.device_count()
            raise OptionError(f"there is no device {name}: {available} are available")
    return device


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
