"""The entry point `vllm.general_plugins`: what of vLLM is hooked, and in which process.

vLLM calls `register` in each of its processes, before it reads its command line. A plug-in that
fails is only logged by vLLM, so everything is looked at again before the server answers
(`before_serving`), and a server that would not capture does not start.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Callable
from concurrent.futures import wait
from functools import wraps
from threading import current_thread, main_thread
from typing import Any

from capture_kernels.errors import AttnError
from pipeline.engines.serving import engine_options, facts_file
from pipeline.engines.serving.answer_writer import AnswerWriter
from pipeline.engines.serving.facts_file import LiveFacts
from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import ModelFacts
from pipeline.engines.serving.sinks import CLOSE_S

from .answers import heard, noted_chat
from .scheduling import decide, note_end

LOG = logging.getLogger("attn.capture")

ARGUMENTS = "vllm.engine.arg_utils:EngineArgs."
ENGINE = "vllm.v1.engine.async_llm:AsyncLLM."
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
WORKER = "vllm.v1.worker.gpu_worker:Worker."
RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner."
RENDERER = "vllm.renderers.online_renderer:OnlineRenderer."
SERVER = "vllm.entrypoints.launchers.app:"
BACKENDS = "pipeline.engines.vllm.model_process.backends."
SEEN = "vLLM 0.33.0 was seen to work"
# The parameters of what is hooked, as far as the hooks count on them.
PARAMETERS = {
    ARGUMENTS + "add_cli_args": ("parser",),
    ARGUMENTS + "from_cli_args": ("args",),
    ENGINE + "generate": ("self", "prompt", "sampling_params", "request_id"),
    ENGINE + "shutdown": ("self",),
    RENDERER + "render_chat": ("self", "request"),
    SERVER + "init_entrypoints_middleware": ("args", "app"),
}
PARAMETERS_OF_MODEL = {
    SCHEDULER + "schedule": ("self",),
    SCHEDULER + "_free_request": ("self", "request"),
    WORKER + "determine_available_memory": ("self",),
    RUNNER + "initialize_kv_cache": ("self", "kv_cache_config", "is_profiling"),
    RUNNER + "execute_model": ("self", "scheduler_output", "intermediate_tensors", "dummy_run"),
    RUNNER + "prepare_attn": ("self", "input_batch"),
    RUNNER + "prepare_dummy_attn": ("self", "input_batch"),
    RUNNER + "sample_tokens": ("self", "grammar_output"),
    RUNNER + "shutdown": ("self",),
}
# Of a `GPUModelRunner`, its recorder; of a `Worker`, a method that has its records delivered.
ATTRIBUTE, DELIVER = "_attn_recorder", "attn_deliver"


def register() -> None:
    """Install the hooks of this process. Called by vLLM. A variable that cannot be used ends the
    program with 2."""
    if not facts_file.is_chosen():
        # The first process: what is captured is not known before the command line is read.
        facts_file.choose_path()
    hook(ARGUMENTS + "add_cli_args", with_options)
    hook(ARGUMENTS + "from_cli_args", read_options)
    try:
        options = ServeOptions.from_environment(os.environ)
    except AttnError as error:
        print(f"attn: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.is_on:
        hook_model()


def hook_model() -> None:
    """The hooks of a process that schedules or runs the model; no harm in one that does not."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.FLASH_ATTN, BACKENDS + "CapturedFlashBackend")
    register_backend(AttentionBackendEnum.TRITON_ATTN, BACKENDS + "CapturedTritonBackend")
    hook(SCHEDULER + "schedule", after(decide))
    hook(SCHEDULER + "_free_request", before(note_end))
    hook(WORKER + "load_model", before(hook_runner))
    hook(WORKER + "determine_available_memory", after(without_ours))
    owner, name = owner_of(WORKER + DELIVER)
    setattr(owner, name, lambda worker: close_recorder(worker.model_runner))


def hook_server() -> None:
    """The hooks of a process that answers."""
    hook(ENGINE + "generate", around_generator(heard))
    hook(ENGINE + "shutdown", before(have_delivered))
    hook(RENDERER + "render_chat", around_coroutine(noted_chat))
    hook(SERVER + "init_entrypoints_middleware", with_ours_outside)


# How functions are hooked ------------------------------------------------------------------------

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def hook(target: str, wrapper: Wrapper) -> None:
    """Put a wrapper around what `module:owner.name` names, once."""
    owner, name = owner_of(target)
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, staticmethod | classmethod) else None
    function = found.__func__ if kind else found
    if getattr(function, "_is_hooked_by_attn", False):
        return
    wrapped = wrapper(function)
    wrapped._is_hooked_by_attn = True  # type: ignore[attr-defined]
    setattr(owner, name, kind(wrapped) if kind else wrapped)


