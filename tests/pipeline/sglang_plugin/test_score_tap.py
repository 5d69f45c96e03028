"""Full scores in the model's process: every row that passed, once, and which did not."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from recorder_steps import DIM, LAYERS, Req, Steps  # noqa: E402

from capture_kernels.fingerprint.reference import attention_rows  # noqa: E402
from pipeline.engines.serving import full_scores  # noqa: E402
from pipeline.engines.serving.answer_writer import SCORES  # noqa: E402
from pipeline.engines.sglang.model_process import recorder as recorders  # noqa: E402
from pipeline.engines.sglang.recorder_keys import USAGE  # noqa: E402

TOKEN = SimpleNamespace(output_index=0, token_ids=(5,))
ON = {"enable_attention_instrumentation": True, "instrumentation_layers": "all"}
ALL = list(range(LAYERS))
# Half of the last place of a float16 below 1, and what float32 adds.
EXACT = 2.6e-4


def answered(some: Steps, req: Req) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`attn_capture_data` and usage of a request that ends now."""
    req.is_over = True
    found = some.recorder.outputs([req])
    (answer,) = found[SCORES][0]
    return answer[0].entries(*answer[1:]), found[USAGE][0][0]


def scores_of(entry: dict[str, Any]) -> np.ndarray:
    from pipeline.analysis import extract_attention_from_response

    (layer,) = extract_attention_from_response({"attn_capture_data": [entry]}).values()
    return layer["scores"]


def check(
    some: Steps, req: Req, entries: list[dict[str, Any]], fed: int, *, layers: list[int] = ALL,
    heads: list[int] | None = None, mask: int = 0, missing: range = range(0), row: int = 1,
) -> None:  # fmt: skip
    """The probabilities of `fed` tokens, but for missing rows, which are 0."""
    assert [entry["layer_idx"] for entry in entries] == layers
    slots = some.runner.req_to_token_pool.req_to_token[row, :fed].long()
    for entry in entries:
        number, scores = entry["layer_idx"], scores_of(entry)
        assert scores.shape[0] == scores.shape[2] == fed - mask
        queries = np.zeros((fed, *some.queries[number][req.rid, fed - 1].shape))
        for position in range(fed):
            if position not in missing:
                queries[position] = some.queries[number][req.rid, position].numpy()
        truth = np.zeros((fed, queries.shape[1], fed))
        truth[mask:, :, mask:] = attention_rows(
            queries[mask:], some.keys[number][slots].double().numpy()[mask:], scale=DIM**-0.5,
            positions=np.arange(fed - mask),
        )  # fmt: skip
        truth[list(missing)] = 0
        expected = truth[mask:, :, mask:]
        if heads is not None:
            expected = expected[:, heads]
        np.testing.assert_allclose(scores, expected, atol=EXACT)


@pytest.mark.parametrize(
    "wanted",
    [{}, {"mask_prefix": 4}, {"heads": [1, 2]}, {"scores": [1]}, {"stream_entries": True}],
    ids=["all", "mask", "heads", "layer", "entries"],
)
def test_chunks_and_steps_prepared_before_the_last_is_known(steps, wanted):
    some = steps(**ON)
    given = {"mode": "fingerprint", "scores": ALL, "stream_entries": False} | wanted
    req = some.request(1, 30, **given)
    first = some.run([req], [12], [0])
    second = some.run([req], [30], [12])
    first([None])
    third = some.run([req], [31])
    second([TOKEN])
    req.output_ids.append(5)
    fourth = some.run([req], [32])
    third([TOKEN])
    req.output_ids.append(5)
    # It ended with the third step: the fourth feeds the last token, which nobody asked for.
    fourth([None])
    entries, usage = answered(some, req)
    mask = wanted.get("mask_prefix", 0)
    check(some, req, entries, 31, layers=given["scores"], heads=wanted.get("heads"), mask=mask)
    assert entries[0]["token_meta"] == {
        "prompt_len": 30 - mask, "total_len": 31 - mask, "vision_ranges": [],
        "lang_ranges": [{"start": 0, "end": 30 - mask}], "last_token_fed": False,
    }  # fmt: skip
    assert usage["overhead_ms"] > 0 and "missing_score_rows" not in usage
    # It is said once.
    assert SCORES not in some.recorder.outputs([req])


