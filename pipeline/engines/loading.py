"""Loading a model of `transformers`: its weights, its device, and which weights they are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from capture_kernels.errors import MissingExtraError, OptionError
from pipeline.durable import facts_of

from .options import CaptureOptions
from .transformers import TransformersEngine

_WEIGHTS = ("*.safetensors", "*.bin")


def load_engine(name: str, options: CaptureOptions) -> TransformersEngine:
    """The engine of a model by its folder or hub name.

    Raises:
        OptionError: the model cannot be found or read, or cannot be captured.
        MissingExtraError: the device does not answer, or the checkpoint needs another package.
    """
    device = choose_device(options.device)
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
    """A hash of a local checkpoint, of its config and of every byte of its weight files: 16
    hexadecimal digits.

    Several files are read at once, at about the rate of sha256 on each core.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    paths = sorted(p for pattern in _WEIGHTS for p in folder.glob(pattern))
    for path, facts in zip(paths, facts_of(paths), strict=True):
        digest.update(json.dumps([path.name, facts]).encode())
    return digest.hexdigest()[:16]


def choose_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` names.

    Raises:
        OptionError: no such device.
        MissingExtraError: no CUDA device answers.
    """
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
