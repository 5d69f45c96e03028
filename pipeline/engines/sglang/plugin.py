"""The entry point `sglang.srt.plugins`: which functions of SGLang are hooked, and where.

SGLang calls `register` in each of its processes before it reads its command line. A hook that
cannot be installed is only logged by SGLang, so everything is looked at again before the server
answers (`check_before_serving`), and a server that would not capture does not start.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Any

from capture_kernels.errors import AttnError
from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.option_table import PREFIX
from pipeline.engines.serving.options import TABLE, ServeOptions
from pipeline.engines.serving.request import ModelFacts

from .answers import AnswerWriter, heard, hide_system_prompt
from .command_line import add_options, read_options
from .layers import refusal

LOG = logging.getLogger("attn.capture")

# Where the model's process writes what can be captured, for the one that answers.
FACTS_VARIABLE = "ATTN_SGLANG_FACTS"
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
    CHAT + "_convert_to_internal_request": ("self", "request", "raw_request"),
    SERVER + "_setup_and_run_http_server": ("server_args", "tokenizer_manager"),
}
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
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hook(target: str, function: Callable[..., Any], kind: Any) -> None:
        HookRegistry.register(target, function, kind)

    if FACTS_VARIABLE not in os.environ:
        # The first process: what is captured is not known before the command line is read.
        hook(ARGUMENTS + "add_cli_args", add_options, HookType.AFTER)
        hook(ARGUMENTS + "from_cli_args", read_options, HookType.AROUND)
        os.environ[FACTS_VARIABLE] = str(Path(tempfile.mkdtemp(prefix="attn-")) / "facts.json")
        hook(MANAGER + "generate_request", heard, HookType.AROUND)
        hook(CHAT + "_convert_to_internal_request", hide, HookType.AFTER)
        hook(SERVER + "_setup_and_run_http_server", before_serving, HookType.BEFORE)
        return
    if not ServeOptions.from_environment(os.environ).is_on:
        return
    wrap_backends()
    hook(RUNNER + "init_attention_backends", start_recorder, HookType.AFTER)
    hook(BATCH + "init_new", prepare_step, HookType.AFTER)
    hook(SCHEDULER + "get_output_streamer_class", streamer_class, HookType.AFTER)
    hook(SCHEDULER + "handle_shutdown", close_recorder, HookType.AFTER)


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
    from .recorder import Recorder

    options = ServeOptions.from_environment(os.environ)
    facts: dict[str, Any]
    try:
        if reason := refusal(runner):
            raise_refused(reason)
        recorder = Recorder(runner, options)
    except AttnError as error:
        facts = {"error": str(error)}
    else:
        runner.sampling_observer = recorder
        setattr(runner, ATTRIBUTE, recorder)
        facts = asdict(recorder.model.facts)
    path = Path(os.environ[FACTS_VARIABLE])
    # Of several processes each says the same.
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(facts), encoding="utf-8")
    unfinished.replace(path)


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
    if recorder is None:
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
    facts = {} if options.turned_off else read_facts(problems)
    if problems:
        for problem in problems:
            print(f"attn: {problem}", file=sys.stderr)
        print("attn: the server does not start, as it would capture nothing", file=sys.stderr)
        sys.stderr.flush()
        end_server()
    found = _facts_of(facts, server_args)
    # The gate is the outermost of the two: what it refuses never reaches the writer.
    app.add_middleware(AnswerWriter)
    app.add_middleware(CaptureGate, options=options, facts=lambda: found)
    say_what_is_captured(options, found)


def _facts_of(facts: dict[str, Any], server_args: Any) -> ModelFacts:
    if not facts:
        return ModelFacts(server_args.model_path, 0, (), 0, None)
    lists = {name: tuple(facts[name]) for name in ("layers", "score_layers")}
    return ModelFacts(**facts | lists)


def read_facts(problems: list[str]) -> dict[str, Any]:
    path = Path(os.environ[FACTS_VARIABLE])
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        problems.append("the hooks in the model's process did not take: see its log above")
        return {}
    if error := facts.get("error"):
        problems.append(error)
        return {}
    return facts


def misfits() -> list[str]:
    """What of SGLang is not as the hooks need it, in words."""
    import pkgutil

    found = []
    for target, wanted in PARAMETERS.items():
        owner, _, name = target.rpartition(".")
        try:
            function = inspect.unwrap(getattr(pkgutil.resolve_name(_colon(owner)), name))
            names = [name for name in inspect.signature(function).parameters if name != "cls"]
        except (ImportError, AttributeError, ValueError) as error:
            found.append(f"this SGLang has no {target} ({error}): 0.5.23 was seen to work")
            continue
        if tuple(names[: len(wanted)]) != wanted and not set(wanted) <= set(names):
            found.append(
                f"{target} takes {', '.join(names)}, not {', '.join(wanted)}: SGLang 0.5.23 was "
                "seen to work"
            )
    return found


def _colon(owner: str) -> str:
    """`module:Class` for a class, `module` for a module."""
    module, _, last = owner.rpartition(".")
    return f"{module}:{last}" if last[:1].isupper() else owner


def say_what_is_captured(options: ServeOptions, facts: ModelFacts) -> None:
    if options.turned_off:
        print("attn: capture is off: --attention-disable-in-production", file=sys.stderr)
        return
    layers = ",".join(map(str, facts.layers))
    parts = ["/".join(options.modes) + " entries"] if options.modes else []
    if options.records:
        parts.append(f"records to {options.sidecar_url or options.store}")
    print(
        f"attn: capturing layers {layers} of {facts.num_layers}, {facts.heads} heads: "
        f"{', '.join(parts)} (capture {facts.capture_id})",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def end_server() -> None:
    """End this process and its children: nothing is served that would mislead."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(1)
