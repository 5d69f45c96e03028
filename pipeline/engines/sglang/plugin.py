"""The entry point `sglang.srt.plugins`: which functions of SGLang are hooked, and where.

SGLang calls `register` in each of its processes before it reads its command line. A hook that
cannot be installed is only logged by SGLang, so everything is looked at again before the server
answers (`check_before_serving`), and a server that would not capture does not start.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from capture_kernels.errors import AttnError
from pipeline.engines.serving import engine_options, facts_file
from pipeline.engines.serving.answer_writer import AnswerWriter
from pipeline.engines.serving.facts_file import LiveFacts
from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.option_table import PREFIX
from pipeline.engines.serving.options import TABLE, ServeOptions
from pipeline.engines.serving.request import ModelFacts
from pipeline.engines.serving.sinks import END_S

from .answers import check_scores, heard, hide_system_prompt
from .command_line import add_options, read_options
from .model_process.layers import refusal

LOG = logging.getLogger("attn.capture")

ARGUMENTS = "sglang.srt.server_args.ServerArgs."
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch."
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
SERVER = "sglang.srt.entrypoints.http_server."
# The parameters of what is hooked, as far as the hooks count on them. SGLang 0.5.23.
PARAMETERS = {
    ARGUMENTS + "add_cli_args": ("parser",),
    ARGUMENTS + "from_cli_args": ("args",),
    RUNNER + "init_attention_backends": ("self",),
    BATCH + "init_new": ("batch", "model_runner"),
    SCHEDULER + "get_output_streamer_class": ("self",),
    SCHEDULER + "handle_shutdown": ("self",),
    MANAGER + "generate_request": ("self", "obj", "request"),
    MANAGER + "_validate_one_request": ("self", "obj", "input_ids"),
    CHAT + "_convert_to_internal_request": ("self", "request", "raw_request"),
    SERVER + "_setup_and_run_http_server": ("server_args", "tokenizer_manager"),
}
Hooks = dict[str, tuple[str, Callable[..., Any]]]
# Of a `ModelRunner`, its recorder.
ATTRIBUTE = "_attn_recorder"


def register() -> None:
    """Install the hooks of this process. Called by SGLang, which only logs what is raised here: so
    where capture was asked for, the program ends."""
    try:
        install_hooks()
    except Exception as error:
        ours = {name for option in TABLE for name in option.names}
        asked = any(variable.startswith(PREFIX) for variable in os.environ)
        if asked or not ours.isdisjoint(word.partition("=")[0] for word in sys.argv):
            LOG.exception("the hooks of this process cannot be installed")
            print(f"attn: cannot hook into this SGLang: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise


def install_hooks() -> None:
    if not facts_file.is_chosen():
        # The first process: what is captured is not known before the command line is read.
        install(HOOKS_OF_FIRST)
        facts_file.choose_folder()
    elif ServeOptions.from_environment(os.environ).is_on:
        wrap_backends()
        install(HOOKS_OF_MODEL)


def install(hooks: Hooks) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, function) in hooks.items():
        HookRegistry.register(target, function, HookType[kind])


def unhooked(hooks: Hooks) -> list[str]:
    """Those of them that SGLang has not installed, in words."""
    return [
        f"the hook on {target} did not take: see the log above"
        for target in hooks
        if not hasattr(find(target), "__wrapped__")
    ]


def find(target: str) -> Any:
    """What a hook's target names. ImportError, AttributeError: nothing."""
    owner, _, name = target.rpartition(".")
    module, _, last = owner.rpartition(".")
    if last[:1].isupper():
        owner = f"{module}:{last}"
    return getattr(pkgutil.resolve_name(owner), name)


# In the model's process --------------------------------------------------------------------------


