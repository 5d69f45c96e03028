"""Steps of several layers, finished together or one by one: each layer's answer is the truth's."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, assert_close, cases, other_layer, paged_case, without_waiting  # noqa: E402
from test_fused_decode import assert_outputs, exact_outputs  # noqa: E402
from test_statistics import (  # noqa: E402
    MASSES,
    active_rows,
    assert_statistics,
    needs_gpu,
    on_device,
    page_table,
    plan_for,
    random_step,
    reference,
)
from test_topk import MASS, ON_GPU, assert_top, large_keys, mean_probabilities, poison  # noqa: E402

from capture_kernels.decode.fused import FusedDecodePlan  # noqa: E402
from capture_kernels.decode.step.layers import NOTED  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.reference import attention_rows  # noqa: E402
from capture_kernels.fingerprint.vector import Layout, fingerprint  # noqa: E402
from capture_kernels.ring.append import AppendPlan, StepRows  # noqa: E402
from capture_kernels.ring.ring import Drain, Ring  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_GPU else []
LENGTHS = [33, 0, 3]
SINK_TYPES = (torch.bfloat16, torch.float32)


def layers_of(count, *, float8=(), sinks=True):
    """`count` layers of the same requests; all, or some, have learned sinks: (case, sinks)."""
    case = paged_case(LENGTHS, 2, 1, 16, padding_rows=1, value_dim=16)
    made = []
    for number in range(count):
        dtype = torch.float8_e5m2 if number in float8 else None
        # Layers whose sinks are of one type can be finished together.
        learned = on_device(0.5 * number, number - 3.0, dtype=SINK_TYPES[number // 2 % 2])
        made.append((other_layer(case, number, dtype), learned if sinks or number != 1 else None))
    return made


def layer_bytes(case, **options):
    one = plan_for(case, scratch_bytes=1 << 30, **options)
    return one.partial.nbytes + sum(each.nbytes for each in one.top._kept.values())


def schedule(plan, case, **options):
    plan.schedule(page_table(case), num_active=active_rows(case), **options)


def run_layers(plan, layers):
    """Layers whose inputs the plan alone holds."""
    for case, sinks in layers:
        copied = (None if each is None else each.clone() for each in (case.descale, sinks))
        descale, learned = copied
        query = case.queries.clone() if case.queries.is_contiguous() else case.queries
        plan.run(query, case.k_cache.clone(), descale=descale, sinks=learned)


def assert_layer(found, case, sinks, **asked):
    """A layer's answer is the reference's."""
    assert_statistics(found, reference(case, sinks=sinks))
    if asked:
        assert_top(found.top, case, sinks=sinks, **asked)


# fmt: off
KINDS_OF_LAYERS = cases(
    ("two at once", 2, (), True),
    slow=[
        ("some are float8", 3, (1,), True),
        ("one by one", 1, (), True),
        ("all at once", 3, (), True),
        ("keys are read again", 0, (), True),
        ("all are float8", 3, (0, 1, 2), True),
        ("some have learned sinks", 3, (), False),
    ],
)
# fmt: on


@pytest.mark.parametrize(("pending", "float8", "sinks"), KINDS_OF_LAYERS)
def test_layers_of_a_step_are_the_references_however_many_wait(pending, float8, sinks):
    layers = layers_of(3, float8=float8, sinks=sinks)
    case, asked = layers[0][0], {"top_k": 2, "mean_top_k": 2, "hubs": True}
    plan = plan_for(case, layers=3, scratch_bytes=pending * layer_bytes(case, **asked), **asked)
    assert plan.top.pending_layers == max(1, pending)
    poison(plan)
    hubs = torch.zeros(case.rows, 60, device=DEVICE)
    schedule(plan, case, hubs=hubs, enabled=on_device(1, 1, 1, 1, dtype=torch.uint8))
    run_layers(plan, layers)
    expected = np.zeros((case.rows, 60))
    for number, (layer, learned) in enumerate(layers):
        assert_layer(plan.answer(number), layer, learned, k=2, mean_k=2)
        assert plan.per_head[number, case.rows :].isnan().all()
        for row in np.flatnonzero(LENGTHS):
            mean = mean_probabilities(layer, row, sinks=learned)
            expected[row, : len(mean)] += mean
    assert_close(hubs, expected, largest=3 * MASS, rms=3 * MASS)
    assert not plan.arrived.any()


@pytest.mark.slow
def test_there_may_be_more_layers_than_one_launch_notes():
    layers = layers_of(NOTED + 3)
    case = layers[0][0]
    plan = plan_for(case, layers=len(layers), top_k=2, scratch_bytes=1 << 30)
    assert plan.top.pending_layers == len(layers)
    schedule(plan, case)
    run_layers(plan, layers)
    for number, (layer, sinks) in enumerate(layers):
        assert_layer(plan.answer(number), layer, sinks, k=2, mean_k=0)


@pytest.mark.parametrize("strided", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_that_are_rescanned_are_finished_together(strided):
    without = paged_case([30, 300], 1, 1, 16)
    case = other_layer(without, 1)
    large_keys(case, range(7, 300, 64), row=1)
    if strided:
        # Of another kind than the next layer, and so finished before it.
        wide = torch.cat([case.queries, case.queries * torch.nan], -1)
        case = replace(case, queries=wide[..., :16])
    plan = plan_for(without, layers=2, top_k=3, programs=1)
    poison(plan)
    schedule(plan, case)
    run_layers(plan, [(case, None), (without, None)])
    for number, layer in enumerate((case, without)):
        assert_layer(plan.answer(number), layer, None, k=3, mean_k=0)
    assert plan.top._kept["rescan_queue"][0] == (not strided)


@given(count=st.integers(1, 3), pending=st.integers(1, 3), asked=st.integers(0, 2))
@pytest.mark.slow
@settings(max_examples=5)  # each takes seconds in the interpreter
def test_layers_may_be_asked_for_at_any_time(count, pending, asked):
    layers = layers_of(count)
    case = layers[0][0]
    scratch = pending * layer_bytes(case, top_k=2)
    plan = plan_for(case, layers=count, scratch_bytes=scratch, top_k=2)
    schedule(plan, case)
    for number, layer in enumerate(layers):
        run_layers(plan, [layer])
        if number == asked:
            assert_layer(plan.answer(number // 2), *layers[number // 2], k=2, mean_k=0)
    for number, layer in enumerate(layers):
        assert_layer(plan.answer(number), *layer, k=2, mean_k=0)


def test_fused_decode_has_its_output_at_once():
    layers = layers_of(2)
    case = layers[0][0]
    plan = plan_for(case, FusedDecodePlan, value_dim=16, layers=2)
    schedule(plan, case)
    for layer, sinks in layers:
        output = torch.full_like(case.queries, 7.0)
        plan.decode(layer.queries, layer.k_cache, layer.v_cache, output, sinks=sinks)
        assert_outputs(output, exact_outputs(layer, sinks=sinks))
    for number, (layer, sinks) in enumerate(layers):
        assert_layer(plan.answer(number), layer, sinks)


@pytest.mark.parametrize(
    "layout", [Layout.LAYERED, pytest.param(Layout.LOG16, marks=pytest.mark.slow)]
)
def test_the_record_of_all_layers_is_the_fingerprint_of_their_attention(layout):
    layers = layers_of(2)
    case = layers[0][0]
    plan = plan_for(case, layers=2)
    schedule(plan, case)
    run_layers(plan, layers)
    ring, rows = Ring(64, DEVICE), case.rows
    append = AppendPlan(ring, max_rows=rows + 1, layers=[0, 9], layout=layout)
    flags = torch.ones(rows, dtype=torch.uint8, device=DEVICE)
    position, handle = case.seq_lens.int() - 1, torch.arange(rows, device=DEVICE)
    append.run(plan.mean[:, :rows], StepRows(position, handle, flags, flags, active_rows(case)))
    records = Drain(ring).flush()
    # The row without keys has no record.
    assert records["handle"].tolist() == [0, 2]
    for record in records:
        row, t = int(record["handle"]), int(record["position"])
        exact = [
            attention_rows(
                layer.query_rows[row][None], layer.keys[row], scale=0.25, positions=[t],
                sinks=sinks.float().cpu().numpy(),
            )[0]
            for layer, sinks in layers
        ]  # fmt: skip
        truth = fingerprint(exact, t, layout)
        assert_close(record["vector"], truth.vector, **MASSES)
        assert_close([record["sink_mass"]], [truth.sink_mass], **MASSES)


def test_a_step_without_rows_has_layers_all_the_same():
    case = paged_case([], 2, 1, 16)
    plan = plan_for(case, layers=2)
    schedule(plan, case)
    run_layers(plan, [(case, None)] * 2)
    assert plan.answer(1).mean.shape == (0, 32)


def test_layers_of_a_step_that_was_given_up_are_forgotten():
    layers = layers_of(2)
    case = layers[0][0]
    plan = plan_for(case, layers=2)
    for step in (layers[:1], layers[::-1]):
        schedule(plan, case)
        run_layers(plan, step)
    for number, layer in enumerate(layers[::-1]):
        assert_layer(plan.answer(number), *layer)


def test_more_layers_than_planned_are_refused():
    layers = layers_of(2)
    plan = plan_for(layers[0][0])
    schedule(plan, layers[0][0])
    run_layers(plan, layers[:1])
    with pytest.raises(OptionError, match="layer 2 of a plan for 1"):
        run_layers(plan, layers[1:])
    assert_layer(plan.answer(), *layers[0])


@pytest.mark.parametrize("layer", [-1, 1, 2])
def test_a_layer_that_has_not_run_has_no_answer(layer):
    layers = layers_of(1)
    plan = plan_for(layers[0][0], layers=2)
    schedule(plan, layers[0][0])
    run_layers(plan, layers)
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
    scratch = 2 * layer_bytes(case, **options)
    plans = [plan_for(case, layers=5, scratch_bytes=scratch, **options) for _ in range(2)]
    captured, eager = plans
    assert captured.top.pending_layers == 2
    hubs = torch.zeros(2, case.rows, 1000, device=DEVICE)
    enabled = on_device(*[1] * case.rows, dtype=torch.uint8)

    def step(plan, hubs):
        plan.schedule(page_table(case), num_active=active, enabled=enabled, hubs=hubs)
        for query, layer_keys in zip(queries, keys, strict=True):
            plan.run(query, layer_keys)
        answers = [plan.answer(layer) for layer in range(5)]
        return [each for found in answers for each in (found.per_head, found.mean, *found.top)]

    active = active_rows(case)
    # Compiled and loaded before a capture begins.
    step(captured, hubs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured, hubs[0])
    random = np.random.default_rng(0)
    without_waiting(lambda: (graph.replay(), step(eager, hubs[1])))
    for _ in range(30):
        random_step(case, random, case.seq_lens)
        flags = random.integers(0, 2, case.active)
        enabled[: case.active].copy_(torch.tensor(flags, device=DEVICE))
        hubs.zero_()
        graph.replay()
        again = step(eager, hubs[1])
        assert all(map(torch.equal, found, again))
        assert torch.equal(hubs[0], hubs[1])
