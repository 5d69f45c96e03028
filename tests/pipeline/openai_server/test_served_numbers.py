"""Every number of a response is that of transformers' own attention in float64 on the same tokens.

Tolerances: the server runs in float32, and shares and logits are rounded to 4 decimals: 1e-4 for
both, which is 5e-5 for the rounding and as much for what float32 leaves of a logit. Fingerprints
are rounded to 5 decimals: 2e-5. Full scores are float16: 5e-4 at 1.
"""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np
import pytest
from live_server import NEEDLE, LiveServer, entries_of, running, tokens_of

from capture_kernels.fingerprint.vector import Layout, Visibility, broken_invariants
from capture_kernels.fingerprint.zones import ZoneRules
from pipeline.engines.serving.options import ServeOptions

ROUNDED = 1e-4
FINGERPRINT = 2e-5


def asked(server: LiveServer, prompt: str = NEEDLE, **body: Any) -> tuple[dict, list[int], int]:
    """An answer, all its tokens, and how many of these are the prompt's."""
    found = server.complete(prompt, logprobs=0, return_attention_tokens=True, **body)
    tokens = tokens_of(server, found, prompt)
    return found, tokens, found["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"top_k_attention": 4, "attention_capture_layers": "1,3"},
        {"attention_capture_head_ids": [0, 3], "attention_capture_layers": "2"},
        {"attention_mask_prefix": 7, "top_k_attention": 64},
        {"include_prompt_attention": 5, "attention_capture_head_ids": [2]},
    ],
    ids=["default", "layers", "heads", "mask", "prompt"],
)
def test_raw_entries_are_the_exact_top_k(server, reference, body):
    found, tokens, prompt = asked(server, **body)
    expected = reference(tokens)
    layers = [int(n) for n in body.get("attention_capture_layers", "0,1,2,3").split(",")]
    heads, mask = body.get("attention_capture_head_ids"), body.get("attention_mask_prefix", 0)
    k, before = body.get("top_k_attention", 32), body.get("include_prompt_attention", 0)
    entries = entries_of(found)
    # The last generated token is never fed, so it has no row.
    wanted = [(position, layer) for position in range(prompt - before, len(tokens) - 1)
              for layer in layers]  # fmt: skip
    assert [(e["position"] + mask, e["layer_id"]) for e in entries] == wanted
    for entry, (position, layer) in zip(entries, wanted, strict=True):
        p, logsumexp = expected.row(layer, position, heads, mask)
        mean = p.mean(axis=0)
        places = entry["token_positions"]
        assert len(places) == min(k, len(mean)) == len(set(places))
        masses = np.sort(mean)[::-1][: len(places)]
        # By mass, as equals may change places.
        np.testing.assert_allclose(mean[places], masses, atol=1e-6)
        scores = entry["attention_scores"]
        np.testing.assert_allclose(scores, masses / masses.sum(), atol=ROUNDED)
        assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=2 * ROUNDED)
        shares = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
        np.testing.assert_allclose(shares, masses, rtol=1e-3, atol=1e-7)
        assert entry["decode_step"] == position - prompt + 1
        assert entry["think_phase"] == ("prompt" if position < prompt else "output")
        assert ("heads" in entry) == (heads is not None)
        for row, number in enumerate(heads or ()):
            of_head = entry["heads"][str(number)]
            own = p[row][of_head["token_positions"]]
            np.testing.assert_allclose(own, np.sort(p[row])[::-1][: len(own)], atol=1e-6)
            assert of_head["logsumexp_candidates"] == pytest.approx(logsumexp[row], abs=2e-4)
            shares = np.exp(np.array(of_head["topk_logits"]) - of_head["logsumexp_candidates"])
            np.testing.assert_allclose(shares, own, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("mask", [0, 6])
def test_sketches_are_the_top_positions_and_the_histogram(server, reference, mask):
    found, tokens, prompt = asked(server, attention_sketch_mode=True, attention_mask_prefix=mask)
    expected = reference(tokens)
    entries = entries_of(found)
    assert [e["decode_step"] for e in entries] == list(range(1, len(tokens) - prompt))
    for entry in entries:
        position = entry["decode_step"] + prompt - 1
        assert entry["mode"] == "sketch"
        assert list(entry["layer_sketches"]) == ["0", "1", "2", "3"]
        for layer, sketch in entry["layer_sketches"].items():
            mean = expected.row(int(layer), position, mask=mask)[0].mean(axis=0)
            places, masses = zip(*sketch["top_hubs"], strict=True)
            assert len(places) == min(32, len(mean))
            np.testing.assert_allclose(masses, np.sort(mean)[::-1][:32], atol=ROUNDED)
            np.testing.assert_allclose(mean[list(places)], masses, atol=ROUNDED)
            assert sketch["mass_captured"] == pytest.approx(sum(sorted(mean)[-32:]), abs=ROUNDED)
            vector = expected.fingerprint(
                [int(layer)], position, visibility=Visibility(1, mask_prefix=mask)
            )
            np.testing.assert_allclose(sketch["dist_hist"], vector[4:20], atol=ROUNDED)
            assert sketch["entropy"] == pytest.approx(float(vector[3]), abs=ROUNDED)


@pytest.mark.parametrize(
    ("body", "visibility"),
    [
        ({}, Visibility(1)),
        ({"attention_mask_prefix": 9}, Visibility(1, 9)),
        ({"attention_capture_layers": "1"}, Visibility(1)),
        ({"attention_capture_head_ids": [1, 2]}, Visibility(1)),
        ({"include_prompt_attention": 8}, Visibility(1)),
    ],
    ids=["default", "mask", "layers", "heads", "prompt"],
)
def test_fingerprints_are_those_of_the_reference(server, reference, body, visibility):
    found, tokens, prompt = asked(server, attention_fingerprint_mode=True, **body)
    expected = reference(tokens)
    layers = [int(n) for n in body.get("attention_capture_layers", "0,1,2,3").split(",")]
    entries = entries_of(found)
    first = 1 - body.get("include_prompt_attention", 0)
    assert [e["step"] for e in entries] == list(range(first, len(tokens) - prompt))
    for entry in entries:
        vector = expected.fingerprint(
            layers, entry["step"] + prompt - 1,
            heads=body.get("attention_capture_head_ids"), visibility=visibility,
        )  # fmt: skip
        np.testing.assert_allclose(entry["fingerprint"], vector, atol=FINGERPRINT)
        zoned = ZoneRules().classify(vector, Layout.LOG16)
        assert entry["manifold"] == zoned.names[0]
        assert entry["confidence"] == pytest.approx(float(zoned.confidence[0]), abs=1e-3)
    sent = np.array([e["fingerprint"] for e in entries], np.float32)
    assert not broken_invariants(sent, np.ones(len(sent), np.uint8))


def test_the_layered_layout_and_a_window_are_the_servers_own(demo, reference):
    options = ServeOptions(
        return_attention_tokens=True, layers="all", layout=Layout.LAYERED, tokens_window=12,
        sink_tokens=2,
    )  # fmt: skip
    with running(demo, options) as live:
        found, tokens, prompt = asked(live, attention_fingerprint_mode=True)
        raw, _, _ = asked(live, top_k_attention=64, attention_capture_layers=[2])
    expected = reference(tokens)
    for entry in entries_of(found):
        vector = expected.fingerprint(
            [0, 1, 2, 3], entry["step"] + prompt - 1, layout=Layout.LAYERED,
            visibility=Visibility(2, 0, 12),
        )  # fmt: skip
        np.testing.assert_allclose(entry["fingerprint"], vector, atol=FINGERPRINT)
    for entry in entries_of(raw):
        mean = expected.row(2, entry["position"], window=12)[0].mean(axis=0)
        assert len(entry["token_positions"]) == 12
        shares = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
        np.testing.assert_allclose(shares, mean[entry["token_positions"]], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("body", [{}, {"attention_capture_head_ids": [3]},
                                  {"attention_mask_prefix": 4}])  # fmt: skip
def test_full_scores_are_all_probabilities_of_the_tokens_that_were_fed(server, reference, body):
    found = server.complete(attn_capture=1, attn_capture_layers="0,2", logprobs=0, **body)
    tokens = tokens_of(server, found, NEEDLE)
    prompt, fed = found["usage"]["prompt_tokens"], len(tokens) - 1
    expected = reference(tokens)
    mask, heads = body.get("attention_mask_prefix", 0), body.get("attention_capture_head_ids")
    assert [layer["layer_idx"] for layer in found["attn_capture_data"]] == [0, 2]
    for layer in found["attn_capture_data"]:
        scores = np.frombuffer(gzip.decompress(base64.b64decode(layer["data"])), np.float16)
        scores = scores.reshape(layer["shape"])
        assert layer["shape"] == [fed - mask, len(heads or range(4)), fed - mask]
        assert layer["token_meta"] == {
            "prompt_len": prompt - mask,
            "total_len": fed - mask,
            "vision_ranges": [],
            "lang_ranges": [{"start": 0, "end": prompt - mask}],
            "last_token_fed": False,
        }
        for position in range(mask, fed):
            p = expected.row(layer["layer_idx"], position, heads, mask)[0]
            row = scores[position - mask]
            np.testing.assert_allclose(row[:, : p.shape[1]], p, atol=5e-4)
            assert not row[:, p.shape[1] :].any()


@pytest.mark.parametrize("mask", [0, 5])
def test_hubs_are_sums_over_the_request(server, reference, mask):
    found, tokens, prompt = asked(server, attention_hubs=True, attention_mask_prefix=mask)
    expected = reference(tokens)
    sums = np.zeros(len(tokens) - 1 - mask)
    for position in range(prompt, len(tokens) - 1):
        for layer in range(4):
            mean = expected.row(layer, position, mask=mask)[0].mean(axis=0)
            sums[: len(mean)] += mean / 4
    hubs = found["usage"]["attention"]["hubs"]
    assert len(hubs) == min(32, len(sums))
    places, masses = zip(*hubs, strict=True)
    np.testing.assert_allclose(masses, np.sort(sums)[::-1][:32], atol=2 * ROUNDED)
    np.testing.assert_allclose(sums[list(places)], masses, atol=2 * ROUNDED)


def test_a_stride_and_a_limit_choose_the_same_rows_everywhere(demo):
    options = ServeOptions(
        return_attention_tokens=True, tokens_stride=3, tokens_max=4, fingerprint_max_steps=2
    )
    with running(demo, options) as live:
        for mode, rows in (({}, 4), ({"attention_fingerprint_mode": True}, 2)):
            found = live.complete(
                max_tokens=20, ignore_eos=True, return_attention_tokens=True, **mode
            )
            prompt, usage = found["usage"]["prompt_tokens"], found["usage"]["attention"]
            steps = [e.get("decode_step", e.get("step")) for e in entries_of(found)]
            multiples = [p - prompt + 1 for p in range(prompt, prompt + 19) if p % 3 == 0]
            assert steps == multiples[:rows]
            assert usage["rows"] == rows
