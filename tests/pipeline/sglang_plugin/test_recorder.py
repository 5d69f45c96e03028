"""The recorder, step by step: what SGLang does in an order of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from recorder_steps import LAYERS, MOST_RUNNING  # noqa: E402

from capture_kernels.errors import OptionError  # noqa: E402
from pipeline.engines.serving.budget import FEWEST  # noqa: E402
from pipeline.engines.serving.responses import decoded  # noqa: E402
from pipeline.engines.serving.steps.base_recorder import GRAPH_PADDING  # noqa: E402
from pipeline.engines.sglang.model_process import outputs  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402

TOKEN = SimpleNamespace(output_index=0, token_ids=(5,))


def steps_of(entries: list[dict]) -> list[int]:
    return [entry.get("decode_step", entry.get("step")) for entry in entries]


def test_a_step_is_prepared_before_the_one_before_is_known(steps):
    some = steps()
    req = some.request(1, 6, mode="fingerprint", prompt_rows=2)
    first = some.run([req], [6], [0])
    second = some.run([req], [7])
    first([TOKEN])
    req.output_ids.append(5)
    third = some.run([req], [8])
    second([TOKEN])
    req.output_ids.append(5)
    assert steps_of(some.said(req)[0]) == [-1, 0, 1]
    # It ended with the second step, when the third was under way.
    req.is_over = True
    third([None])
    entries, usage = some.said(req)
    assert entries == []
    assert (usage[0]["rows"], "missing_prompt_rows" in usage[0]) == (3, False)
    # Its end is said once.
    assert some.said(req) == ([], [])


def test_a_request_that_is_put_back_has_each_row_once(steps):
    some = steps()
    req = some.request(1, 6, mode="raw", layers=[1])
    some.run([req], [6], [0])([TOKEN])
    req.output_ids.append(5)
    some.run([req], [7])([TOKEN])
    req.output_ids.append(5)
    # The step at position 7 has run when it is put back: its token is not taken.
    some.run([req], [8])([None])
    req.kv.req_pool_idx = 3
    some.run([req], [8], [1])([TOKEN])
    req.output_ids.append(5)
    some.run([req], [9])([TOKEN])
    entries, _ = some.said(req)
    assert [entry["position"] for entry in entries] == [6, 7, 8]


def test_more_rows_of_prompts_than_a_step_has_room_for(steps):
    some = steps()
    room = MOST_RUNNING + GRAPH_PADDING
    reqs = [some.request(n, 30, mode="fingerprint", prompt_rows=15) for n in (1, 2)]
    some.run(reqs, [30, 30], [0, 0])([TOKEN, TOKEN])
    for req in reqs:
        req.is_over = True
        entries, usage = some.said(req)
        # Those nearest to the answers, of each request as many.
        assert steps_of(entries) == list(range(1 - room // 2, 1))
        assert usage[0]["missing_prompt_rows"] == 15 - room // 2


def test_cached_rows_and_chunks(steps):
    some = steps()
    req = some.request(1, 30, mode="fingerprint", prompt_rows=12)
    # 20 tokens from the cache; the others in two chunks, of which the first has no token.
    some.run([req], [25], [20])([None])
    some.run([req], [30], [25])([TOKEN])
    req.is_over = True
    entries, usage = some.said(req)
    assert steps_of(entries) == list(range(-9, 1))
    assert usage[0]["missing_prompt_rows"] == 2


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_without_a_layer_says_nothing_instead_of_the_last_ones_numbers(steps, layer):
    some = steps()
    req = some.request(1, 6, mode="raw", layers=[0])
    some.run([req], [6], [0])([TOKEN])
    req.output_ids += [5, 5, 5]
    some.run([req], [7])([TOKEN])
    some.run([req], [8], leave_out=layer)([TOKEN])
    some.run([req], [9])([TOKEN])
    assert [entry["position"] for entry in some.said(req)[0]] == [6, 8]


@pytest.mark.parametrize("begins", [0, 1])
def test_kv_slots_are_those_of_when_the_step_began(steps, begins):
    """What SGLang gives a token later in the step counts only if the step begins later."""

    def entries(*, moved: bool) -> list[dict]:
        some = steps(layers="1")
        recorder, table = some.recorder, some.runner.req_to_token_pool.req_to_token
        recorder.model.first_layer = begins
        run = recorder.layer

        def layer(one, *given, **named):
            run(one, *given, **named)
            if moved and one.layer_id == 0:
                table[1, :6] = table[2, :6].clone()

        recorder.layer = layer
        req = some.request(1, 6, mode="raw", layers=[1], prompt_rows=1)
        some.run([req], [6], [0])([TOKEN])
        found, _ = some.said(req)
        assert len(found) == 1
        return [{name: value for name, value in found[0].items() if "time" not in name}]

    assert (entries(moved=True) == entries(moved=False)) is (begins == 0)


def test_the_next_request_in_a_row_has_nothing_of_the_last(steps):
    some = steps()
    flags = some.recorder.capture.requests
    asking = some.request(1, 6, mode="raw", mask_prefix=3)
    some.run([asking], [6], [0])([TOKEN])
    asking.output_ids.append(5)
    some.run([asking], [7])([TOKEN])
    assert (int(flags.enabled[1]), int(flags.mask[1])) == (1, 3)
    # Aborted; another request gets its row.
    silent = some.request(1, 6)
    some.run([silent], [6], [0])([TOKEN])
    assert (int(flags.enabled[1]), int(flags.mask[1])) == (0, 0)
    assert some.said(silent) == ([], [])
    other = some.request(1, 6, mode="raw", prompt_rows=1)
    some.run([other], [6], [0])([TOKEN])
    entries, _ = some.said(other)
    assert {entry["position"] for entry in entries} == {5}


def test_one_of_two_asks(steps):
    some = steps()
    silent, asking = some.request(1, 6), some.request(2, 9, mode="sketch")
    some.run([silent, asking], [6, 9], [0, 0])([TOKEN, TOKEN])
    for req in (silent, asking):
        req.output_ids.append(5)
    some.run([silent, asking], [7, 10])([TOKEN, TOKEN])
    assert some.recorder.outputs([silent]) == {}
    entries, usage = some.recorder.outputs([silent, asking]).values()
    assert (entries[0], usage[0]) == ([], [])
    assert steps_of(decoded(entries[1])) == [1]


def test_a_prompt_that_no_hook_saw_has_nothing_of_the_step_before(steps, monkeypatch):
    """On a GPU, where generated tokens run in CUDA graphs that no hook sees either."""
    some = steps()
    first, second = (some.request(row, 6, mode="raw", prompt_rows=1) for row in (1, 2))
    some.run([first], [6], [0])([TOKEN])
    assert steps_of(some.said(first)[0]) == [0] * LAYERS
    monkeypatch.setattr(some.recorder, "on_gpu", True)
    monkeypatch.setattr(some.recorder, "layer", lambda *given, **named: None)
    some.run([second], [6], [0])([TOKEN])
    assert some.said(second)[0] == []


@pytest.mark.parametrize("as_prompts", [False, True])
def test_a_step_that_other_ranks_have_padded_says_the_same(steps, as_prompts):
    """As with data-parallel attention, where the rows that pad it are of request 0."""

    def entries(**padded: int | bool) -> list[list[dict]]:
        some = steps()
        reqs = [some.request(1, 6, mode="raw"), some.request(3, 9, mode="fingerprint")]
        some.run(reqs, [6, 9], [0, 0])([TOKEN, TOKEN])
        for step in range(2):
            for req in reqs:
                req.output_ids.append(5)
            some.run(reqs, [7 + step, 10 + step], **padded)([TOKEN, TOKEN])
        assert some.recorder.off is None
        return [some.said(req)[0] for req in reqs]

    alone = entries()
    assert [len(found) for found in alone] == [2 * LAYERS, 2]
    assert entries(padding=5, as_prompts=as_prompts) == alone


def test_records_of_ended_and_of_aborted_requests_are_in_the_store(steps, tmp_path):
    path = tmp_path / "f.db"
    some = steps(path)
    reqs = [some.request(n, 6, mode="fingerprint", stream_entries=False) for n in (1, 2)]
    some.run(reqs, [6, 6], [0, 0])([TOKEN, TOKEN])
    for length in range(7, 12):
        for req in reqs:
            req.output_ids.append(5)
        some.run(reqs, [length, length])([TOKEN, TOKEN])
    for req in reqs:
        req.is_over = True
        # Its client asked for nothing, so it is told nothing.
        assert some.said(req) == ([], [])
    some.recorder.close()
    with open_store(path) as store:
        rows = [row for batch in store.scan() for row in batch.to_pylist()]
    assert sorted((row["request_id"], row["position"]) for row in rows) == [
        (name, position) for name in ("r1", "r2") for position in range(6, 11)
    ]


def test_a_fault_is_logged_once_and_ends_capture(steps, caplog, monkeypatch):
    some = steps()
    req = some.request(1, 6, mode="raw", layers=[0])
    some.run([req], [6], [0])([TOKEN])
    req.output_ids += [5, 5]
    some.run([req], [7])([TOKEN])

    def broken(rows, **asked):
        raise RuntimeError("a fault for the test")

    monkeypatch.setattr(some.recorder.capture, "results", broken)
    some.run([req], [8])([TOKEN])
    some.run([req], [9])([TOKEN])
    req.is_over = True
    entries, usage = some.said(req)
    assert steps_of(entries) == [1]
    assert usage[0]["off"] == "capture ended with an error: see the server's log"
    assert [facts.reasons["capture"] for facts in some.facts] == [usage[0]["off"]]
    assert len(caplog.records) == 1
    assert "a fault for the test" in caplog.text
    assert not some.recorder.is_active(None)


def test_a_fault_in_what_is_answered_does_not_reach_sglang(steps, monkeypatch):
    some = steps()
    req = some.request(1, 6, mode="raw")
    some.run([req], [6], [0])([TOKEN])
    monkeypatch.setattr(outputs, "ENTRIES", [])  # no key of a dict
    assert some.recorder.outputs([req]) == {}
    assert some.recorder.failed


def test_a_budget_that_is_passed_ends_capture(steps):
    some = steps(overhead_budget=0.01)
    req = some.request(1, 6, mode="raw", layers=[0], prompt_rows=1)
    some.run([req], [6], [0])([TOKEN])
    assert some.recorder.off is None
    for length in range(7, 7 + 2 * FEWEST):
        req.output_ids.append(5)
        some.run([req], [length])([TOKEN])
    reason = some.recorder.off
    assert "--attention-overhead-budget 0.01" in reason
    assert [facts.reasons["capture"] for facts in some.facts] == [reason]
    req.is_over = True
    entries, usage = some.said(req)
    # The step that was prepared when it was passed is the last.
    assert steps_of(entries) == list(range(len(entries)))
    assert FEWEST <= len(entries) <= FEWEST + 1
    assert usage[0]["off"] == reason


def test_fused_decode_is_of_vllm(steps):
    with pytest.raises(OptionError, match="--attention-fused-decode is of vLLM alone"):
        steps(fused_decode=True)
