"""Stands in for packages that SGLang imports at its start and does not use on a CPU.

Their names resolve, to anything, and what is called raises. `make` names this module in a .pth file
of SGLang's virtual environment, so that every Python started there imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import draft_standins

MISSING = {
    # Prints in notebooks, and brings 15 packages.
    "IPython": "9.18.1",
    # SGLang's kernels: the wheel holds CUDA's alone. `torch_native` attention needs none.
    "sgl_kernel": "0.4.10",
    # Processes images. Built against a torch for CUDA, it does not load beside one for a CPU.
    "torchvision": "0.28.0",
}


class _Nothing(type):
    """A class whose attributes are such classes, so that it can be a base, a decorator's name or an
    enumeration."""

    def __getattr__(cls, name: str) -> Any:
        return _nothing(cls.__qualname__, name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{cls.__qualname__} is not there on a machine without a GPU")


def _nothing(owner: str, name: str) -> _Nothing:
    # What asks for __wrapped__, __file__ and the like looks whether it is there.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing(name, (), {"__qualname__": f"{owner}.{name}"})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _nothing(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # Transformers reads it.
        module.__version__ = MISSING[module.__name__.partition(".")[0]]  # type: ignore[attr-defined]
        if module.__name__ == "sgl_kernel":
            vars(module).update(draft_standins.KERNELS)


def _run_prompts_over_latent_keys(module: ModuleType) -> None:
    """Latent attention (MLA) of prompts too, as it is of generated tokens: `torch_native` attention
    has no other way, and SGLang does not know that."""
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def _run_what_gpus_do(module: ModuleType) -> None:
    """Where layers with a window have a pool of their own, `torch_native` attention writes their
    keys there, and reads them in the KV slots of the other layers. It does not say how many keys a
    row has that pads a batch, as rows do with data-parallel attention."""
    backend = module.TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1

    def translated(run: Callable[..., Any]) -> Callable[..., Any]:
        def found(
            self: Any, query: Any, output: Any, keys: Any, values: Any, table: Any, *rest: Any,
            **given: Any,
        ) -> Any:  # fmt: skip
            if self.use_sliding_window_kv_pool:
                pool = self.token_to_kv_pool
                if any(keys is one for one in pool.swa_kv_pool.k_buffer):
                    table = pool.full_to_swa_index_mapping[table.long()]
            return run(self, query, output, keys, values, table, *rest, **given)

        return found

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, translated(getattr(backend, name)))
    run_extend = backend._run_sdpa_forward_extend

    def over_drafts(
        self: Any, query: Any, output: Any, keys: Any, values: Any, table: Any, rows: Any,
        lengths: Any, prefixes: Any, counts: Any, *rest: Any, **given: Any,
    ) -> Any:  # fmt: skip
        """Of drafts only the lengths before them are given."""
        if prefixes is None:
            prefixes, counts = lengths, lengths.new_full(lengths.shape, len(query) // len(lengths))
            lengths = lengths + counts
        return run_extend(
            self, query, output, keys, values, table, rows, lengths, prefixes, counts, *rest,
            **given,
        )  # fmt: skip

    backend._run_sdpa_forward_extend = over_drafts


PATCHES = {
    "sglang.srt.models.deepseek_common.attention_backend_handler": _run_prompts_over_latent_keys,
    "sglang.srt.layers.attention.torch_native_backend": _run_what_gpus_do,
    "sglang.srt.speculative.draft_utils": draft_standins.draft_with_torch_native,
}


class _Patched(importlib.abc.MetaPathFinder):
    """Finds modules of SGLang's as others do, and makes them do on a CPU what they do on a GPU."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = PATCHES.get(fullname)
        if patch is None:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.loader is None:
            return found
        run = found.loader.exec_module

        def patched(module: ModuleType) -> None:
            run(module)
            patch(module)

        found.loader.exec_module = patched  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, _Patched())
# Last, so that a package that is there is found first.
sys.meta_path.append(_Finder())
