"""Full scores in a worker of vLLM: of chunks of prompts, of steps of tokens, of requests that are
put back, and of rows whose token is not kept."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from full_score_rows import check_scores, scored  # noqa: E402
from vllm_steps import HEADS, LAYERS, Steps  # noqa: E402

from pipeline.engines.serving import full_scores  # noqa: E402


@pytest.fixture
def scores(steps):
    def make(**options: Any) -> Steps:
        given = {"enable_attention_instrumentation": True, "instrumentation_layers": "all"}
        return steps(**given | options)

    return make


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("windowed", [False, True])
def test_chunks_of_prompts_and_steps_of_tokens(scores, layout, windowed):
    some = scores(layout=layout, windowed=windowed)
    req, other = some.request("r", 37, scores=[0, 1]), some.request("o", 5, prompt_rows=1)
    some.run((req, 16))()
    some.run((req, 20), (other, 5))()
    some.run((req, 1), (other, 1), padding=2)()
    some.decode(other, req, times=12, padding=1)
    some.end(req)
    some.run()
    check_scores(some, req, scored(some, req), range(37 + 12))


def test_chosen_heads_layers_and_a_masked_prefix(scores):
    some = scores()
    req = some.request("r", 9, scores=[1], heads=[0, 3], mask_prefix=4)
    some.answer(req, tokens=4)
    some.run()
    check_scores(some, req, scored(some, req), range(12), layers=(1,), heads=[0, 3], mask=4)


def test_rows_wait_until_their_token_is_kept(scores):
    """A step is prepared before the tokens of the one before are known."""
    some = scores()
    req = some.request("r", 6, scores=[0, 1])
    first = some.run((req, 6))
    second = some.run((req, 1))
    first()
    third = some.run((req, 1))
    second()
    some.run((req, 1))
    check_scores(some, req, scored(some, req), range(7))
    third()
    # It ended at its third token: two more steps were run in vain.
    req.outputs = req.outputs[:3]
    some.end(req)
    some.run()
    check_scores(some, req, scored(some, req), range(7, 8))


def test_a_request_that_is_put_back_has_each_row_once(scores):
    some = scores()
    req = some.request("r", 11, scores=[0, 1])
    some.run((req, 11))()
    some.decode(req, times=3)
    stale = some.run((req, 1))
    some.put_back(req)
    stale(stale=True)
    some.run((req, 8))()
    some.run((req, req.num_output_tokens + 11 - 8))()
    some.decode(req, times=2)
    some.end(req)
    some.run()
    check_scores(some, req, scored(some, req), range(11 + req.num_output_tokens - 1))


def test_rows_whose_query_was_not_kept_are_left_out(scores):
    some = scores()
    req = some.request("r", 6, scores=[0, 1])
    some.run((req, 6))()
    some.decode(req, times=1, leave_out=1)
    some.decode(req, times=1)
    some.end(req)
    some.run()
    found = scored(some, req)
    assert sorted(found[0]) == list(range(8))
    assert sorted(found[1]) == [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("steps_past", [0, 1])
def test_a_request_that_takes_too_much_is_told_why(scores, monkeypatch, steps_past):
    """Not if only a step that was prepared past its end does."""
    some, room = scores(), 9
    monkeypatch.setattr(full_scores, "SCORES_BYTES", 2 * LAYERS * HEADS * room * room)
    req = some.request("r", 6, scores=[0, 1])
    some.run((req, 6))()
    some.decode(req, times=room - 6)
    last = some.run((req, 1))
    if steps_past:
        some.decode(req, times=2)
        last()
    else:
        some.run((req, 1))  # what is said of the steps before is said at this one
    some.end(req)
    some.run()
    rows = scored(some, req)
    refused = [one.no_scores for one in some.reports if one.key == "r" and one.no_scores]
    if steps_past:
        assert "attn_capture of 10 tokens takes more than" in refused[0]
    else:
        assert not refused
    assert sorted(rows[0]) == list(range(room))


def test_a_step_that_is_read_after_its_request_began_again_gives_no_row_twice(scores):
    some = scores()
    req = some.request("r", 11, scores=[0, 1])
    some.run((req, 11))()
    some.decode(req, times=2)
    stale = some.run((req, 1))
    some.put_back(req)
    again = some.run((req, 8))
    stale(stale=True)
    again()
    some.run((req, req.num_output_tokens + 11 - 8))()
    some.decode(req, times=2)
    some.end(req)
    some.run()
    check_scores(some, req, scored(some, req), range(11 + req.num_output_tokens - 1))


def test_what_was_taken_of_a_step_is_kept_no_longer_than_it_is_needed(scores, monkeypatch):
    """By nothing that Python would have to look for: it may be large, and lies in pinned memory."""
    some, kept = scores(), list[Any]()
    req, own = some.request("r", 6, scores=[0, 1]), some.recorder._scores.end

    def end(table: Any) -> Any:
        found = own(table)
        kept.extend(weakref.ref(each) for each in found.rows[0].found.values())
        return found

    monkeypatch.setattr(some.recorder._scores, "end", end)
    gc.collect()
    gc.disable()
    try:
        some.answer(req, tokens=3)
        some.run()
        assert len(kept) == 2 * 3 and len(scored(some, req)[0]) == 8
        until = time.monotonic() + 10
        # What is sent is let go by a thread of ZMQ's.
        while any(each() is not None for each in kept) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(each() is not None for each in kept)
    finally:
        gc.enable()


def test_nobody_else_is_looked_at(scores):
    some = scores()
    req = some.request("r", 6, prompt_rows=1)
    some.answer(req, tokens=4)
    entries, _ = some.ended(req)
    assert some.check(req, entries) and not some.blocks.get("r")
