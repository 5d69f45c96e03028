"""The entry point: what of vLLM is hooked, options on its command line, and servers that do not
start."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

torch = pytest.importorskip("torch")

from vllm_steps import CONTEXT, Steps  # noqa: E402

from pipeline.engines.serving import facts_file  # noqa: E402
from pipeline.engines.serving.answer_writer import CURRENT  # noqa: E402
from pipeline.engines.serving.facts_file import ENDED, LiveFacts  # noqa: E402
from pipeline.engines.serving.options import TABLE, ServeOptions  # noqa: E402
from pipeline.engines.serving.request import CaptureRequest, ModelFacts  # noqa: E402
from pipeline.engines.serving.sinks import END_S  # noqa: E402
from pipeline.engines.vllm import plugin  # noqa: E402
from pipeline.engines.vllm.hooking import (  # noqa: E402
    after,
    around_coroutine,
    around_generator,
    before,
    hook,
    is_hooked,
    misfits,
)
from pipeline.engines.vllm.model_hooks import DELIVER, SCHEDULER  # noqa: E402
from pipeline.engines.vllm.model_hooks import PARAMETERS as PARAMETERS_OF_MODEL  # noqa: E402
from pipeline.engines.vllm.plugin import PARAMETERS, have_delivered, register  # noqa: E402

FACTS = ModelFacts("demo", 4, (1, 3), 8, 4096, capture_id="abc")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"TMPDIR": str(tmp_path)})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # Folders of tests have long names.
    monkeypatch.setattr("pipeline.engines.vllm.replies.MOST_PATH_BYTES", 1_000)
    # What ends with a process ends with no test.
    monkeypatch.setattr("atexit.register", lambda function: function)


# How functions are hooked ------------------------------------------------------------------------


class Owner:
    def method(self, a: int, b: int = 2) -> Any:
        return "method", a, b

    @staticmethod
    def static(a: int) -> Any:
        return "static", a

    @classmethod
    def of_class(cls, a: int) -> Any:
        return cls.__name__, a


class Child(Owner):
    pass


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    """One that is hooked, with a class of its own."""
    made = ModuleType("hooked_by_tests")
    made.Owner = type("Owner", (Owner,), dict(vars(Owner)))
    made.function = lambda a, b=2: ("function", a, b)
    monkeypatch.setitem(sys.modules, "hooked_by_tests", made)
    return made


def shouting(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: ("hooked", *original(*given, **named))


@pytest.mark.parametrize("times", [1, 2])
def test_functions_and_methods_of_each_kind_are_hooked_once(module, times):
    names = ("function", "Owner.method", "Owner.static", "Owner.of_class")
    for name in names * times:
        hook(f"hooked_by_tests:{name}", shouting)
    child = type("Child", (module.Owner,), {})
    assert module.function(1) == ("hooked", "function", 1, 2)
    for owner in (module.Owner, child):
        assert owner().method(1, b=3) == ("hooked", "method", 1, 3)
        assert owner.static(1) == owner().static(1) == ("hooked", "static", 1)
        assert owner.of_class(1) == owner().of_class(1) == ("hooked", owner.__name__, 1)
    assert all(is_hooked(f"hooked_by_tests:{name}") for name in names)


def test_what_is_not_there_is_no_target(module):
    with pytest.raises(AttributeError):
        hook("hooked_by_tests:Owner.other", shouting)
    with pytest.raises(ImportError):
        hook("hooked_by_tests.other:Owner.method", shouting)
    assert not is_hooked("hooked_by_tests:Owner.method")


def test_hooks_before_and_after_see_what_is_given_and_found(module):
    seen: list[Any] = []
    hook("hooked_by_tests:Owner.method", before(lambda *given, b: seen.append((*given, b))))
    owner = module.Owner()
    assert owner.method(1, b=3) == ("method", 1, 3)
    assert seen == [(owner, 1, 3)]
    hook("hooked_by_tests:function", after(lambda found, first: (*found, first)))
    assert module.function("x", b=1) == ("function", "x", 1, "x")


def test_hooks_around_what_is_asynchronous(module):
    async def coroutine(a: int, *, b: int) -> Any:
        return a, b

    async def generator(a: int, *, b: int) -> Any:
        yield a
        yield b

    async def around(original: Any, *given: Any, **named: Any) -> Any:
        return "hooked", await original(*given, **named)

    async def each(original: Any, *given: Any, **named: Any) -> Any:
        async for one in original(*given, **named):
            yield "hooked", one

    async def main() -> Any:
        hooked = around_generator(each)(generator)
        assert inspect.isasyncgenfunction(hooked)
        return await around_coroutine(around)(coroutine)(1, b=2), [n async for n in hooked(1, b=2)]

    assert asyncio.run(main()) == (("hooked", (1, 2)), [("hooked", 1), ("hooked", 2)])


def test_misfits_are_said_in_words(module):
    target = "hooked_by_tests:"
    fits = {"Owner.method": ("self", "a"), "Owner.static": ("a",), "Owner.of_class": ("a",)}
    fits = {target + name: wanted for name, wanted in fits.items()}
    for name in fits:
        hook(name, before(lambda *given: None))
    assert misfits(fits) == []
    found = misfits({
        target + "Owner.method": ("self", "b"),
        target + "function": ("a",),
        target + "Owner.gone": ("self",),
        "hooked_by_tests.gone:Owner.method": ("self",),
    })  # fmt: skip
    assert found[0] == (
        "hooked_by_tests.Owner.method takes self, a, b, not self, b: vLLM 0.33.0 was seen to work"
    )
    assert found[1] == "the hook on hooked_by_tests.function did not take: see the log above"
    assert found[2].startswith("this vLLM has no hooked_by_tests.Owner.gone (")
    assert found[3].startswith("this vLLM has no hooked_by_tests.gone.Owner.method (")
    assert len(found) == 4


# On the command line -----------------------------------------------------------------------------


def started(vllm: SimpleNamespace, *words: str) -> ServeOptions:
    """What another process makes of a command line, which vLLM reads as its own."""
    register()
    parser = vllm.EngineArgs.add_cli_args(argparse.ArgumentParser())
    arguments = parser.parse_args(["--model", "demo", *words])
    assert vllm.EngineArgs.from_cli_args(arguments) == (vllm.EngineArgs, "demo")
    return ServeOptions.from_environment(os.environ)


def test_options_of_the_command_line_reach_other_processes(vllm, tmp_path):
    options = started(
        vllm, "--return-attention-tokens", "--attention-capture-stride=3",
        "--attention-store", str(tmp_path / "f.db"),
        "--attention-cors-origins", "https://a.example", "https://b.example",
        "--attention-sample-rate", "0.5",
    )  # fmt: skip
    assert options.is_on and options.return_attention_tokens
    assert (options.tokens_stride, options.sample_rate) == (3, 0.5)
    assert options.store == tmp_path / "f.db"
    assert options.cors_origins == ("https://a.example", "https://b.example")
    parser = vllm.EngineArgs.add_cli_args(argparse.ArgumentParser())
    known = set(parser._option_string_actions)
    assert {name for option in TABLE for name in option.names} <= known
    # The process that answers is this one.
    assert misfits(PARAMETERS) == []
    assert ServeOptions.from_environment(os.environ).secret == options.secret


def test_without_our_options_nothing_is_hooked_but_the_command_line(vllm):
    assert not started(vllm).is_on
    hooked = [target for target in PARAMETERS if is_hooked(target)]
    assert [target.rpartition(".")[2] for target in hooked] == ["add_cli_args", "from_cli_args"]
    assert vllm.registered == {}


@pytest.mark.parametrize(
    "words", [["--attention-tokens-stride", "0"], ["--attention-store", "/proc/no/such.db"]]
)
def test_what_cannot_be_used_ends_the_program_with_one_line(vllm, words, capsys):
    with pytest.raises(SystemExit) as ended:
        started(vllm, *words)
    assert ended.value.code == 2
    says = capsys.readouterr().err
    assert says.count("\n") == 1 and says.startswith("attn: ")


def test_a_key_is_not_among_the_arguments_which_vllm_logs(vllm):
    register()
    parser = vllm.EngineArgs.add_cli_args(argparse.ArgumentParser())
    key = "a-key-of-this-test"
    arguments = parser.parse_args(
        ["--model", "demo", "--return-attention-tokens", "--attention-api-key", key]
    )
    assert key not in str(arguments)
    vllm.EngineArgs.from_cli_args(arguments)
    assert ServeOptions.from_environment(os.environ).api_key == key


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"grpc": True}, "--grpc answers without attention: leave it out"),
        ({"headless": True}, "--headless: attention cannot be captured for a server on another"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2},
         "--data-parallel-size-local 2 of 4: attention cannot be captured on other machines: use "
         "--data-parallel-hybrid-lb"),
        ({"data_parallel_backend": "ray"}, "--data-parallel-backend ray was not tried: use mp"),
        ({"enable_elastic_ep": True}, "--enable-elastic-ep was not tried: leave it out"),
        ({}, "VLLM_USE_RUST_FRONTEND answers without attention: leave it out"),
    ],
)  # fmt: skip
def test_servers_that_cannot_answer_with_attention_do_not_start(
    vllm, capsys, monkeypatch, given, says
):
    register()
    if not given:
        monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_USE_RUST_FRONTEND", True)
    arguments = argparse.Namespace(model="demo", return_attention_tokens=True, **given)
    with pytest.raises(SystemExit) as ended:
        vllm.EngineArgs.from_cli_args(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"attn: {says}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "given",
    [
        {}, {"data_parallel_size": 2, "data_parallel_backend": "mp"},
        {"data_parallel_size": 2, "data_parallel_size_local": 2},
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True},
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 0},
        {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_rank": 0},
    ],
)  # fmt: skip
def test_ranks_of_data_parallelism_on_this_machine_are_not_refused(vllm, given):
    register()
    defaults = {"data_parallel_backend": "mp", "headless": False, "enable_elastic_ep": False}
    asked = {"model": "demo", "return_attention_tokens": True, **defaults, **given}
    vllm.EngineArgs.from_cli_args(argparse.Namespace(**asked))
    assert ServeOptions.from_environment(os.environ).is_on


def test_a_further_process_that_answers_is_hooked_before_it_reads_a_command_line(vllm):
    os.environ |= ServeOptions(return_attention_tokens=True).environment()
    register()
    assert misfits(PARAMETERS) == []


def test_a_name_that_is_too_long_for_a_socket_is_said_at_the_start(vllm, capsys, monkeypatch):
    started(vllm, "--return-attention-tokens")
    facts_file.write(FACTS)
    monkeypatch.setitem(os.environ, "ATTN_ENGINE_FACTS", f"/tmp/{'x' * 1_000}")
    monkeypatch.setattr("pipeline.engines.vllm.plugin.LiveFacts", lambda: lambda: FACTS)
    with pytest.raises(SystemExit):
        app_of(vllm)
    assert "set TMPDIR to a folder with a shorter name" in capsys.readouterr().err


def test_a_variable_that_cannot_be_used_ends_the_program(vllm, capsys):
    os.environ["ATTN_CAPTURE_TOKENS_STRIDE"] = "two"
    with pytest.raises(SystemExit) as ended:
        register()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("attn: ATTN_CAPTURE_TOKENS_STRIDE='two'")


def test_all_processes_of_a_server_have_one_folder_of_facts(vllm):
    register()
    path = os.environ["ATTN_ENGINE_FACTS"]
    register()
    assert os.environ["ATTN_ENGINE_FACTS"] == path


# Before it serves --------------------------------------------------------------------------------


def app_of(vllm: SimpleNamespace) -> Starlette:
    """vLLM's app, once its middlewares are there."""
    from vllm.entrypoints.launchers import app as launcher

    async def answer(request: Any) -> Any:
        made.state.reached = CURRENT.get(), await request.json()
        return PlainTextResponse("vllm")

    made = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    launcher.init_entrypoints_middleware(argparse.Namespace(model="demo"), made, ("generate",))
    return made


