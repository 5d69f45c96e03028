"""Loading a model of `transformers`: its weights and its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from capture_kernels.errors import MissingExtraError, OptionError

from .options import CaptureOptions
from .revision import revision_of
from .transformers import TransformersEngine


def load_engine(name: str, options: CaptureOptions) -> TransformersEngine:
    """The engine of a model by its folder or hub name.

    Raises:
        OptionError: the model cannot be found or read, or cannot be captured.
        MissingExtraError: the device does not answer, or the checkpoint needs another package.
    """
    device = choose_device(options.device)
    check_folder(name)
    try:
        config = AutoConfig.from_pretrained(name)
        if config.is_encoder_decoder:
            raise OptionError(f"{name} is an encoder-decoder model, which cannot be captured")
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise MissingExtraError(f"model {name!r}: {_first_line(error)}") from None
    except (OSError, ValueError) as error:
        raise cannot_load(name, error) from None
    revision = revision_of(name, config)
    return TransformersEngine(model.to(device), tokenizer, options, name=name, revision=revision)


def check_folder(name: str) -> None:
    """OptionError where a model's name can only be a folder's, and there is none."""
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise OptionError(f"cannot load model {name!r}: there is no such folder")


def cannot_load(name: str, error: Exception) -> OptionError:
    """What to raise for what `transformers` raised."""
    here = "" if Path(name).exists() else f"there is no folder {name} here, and "
    return OptionError(f"cannot load model {name!r}: {here}{_first_line(error)}")


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