def wrap_backends() -> None:
    """Have every attention backend hand its layers to the recorder once they have run."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name, factory in list(ATTENTION_BACKENDS.items()):
        ATTENTION_BACKENDS[name] = partial(instrumented, factory)


def instrumented(factory: Callable[[Any], Any], runner: Any) -> Any:
    backend = factory(runner)
    if runner.is_draft_worker:
        return backend
    for name, decode in (("forward_decode", True), ("forward_extend", False)):
        setattr(backend, name, recorded(getattr(backend, name), runner, decode=decode))
    return backend


def recorded(original: Callable[..., Any], runner: Any, *, decode: bool) -> Callable[..., Any]:
    @wraps(original)
    def forward(
        q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        **given: Any,
    ) -> Any:  # fmt: skip
        output = original(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **given)
        recorder = getattr(runner, ATTRIBUTE, None)
        if recorder is not None:
            recorder.layer(layer, q, forward_batch, decode=decode, sinks=given.get("sinks"))
        return output

    return forward


def start_recorder(result: None, runner: Any) -> None:
    """After `ModelRunner.init_attention_backends`: the model and its pools are there."""
    if runner.is_draft_worker:
        return
    from .model_process.drafts import wrap_verify
    from .model_process.layers import ranks_of_this_process
    from .model_process.recorder import Recorder

    options = ServeOptions.from_environment(os.environ)
    ranks, recorder, reason = ranks_of_this_process(), None, None
    try:
        if lost := unhooked(HOOKS_OF_MODEL):
            raise_refused("; ".join(lost))
        if reason := refusal(runner):
            raise_refused(reason)
        if not runner.spec_algorithm.is_none():
            wrap_verify(ATTRIBUTE)
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
    if runner.spec_algorithm.is_none():
        runner.sampling_observer = recorder
    else:
        # Beside drafts its setter refuses one. `ModelRunner.sample`, which prompts pass through,
        # calls one all the same.
        runner._sampling_observer = recorder
    setattr(runner, ATTRIBUTE, recorder)
    # Ctrl+C in a terminal ends this process as it does the first.
    atexit.register(recorder.close)
    if ranks.answers:
        facts_file.write(recorder.model.facts)


def raise_refused(reason: str) -> None:
    raise AttnError(f"attention of this server cannot be captured: {reason}")


def prepare_step(result: Any, cls: type, batch: Any, model_runner: Any, **given: Any) -> None:
    """After `ForwardBatch.init_new`."""
    recorder = getattr(model_runner, ATTRIBUTE, None)
    if recorder is not None:
        recorder.prepare(result, batch)


def streamer_class(result: type, scheduler: Any) -> type:
    """After `Scheduler.get_output_streamer_class`: one that adds what the recorder has."""
    runner = scheduler.tp_worker.model_runner
    recorder = getattr(runner, ATTRIBUTE, None)
    if recorder is None or not recorder.ranks.answers:
        return result
    recorder.model.use_tokenizer(scheduler.tokenizer)
    outputs: Callable[[list[Any]], dict[str, list[Any]]] = recorder.outputs

    base: Any = result

    class Streamer(base):
        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            return outputs(reqs)

    return Streamer


def close_recorder(result: None, scheduler: Any, request: Any) -> None:
    """After `Scheduler.handle_shutdown`: no step comes any more."""
    recorder = getattr(scheduler.tp_worker.model_runner, ATTRIBUTE, None)
    if recorder is not None:
        recorder.close()


# In the process that answers ---------------------------------------------------------------------


def hide(result: Any, self: Any, request: Any, *rest: Any) -> None:
    options = ServeOptions.from_environment(os.environ)
    hide_system_prompt(result, self, request, *rest, secret=options.secret)


def before_serving(server_args: Any, tokenizer_manager: Any, *rest: Any, **given: Any) -> None:
    """Before the HTTP server is set up: see that the hooks are there, and put ours around it."""
    from sglang.srt.entrypoints.http_server import app

    options = ServeOptions.from_environment(os.environ)
    if not options.is_on and not options.turned_off:
        return
    problems = misfits()
    facts: Callable[[], ModelFacts]
    if options.turned_off:
        nothing = ModelFacts(server_args.model_path, 0, (), 0, None)
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
        sys.stderr.flush()
        end_server()
    # The gate is the outermost of the two: what it refuses never reaches the writer.
    app.add_middleware(
        AnswerWriter, at_end=partial(end_model, tokenizer_manager, facts), secret=options.secret
    )
    app.add_middleware(CaptureGate, options=options, facts=facts)
    engine_options.say_what_is_captured(options, facts())


async def end_model(tokenizer_manager: Any, facts: Callable[[], ModelFacts]) -> None:
    """Have the model's process deliver its records and end, as SGLang does after a SIGTERM; after a
    SIGINT it would kill it."""
    if facts().reasons.get("capture") == facts_file.ENDED or not facts().layers:
        return
    from sglang.srt.managers.io_struct import ShutdownReq

    if (watchdog := tokenizer_manager._subprocess_watchdog) is not None:
        watchdog.stop()  # it would take the end for a crash
    tokenizer_manager._dispatch_to_scheduler(ShutdownReq())
    until = time.monotonic() + END_S
    while facts().reasons.get("capture") != facts_file.ENDED and time.monotonic() < until:
        await asyncio.sleep(0.05)


def misfits() -> list[str]:
    """What of SGLang is not as the hooks need it, in words."""
    found = []
    for target, wanted in PARAMETERS.items():
        try:
            function = inspect.unwrap(find(target))
            names = [name for name in inspect.signature(function).parameters if name != "cls"]
        except (ImportError, AttributeError, ValueError) as error:
            found.append(f"this SGLang has no {target} ({error}): 0.5.23 was seen to work")
            continue
        if tuple(names[: len(wanted)]) != wanted and not set(wanted) <= set(names):
            found.append(
                f"{target} takes {', '.join(names)}, not {', '.join(wanted)}: SGLang 0.5.23 was "
                "seen to work"
            )
    return found or unhooked(HOOKS_OF_FIRST)


def end_server() -> None:
    """End this process and its children: nothing is served that would mislead."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(1)


# How and with what each process's functions are hooked.
HOOKS_OF_FIRST: Hooks = {
    ARGUMENTS + "add_cli_args": ("AFTER", add_options),
    ARGUMENTS + "from_cli_args": ("AROUND", read_options),
    MANAGER + "generate_request": ("AROUND", heard),
    MANAGER + "_validate_one_request": ("BEFORE", check_scores),
    CHAT + "_convert_to_internal_request": ("AFTER", hide),
    SERVER + "_setup_and_run_http_server": ("BEFORE", before_serving),
}
HOOKS_OF_MODEL: Hooks = {
    RUNNER + "init_attention_backends": ("AFTER", start_recorder),
    BATCH + "init_new": ("AFTER", prepare_step),
    SCHEDULER + "get_output_streamer_class": ("AFTER", streamer_class),
    SCHEDULER + "handle_shutdown": ("AFTER", close_recorder),
}