def asked(app: Starlette, **fields: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return await client.post("/v1/completions", json={"prompt": "a", **fields})

    return asyncio.run(main())


def test_a_server_that_captures_says_so_and_has_our_gate(vllm, capsys):
    started(vllm, "--return-attention-tokens")
    facts_file.write(FACTS)
    app = app_of(vllm)
    assert "attn: capturing layers 1,3 of 4, 8 heads" in capsys.readouterr().err
    assert asked(app).text == "vllm"
    answer = asked(app, return_attention_tokens="yes")
    assert answer.status_code == 400
    assert "return_attention_tokens must be true or false" in answer.json()["error"]["message"]
    # A request is signed where vLLM takes its arguments from, and the answer is written to.
    asked(app, return_attention_tokens=True)
    current, body = app.state.reached
    wanted = CaptureRequest.from_custom_params(body["vllm_xargs"], current.secret)
    assert wanted.layers == [1, 3] and body.keys() == {"prompt", "vllm_xargs"}
    # What a worker says later is known to the gate.
    facts_file.write(ModelFacts("demo", 4, (1, 3), 8, 4096, {"capture": "it failed"}))
    assert "it failed" in asked(app, return_attention_tokens=True).json()["error"]["message"]


def test_a_server_that_is_in_production_may_refuse(vllm, capsys):
    words = ("--return-attention-tokens", "--attention-disable-in-production")
    options = started(vllm, *words)
    assert options.turned_off
    app = app_of(vllm)
    assert "capture is off" in capsys.readouterr().err
    assert asked(app, return_attention_tokens=True).status_code == 403
    assert vllm.registered == {}


def test_a_server_without_our_options_is_as_it_was(vllm, capsys):
    started(vllm)
    assert app_of(vllm).user_middleware == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fault", ["no facts", "refused", "not hooked", "another vLLM"])
def test_a_server_that_would_capture_nothing_does_not_start(vllm, monkeypatch, capsys, fault):
    started(vllm, "--return-attention-tokens")
    if fault != "no facts":
        facts_file.write("that model was not tried" if fault == "refused" else FACTS)
    if fault == "not hooked":
        monkeypatch.setattr(vllm.OnlineRenderer, "render_chat", lambda self, request: None)
    if fault == "another vLLM":
        monkeypatch.setattr(vllm.AsyncLLM, "generate", lambda self, request: None)
    with pytest.raises(SystemExit) as ended:
        app_of(vllm)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "attn: the server does not start, as it would capture nothing"
    assert {
        "no facts": "the hooks in the model's process did not take",
        "refused": "that model was not tried",
        "not hooked": "the hook on vllm.renderers.online_renderer.OnlineRenderer.render_chat",
        "another vLLM": "AsyncLLM.generate takes self, request, not self, prompt",
    }[fault] in "\n".join(lines[:-1])


# In a worker -------------------------------------------------------------------------------------


def worker_of(vllm: SimpleNamespace, runner: Any = None, *, v2: bool = True) -> Any:
    """A worker that has loaded its model."""
    worker = vllm.Worker()
    worker.use_v2_model_runner, worker.model_runner = v2, runner
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    assert worker.load_model(load_dummy_weights=False) == "loaded"
    return worker


@pytest.fixture
def running(vllm, steps) -> Iterator[Callable[..., tuple[Steps, Any]]]:
    """Steps of a hooked vLLM, and its runner: a recorder of its own begins with its KV cache."""
    runners: list[Any] = []

    def make(**changed: Any) -> tuple[Steps, Any]:
        os.environ |= ServeOptions(return_attention_tokens=True, layers="all").environment()
        register()
        some = steps()
        some.options = ServeOptions.from_environment(os.environ)
        some.recorder.close()
        runner = vllm.GPUModelRunner(some.runner)
        mode = SimpleNamespace(name="X", mixed_mode=lambda: SimpleNamespace(name="PIECEWISE"))
        runner.compilation_config = SimpleNamespace(cudagraph_mode=mode)
        vars(runner).update(changed)
        runners.append(runner)
        worker_of(vllm, runner)
        runner.initialize_kv_cache(runner.kv_cache_config, True)
        assert not hasattr(runner, "_attn_recorder"), "memory is being measured"
        runner.initialize_kv_cache(runner.kv_cache_config)
        return some, runner

    yield make
    for runner in runners:
        runner.shutdown()


def test_backends_take_the_places_of_the_built_in_ones(vllm):
    os.environ |= ServeOptions(return_attention_tokens=True).environment()
    register()
    register()
    folder = "pipeline.engines.vllm.model_process.backends."
    assert vllm.registered == {
        "FLASH_ATTN": folder + "CapturedFlashBackend",
        "TRITON_ATTN": folder + "CapturedTritonBackend",
    }
    scheduler = vllm.Scheduler()
    assert scheduler.schedule().attn_decided.kept == {}
    assert is_hooked(SCHEDULER + "_free_request")


def test_steps_of_the_runner_are_captured_and_its_end_is_the_recorders(running):
    some, runner = running()
    assert LiveFacts()().layers == (0, 1)
    recorder = some.recorder = runner._attn_recorder
    assert all(layer._attn_recorder is recorder for layer in some.layers)

    def sample(output: Any, ran: Any) -> None:
        runner.execute_model_state = ran
        runner.sample_tokens(output)

    # As vLLM calls them, and its attention ours.
    hooked = SimpleNamespace(
        begin=lambda scheduled: runner.execute_model(scheduled), prepare=runner.prepare_attn,
        layer=lambda layer, *given: layer._attn_recorder.layer(layer, *given),
        results=sample, _reporter=recorder._reporter, close=recorder.close,
        model=recorder.model,
    )  # fmt: skip
    some.recorder = hooked
    req = some.request("r", 6, prompt_rows=1)
    some.run((req, 6))()
    # As where the step has failed.
    assert runner.sample_tokens(None) is None
    for dummy in ({"dummy_run": True}, {"intermediate_tensors": None, "dummy_run": True}):
        runner.execute_model(None, **dummy)
        runner.prepare_dummy_attn(None, True)
    runner.execute_model(None, None, True)
    assert runner.sample_tokens(None) is None
    some.decode(req, times=3)
    some.end(req)
    entries, usage = some.ended(req)
    assert some.check(req, entries) == [(p, n) for p in range(5, 9) for n in range(2)]
    assert usage["rows"] == 4
    runner.shutdown()
    assert LiveFacts()().reasons["capture"] == ENDED
    assert not hasattr(runner, "_attn_recorder")
    assert not any(hasattr(layer, "_attn_recorder") for layer in some.layers)
    runner.shutdown()
    # What it runs now is not captured.
    CONTEXT.attn_metadata = {}
    runner.execute_model(None)
    runner.prepare_attn(None)
    assert runner.sample_tokens("output") == "output"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"is_pooling_model": True}, "cannot be captured: the model does not generate"),
        ({"layers": {}}, "no layer has attention to capture"),
        (
            {"compilation_config": SimpleNamespace(cudagraph_mode=SimpleNamespace(
                name="FULL", mixed_mode=lambda: SimpleNamespace(name="FULL")))},
            "whole graphs of prompts",
        ),
    ],
)  # fmt: skip
def test_why_a_model_cannot_be_captured_reaches_the_process_that_answers(
    running, capsys, changed, reason
):
    _, runner = running(**changed)
    assert not hasattr(runner, "_attn_recorder")
    plugin.hook_server()
    with pytest.raises(SystemExit):
        app_of(runner)
    assert reason in capsys.readouterr().err