def owner_of(target: str) -> tuple[Any, str]:
    """The module or class of a target, and the name in it. ImportError, AttributeError: nothing."""
    module, _, path = target.partition(":")
    owner, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{owner}" if owner else module), name


def is_hooked(target: str) -> bool:
    owner, name = owner_of(target)
    return hasattr(getattr(owner, name), "_is_hooked_by_attn")


def before(function: Callable[..., None]) -> Wrapper:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wrapped(*given: Any, **named: Any) -> Any:
            function(*given)
            return original(*given, **named)

        return wrapped

    return wrapper


def after(function: Callable[..., Any]) -> Wrapper:
    """A hook that is given the result, and what the function was given by place; it returns the
    result."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wrapped(*given: Any, **named: Any) -> Any:
            return function(original(*given, **named), given[0])

        return wrapped

    return wrapper


def around_generator(function: Callable[..., Any]) -> Wrapper:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        async def wrapped(*given: Any, **named: Any) -> Any:
            async for output in function(original, *given, **named):
                yield output

        return wrapped

    return wrapper


def around_coroutine(function: Callable[..., Any]) -> Wrapper:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        async def wrapped(*given: Any, **named: Any) -> Any:
            return await function(original, *given, **named)

        return wrapped

    return wrapper


# On the command line -----------------------------------------------------------------------------


def with_options(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def add_cli_args(parser: Any, *given: Any, **named: Any) -> Any:
        parser = original(parser, *given, **named)
        engine_options.add_options(parser)
        return parser

    return add_cli_args


def read_options(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_cli_args(cls: type, args: Any, *given: Any, **named: Any) -> Any:
        options = engine_options.pass_options_on(args)
        if options.is_on or options.turned_off:
            hook_server()
        return original(cls, args, *given, **named)

    return from_cli_args


# In a worker -------------------------------------------------------------------------------------


def hook_runner(worker: Any) -> None:
    """Before `Worker.load_model`: the hooks on the model's runner."""
    if not worker.use_v2_model_runner:
        facts_file.write(
            "attention of this server cannot be captured: it needs vLLM's V2 model runner, which "
            "VLLM_USE_V2_MODEL_RUNNER=0 or a feature of the model turns off"
        )
        return
    hook(RUNNER + "initialize_kv_cache", with_recorder)
    hook(RUNNER + "execute_model", before_step)
    hook(RUNNER + "prepare_attn", with_rows)
    hook(RUNNER + "prepare_dummy_attn", before(dummy_step))
    hook(RUNNER + "sample_tokens", with_results)
    hook(RUNNER + "shutdown", before(close_recorder))


def without_ours(found: int, worker: Any) -> int:
    """After `Worker.determine_available_memory`: what is left for keys and values, unless it was
    given."""
    if worker.cache_config.kv_cache_memory_bytes is not None:
        return found
    from .model_process.recorder import bytes_of_capture

    try:
        ours = bytes_of_capture(worker.model_runner, ServeOptions.from_environment(os.environ))
    except AttnError:  # said when the recorder starts
        return found
    return found - ours


