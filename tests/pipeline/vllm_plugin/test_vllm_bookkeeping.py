"""What a recorder holds of requests between vLLM's steps: their tokens, and which rows are over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_steps import FIRST_TOKEN, LAYERS, Steps, runner_of, steps_of  # noqa: E402

from pipeline.engines.serving.budget import FEWEST  # noqa: E402
from pipeline.engines.serving.steps.ranks import Ranks  # noqa: E402
from pipeline.engines.serving.steps.states import Stage  # noqa: E402
from pipeline.engines.vllm.model_process.plans import keys_of  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402


def tokens_of(some: Steps, path: Any) -> list[tuple[int, int]]:
    """Positions and tokens of the records of a request, once all are delivered."""
    some.recorder.close()
    with open_store(path) as store:
        rows = [row for batch in store.scan() for row in batch.to_pylist()]
    return sorted((row["position"], row["token_id"]) for row in rows)


@pytest.mark.parametrize("token", ["taken", "dropped, then put back", "put back, then dropped"])
def test_tokens_of_rows_are_those_that_were_fed_though_one_was_sampled_twice(
    steps, tmp_path, token
):
    """vLLM takes the token of a step that was in flight when it puts a request back, or drops it
    and samples it again."""
    path = tmp_path / "f.db"
    some = steps(path)
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req)
    in_flight = some.run((req, 1))
    some.put_back(req)
    if token == "taken":
        in_flight()
    if token == "dropped, then put back":
        in_flight(stale=True)
    again = some.run((req, 6 + len(req.outputs)))
    if token == "put back, then dropped":
        in_flight(stale=True)
    again()
    some.decode(req, times=3)
    some.end(req)
    some.ended(req)
    count = len(req.outputs) - 1
    assert tokens_of(some, path) == [(6 + n, FIRST_TOKEN + n) for n in range(count)]


def test_a_request_that_is_aborted_before_its_first_token_has_its_prompts_rows(steps):
    some = steps()
    req = some.request("r", 6, layers=[0], prompt_rows=3)
    step = some.run((req, 6))
    some.end(req)
    step()
    entries, usage = some.ended(req)
    assert some.check(req, entries) == [(3, 0), (4, 0), (5, 0)]
    assert "missing_prompt_rows" not in usage


def test_a_request_is_forgotten_when_it_has_ended(steps):
    some = steps()
    req, other = (some.request(name, 6, layers=[0]) for name in ("r", "other"))
    some.run((req, 6), (other, 6))()
    some.decode(req, other)
    some.end(req)
    under_way = some.run((req, 1), (other, 1))
    flags = some.recorder.capture.requests.enabled
    # It runs once more, as vLLM did not know yet.
    assert flags[:2].tolist() == [0, 1]
    under_way()
    some.end(other)
    some.run()
    assert not some.recorder._states
    entries, usage = some.said(req)
    assert (steps_of(entries), usage["rows"]) == ([1], 1)


def test_rows_that_are_not_wanted_are_not_computed(steps):
    some = steps()
    req = some.request("r", 6, layers=[0], stride=2)
    flags = some.recorder.capture.requests.enabled
    some.run((req, 6))()
    found = []
    for _ in range(4):
        some.decode(req)
        found.append(int(flags[0]))
    assert found == [1, 0, 1, 0]


def test_a_position_that_is_run_again_without_being_put_back_is_not_captured_again(steps):
    """As after keys that could not be loaded."""
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req, times=2)
    req.computed, req.length = req.computed - 1, req.length - 1
    some.run((req, 1))
    assert not some.recorder.capture.requests.enabled.any()
    some.end(req)
    entries, _ = some.ended(req)
    assert some.check(req, entries) == [(6, 0), (7, 0)]


def test_an_incomplete_step_says_nothing(steps, monkeypatch):
    """Of layers that did not run once in turn, whose columns are then zeros."""
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req)
    found = some.recorder.capture.results

    def incomplete(rows: int, **asked: Any) -> Any:
        results = found(rows, **asked)
        results.mean.zero_()
        return results

    with monkeypatch.context() as patched:
        patched.setattr(some.recorder.capture, "results", incomplete)
        some.decode(req)
    some.decode(req, times=2)
    some.end(req)
    entries, _ = some.ended(req)
    assert some.check(req, entries) == [(6, 0), (8, 0), (9, 0)]


@pytest.mark.parametrize("spare", [0, 3])
def test_queries_past_the_last_request_are_not_read(steps, spare):
    """A graph of parts of a step may be for more tokens than the step has."""
    some = steps()
    own = some.run_layer

    def run_layer(layer: Any, query: Any, metadata: Any) -> None:
        own(layer, torch.cat([query, torch.full((spare, *query.shape[1:]), torch.nan)]), metadata)

    some.run_layer = run_layer
    req, other = (some.request(name, 6, prompt_rows=2) for name in ("r", "other"))
    some.answer(req, other, tokens=3)
    some.run()
    for one in (req, other):
        assert some.check(one, some.said(one)[0]) == [
            (position, number) for position in range(4, 8) for number in range(LAYERS)
        ]


def test_nothing_is_computed_once_the_budget_is_passed(steps):
    some = steps(overhead_budget=0.01)
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req, times=FEWEST)
    assert some.recorder.capture.requests.enabled.any()
    some.decode(req, times=FEWEST)
    assert some.recorder.off is not None
    assert not some.recorder.capture.requests.enabled.any()


def test_a_step_that_attends_to_both_sides_is_not_captured(steps):
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req)
    own = some.run_layer

    def run_layer(layer: Any, query: Any, metadata: Any) -> None:
        metadata.causal = False
        own(layer, query, metadata)

    some.run_layer = run_layer
    some.decode(req)
    some.run_layer = own
    some.decode(req, times=2)
    some.end(req)
    entries, _ = some.ended(req)
    assert some.check(req, entries) == [(6, 0), (8, 0), (9, 0)]


# After a fault -----------------------------------------------------------------------------------


def broken(*given: Any, **named: Any) -> None:
    raise RuntimeError("a fault for the test")


def test_who_ends_in_the_step_of_a_fault_is_told_too(steps, monkeypatch):
    some = steps()
    reqs = [some.request(name, 6, layers=[0]) for name in "ab"]
    some.answer(*reqs, tokens=3)
    monkeypatch.setattr(some.recorder, "_settle", broken)
    some.run()
    usages = [some.said(req)[1] or {} for req in reqs]
    assert [usage.get("off") for usage in usages] == [some.recorder.off] * 2


def test_who_is_put_back_after_a_fault_is_told_its_end_once(steps, monkeypatch):
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req, times=2)
    monkeypatch.setattr(some.recorder.capture, "results", broken)
    some.decode(req)
    entries, usage = some.said(req)
    assert (len(entries), usage["rows"], usage["off"]) == (2, 2, some.recorder.off)
    some.put_back(req)
    some.run((req, 6 + len(req.outputs)))()
    assert some.said(req) == ([], None)


# In CUDA graphs, as far as a CPU shows it --------------------------------------------------------


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_graph_holds_the_capture_though_nobody_asks(steps, monkeypatch, on_gpu):
    some = steps()
    some.recorder.on_gpu = on_gpu
    began: list[Any] = []
    begin = some.recorder.capture.begin
    monkeypatch.setattr(
        some.recorder.capture, "begin", lambda *tables: began.append(begin(*tables))
    )
    silent = some.request("silent", 6)
    some.run((silent, 6))()
    assert began == []
    some.decode(silent, padding=2, times=3)
    assert len(began) == (3 if on_gpu else 0)


def test_the_results_of_a_replayed_graph_are_taken(steps):
    """The host sees none of its layers run."""
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.recorder.on_gpu = True
    own = some.run_layer

    def run_layer(*given: Any) -> None:
        own(*given)
        if some.recorder._stage is Stage.ENDED:
            some.recorder._stage = Stage.REPLAYED

    some.run_layer = run_layer
    some.decode(req, times=3)
    some.end(req)
    entries, _ = some.ended(req)
    assert some.check(req, entries) == [(6, 0), (7, 0), (8, 0)]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_that_is_no_graph_and_lacks_a_layer_says_nothing(steps, layer):
    """Instead of the numbers of the last one, as if it were a replayed graph."""
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.recorder.on_gpu = True
    some.decode(req)
    some.decode(req, leave_out=layer)
    some.decode(req)
    some.end(req)
    entries, _ = some.ended(req)
    assert some.check(req, entries) == [(6, 0), (8, 0)]


# What it is made of ------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [[[0], [1]], [[1], [0]], [[1, 0]]])
def test_keys_are_found_by_the_table_of_their_layers_group(steps, groups):
    some = steps()
    runner = runner_of(some.layers, [[some.layers[number] for number in own] for own in groups])
    for number, keys in keys_of(runner, some.recorder.model).items():
        assert number in groups[keys.group]


def test_keys_of_queries_of_8_bits_are_scaled_for_both(steps):
    some = steps()
    for number, layer in enumerate(some.layers):
        layer.kv_cache = layer.kv_cache.to(torch.float8_e4m3fn)
        layer._k_scale, layer._q_scale = torch.tensor(0.5), torch.tensor(4.0)
        layer.query_quant = object()
        layer.impl.supports_quant_query_input = bool(number)
    keys = keys_of(some.runner, some.recorder.model)
    assert [keys[number].scale.tolist() for number in range(LAYERS)] == [[0.5], [2.0]]


def test_captures_of_models_with_a_window_are_others(steps):
    ids = [steps(windowed=given).recorder.model.facts.capture_id for given in (False, True)]
    assert len(set(ids)) == 2


def test_only_the_rank_that_answers_makes_records(steps, tmp_path):
    group = SimpleNamespace(all_reduce=lambda part: 2 * part)
    made = [steps(tmp_path / "f.db", Ranks(2, number, group)) for number in range(2)]
    assert [some.recorder._records is not None for some in made] == [True, False]
