"""Speculative decoding: a step runs a request's last token and drafts of the next ones, and only
what is sampled says which of its rows are kept."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_steps import (  # noqa: E402
    DRAFTS,
    LAYERS,
    MOST_RUNNING,
    DraftSteps,
    runner_of,
    steps_of,
)

from capture_kernels.errors import OptionError  # noqa: E402
from pipeline.engines.serving.steps.base_recorder import GRAPH_PADDING  # noqa: E402
from pipeline.engines.serving.steps.served_model import WITH_DRAFTS  # noqa: E402
from pipeline.engines.serving.steps.states import NotedRow  # noqa: E402
from pipeline.engines.vllm.model_process.drafts import TokenRows  # noqa: E402
from pipeline.engines.vllm.model_process.layers import refusal  # noqa: E402
from pipeline.engines.vllm.model_process.states import SampledStep, StepTaken  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402

NOW = datetime.now(UTC)


def positions_of(found):
    """The positions of checked entries; each layer has all of them."""
    of_layers = [[p for p, number in found if number == layer] for layer in range(LAYERS)]
    assert all(of_layer == of_layers[0] for of_layer in of_layers)
    return of_layers[0]


@pytest.mark.parametrize("windowed", [False, True], ids=["one group", "windows in a second group"])
def test_rows_are_those_of_accepted_drafts(steps, windowed):
    """Steps of drafts alone, beside prompts, and padded; some of none, some of all are accepted."""
    some = steps(kind=DraftSteps, windowed=windowed)
    one, two = some.request("one", 9, layers=[0, 1]), some.request("two", 30, prompt_rows=4)
    some.run((one, 9))()
    some.verify((one, 0))()
    some.run((one, 4), (two, 20), drafts={one: (DRAFTS, 2)})()
    some.run((one, 4), (two, 10), drafts={one: (DRAFTS, 3)})()
    some.verify((one, 3), (two, 1), padding=2)()
    some.verify((one, 1), (two, 0))()
    # One has no draft in this step.
    some.run((one, 1), (two, 3), drafts={one: (0, 0), two: (2, 2)}, padding=1)()
    for req, kept in ((one, 1 + 1 + 3 + 4 + 4 + 2 + 1), (two, 1 + 2 + 1 + 3)):
        assert len(req.outputs) == kept
        some.end(req)
    some.run()
    for req, prompt_rows in ((one, 0), (two, 4)):
        entries, usage = some.said(req)
        begin = len(req.prompt) - prompt_rows
        # The last token was fed to no step.
        end = len(req.prompt) + len(req.outputs) - 1
        assert positions_of(some.check(req, entries)) == list(range(begin, end))
        assert usage["rows"] == end - begin


@pytest.mark.parametrize("seed", range(12))
def test_steps_under_way_and_requests_put_back(steps, seed):
    """A step is prepared before the engine has read what the one before sampled, and positions
    that it is given are then too large."""
    random = np.random.default_rng(seed)
    some = steps(kind=DraftSteps)
    reqs = [some.request(f"r{n}", 5 + 7 * n, layers=[0, 1]) for n in range(3)]
    for req in reqs:
        some.run((req, len(req.prompt)))()
    under_way = []
    for _ in range(int(random.integers(2, 9))):
        accepted = random.integers(0, DRAFTS + 1, len(reqs)).tolist()
        under_way.append(some.verify(*zip(reqs, accepted, strict=True)))
        if len(under_way) == 2 or random.random() < 0.5:
            under_way.pop(0)()
    back = reqs[seed % 4] if seed % 4 < 3 else None
    for read in under_way:
        read()
    if back is not None:
        # What another step has sampled of it is not taken.
        stale = some.verify(*[(req, 1) for req in reqs])
        some.put_back(back)
        stale(stale_of=back)
        for known in (back.keys, back.queries):
            known[:, len(back.prompt) + len(back.outputs) :].normal_(generator=some.generator)
        some.run((back, len(back.prompt) + len(back.outputs)))()
        some.verify((back, 2))()
    for req in reqs:
        some.end(req)
    some.run()
    for req in reqs:
        entries, usage = some.said(req)
        begin, kept = len(req.prompt), len(req.outputs)
        assert positions_of(some.check(req, entries)) == list(range(begin, begin + kept - 1))
        assert usage["rows"] == kept - 1


@pytest.mark.parametrize("windowed", [False, True], ids=["one group", "windows in a second group"])
def test_steps_with_prompts_while_the_one_before_is_under_way(steps, windowed):
    some = steps(kind=DraftSteps, windowed=windowed)
    one = some.request("one", 9, layers=[0, 1])
    two = some.request("two", 30, prompt_rows=4)
    some.run((one, 9))()
    first = some.verify((one, 0))
    second = some.run((one, 4), (two, 20), drafts={one: (DRAFTS, 1)})
    first()
    third = some.run((one, 4), (two, 10), drafts={one: (DRAFTS, 0)})
    second()
    fourth = some.verify((one, 3), (two, 1))
    third()
    fourth()
    for req in (one, two):
        some.end(req)
    some.run()
    for req, rows in ((one, 0), (two, 4)):
        entries, _ = some.said(req)
        begin, end = len(req.prompt) - rows, len(req.prompt) + len(req.outputs) - 1
        assert positions_of(some.check(req, entries)) == list(range(begin, end))


def test_a_prompts_last_token_with_drafts_that_only_fill_the_step_up(steps):
    """As after a hit in the prefix cache. None of these drafts is accepted."""
    some = steps(kind=DraftSteps)
    req = some.request("r", 9, prompt_rows=2)
    some.run((req, 1 + DRAFTS), cached=8, drafts={req: (DRAFTS, 0)})()
    some.verify((req, 2))()
    some.end(req)
    some.run()
    entries, _ = some.said(req)
    assert positions_of(some.check(req, entries)) == [8, 9, 10, 11]


def test_a_request_that_is_put_back_before_a_step_is_read(steps):
    """As where vLLM empties its prefix cache."""
    some = steps(kind=DraftSteps)
    req = some.request("r", 9, prompt_rows=2)
    some.run((req, 9))()
    some.verify((req, 2))()
    stale = some.verify((req, 3))
    some.put_back(req)
    known = len(req.prompt) + len(req.outputs)
    for each in (req.keys, req.queries):
        each[:, known:].normal_(generator=some.generator)
    again = some.run((req, known))
    stale(stale=True)
    again()
    some.verify((req, 1))()
    some.end(req)
    some.run()
    entries, usage = some.said(req)
    end = len(req.prompt) + len(req.outputs) - 1
    assert positions_of(some.check(req, entries)) == list(range(7, end))
    assert "off" not in usage


def test_rows_that_cannot_be_where_they_are_said_to_be_are_dropped():
    note = NotedRow(0, 0, SimpleNamespace(collector=SimpleNamespace(wants=lambda at: True)), 20, 1)
    for begin, kept in ((20, 20), (14, 14), (13, None), (21, None)):
        step = SampledStep([], [note], StepTaken(None), None, NOW, [[5]], {0: 20})
        found = [each.position for each in step.placed({0: begin}, 6).noted]
        assert found == ([] if kept is None else [kept])


def test_strides_and_ends_hold_for_true_positions(steps):
    some = steps(kind=DraftSteps)
    req = some.request("r", 8, stride=3, max_steps=2)
    some.run((req, 8))()
    under_way = some.verify((req, 1))
    for accepted in (0, 3, 2):
        following = some.verify((req, accepted))
        under_way()
        under_way = following
    under_way()
    # All that it wants is there.
    some.verify((req, 0))()
    assert not some.recorder.capture.requests.enabled.any()
    some.end(req)
    some.run()
    entries, usage = some.said(req)
    assert positions_of(some.check(req, entries)) == [9, 12]
    assert usage["rows"] == 2


def test_an_answer_ends_within_accepted_drafts(steps):
    """A stop token among them: what follows it is not the answer's."""
    some = steps(kind=DraftSteps)
    req = some.request("r", 6, layers=[0, 1])
    some.run((req, 6))()
    some.verify((req, 3))()
    del req.outputs[3:]
    some.end(req)
    some.run()
    entries, _ = some.said(req)
    assert positions_of(some.check(req, entries)) == [6, 7]
    assert steps_of(entries)[::LAYERS] == [1, 2]