@pytest.mark.parametrize("as_prompts", [False, True])
def test_steps_that_other_ranks_have_padded(steps, as_prompts):
    some = steps(**ON)
    req = some.request(1, 30, mode="fingerprint", scores=ALL, stream_entries=False)
    some.run([req], [30], [0])([TOKEN])
    req.output_ids.append(5)
    some.run([req], [31], padding=2, as_prompts=as_prompts)([TOKEN])
    req.output_ids.append(5)
    some.run([req], [32])([None])
    entries, usage = answered(some, req)
    check(some, req, entries, 31)
    assert "missing_score_rows" not in usage


def test_rows_that_never_passed_are_named(steps):
    some = steps(**ON)
    req = some.request(1, 30, mode="fingerprint", scores=ALL, mask_prefix=3, stream_entries=False)
    some.run([req], [30], [20])([TOKEN])
    req.output_ids.append(5)
    entries, usage = answered(some, req)
    check(some, req, entries, 30, mask=3, missing=range(20))
    assert [e["token_meta"]["missing_rows"] for e in entries] == [[{"start": 0, "end": 17}]] * 2
    assert usage["missing_score_rows"] == 17


def test_a_request_that_is_put_back_has_each_row_once(steps):
    some = steps(**ON)
    req = some.request(1, 20, mode="fingerprint", scores=ALL, stream_entries=False)
    some.run([req], [20], [0])([TOKEN])
    req.output_ids.append(5)
    some.run([req], [21])([TOKEN])
    req.output_ids.append(5)
    taken = dict(some.queries[0])
    # The step at position 21 has run when it is put back: its token is not taken.
    some.run([req], [22])([None])
    req.kv.req_pool_idx = 3
    # As a prompt of 22 tokens in two chunks; rows that were taken stay as they were.
    some.run([req], [9], [0])([None])
    some.run([req], [22], [9])([TOKEN])
    req.output_ids.append(5)
    some.queries[0] |= taken
    entries, usage = answered(some, req)
    assert "missing_score_rows" not in usage
    # Keys are those of the row that it had first, but for the last row.
    whole = scores_of(entries[0])
    assert whole.shape[0] == 22
    np.testing.assert_allclose(whole.sum(axis=2), 1, atol=2e-3)
    slots = some.runner.req_to_token_pool.req_to_token
    for row, positions in ((1, range(21)), (3, [21])):
        keys = some.keys[0][slots[row, :22].long()].double().numpy()
        for position in positions:
            query = some.queries[0][req.rid, position].double().numpy()[None]
            p = attention_rows(query, keys, scale=DIM**-0.5, positions=np.array([position]))[0]
            np.testing.assert_allclose(whole[position], p, atol=EXACT)


@pytest.mark.parametrize("layer", ALL)
def test_a_step_without_a_layer_has_no_row_instead_of_the_last_ones_queries(steps, layer):
    some = steps(**ON)
    req = some.request(1, 6, mode="fingerprint", scores=ALL, stream_entries=False)
    some.run([req], [6], [0])([TOKEN])
    for length, left_out in ((7, None), (8, layer), (9, None)):
        req.output_ids.append(5)
        some.run([req], [length], leave_out=left_out)([TOKEN])
    req.output_ids.append(5)
    entries, usage = answered(some, req)
    assert entries[0]["token_meta"]["missing_rows"] == [{"start": 7, "end": 8}]
    assert usage["missing_score_rows"] == 1
    assert not scores_of(entries[layer])[7].any()
    assert scores_of(entries[1 - layer])[7].any()


def test_the_queries_of_a_request_are_not_the_next_ones_in_its_row(steps):
    some = steps(**ON)
    for row, left_out in ((1, None), (2, 0)):
        req = some.request(row, 6, mode="fingerprint", scores=ALL, stream_entries=False)
        some.run([req], [6], [0])([TOKEN])
        req.output_ids.append(5)
        # At the same position as the other, but the layer does not run.
        some.run([req], [7], leave_out=left_out)([TOKEN])
        req.output_ids.append(5)
        entries, usage = answered(some, req)
        assert usage.get("missing_score_rows", 0) == (left_out is not None)
        assert scores_of(entries[0])[6].any() == (left_out is None)


def test_one_of_three_asks_in_prompts_and_in_steps(steps):
    some = steps(**ON)
    reqs = [some.request(1, 7), some.request(2, 5, mode="raw", scores=[1]), some.request(3, 4)]
    some.run(reqs, [7, 5, 4], [0, 0, 0])([TOKEN] * 3)
    for _ in range(2):
        for req in reqs:
            req.output_ids.append(5)
        lengths = [len(r.origin_input_ids) + len(r.output_ids) for r in reqs]
        some.run(reqs, lengths)([TOKEN] * 3)
    for req in reqs:
        req.output_ids.append(5)
        req.is_over = True
    found = some.recorder.outputs(reqs)
    assert (found[SCORES][0], found[SCORES][2]) == ([], [])
    answer = found[SCORES][1][0]
    check(some, reqs[1], answer[0].entries(*answer[1:]), 7, layers=[1], row=2)