def test_a_vllm_whose_runner_differs_is_not_captured(running, vllm, capsys, monkeypatch):
    monkeypatch.setattr(vllm.GPUModelRunner, "prepare_attn", lambda self, batch: batch)
    _, runner = running()
    assert not hasattr(runner, "_attn_recorder")
    plugin.hook_server()
    with pytest.raises(SystemExit):
        app_of(vllm)
    says = capsys.readouterr().err
    assert "GPUModelRunner.prepare_attn takes self, batch, not self, input_batch" in says


def test_all_hooks_fit_what_they_are_for(running):
    running()
    assert misfits(PARAMETERS_OF_MODEL) == []


def test_another_runner_is_not_captured(vllm):
    os.environ |= ServeOptions(return_attention_tokens=True).environment()
    register()
    worker_of(vllm, v2=False)
    assert not is_hooked("vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model")
    with pytest.raises(Exception, match="it needs vLLM's V2 model runner"):
        LiveFacts()


def test_memory_of_capture_is_not_given_to_keys_and_values(running, vllm, monkeypatch):
    _, runner = running()
    own = "pipeline.engines.vllm.model_process.plans.bytes_of_capture"
    measured: list[Any] = []
    monkeypatch.setattr(own, lambda *given: measured.append(given) or 1000)
    worker = worker_of(vllm, runner)
    assert worker.determine_available_memory() == (1 << 30) - 1000
    ((of, options),) = measured
    assert of is runner and options.return_attention_tokens
    # Whoever gave a number means it.
    worker.cache_config.kv_cache_memory_bytes = 1 << 30
    assert worker.determine_available_memory() == 1 << 30


