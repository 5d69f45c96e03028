"""Layers with a sliding window whose keys SGLang holds in a pool of their own (gpt-oss, Gemma 4).

A token has a KV slot in the pool of the other layers, which `req_to_token` names, and one in this
pool until SGLang frees it there. `full_to_swa_index_mapping` says which, in one place for as long
as the server runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class WindowPool:
    """The pool of keys of such layers, as far as a `ModelRunner` has one.

    Attributes:
        layers: the numbers of the layers whose keys it holds.
        slot_map: int64[KV slots], where the key is of a token in each slot of the other pool; 0 of
            a token whose key is freed here. None if there is no such pool.
        refusal: why its keys cannot be captured, in words; None if they can.
    """

    def __init__(self, runner: Any) -> None:
        self.layers: frozenset[int] = frozenset()
        self.slot_map: Tensor | None = None
        self.refusal: str | None = None
        if not runner.is_hybrid_swa:
            return
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        pool = runner.token_to_kv_pool
        kind, otherwise = type(pool), "use --disable-hybrid-swa-memory"
        # Its subclasses and relatives find keys in ways of their own.
        if kind is not SWAKVPool or pool.is_mla() or pool.swa_req_ring_size is not None:
            self.refusal = f"keys of windows in a {kind.__name__} were not tried: {otherwise}"
            return
        self.layers = frozenset(n for n, (_, is_own) in pool.layers_mapping.items() if is_own)
        self.slot_map = pool.full_to_swa_index_mapping
