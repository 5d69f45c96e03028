"""Requests on different ranks (`--attn-dp-size`, of which SGLang makes the older
`--enable-dp-attention`): attention of each is as it is in a server of one rank, whatever the other
ranks have to do in the same step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from asking import MODES
from running_sglang import SGLangServer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_checks import check_hubs  # noqa: E402
from latent_model import LAYERS, save_latent_model  # noqa: E402
from served_models import (  # noqa: E402
    PROMPTS,
    check_heads_and_full_scores,
    check_mode,
    generate,
    serving,
    stored_at_the_end,
)

pytestmark = pytest.mark.slow
RANKS = ("--tp-size", "2", "--attn-dp-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Its last layer has experts, which no attention comes after."""
    folder = tmp_path_factory.mktemp("latent") / "model"
    return save_latent_model(
        folder, torch.float32, first_k_dense_replace=LAYERS[-1], scoring_func="softmax",
        n_group=1, topk_group=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records") / "fingerprints.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory, model, store) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("sglang")
    # The cores of each rank, which SGLang asks for where there are more ranks than NUMA nodes.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    options = ("--attention-store", store, "--attention-hub-slots", "2", "--attention-logit-lens")
    with serving(folder, model, *RANKS, *options, environment=cores) as running:
        yield running


def test_what_ranks_do_together_is_refused(server):
    said = server.client.get("/v1/attention/capabilities").json()
    assert said["supported"] and said["heads"] == 4 and said["features"]["attention_hubs"]
    assert said["reasons"]["logit_lens"].startswith("with --tp-size")
    assert said["reasons"]["moe_routing"].startswith("data-parallel attention")


@pytest.mark.parametrize("mode", MODES)
def test_every_number_is_that_of_transformers(server, model, mode):
    """First with requests on both ranks, then with one request, while the other rank idles."""
    check_mode(server, model, mode, layers=LAYERS)


def test_some_heads_and_full_scores(server, model):
    check_heads_and_full_scores(server, model, layers=LAYERS)


def test_hubs_of_requests_on_both_ranks(server, model):
    fields = {"return_attention_tokens": True, "attention_hubs": True,
              "include_prompt_attention": 1}  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: generate(server, prompt, **fields), PROMPTS[:2]))
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        usage = answer["meta_info"]["attention_usage"][-1]
        check_hubs(model, prompt, answer["output_ids"], usage)


def test_every_row_of_both_ranks_is_stored_before_the_server_ends(server, store):
    """The last test of this server."""
    new = 9
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: generate(server, PROMPTS[n % 3], new=new), range(8)))
    names = {answer["meta_info"]["id"] for answer in answers}
    # Of each token that was fed to the model.
    assert stored_at_the_end(server, store, names) == dict.fromkeys(names, new - 1)
    log = server.log.read_text(errors="replace")
    for rank in range(2):
        assert re.search(rf"DP{rank} TP{rank}\] records: given [1-9]", log), log[-3000:]
