"""Latent attention (MLA), of a tiny DeepSeek V2 with random weights: transformers' in float64.

SGLang runs prompts over latent keys here, as it does after a prefix from the cache; prompts over
keys made of latent ones need a GPU (`test_models_on_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from asking import MODES
from running_sglang import SGLangServer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from latent_model import LAYERS, save_latent_model  # noqa: E402
from served_models import check_heads_and_full_scores, check_mode, serving  # noqa: E402

from pipeline.engines.sglang.model_process.latent import LatentLayers  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_latent_model(tmp_path_factory.mktemp("latent") / "model", torch.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory, model) -> Iterator[SGLangServer]:
    with serving(tmp_path_factory.mktemp("sglang"), model) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_number_is_that_of_transformers(server, model, mode):
    check_mode(server, model, mode, layers=LAYERS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_heads_on_two_ranks_that_each_have_all_latent_keys(tmp_path, model):
    """Each rank has half of the heads, and the same latent keys."""
    ranks = "--tp-size", "2"
    # The cores of each rank, which SGLang asks for where there are more ranks than NUMA nodes.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serving(tmp_path, model, *ranks, environment=cores) as running:
        said = running.client.get("/v1/attention/capabilities").json()
        assert said["supported"] and said["heads"] == 4
        for mode in MODES:
            check_mode(running, model, mode, layers=LAYERS)


@pytest.mark.slow
def test_chosen_heads_of_prompts_and_full_scores(server, model):
    check_heads_and_full_scores(server, model, layers=LAYERS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_queries_over_made_keys_meet_the_latent_ones(dtype):
    """The weights of latent keys may be of another type than queries, with a scale."""
    heads, nope, rope, latent, rows, keys = 3, 8, 4, 16, 5, 7
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    prompts, others = torch.nn.Identity(), torch.nn.Identity()
    owner = torch.nn.Module()
    owner.attn_mha, owner.attn_mqa = prompts, others
    owner.qk_nope_head_dim, owner.qk_rope_head_dim = nope, rope
    made_of = random(heads, nope, latent)
    owner.w_kc, owner.w_scale = (made_of / 2).to(dtype), 2.0
    if dtype is torch.float64:
        owner.w_kc = made_of
    layers = LatentLayers(torch.nn.Sequential(owner))
    query, latents = random(rows, heads, nope + rope), random(keys, latent + rope)

    assert layers.queries(others, query) is query
    found = layers.queries(prompts, query) @ latents.T
    keys_of_heads = torch.einsum("hdl,kl->hkd", made_of, latents[:, :latent])
    turned = latents[None, :, latent:].expand(heads, -1, -1)
    expected = torch.einsum("rhd,hkd->rhk", query, torch.cat([keys_of_heads, turned], dim=-1))
    tolerance = 1e-12 if dtype is torch.float64 else 0.1
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"use_dsa": True}, "DSA"), ({"dcp_size": 2}, "--dcp-size"),
     ({"use_deep_gemm_bmm": True}, "SGLANG_USE_DEEPGEMM_BMM"), ({}, None)],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused_by_name(given, says):
    owner = SimpleNamespace(attn_mha=torch.nn.Identity(), attn_mqa=torch.nn.Identity(),
                            use_deep_gemm_bmm=False)  # fmt: skip
    vars(owner).update(given)
    found = LatentLayers(SimpleNamespace(modules=lambda: [owner])).refusal
    assert found is None if says is None else says in found
