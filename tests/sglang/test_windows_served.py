"""Layers with a sliding window whose keys SGLang holds in a pool of their own, on a CPU.

There it reads them in KV slots of the other pool, which `standins/cpu_standins.py` mends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from asking import MODES
from running_sglang import SGLangServer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from served_models import (  # noqa: E402
    check_heads_and_full_scores,
    check_mode,
    generate,
    serving,
)
from window_model import LAYERS, WINDOW, save_window_model  # noqa: E402

from capture_kernels.errors import OptionError  # noqa: E402
from pipeline.engines.sglang.model_process.layers import kinds_of  # noqa: E402
from pipeline.engines.sglang.model_process.windows import WindowPool  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_window_model(tmp_path_factory.mktemp("windows") / "model", torch.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory, model) -> Iterator[SGLangServer]:
    # Both pools give their slots out in turn. Once each has come round, tokens have different ones,
    # as keys that have left a window were freed in one of them alone.
    few = ("--max-total-tokens", "1024")
    with serving(tmp_path_factory.mktemp("sglang"), model, *few) as running:
        assert "SWAKVPool mem usage" in running.log.read_text()
        for seed in range(8):
            prompt = np.random.default_rng(100 + seed).integers(3, 2048, 150).tolist()
            generate(running, prompt, new=WINDOW)
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_number_is_that_of_transformers(server, model, mode):
    """Of generated tokens before and after their prompt has left the window."""
    check_mode(server, model, mode, layers=LAYERS, new=WINDOW + 5)


@pytest.mark.slow
def test_chosen_heads_of_prompts_and_full_scores(server, model):
    check_heads_and_full_scores(server, model, layers=LAYERS)


class Pool:
    """As far as `WindowPool` looks at one of SGLang's."""

    swa_req_ring_size = None
    layers_mapping: ClassVar = {0: (0, False), 1: (0, True), 2: (1, True)}
    full_to_swa_index_mapping = torch.zeros(9, dtype=torch.int64)

    def is_mla(self) -> bool:
        return False


class LatentPool(Pool):
    def is_mla(self) -> bool:
        return True


class RingPool(Pool):
    swa_req_ring_size = 128


@pytest.mark.parametrize(
    ("pool", "is_known"),
    [(Pool, True), (type("UnifiedPool", (Pool,), {}), False), (LatentPool, False),
     (RingPool, False)],
)  # fmt: skip
def test_a_pool_that_finds_keys_in_another_way_is_refused_by_name(monkeypatch, pool, is_known):
    known = pool if pool in (LatentPool, RingPool) else Pool
    module = SimpleNamespace(SWAKVPool=known)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.swa_memory_pool", module)
    found = WindowPool(SimpleNamespace(is_hybrid_swa=True, token_to_kv_pool=pool()))
    if is_known:
        assert found.refusal is None and found.layers == {1, 2}
        assert found.slot_map is Pool.full_to_swa_index_mapping
    else:
        assert found.refusal is not None and found.slot_map is None and not found.layers
        assert pool.__name__ in found.refusal and "--disable-hybrid-swa-memory" in found.refusal


def test_a_server_with_one_pool_has_no_slots_to_map():
    found = WindowPool(SimpleNamespace(is_hybrid_swa=False))
    assert (found.refusal, found.slot_map, found.layers) == (None, None, frozenset())


def test_layers_of_such_a_pool_without_a_window_are_refused():
    given = {"logit_cap": 0.0, "xai_temperature_len": -1, "sliding_window_size": -1,
             "tp_q_head_num": 4, "tp_k_head_num": 2, "qk_head_dim": 8, "scaling": 1.0}  # fmt: skip
    layer = SimpleNamespace(**given)
    assert not kinds_of({3: layer})[0].mapped
    with pytest.raises(OptionError, match="layer 3 keeps the keys of a chunk"):
        kinds_of({3: layer}, {3})
    layer.sliding_window_size = 15
    assert (kinds_of({3: layer}, {3})[0].window, kinds_of({3: layer}, {3})[0].mapped) == (16, True)