def test_records_are_of_kept_rows(steps, tmp_path):
    some = steps(tmp_path / "store", kind=DraftSteps)
    req = some.request("r", 7, layers=[0, 1])
    some.run((req, 7))()
    for accepted in (3, 0, 2):
        some.verify((req, accepted))()
    some.end(req)
    some.run()
    some.close()
    with open_store(tmp_path / "store") as store:
        rows = [row for batch in store.scan() for row in batch.to_pylist()]
    assert sorted(row["position"] for row in rows) == list(range(7, 7 + 4 + 1 + 3))


@pytest.mark.parametrize(("padding", "spare"), [(0, 0), (2, 0), (0, 5), (3, 1)])
def test_rows_of_tokens_are_those_of_their_requests(padding, spare):
    counts, lengths = [1, 4, 2], [1, 9, 30]
    most = 3 + padding
    rows = TokenRows(SimpleNamespace(
        query_start_loc=torch.tensor([0, 1, 5, 7] + [7] * padding, dtype=torch.int32),
        seq_lens=torch.tensor(lengths + [0] * padding, dtype=torch.int32),
    ))  # fmt: skip
    requests, seen = rows.of_tokens(torch.arange(7 + spare), most)
    assert requests[:7].tolist() == [n for n, count in enumerate(counts) for _ in range(count)]
    assert seen.tolist() == [1, 6, 7, 8, 9, 29, 30] + [0] * spare
    assert seen.dtype == torch.int32
    # A request that is none has no more rows in the table.
    assert int(requests.max()) < most
    assert rows.lengths(torch.tensor([1, 2]), torch.tensor([2, 6])).tolist() == [7, 30]


def test_plans_have_room_for_drafts_and_what_is_not_offered_is_named(steps):
    some = steps(kind=DraftSteps, enable_attention_instrumentation=True, hub_slots=1)
    assert some.recorder.capture.max_rows == MOST_RUNNING * (1 + DRAFTS) + GRAPH_PADDING
    assert some.recorder.capture.requests.size == MOST_RUNNING + GRAPH_PADDING
    reasons = some.recorder.model.facts.reasons
    for name in ("attention_hubs", "attn_capture"):
        assert reasons[name] == WITH_DRAFTS
    assert some.recorder.capture.hubs.numel() == 0
    assert some.recorder.model.facts.score_layers == ()
    with pytest.raises(OptionError, match=r"^--attention-fused-decode does not run spec"):
        steps(kind=DraftSteps, fused_decode=True)


def test_only_adaptive_verification_is_refused():
    runner = runner_of([], [])
    runner.vllm_config.speculative_config = SimpleNamespace(enable_adaptive_verification=False)
    assert refusal(runner) is None
    runner.vllm_config.speculative_config.enable_adaptive_verification = True
    assert "adaptive verification" in (refusal(runner) or "")
