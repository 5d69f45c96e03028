"""What is hooked in processes that schedule or run a model, and what becomes of it there."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from capture_kernels.errors import AttnError
from pipeline.engines.serving import facts_file
from pipeline.engines.serving.options import ServeOptions

from .hooking import after, before, hook, misfits, owner_of
from .scheduling import RECORDER as ATTRIBUTE
from .scheduling import decide, note_end

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
WORKER = "vllm.v1.worker.gpu_worker:Worker."
RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner."
LATENT = "vllm.model_executor.layers.attention.mla_attention:MLAAttention."
BACKENDS = "pipeline.engines.vllm.model_process.backends."
# The parameters of what is hooked, as far as the hooks count on them.
PARAMETERS = {
    SCHEDULER + "schedule": ("self",),
    SCHEDULER + "_free_request": ("self", "request"),
    WORKER + "determine_available_memory": ("self",),
    RUNNER + "load_model": ("self", "load_dummy_weights"),
    RUNNER + "initialize_kv_cache": ("self", "kv_cache_config", "is_profiling"),
    RUNNER + "execute_model": ("self", "scheduler_output", "intermediate_tensors", "dummy_run"),
    RUNNER + "prepare_attn": ("self", "input_batch"),
    RUNNER + "prepare_dummy_attn": ("self", "input_batch"),
    RUNNER + "sample_tokens": ("self", "grammar_output"),
    RUNNER + "shutdown": ("self",),
    LATENT + "forward_impl": ("self", "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata"),
}
# Of a `Worker`, a method that has its records delivered.
DELIVER = "attn_deliver"


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


def hook_runner(worker: Any, **_: Any) -> None:
    """Before `Worker.load_model`: the hooks on the model's runner."""
    if not worker.use_v2_model_runner:
        facts_file.write(
            "attention of this server cannot be captured: it needs vLLM's V2 model runner, which "
            "VLLM_USE_V2_MODEL_RUNNER=0 or a feature of the model turns off"
        )
        return
    hook(RUNNER + "load_model", after(with_hidden_states))
    hook(RUNNER + "initialize_kv_cache", with_recorder)
    hook(RUNNER + "execute_model", before_step)
    hook(RUNNER + "prepare_attn", with_rows)
    hook(RUNNER + "prepare_dummy_attn", before(dummy_step))
    hook(RUNNER + "sample_tokens", with_results)
    hook(RUNNER + "shutdown", before(close_recorder))
    hook(LATENT + "forward_impl", with_latent_layer)


def without_ours(found: int, worker: Any) -> int:
    """After `Worker.determine_available_memory`: what is left for keys and values, unless it was
    given."""
    if worker.cache_config.kv_cache_memory_bytes is not None:
        return found
    from .model_process.plans import bytes_of_capture

    try:
        ours = bytes_of_capture(worker.model_runner, ServeOptions.from_environment(os.environ))
    except AttnError:  # said when the recorder starts
        return found
    return found - ours


def with_hidden_states(found: Any, runner: Any) -> Any:
    """After `GPUModelRunner.load_model`, before anything is compiled: have the model hand out what
    a logit lens looks at."""
    from .model_process.captured_model import CapturedModel
    from .model_process.layers import ranks_of_this_process, refusal
    from .model_process.lens import hand_out

    options = ServeOptions.from_environment(os.environ)
    if options.logit_lens and refusal(runner) is None:
        try:
            layers = CapturedModel(runner, options, ranks_of_this_process().count).handed_out
        except AttnError:  # said when the recorder starts
            layers = ()
        if layers:
            hand_out(runner, layers)
    return found


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
    from .model_process.layers import graph_refusal, ranks_of_this_process, refusal
    from .model_process.recorder import Recorder

    options = ServeOptions.from_environment(os.environ)
    ranks, recorder, reason = ranks_of_this_process(), None, None
    try:
        found = misfits(PARAMETERS)
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
    for layer in recorder.model.tapped.values():
        setattr(layer, ATTRIBUTE, recorder)
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


def dummy_step(runner: Any, *given: Any, **named: Any) -> None:
    recorder = getattr(runner, ATTRIBUTE, None)
    if recorder is not None:
        recorder.prepare_dummy()


def with_results(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample_tokens(runner: Any, *given: Any, **named: Any) -> Any:
        ran = getattr(runner, "execute_model_state", None)  # which it takes away
        output = original(runner, *given, **named)
        recorder = getattr(runner, ATTRIBUTE, None)
        if recorder is not None and output is not None:
            recorder.results(output, ran)
        return output

    return sample_tokens


def with_latent_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around latent attention (MLA). vLLM calls a backend for a step's tokens in two parts; this
    call has all of them."""

    @wraps(original)
    def forward_impl(
        layer: Any, q: Any, k_c_normed: Any, k_pe: Any, kv_cache: Any, attn_metadata: Any,
        *given: Any, **named: Any,
    ) -> Any:  # fmt: skip
        found = original(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, *given, **named)
        recorder = None if attn_metadata is None else getattr(layer, ATTRIBUTE, None)
        if recorder is not None:
            recorder.layer(layer, q, attn_metadata)
        return found

    return forward_impl


def close_recorder(runner: Any, *given: Any) -> None:
    recorder = getattr(runner, ATTRIBUTE, None)
    if recorder is not None:
        recorder.close()
        for layer in recorder.model.tapped.values():
            delattr(layer, ATTRIBUTE)
        delattr(runner, ATTRIBUTE)
