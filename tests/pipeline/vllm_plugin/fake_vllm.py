"""As much of vLLM 0.33.0 as the plug-in imports: modules, classes, and parameters that are its own,
with next to nothing behind them. vLLM itself is tested with in tests/vllm, on a GPU."""

from __future__ import annotations

import argparse
import sys
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OURS = "pipeline.engines.vllm.model_process.backends"


class VLLMValidationError(Exception):
    pass


class AttentionBackendEnum(Enum):
    FLASH_ATTN, TRITON_ATTN = auto(), auto()


class Impl:
    """An implementation of attention that copies its queries."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        output.copy_(query)
        return output


def install(monkeypatch: pytest.MonkeyPatch, context: SimpleNamespace) -> SimpleNamespace:
    """Have `import vllm...` find these; each test has classes of its own, as they are hooked.

    Args:
        context: what `get_forward_context` gives.

    Returns:
        The classes that are hooked; registered: the classes of backends by name; group: of tensor
        parallelism.
    """

    class EngineArgs:
        @staticmethod
        def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--model")
            return parser

        @classmethod
        def from_cli_args(cls, args: argparse.Namespace) -> Any:
            return cls, args.model

    class AsyncLLM:
        async def generate(
            self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0
        ) -> Any:
            yield prompt, sampling_params, request_id, priority

        def shutdown(self, timeout: float | None = None) -> None:
            pass

    class APIServerProcessManager:
        def __init__(self) -> None:
            self.had: list[float | None] = []

        def shutdown(self, timeout: float | None = None) -> None:
            self.had.append(timeout)

    class OnlineRenderer:
        async def render_chat(self, request: Any, *, skip_mm_cache: bool = False) -> Any:
            return request, skip_mm_cache

    class Scheduler:
        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}

        def schedule(self, throttle_prefills: bool = False) -> Any:
            counts = dict.fromkeys(self.requests, 1)
            return SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens=counts)

        def _free_request(self, request: Any, delay_free_blocks: bool = False) -> None:
            del self.requests[request.request_id]

    class Worker:
        def load_model(self, *, load_dummy_weights: bool = False) -> str:
            return "loaded"

        def determine_available_memory(self) -> int:
            return 1 << 30

    class GPUModelRunner:
        """One that was given the insides of another, and runs what it was given."""

        def __init__(self, like: SimpleNamespace) -> None:
            vars(self).update(vars(like))

        def load_model(self, load_dummy_weights: bool = False) -> None:
            pass

        def initialize_kv_cache(
            self, kv_cache_config: Any, is_profiling: bool = False, allocation: Any = None
        ) -> None:
            self.kv_cache_config = kv_cache_config

        def execute_model(
            self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False
        ) -> Any:
            return scheduler_output

        def prepare_attn(self, input_batch: Any) -> Any:
            return input_batch

        def prepare_dummy_attn(self, input_batch: Any, valid_state_slots: bool = False) -> Any:
            return input_batch

        def sample_tokens(self, grammar_output: Any) -> Any:
            return grammar_output

        def shutdown(self) -> None:
            pass

    def init_entrypoints_middleware(args: Any, app: Any, supported_tasks: Any) -> None:
        pass

    import torch

    class MoERunner(torch.nn.Module):
        pass

    class EagleModelMixin:
        aux_hidden_state_layers: tuple[int, ...] = ()

    class MLAAttention(SimpleNamespace):
        """It copies its queries."""

        def forward_impl(
            self, q: Any, k_c_normed: Any, k_pe: Any, kv_cache: Any, attn_metadata: Any,
            output: Any, output_scale: Any = None,
        ) -> Any:  # fmt: skip
            output.copy_(q)
            return output

    Attention = type("Attention", (SimpleNamespace,), {})  # noqa: N806
    registered: dict[str, str] = {}
    # Each backend has an implementation of its own.
    impls = [type(f"{name}Impl", (Impl,), {}) for name in ("FlashAttention", "TritonAttention")]
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    backends = "v1.attention.backends."
    flash, triton = (type(f"{name}AttentionBackend", (), {}) for name in ("Flash", "Triton"))
    modules: dict[str, dict[str, Any]] = {
        "engine.arg_utils": {"EngineArgs": EngineArgs},
        "v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "v1.utils": {"APIServerProcessManager": APIServerProcessManager},
        "v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "v1.worker.gpu_worker": {"Worker": Worker},
        "v1.worker.gpu.model_runner": {"GPUModelRunner": GPUModelRunner},
        "renderers.online_renderer": {"OnlineRenderer": OnlineRenderer},
        "entrypoints.launchers.app": {"init_entrypoints_middleware": init_entrypoints_middleware},
        backends + "registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": lambda which, path: registered.update({which.name: path}),
        },
        backends + "flash_attn": {
            "FlashAttentionBackend": flash, "FlashAttentionImpl": impls[0],
        },
        backends + "triton_attn": {
            "TritonAttentionBackend": triton, "TritonAttentionImpl": impls[1],
        },
        "model_executor.layers.attention": {"Attention": Attention, "MLAAttention": MLAAttention},
        "model_executor.layers.attention.mla_attention": {"MLAAttention": MLAAttention},
        "model_executor.layers.fused_moe.layer": {"MoERunner": MoERunner},
        "model_executor.models.interfaces": {
            "supports_eagle3": lambda model: hasattr(model, "set_aux_hidden_state_layers"),
        },
        "model_executor.models.utils": {
            "extract_layer_index": lambda name: next(int(p) for p in name.split(".") if p.isdigit())
        },
        "distributed.parallel_state": {"get_tp_group": lambda: group},
        "forward_context": {"get_forward_context": lambda: context},
        "exceptions": {"VLLMValidationError": VLLMValidationError},
        "envs": {"VLLM_USE_RUST_FRONTEND": False},
    }  # fmt: skip
    for name, content in modules.items():
        parts = ["vllm", *name.split(".")]
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if not isinstance(sys.modules.get(path), _Fake):
                monkeypatch.setitem(sys.modules, path, _Fake(path))
        vars(sys.modules["vllm." + name]).update(content)
    # Made of those of this test alone.
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    monkeypatch.setitem(sys.modules, OURS, None)
    monkeypatch.delitem(sys.modules, OURS)
    return SimpleNamespace(
        EngineArgs=EngineArgs, AsyncLLM=AsyncLLM, OnlineRenderer=OnlineRenderer,
        Scheduler=Scheduler, Worker=Worker, GPUModelRunner=GPUModelRunner, Attention=Attention,
        MoERunner=MoERunner, EagleModelMixin=EagleModelMixin, registered=registered, group=group,
        APIServerProcessManager=APIServerProcessManager, MLAAttention=MLAAttention,
    )  # fmt: skip


class _Fake(ModuleType):
    pass
