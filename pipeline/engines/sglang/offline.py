"""SGLang's engine without HTTP, for an offline capture: the plug-in writes into the store.

`Engine` takes no options of ours, so that they travel as ATTN_CAPTURE_* variables. It starts the
processes that a server has, but the one that answers; the plug-in is in each.

Source: SGLang 0.5.23, srt/entrypoints/engine.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from capture_kernels.arrays import Ints
from capture_kernels.errors import AttnError, MissingExtraError, OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.loading import choose_device
from pipeline.engines.options import CaptureOptions, PromptError, choose_layers
from pipeline.engines.serving import facts_file
from pipeline.engines.serving.option_table import PREFIX
from pipeline.engines.serving.options import INT32, ServeOptions
from pipeline.engines.serving.request import CUSTOM_PARAM, CaptureRequest, ModelFacts
from pipeline.engines.transformers import think_tags

from .plugin import misfits

Result = TypeVar("Result")
# Requests that run at once, and tokens of prompts in one step. The recorder has room for as many
# rows as there may be requests, and a step may hold no more, or rows of prompts would be left out.
MOST_RUNNING = CHUNK = 512
# Tokens in the cache on a CPU, where SGLang would take most of the memory; on a GPU it is measured.
CPU_CACHE_TOKENS = 32_768
# It keeps a few tokens of the context free: what it calls max_req_input_len is so many less than
# the longest sequence but one.
RESERVED = 4
# What it does not pass on to the attention that is captured.
REFUSED = {
    "heads": "it records the mean of all heads",
    "per_layer": "the plug-in makes one record for the mean of the layers",
}
# The reasoning parser with <think> and </think> that does not begin inside.
PARSER = "qwen3"
# SGLang's own requests begin with this.
RESERVED_ID = "HEALTH_CHECK"


class Generated(NamedTuple):
    """What the run of one prompt did.

    Args:
        positions: int64[R], ascending, of the rows that have a record.
        blind_rows: rows to capture that see no key: they have no record.
    """

    prompt_tokens: int
    new_tokens: list[int]
    positions: Ints
    blind_rows: int


class OfflineEngine:
    """Runs prompts in SGLang, many at once, whose fingerprints it writes into a store.

    Close it, or leave its `with` block; what is not in the store by then is lost.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        options: what to capture.
        store: path of the store that the engine appends to; another process may read it.

    Attributes:
        name: what the records call the model.
        layers: that are captured, ascending.
        capture_id: of the records.

    Raises:
        OptionError: an option that this engine has not, or a model that cannot be captured.
        MissingExtraError: SGLang is not installed, or the device does not answer.
    """

    def __init__(self, model: str, options: CaptureOptions, store: Path) -> None:
        serve = serve_options(options, store)
        device = choose_device(options.device)
        try:
            from sglang.srt.entrypoints.engine import Engine
        except ImportError as error:
            if (error.name or "").split(".")[0] != "sglang":
                raise
            raise missing_sglang() from None
        self.options, self._secret = options, serve.secret
        self.tokenizer, dtype = _tokenizer_and_dtype(model)
        if options.think_tags:
            think_tags(self.tokenizer)

        class Quiet(Engine):
            """Its children leave Ctrl+C to this process."""

            run_scheduler_process_func = staticmethod(run_scheduler)
            run_detokenizer_process_func = staticmethod(run_detokenizer)

        given: dict[str, Any] = {
            "model_path": model,
            "dtype": dtype,
            "device": device.type,
            "attention_backend": "triton" if device.type == "cuda" else "torch_native",
            # Tokens that it finds in a cache have no row.
            "disable_radix_cache": True,
            "chunked_prefill_size": CHUNK,
            "max_running_requests": MOST_RUNNING,
            "sampling_backend": "pytorch",
            # A graph of a prompt's step would not come by the recorder.
            "disable_prefill_cuda_graph": True,
            "reasoning_parser": PARSER if options.think_tags else None,
        }
        if device.type == "cpu":
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
            given["max_total_tokens"] = CPU_CACHE_TOKENS
        elif device.index:
            given["base_gpu_id"] = device.index
        put_options(serve, os.environ)
        self._engine: Any = None
        try:
            with stdout_as_stderr():
                self._engine = Quiet(**given)
            facts = _facts()
            assert facts.capture_id is not None, "the plug-in says it"
            self.name, self.layers, self.capture_id = facts.name, facts.layers, facts.capture_id
            info = self._engine.get_server_info()
            self._most_tokens = int(info["max_req_input_len"]) - 1
        except BaseException:
            self.close()
            raise

    def run(self, work: Awaitable[Result]) -> Result:
        """Wait for something that awaits `generate`."""
        found: Result = self._engine.loop.run_until_complete(work)
        return found

    def tokens(self, prompt: str, request_id: str) -> list[int]:
        """The tokens of a prompt. PromptError: it has none, or more than fit."""
        tokens = list(self.tokenizer(prompt)["input_ids"])
        if not tokens:
            raise PromptError(f"prompt {request_id!r} has no tokens")
        if len(tokens) > self._most_tokens:
            raise PromptError(
                f"prompt {request_id!r} has {len(tokens)} tokens, more than the "
                f"{self._most_tokens} that this engine takes"
            )
        if request_id.startswith(RESERVED_ID):
            raise PromptError(
                f"prompt {request_id!r} has an id that SGLang keeps for itself: give it another"
            )
        return tokens

    def most_rows(self, tokens: list[int]) -> int:
        """The most rows that a prompt can have."""
        return (len(tokens) + self.options.max_new_tokens) // self.options.stride + 1

    async def generate(
        self, tokens: list[int], *, request_id: str, session_id: str | None
    ) -> Generated:
        """Run one prompt to its end. Its records reach the store a little later.

        Raises:
            PromptError: SGLang refused it.
        """
        options = self.options
        request = CaptureRequest(
            mode="fingerprint",
            layers=list(self.layers),
            mask_prefix=options.mask_prefix,
            prompt_rows=len(tokens),
            prompt_stride=options.stride,
            stride=options.stride,
            max_steps=options.max_steps,
            window=options.window,
            session_id=session_id,
            stream_entries=False,
        )
        room = self._most_tokens + 1 + RESERVED - len(tokens)
        sampling = {
            "temperature": 0,
            # For 0 it would not sample, and what samples is what copies the rows. The token that
            # is too many is never fed.
            "max_new_tokens": max(1, min(options.max_new_tokens, room)),
            "custom_params": {CUSTOM_PARAM: request.signed(self._secret)},
        }
        try:
            answer = await self._engine.async_generate(
                input_ids=tokens, sampling_params=sampling, rid=request_id
            )
        except ValueError as error:
            raise PromptError(f"prompt {request_id!r} was refused: {error}") from None
        reason = answer["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise PromptError(f"prompt {request_id!r} was refused: {reason.get('message')}")
        new = list(answer["output_ids"])[: options.max_new_tokens]
        positions, blind = recorded_positions(options, len(tokens), len(new))
        return Generated(len(tokens), new, positions, blind)

    def close(self) -> None:
        """End the engine's processes."""
        facts_file.remove()
        if self._engine is not None:
            self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def recorded_positions(options: CaptureOptions, prompt: int, new: int) -> tuple[Ints, int]:
    """Positions of the rows that have a record, and how many wanted rows see no key to describe.

    Args:
        prompt: tokens of the prompt.
        new: tokens that were generated; the last is never fed to the model.
    """
    wanted = np.arange(0, prompt + max(0, new - 1), options.stride, dtype=np.int64)
    generated = wanted[wanted >= prompt]
    if options.max_steps:
        generated = generated[: options.max_steps]
    wanted = np.concatenate([wanted[wanted < prompt], generated])
    # A row sees its own key, unless that is masked or a sink.
    seen = wanted >= max(options.mask_prefix, options.sink_tokens)
    return wanted[seen], int((~seen).sum())


