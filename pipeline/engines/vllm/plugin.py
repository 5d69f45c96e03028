"""The entry point `vllm.general_plugins`: what of vLLM is hooked, and in which process.

vLLM calls `register` in each of its processes, before it reads its command line. A plug-in that
fails is only logged by vLLM, so everything is looked at again before the server answers
(`before_serving`), and a server that would not capture does not start.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
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
from pipeline.engines.serving.sinks import END_S, GRACE_S

from .answers import heard, rendered_chat
from .hooking import around_coroutine, around_generator, before, hook, misfits
from .model_hooks import DELIVER, hook_model
from .replies import replies_refusal

LOG = logging.getLogger("attn.capture")

ARGUMENTS = "vllm.engine.arg_utils:EngineArgs."
ENGINE = "vllm.v1.engine.async_llm:AsyncLLM."
RENDERER = "vllm.renderers.online_renderer:OnlineRenderer."
SERVER = "vllm.entrypoints.launchers.app:"
SERVERS = "vllm.v1.utils:APIServerProcessManager."
# The parameters of what is hooked, as far as the hooks count on them.
PARAMETERS = {
    ARGUMENTS + "add_cli_args": ("parser",),
    ARGUMENTS + "from_cli_args": ("args",),
    ENGINE + "generate": ("self", "prompt", "sampling_params", "request_id"),
    ENGINE + "shutdown": ("self",),
    RENDERER + "render_chat": ("self", "request"),
    SERVER + "init_entrypoints_middleware": ("args", "app"),
    SERVERS + "shutdown": ("self", "timeout"),
}


def register() -> None:
    """Install the hooks of this process. Called by vLLM. A variable that cannot be used ends the
    program with 2."""
    if not facts_file.is_chosen():
        # The first process: what is captured is not known before the command line is read.
        facts_file.choose_folder()
        # By this process, as further ones that answer may be killed.
        atexit.register(facts_file.remove)
    hook(ARGUMENTS + "add_cli_args", with_options)
    hook(ARGUMENTS + "from_cli_args", read_options)
    try:
        options = ServeOptions.from_environment(os.environ)
    except AttnError as error:
        print(f"attn: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.is_on:
        hook_model()
    if options.is_on or options.turned_off:
        # Further processes that answer read no command line.
        hook_server()


def hook_server() -> None:
    """The hooks of a process that answers."""
    hook(ENGINE + "generate", around_generator(heard))
    hook(ENGINE + "shutdown", before(have_delivered))
    hook(RENDERER + "render_chat", around_coroutine(rendered_chat))
    hook(SERVER + "init_entrypoints_middleware", with_ours_outside)
    hook(SERVERS + "shutdown", with_time_to_deliver)


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
            refuse_other_servers(args)
            hook_server()
        return original(cls, args, *given, **named)

    return from_cli_args


# In a process that answers -----------------------------------------------------------------------


def with_ours_outside(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def init_entrypoints_middleware(args: Any, app: Any, *given: Any, **named: Any) -> Any:
        found = original(args, app, *given, **named)
        before_serving(app, args)
        return found

    return init_entrypoints_middleware


def refuse_other_servers(args: Any) -> None:
    """End the program with 2 where answers do not pass through Python's HTTP, or are not made on
    this machine."""
    import vllm.envs as envs

    def given(name: str) -> Any:
        return getattr(args, name, None)

    local, ranks = given("data_parallel_size_local"), given("data_parallel_size") or 1
    # With these all engines of a server are on its machine.
    balanced = given("data_parallel_hybrid_lb") or given("data_parallel_external_lb") or any(
        given(name) is not None for name in ("data_parallel_start_rank", "data_parallel_rank")
    )  # fmt: skip
    elsewhere = local is not None and local < ranks and not balanced
    for refused, applies in {
        "--grpc answers without attention: leave it out": given("grpc"),
        "VLLM_USE_RUST_FRONTEND answers without attention: leave it out": (
            envs.VLLM_USE_RUST_FRONTEND
        ),
        "--headless: attention cannot be captured for a server on another machine": (
            given("headless")
        ),
        f"--data-parallel-size-local {local} of {ranks}: attention cannot be captured on other "
        "machines: use --data-parallel-hybrid-lb": elsewhere,
        "--data-parallel-backend ray was not tried: use mp": (
            given("data_parallel_backend") == "ray"
        ),
        "--enable-elastic-ep was not tried: leave it out": given("enable_elastic_ep"),
    }.items():
        if applies:
            print(f"attn: {refused}", file=sys.stderr)
            raise SystemExit(2)


def have_delivered(engine: Any, timeout: float | None = None) -> None:
    """Before `AsyncLLM.shutdown`, after which vLLM kills its other processes, unless it gives them
    time to end: have records delivered."""
    if timeout:
        return
    # An engine that failed as it was made has none.
    handler = getattr(engine, "output_handler", None)
    loop = None if handler is None else handler.get_loop()
    # After a signal vLLM calls it in a thread, while the loop goes on.
    if loop is None or not loop.is_running() or current_thread() is main_thread():
        return
    asked = asyncio.run_coroutine_threadsafe(engine.collective_rpc(DELIVER), loop)
    wait([asked], END_S)
    if not asked.done() or asked.exception() is not None:
        LOG.warning("records of the last second may be lost: the engine does not answer")


def with_time_to_deliver(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `APIServerProcessManager.shutdown`, in the process above several that answer: after a
    signal vLLM would kill these at once, and its engines then."""

    @wraps(original)
    def shutdown(servers: Any, timeout: float | None = None) -> None:
        original(servers, timeout=timeout or END_S + GRACE_S)

    return shutdown


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
        except AttnError as error:
            problems.append(str(error))
    if too_long := replies_refusal():
        problems.append(too_long)
    if problems:
        for problem in problems:
            print(f"attn: {problem}", file=sys.stderr)
        print("attn: the server does not start, as it would capture nothing", file=sys.stderr)
        raise SystemExit(2)
    # The gate is the outermost of the two: what it refuses never reaches the writer.
    app.add_middleware(AnswerWriter, secret=options.secret)
    app.add_middleware(CaptureGate, options=options, facts=facts, place="vllm_xargs")
    engine_options.say_what_is_captured(options, facts())