def test_an_aborted_request_is_answered_nothing_and_freed(steps):
    some = steps(**ON)
    req = some.request(1, 30, mode="fingerprint", scores=ALL, stream_entries=False)
    some.run([req], [30], [0])([TOKEN])
    state = recorders.ATTRIBUTE
    held = weakref.ref(getattr(req, state).scores)
    assert held().nbytes == 2 * 30 * 4 * 30 * 2
    req.is_over = True
    req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "abort"})
    assert SCORES not in some.recorder.outputs([req])
    gc.collect()
    assert held() is None
    # One that SGLang forgets, with what is kept of it.
    other = some.request(2, 30, mode="fingerprint", scores=ALL, stream_entries=False)
    some.run([other], [30], [0])([TOKEN])
    held = weakref.ref(getattr(other, state).scores)
    del other
    some.run([some.request(2, 6)], [6], [0])([TOKEN])
    gc.collect()
    assert held() is None


def test_a_request_that_takes_too_much_is_ended_and_others_go_on(steps, monkeypatch):
    refused = []
    monkeypatch.setattr(recorders, "refuse_request", lambda req, says: refused.append((req, says)))
    # Of both layers, four heads each.
    monkeypatch.setattr(full_scores, "SCORES_BYTES", 2 * 8 * 20 * 20)
    some = steps(**ON)
    long = some.request(1, 21, mode="fingerprint", scores=ALL, stream_entries=False)
    fits = some.request(2, 19, mode="fingerprint", scores=ALL, stream_entries=False)
    # Before any of it is computed, though the first chunk alone would fit.
    some.run([long, fits], [5, 19], [0, 0])([None, TOKEN])
    assert [req for req, _ in refused] == [long]
    assert refused[0][1].startswith("attn_capture of 21 tokens takes more than")
    assert getattr(long, recorders.ATTRIBUTE).scores is None
    for length in (20, 21):
        fits.output_ids.append(5)
        some.run([fits], [length])([TOKEN])
    # With position 20 its answer has gone too far.
    assert [req for req, _ in refused] == [long, fits]


def test_scores_end_with_capture_and_the_answer_says_where(steps, monkeypatch):
    some = steps(**ON)
    req = some.request(1, 6, mode="fingerprint", scores=ALL)
    some.run([req], [6], [0])([TOKEN])
    req.output_ids.append(5)
    monkeypatch.setattr(some.recorder.capture, "begin", lambda table: 1 / 0)
    some.run([req], [7])
    assert some.recorder.failed and not some.recorder.is_active(None)
    req.output_ids += [5, 5]
    entries, usage = answered(some, req)
    assert usage["off"] and usage["missing_score_rows"] == 2
    assert entries[0]["token_meta"]["missing_rows"] == [{"start": 6, "end": 8}]
    check(some, req, entries, 6)


def test_images_and_sounds_of_a_prompt_are_named(steps):
    some = steps(**ON)
    req = some.request(1, 30, mode="fingerprint", scores=[0], mask_prefix=4, stream_entries=False)
    # As SGLang has them: the last token is in the range.
    images = SimpleNamespace(offsets=[(12, 15), (2, 6)], is_audio=lambda: False)
    sounds = SimpleNamespace(offsets=[(20, 20), (0, 1)], is_audio=lambda: True)
    without = SimpleNamespace(offsets=None, is_audio=lambda: False)
    req.multimodal_inputs = SimpleNamespace(mm_items=[images, sounds, without])
    some.run([req], [30], [0])([TOKEN])
    req.output_ids.append(5)
    meta = answered(some, req)[0][0]["token_meta"]
    assert meta["vision_ranges"] == [{"start": 0, "end": 3}, {"start": 8, "end": 12}]
    assert meta["lang_ranges"] == [
        {"start": 3, "end": 8}, {"start": 12, "end": 16}, {"start": 17, "end": 26}
    ]  # fmt: skip


def test_tensor_parallelism_refuses_them_by_name(steps):
    some = steps(**ON)
    assert some.recorder.model.facts.score_layers == tuple(ALL)
    some.runner.model_config.num_attention_heads *= 2
    facts = recorders.CapturedModel(some.runner, some.options, ranks=2).facts
    assert facts.score_layers == () and "--tp-size" in facts.reasons["attn_capture"]
