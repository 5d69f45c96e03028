"""Steps of several layers, of which some are finished at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, assert_close, paged_case  # noqa: E402
from test_statistics import (  # noqa: E402
    active_rows,
    needs_gpu,
    on_device,
    page_table,
    plan_for,
    random_step,
)
from test_topk import MASS, ON_GPU, large_keys, poison  # noqa: E402

from capture_kernels.decode.fused import FusedDecodePlan  # noqa: E402
from capture_kernels.decode.step.layers import NOTED  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.ring.append import AppendPlan, StepRows  # noqa: E402
from capture_kernels.ring.ring import Ring  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_GPU else []
LOOKED_FOR = {"top_k": 5, "mean_top_k": 3, "hubs": True}
LENGTHS = [70, 0, 3]


def layers_of(count, *, differ=None):
    """One case, and `count` layers of it: keys and queries, and what `run` takes beside."""
    case = paged_case(LENGTHS, 2, 1, 16, padding_rows=1, value_dim=16)
    made = []
    for number in range(count):
        other = paged_case(LENGTHS, 2, 1, 16, padding_rows=1, seed=number)
        inputs = {"sinks": on_device(0.5 * number, number - 3.0)}
        keys = other.k_cache[torch.randperm(len(other.k_cache), device=DEVICE)]
        # Slots lie alike in all layers.
        keys = torch.where(case.k_cache.isnan(), torch.nan, keys.nan_to_num(0.25))
        if differ == "all float8" or (differ == "float8" and number == 1):
            keys = keys.to(torch.float8_e5m2)
            inputs["descale"] = on_device(2.0 + number)
        if differ == "sinks" and number == 1:
            del inputs["sinks"]
        made.append((other.queries, keys, inputs))
    return case, made


def bytes_a_layer(case, **options):
    one = plan_for(case, scratch_bytes=1 << 30, **options)
    return one.partial.nbytes + sum(each.nbytes for each in one.top._kept.values())


def run_steps(plan, case, layers, hubs=None, enabled=None):
    """A step of whose inputs the plan alone knows."""
    plan.schedule(page_table(case), num_active=active_rows(case), enabled=enabled, hubs=hubs)
    for query, keys, inputs in layers:
        others = {name: each.clone() for name, each in inputs.items()}
        # What is cloned is contiguous.
        query = query.clone() if query.is_contiguous() else query
        plan.run(query, keys.clone(), **others)


def tensors_of(statistics):
    return [statistics.per_head, statistics.mean, *(statistics.top or ())]


def assert_same(found, expected):
    for ours, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mean_top_k", [1, 5])
def test_a_head_mean_without_hubs_is_what_each_layer_has_alone(mean_top_k):
    case, layers = layers_of(3)
    plan = plan_for(case, layers=3, mean_top_k=mean_top_k)
    assert plan.top.pending_layers == 3
    poison(plan)
    run_steps(plan, case, layers)
    for number, layer in enumerate(layers):
        alone = plan_for(case, mean_top_k=mean_top_k)
        run_steps(alone, case, [layer])
        assert_same(plan.answer(number), alone.answer())
        assert alone.answer().top.mean_positions[0].min() >= 0


@pytest.mark.parametrize(
    ("at_once", "again", "differ"),
    [
        pytest.param(1, False, None, id="one by one"),
        pytest.param(2, False, None, id="two at once"),
        pytest.param(3, False, None, id="all at once"),
        pytest.param(1, True, None, id="computed again"),
        pytest.param(3, False, "float8", id="some are float8"),
        pytest.param(3, False, "all float8", id="all are float8"),
        pytest.param(3, False, "sinks", id="some have learned sinks"),
    ],
)
def test_layers_are_what_each_is_alone(at_once, again, differ):
    case, layers = layers_of(3, differ=differ)
    enabled = on_device(1, 1, 1, 1, dtype=torch.uint8)
    scratch = 0 if again else at_once * bytes_a_layer(case, **LOOKED_FOR)
    hubs, summed = (torch.zeros(case.rows, 60, device=DEVICE) for _ in range(2))
    plan = plan_for(case, layers=3, scratch_bytes=scratch, **LOOKED_FOR)
    assert plan.top.pending_layers == at_once
    poison(plan)
    run_steps(plan, case, layers, hubs, enabled)
    for number, layer in enumerate(layers):
        alone = plan_for(case, scratch_bytes=0 if again else 1 << 30, **LOOKED_FOR)
        poison(alone)
        run_steps(alone, case, [layer], summed, enabled)
        assert_same(plan.answer(number), alone.answer())
        assert plan.per_head[number, case.rows :].isnan().all()
    assert_close(hubs, summed, largest=MASS, rms=MASS)
    assert not plan.arrived.any()


def test_there_may_be_more_layers_than_one_launch_notes():
    case, layers = layers_of(NOTED + 3)
    plan, one_by_one = (
        plan_for(case, layers=len(layers), top_k=3, scratch_bytes=scratch)
        for scratch in (1 << 30, 0)
    )
    assert (plan.top.pending_layers, one_by_one.top.pending_layers) == (len(layers), 1)
    for each in (plan, one_by_one):
        poison(each)
        run_steps(each, case, layers)
    for number in range(len(layers)):
        assert_same(plan.answer(number), one_by_one.answer(number))


@pytest.mark.parametrize("strided", [False, True])
def test_layers_whose_keys_are_read_again_are_finished_together(strided):
    case = paged_case([30, 900], 1, 1, 16)
    without = case.k_cache.clone()
    large_keys(case, range(7, 900, 64), row=1)
    queries = case.queries
    if strided:
        # Of another kind than the next layer's, and so finished before it.
        queries = torch.cat([queries, queries * torch.nan], -1)[..., :16]
    layers = [(queries, case.k_cache, {}), (-case.queries, without, {})]
    plan = plan_for(case, layers=2, top_k=5)
    assert plan.top.pending_layers == 2
    poison(plan)
    run_steps(plan, case, layers)
    found = []
    for number, layer in enumerate(layers):
        alone = plan_for(case, top_k=5)
        run_steps(alone, case, [layer])
        assert alone.top._kept["rescan_queue"][0] == (number == 0)
        assert_same(plan.answer(number), alone.answer())
        found.append(alone.answer().top.positions.tolist())
    assert found[0] != found[1] and min(found[0][1][0]) >= 0


@settings(max_examples=5, deadline=None)
@given(count=st.integers(1, 4), at_once=st.integers(1, 4), asked=st.integers(0, 3))
def test_layers_may_be_asked_for_at_any_time(count, at_once, asked):
    case, layers = layers_of(count)
    scratch = at_once * bytes_a_layer(case, top_k=4)
    plans = [plan_for(case, layers=count, scratch_bytes=scratch, top_k=4) for _ in range(2)]
    for plan in plans:
        plan.schedule(page_table(case), num_active=active_rows(case))
    for number, (query, keys, inputs) in enumerate(layers):
        for plan in plans:
            plan.run(query, keys, **inputs)
        if number == asked:
            early = [each.clone() for each in tensors_of(plans[1].answer(number // 2))]
            late = tensors_of(plans[1].answer(number // 2))
            assert all(map(torch.equal, early, late))
    for number in range(count):
        assert_same(plans[1].answer(number), plans[0].answer(number))


def test_fused_decode_has_its_output_at_once():
    case, layers = layers_of(3)
    together, alone = (
        plan_for(case, FusedDecodePlan, value_dim=16, layers=count, top_k=4) for count in (3, 1)
    )
    together.schedule(page_table(case), num_active=active_rows(case))
    outputs, expected = torch.zeros(2, case.rows, 2, 16, dtype=case.queries.dtype, device=DEVICE)
    found = []
    for query, keys, inputs in layers:
        together.decode(query, keys, case.v_cache, outputs, **inputs)
        alone.schedule(page_table(case), num_active=active_rows(case))
        alone.decode(query, keys, case.v_cache, expected, **inputs)
        assert torch.equal(outputs, expected) and outputs.any()
        found.append([each.clone() for each in tensors_of(alone.answer())])
    for number, answer in enumerate(found):
        assert all(map(torch.equal, tensors_of(together.answer(number)), answer))


def test_all_layers_go_to_the_ring_as_one_record():
    case, layers = layers_of(3)
    plan = plan_for(case, layers=3)
    run_steps(plan, case, layers)
    ring = Ring(64, DEVICE)
    append = AppendPlan(ring, max_rows=case.rows + 1, layers=[0, 5, 9])
    flags = torch.ones(case.rows, dtype=torch.uint8, device=DEVICE)
    position, handle = case.seq_lens.int() - 1, torch.arange(case.rows, device=DEVICE)
    append.run(
        plan.mean[:, : case.rows], StepRows(position, handle, flags, flags, active_rows(case))
    )
    # A row of a single key, the sink, and one of none have no record.
    assert int(ring.state[0]) == sum(length > 1 for length in LENGTHS)


def test_a_step_without_rows_has_layers_all_the_same():
    case = paged_case([], 2, 1, 16)
    plan = plan_for(case, layers=2)
    run_steps(plan, case, [(case.queries, case.k_cache, {})] * 2)
    assert plan.answer(1).mean.shape == (0, 32)


def test_layers_of_a_step_that_was_given_up_are_forgotten():
    case, layers = layers_of(3)
    plan, other = (plan_for(case, layers=3, top_k=3) for _ in range(2))
    run_steps(plan, case, layers[:2])
    run_steps(plan, case, layers[::-1])
    run_steps(other, case, layers[::-1])
    for number in range(3):
        assert_same(plan.answer(number), other.answer(number))


def test_more_layers_than_planned_are_refused():
    case, layers = layers_of(3)
    plan = plan_for(case, layers=2)
    run_steps(plan, case, layers[:2])
    before = plan.per_head.clone()
    with pytest.raises(OptionError, match="layer 3 of a plan for 2"):
        plan.run(layers[2][0], layers[2][1])
    assert torch.equal(plan.per_head.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("layer", [-1, 1, 2])
def test_a_layer_that_has_not_run_has_no_answer(layer):
    case, layers = layers_of(1)
    plan = plan_for(case, layers=2)
    run_steps(plan, case, layers)
    with pytest.raises(OptionError, match="in which 1 layers have run"):
        plan.answer(layer)
    assert plan.answer(0).valid.tolist() == [True, False, True, False]


def test_a_plan_without_layers_is_refused():
    with pytest.raises(OptionError, match="layers must be 1 or more, got 0"):
        plan_for(paged_case([5], 2, 1, 16), layers=0)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_of_several_layers_follows_the_lengths_of_each_step():
    case = paged_case([1500, 64, 700, 2000, 1, 90], 8, 2, 64, dtype=torch.bfloat16, padding_rows=2)
    queries = [torch.randn_like(case.queries) for _ in range(5)]
    keys = [case.k_cache, *(torch.randn_like(case.k_cache) for _ in range(4))]
    options = {"top_k": 16, "mean_top_k": 16, "hubs": True, "max_length": 2000, "programs": None}
    scratch = 2 * bytes_a_layer(case, **options)
    plans = [plan_for(case, layers=5, scratch_bytes=scratch, **options) for _ in range(2)]
    captured, eager = plans
    assert captured.top.pending_layers == 2
    hubs = torch.zeros(2, case.rows, 1000, device=DEVICE)
    enabled = on_device(*[1] * case.rows, dtype=torch.uint8)

    def step(plan, hubs):
        plan.schedule(page_table(case), num_active=active, enabled=enabled, hubs=hubs)
        for query, layer_keys in zip(queries, keys, strict=True):
            plan.run(query, layer_keys)
        return [tensor for layer in range(5) for tensor in tensors_of(plan.answer(layer))]

    active = active_rows(case)
    # Compiled and loaded before a capture begins.
    step(captured, hubs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured, hubs[0])
    random = np.random.default_rng(0)
    step(eager, hubs[1])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
        step(eager, hubs[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for _ in range(30):
        random_step(case, random, case.seq_lens)
        enabled[: case.active].copy_(
            torch.tensor(random.integers(0, 2, case.active), device=DEVICE)
        )
        hubs.zero_()
        graph.replay()
        again = step(eager, hubs[1])
        assert all(map(torch.equal, found, again))
        assert torch.equal(hubs[0], hubs[1])