def with_recorder(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def initialize_kv_cache(
        runner: Any, kv_cache_config: Any, is_profiling: bool = False, *given: Any, **named: Any
    ) -> Any:
        found = original(runner, kv_cache_config, is_profiling, *given, **named)
        if not is_profiling:
            start_recorder(runner)
        return found

    return initialize_kv_cache


def start_recorder(runner: Any) -> None:
    """The model and its KV cache are there, and no CUDA graph yet."""
    from .model_process.backends import ATTRIBUTE as OF_LAYER
    from .model_process.layers import graph_refusal, ranks_of_this_process, refusal
    from .model_process.recorder import Recorder

    options = ServeOptions.from_environment(os.environ)
    ranks, recorder, reason = ranks_of_this_process(), None, None
    try:
        found = misfits(PARAMETERS_OF_MODEL)
        if reason := "; ".join(found) or refusal(runner) or graph_refusal(runner):
            raise AttnError(f"attention of this server cannot be captured: {reason}")
        recorder = Recorder(runner, options, facts_file.write, ranks)
    except AttnError as error:
        reason = str(error)
    reason = ranks.first_reason(reason)
    if recorder is None or reason is not None:
        if recorder is not None:
            recorder.close()
        if ranks.answers:
            facts_file.write(str(reason))
        return
    for layer in recorder.model.layers.values():
        setattr(layer, OF_LAYER, recorder)
    setattr(runner, ATTRIBUTE, recorder)
    atexit.register(recorder.close)
    if ranks.answers:
        facts_file.write(recorder.model.facts)
        if (tokenizer := tokenizer_of(runner.vllm_config.model_config)) is not None:
            recorder.model.use_tokenizer(tokenizer)


def tokenizer_of(config: Any) -> Any:
    """The tokenizer of a `ModelConfig`; None where vLLM is told to have none."""
    if config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(config)


def before_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def execute_model(runner: Any, scheduler_output: Any, *given: Any, **named: Any) -> Any:
        recorder = getattr(runner, ATTRIBUTE, None)
        is_dummy = named.get("dummy_run", len(given) > 1 and given[1])
        if recorder is not None and not is_dummy:
            recorder.begin(scheduler_output)
        return original(runner, scheduler_output, *given, **named)

    return execute_model


def with_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_attn(runner: Any, input_batch: Any) -> Any:
        found = original(runner, input_batch)
        recorder = getattr(runner, ATTRIBUTE, None)
        if recorder is not None:
            recorder.prepare(input_batch)
        return found

    return prepare_attn


def dummy_step(runner: Any, *given: Any) -> None:
    recorder = getattr(runner, ATTRIBUTE, None)
    if recorder is not None:
        recorder.prepare_dummy()


def with_results(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample_tokens(runner: Any, *given: Any, **named: Any) -> Any:
        output = original(runner, *given, **named)
        recorder = getattr(runner, ATTRIBUTE, None)
        if recorder is not None and output is not None:
            recorder.results(output)
        return output

    return sample_tokens


def close_recorder(runner: Any, *given: Any) -> None:
    recorder = getattr(runner, ATTRIBUTE, None)
    if recorder is not None:
        recorder.close()
        for layer in recorder.model.layers.values():
            del layer._attn_recorder
        delattr(runner, ATTRIBUTE)


# In a process that answers -----------------------------------------------------------------------


def with_ours_outside(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def init_entrypoints_middleware(args: Any, app: Any, *given: Any, **named: Any) -> Any:
        found = original(args, app, *given, **named)
        before_serving(app, args)
        return found

    return init_entrypoints_middleware


def have_delivered(engine: Any, *given: Any) -> None:
    """Before `AsyncLLM.shutdown`, after which vLLM kills its other processes: have records
    delivered."""
    handler = engine.output_handler
    loop = None if handler is None else handler.get_loop()
    # After a signal vLLM calls it in a thread, while the loop goes on.
    if loop is None or not loop.is_running() or current_thread() is main_thread():
        return
    asked = asyncio.run_coroutine_threadsafe(engine.collective_rpc(DELIVER), loop)
    wait([asked], CLOSE_S + 1.0)
    if not asked.done() or asked.exception() is not None:
        LOG.warning("records of the last second may be lost: the engine does not answer")


def before_serving(app: Any, args: Any) -> None:
    """See that the hooks are there, and put ours around the app."""
    options = ServeOptions.from_environment(os.environ)
    if not options.is_on and not options.turned_off:
        return
    problems = misfits(PARAMETERS)
    facts: Callable[[], ModelFacts]
    if options.turned_off:
        nothing = ModelFacts(args.model, 0, (), 0, None)
        facts = lambda: nothing  # noqa: E731
    else:
        try:
            facts = LiveFacts()
            atexit.register(facts_file.remove)
        except AttnError as error:
            problems.append(str(error))
    if problems:
        for problem in problems:
            print(f"attn: {problem}", file=sys.stderr)
        print("attn: the server does not start, as it would capture nothing", file=sys.stderr)
        raise SystemExit(2)
    # The gate is the outermost of the two: what it refuses never reaches the writer.
    app.add_middleware(AnswerWriter, secret=options.secret)
    app.add_middleware(CaptureGate, options=options, facts=facts, place="vllm_xargs")
    engine_options.say_what_is_captured(options, facts())


def misfits(parameters: dict[str, tuple[str, ...]]) -> list[str]:
    """What of vLLM is not as the hooks need it, in words."""
    found = []
    for target, wanted in parameters.items():
        name = target.replace(":", ".")
        try:
            owner, own = owner_of(target)
            function = inspect.unwrap(getattr(owner, own))
            names = [name for name in inspect.signature(function).parameters if name != "cls"]
        except (ImportError, AttributeError, ValueError) as error:
            found.append(f"this vLLM has no {name} ({error}): {SEEN}")
            continue
        if tuple(names[: len(wanted)]) != wanted:
            found.append(f"{name} takes {', '.join(names)}, not {', '.join(wanted)}: {SEEN}")
        elif not is_hooked(target):
            found.append(f"the hook on {name} did not take: see the log above")
    return found