@pytest.mark.parametrize("answers", [True, False])
def test_records_are_delivered_before_the_engine_is_killed(
    running, vllm, monkeypatch, caplog, answers
):
    """vLLM calls `AsyncLLM.shutdown` in a thread, while its loop runs."""
    monkeypatch.setattr("pipeline.engines.vllm.plugin.END_S", 0.2)
    _, runner = running()
    worker = worker_of(vllm, runner)
    asked: list[str] = []

    class Engine:
        async def collective_rpc(self, method: str) -> None:
            asked.append(method)
            if not answers:
                await asyncio.sleep(60)
            getattr(worker, method)()

    async def main() -> None:
        engine = Engine()
        engine.output_handler = asyncio.current_task()
        # Where nothing runs beside it, it would wait for itself.
        have_delivered(engine)
        assert asked == []
        await asyncio.to_thread(have_delivered, engine, 0)

    asyncio.run(main())
    assert asked == [DELIVER]
    ended = LiveFacts()().reasons.get("capture") == ENDED
    assert ended == answers
    assert ("records of the last second may be lost" in caplog.text) == (not answers)


@pytest.mark.parametrize("asked", [0, None, 60.0])
def test_processes_that_answer_have_time_to_deliver(vllm, asked):
    """After a signal vLLM gives several of them none without `--shutdown-timeout`."""
    started(vllm, "--return-attention-tokens")
    servers = vllm.APIServerProcessManager()
    servers.shutdown(timeout=asked)
    (had,) = servers.had
    # Each waits as long for the engines to deliver, and then has to end.
    assert had == asked if asked else had > END_S
