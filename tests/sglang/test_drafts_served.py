"""Speculative decoding with SGLang's own scheduler on a CPU: rows of drafts are there as far as the
drafts are accepted, and say what they say in a server without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from asking import MODES
from running_sglang import MODEL, SGLangServer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from latent_model import save_latent_model  # noqa: E402
from random_model import save_noisy_copy  # noqa: E402
from served_models import (  # noqa: E402
    PROMPTS,
    check_mode,
    generate,
    serving,
    stored_at_the_end,
)

pytestmark = pytest.mark.slow
DRAFTS = ("--speculative-algorithm", "STANDALONE")
# SGLang makes 4 tokens of it, as by default.
CONTRADICTING = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
                 "--speculative-num-draft-tokens", "8")  # fmt: skip


@pytest.fixture(scope="module", params=["demo model", "latent keys"])
def model(request, tmp_path_factory) -> Path:
    if request.param == "demo model":
        return MODEL
    return save_latent_model(tmp_path_factory.mktemp("latent") / "model", torch.float32)


@pytest.fixture(scope="module")
def store(model, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records") / "fingerprints.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory, model, store) -> Iterator[SGLangServer]:
    """The model that drafts has noise in its weights, so that the two do not always agree."""
    draft = save_noisy_copy(tmp_path_factory.mktemp("draft") / "model", model, 0.05)
    numbers = CONTRADICTING if model == MODEL else ()
    options = (*numbers, "--speculative-draft-model-path", draft, "--attention-store", store,
               "--attention-logit-lens")  # fmt: skip
    with serving(tmp_path_factory.mktemp("sglang"), model, *DRAFTS, *options) as running:
        yield running


def test_what_needs_all_rows_is_refused(server):
    said = server.client.get("/v1/attention/capabilities").json()
    assert said["supported"]
    for name in ("attention_hubs", "attn_capture", "logit_lens"):
        assert said["reasons"][name].startswith("with speculative decoding"), said


@pytest.mark.parametrize("mode", MODES)
def test_every_number_is_that_of_transformers(server, model, mode):
    check_mode(server, model, mode, layers=list(range(4 if model == MODEL else 3)))


def test_rows_of_prompts_and_every_record_are_there_once(server, store):
    """The last test of this server."""
    new, rows = 24, 3
    fields = {"return_attention_tokens": True, "include_prompt_attention": rows,
              "attention_fingerprint_mode": True}  # fmt: skip
    prompts = [prompt[::-1] for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda prompt: generate(server, prompt, new=new, **fields), prompts)
        )
    for answer in answers:
        steps = [entry["step"] for entry in answer["meta_info"]["attention_tokens"]]
        assert steps == list(range(1 - rows, new))
        assert answer["meta_info"]["attention_usage"][-1]["rows"] == new - 1 + rows
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    # Some drafts were accepted, and some were not.
    assert len(prompts) * (new - 1) / 4 < verified < len(prompts) * (new - 1)
    names = {answer["meta_info"]["id"] for answer in answers}
    assert stored_at_the_end(server, store, names) == dict.fromkeys(names, new - 1 + rows)