def serve_options(options: CaptureOptions, store: Path) -> ServeOptions:
    """The plug-in's options for a capture.

    Raises:
        OptionError: what this engine cannot do, by the name that it has in `attn capture`.
    """
    for name, reason in REFUSED.items():
        if getattr(options, name):
            raise OptionError(
                f"--{name.replace('_', '-')} is not available with --engine sglang: {reason}; use "
                "--engine transformers"
            )
    if options.layers not in ("last", "auto", "all"):
        choose_layers(options.layers, [0], INT32)
    if options.layout is Layout.LAYERED and (options.layers == "last" or ("," not in options.layers
                                             and options.layers.isdecimal())):  # fmt: skip
        raise OptionError("layout layered needs several layers: try --layers auto")
    return ServeOptions(
        store=store,
        layers=options.layers.replace(" ", ""),
        layout=options.layout,
        # No context is longer.
        tokens_window=min(options.window, INT32),
        mask_prefix=min(options.mask_prefix, INT32),
        sink_tokens=min(options.sink_tokens, INT32),
    )


def put_options(options: ServeOptions, environment: MutableMapping[str, str]) -> None:
    """Have the variables say these options, and nothing that they said before."""
    for name in [name for name in environment if name.startswith(PREFIX)]:
        del environment[name]
    environment.update(options.environment())


def missing_sglang() -> MissingExtraError:
    return MissingExtraError(
        "--engine sglang needs SGLang: pip install 'attn[sglang]', or use --engine transformers"
    )


def _tokenizer_and_dtype(model: str) -> tuple[Any, str]:
    """A model's tokenizer, and the type of its weights: SGLang would make float32 half of that."""
    from transformers import AutoConfig, AutoTokenizer

    from pipeline.engines.loading import cannot_load, check_folder

    check_folder(model)
    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise cannot_load(model, error) from None
    dtype = getattr(config, "dtype", None)
    return tokenizer, "auto" if dtype is None else str(dtype).removeprefix("torch.")


def _facts() -> ModelFacts:
    """What the plug-in captures, in the words of the model's process. OptionError: nothing."""
    if not facts_file.is_chosen():
        raise OptionError(
            "SGLang did not load attn's plug-in: install attn in the same environment, and name "
            "attn in SGLANG_PLUGINS if that is set"
        )
    problems = misfits()
    try:
        facts = facts_file.LiveFacts()()
    except AttnError as error:
        problems.append(str(error))
    if problems:
        raise OptionError("; ".join(problems))
    return facts


@contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """Inside the block what this process and its children print goes to stderr; the children's
    does so for good, as stdout is for the summary."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# In SGLang's processes ---------------------------------------------------------------------------


def run_scheduler(*given: Any, **named: Any) -> Any:
    from sglang.srt.managers.scheduler import run_scheduler_process

    return _without_interrupts(run_scheduler_process, *given, **named)


def run_detokenizer(*given: Any, **named: Any) -> Any:
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return _without_interrupts(run_detokenizer_process, *given, **named)


def _without_interrupts(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Ctrl+C on a terminal reaches every process; the first ends these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return function(*given, **named)
