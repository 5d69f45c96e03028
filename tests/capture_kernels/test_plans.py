"""Plans that many steps share: with room to spare, in CUDA graphs from queries and keys to records,
and on a device that is not the current one."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, assert_close, other_layer, paged_case  # noqa: E402
from test_fused_decode import assert_outputs, exact_outputs  # noqa: E402
from test_scores import EXACT, prompt, truth  # noqa: E402
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
from test_topk import MASS, ON_GPU, assert_top, mean_probabilities, poison  # noqa: E402

from capture_kernels.decode.fused import FusedDecodePlan  # noqa: E402
from capture_kernels.decode.plan import StatisticsPlan  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.reference import attention_rows  # noqa: E402
from capture_kernels.fingerprint.vector import Layout, fingerprint  # noqa: E402
from capture_kernels.ring.append import MEAN_LAYER, AppendPlan, StepRows  # noqa: E402
from capture_kernels.ring.ring import Drain, Ring  # noqa: E402
from capture_kernels.scores.plan import ScoresPlan  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_GPU else []
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="no two CUDA devices answer"
)


def first_rows(case, count):
    """The first requests of a case alone, in the same memory."""
    names = ("queries", "seq_lens", "req_pool_indices", "lengths", "query_rows", "keys")
    return replace(case, **{name: getattr(case, name)[:count] for name in names})


def record_of(layers, row, layout):
    """The fingerprint of a row of some layers, each of the same lengths, from float64."""
    t = layers[0].lengths[row] - 1
    rows = [
        attention_rows(
            layer.query_rows[row][None],
            layer.keys[row][: t + 1],
            scale=layer.queries.shape[2] ** -0.5,
            positions=[t],
        )[0]
        for layer in layers
    ]
    return fingerprint(rows, t, layout)


ROOM = {"max_rows": 200, "max_length": 40_000, "layers": 3, "programs": 50, "top_k": 2}


@pytest.mark.parametrize("scratch", [1 << 18, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_plan_may_have_room_for_far_more_than_a_step_has(fused, scratch):
    case = paged_case([97, 0, 33], 2, 1, 16, value_dim=16, padding_rows=1)
    options = {**ROOM, "mean_top_k": 2, "hubs": True, "scratch_bytes": scratch}
    assert_steps(case, fused, options, steps=1)


def assert_steps(case, fused, options, steps):
    """Steps of one layer with a larger plan are the reference's."""
    depth = case.v_cache.shape[2]
    if fused:
        options = {**options, "plan": FusedDecodePlan, "value_dim": depth}
    plan = plan_for(case, **options)
    poison(plan)
    hubs = torch.zeros(case.rows, max(case.lengths), device=DEVICE)
    output = torch.full_like(case.queries[..., :depth], torch.nan)
    for _ in range(steps):
        plan.schedule(page_table(case), num_active=active_rows(case), hubs=hubs)
        if fused:
            plan.decode(case.queries, case.k_cache, case.v_cache, output)
        else:
            plan.run(case.queries, case.k_cache)
        found = plan.answer()
        assert_statistics(found, reference(case))
        assert_top(found.top, case, k=2, mean_k=2)
    assert plan.per_head[:, case.rows :].isnan().all() and plan.per_head[1:].isnan().all()
    for row, length in enumerate(case.lengths):
        mean = mean_probabilities(case, row)
        assert_close(hubs[row, :length], steps * mean, largest=steps * MASS, rms=steps * MASS)
        assert not hubs[row, length:].any()
    if fused:
        assert_outputs(output, exact_outputs(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_plan_for_a_large_batch_of_long_rows_serves_one_short_row(fused):
    case = paged_case([4096], 32, 8, 128, dtype=torch.bfloat16, value_dim=128)
    room = {"max_rows": 256, "max_length": 1 << 17, "layers": 4, "programs": None, "top_k": 2}
    assert_steps(case, fused, {**room, "mean_top_k": 2, "hubs": True}, steps=3)


def captured(step):
    """A step as a CUDA graph, and what it returned while it was captured."""
    # Compiled and loaded before a capture begins.
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("layout", "per_layer"),
    [(Layout.LOG16, False), (Layout.LAYERED, False), (Layout.LOG16, True)],
)
def test_one_graph_takes_queries_and_keys_to_the_records_of_the_ring(layout, per_layer):
    whole = paged_case([1500, 64, 700, 2000, 1, 90], 8, 2, 64, dtype=torch.bfloat16, padding_rows=2)
    layers = [other_layer(whole, seed) for seed in range(3)]
    count, numbers = whole.rows, [3, 9, 12]
    plan = plan_for(whole, layers=3, programs=None, max_length=2000)
    ring = Ring(1024, DEVICE)
    append = AppendPlan(ring, max_rows=count, layers=numbers, layout=layout, per_layer=per_layer)
    drain, active = Drain(ring), active_rows(whole)
    enabled = on_device(*[1] * count, dtype=torch.uint8)
    phase = on_device(*[number % 3 for number in range(count)], dtype=torch.uint8)
    position = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    handle = 100 + torch.arange(count, device=DEVICE)
    rows = StepRows(position, handle, phase, enabled, active)

    def step():
        torch.sub(whole.seq_lens, 1, out=position)
        plan.schedule(page_table(whole), enabled=enabled, num_active=active)
        for layer in layers:
            plan.run(layer.queries, layer.k_cache)
        append.run(plan.mean[:, :count], rows)

    graph, _ = captured(step)
    drain.flush()
    random = np.random.default_rng(0)
    for _ in range(12):
        now = random_step(whole, random, whole.seq_lens)
        flags = random.integers(0, 2, whole.active)
        enabled[: whole.active].copy_(torch.tensor(flags, device=DEVICE))
        there = int(random.integers(1, whole.active + 1))
        active.fill_(there)
        for layer in layers:
            layer.queries.copy_(layer.queries.roll(1, -1))
        queries = [layer.queries[: whole.active].double().cpu().numpy() for layer in layers]
        graph.replay()
        records = drain.flush()
        # A row of a single token sees its sink alone.
        asked = [row for row in range(there) if flags[row] and now.lengths[row] > 1]
        expected = [
            (row, number, found)
            for row in asked
            for number, found in (
                enumerate([[layer] for layer in range(3)]) if per_layer else [(None, range(3))]
            )
        ]
        assert len(records) == len(expected)
        for record, (row, number, chosen) in zip(records, expected, strict=True):
            exact = record_of(
                [replace(layers[i], lengths=now.lengths, query_rows=queries[i]) for i in chosen],
                row,
                layout,
            )
            assert record["handle"] == 100 + row and record["phase"] == row % 3
            assert record["position"] == now.lengths[row] - 1
            assert record["layer"] == (MEAN_LAYER if number is None else numbers[number])
            assert_close(record["vector"], exact.vector, **MASSES)
            assert_close([record["sink_mass"]], [exact.sink_mass], **MASSES)
    assert (drain.dropped, drain.torn) == (0, 0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_graphs_of_several_batch_sizes_may_share_a_plan(fused):
    lengths = [900, 64, 700, 1200, 2, 90, 33, 500]
    whole = paged_case(lengths, 8, 2, 64, dtype=torch.bfloat16, value_dim=64)
    options = {"layers": 2, "programs": None, "max_length": 1200, "top_k": 4, "mean_top_k": 4}
    if fused:
        options |= {"plan": FusedDecodePlan, "value_dim": 64}
    plan = plan_for(whole, **options)
    other = other_layer(whole, 1)
    output = torch.zeros_like(whole.queries)

    def step(count):
        batch, second = first_rows(whole, count), first_rows(other, count)
        plan.schedule(page_table(batch))
        for layer in (batch, second):
            if fused:
                plan.decode(layer.queries, layer.k_cache, whole.v_cache, output[:count])
            else:
                plan.run(layer.queries, layer.k_cache)
        return [plan.answer(layer, rows=count) for layer in (0, 1)]

    graphs = {count: captured(lambda count=count: step(count)) for count in (8, 1, 3, 5)}
    random = np.random.default_rng(1)
    for count in (5, 8, 1, 8, 3, 1, 5, 3):
        now = random_step(whole, random, whole.seq_lens)
        poison(plan)
        output.fill_(torch.nan)
        graph, found = graphs[count]
        graph.replay()
        with pytest.raises(OptionError, match="say how many rows"):
            plan.answer()
        for number, layer in enumerate((whole, other)):
            case = first_rows(replace(layer, lengths=now.lengths), count)
            case = replace(case, keys=[k[:n] for k, n in zip(case.keys, case.lengths, strict=True)])
            assert_statistics(found[number], reference(case))
            assert_top(found[number].top, case, k=4, mean_k=4)
            again = plan.answer(number, rows=count)
            assert torch.equal(again.mean, found[number].mean)
            assert len(again.per_head) == len(again.top.positions) == count
        if fused:
            assert_outputs(output[:count], exact_outputs(case))
            assert output[count:].isnan().all()


def test_a_plan_that_graphs_share_does_not_guess_the_rows_of_an_answer(monkeypatch):
    # Stands for a capture, which takes a device: what the host knows of it.
    capturing = [True]
    monkeypatch.setattr(StatisticsPlan, "_is_capturing", lambda plan: capturing[0])
    whole = paged_case([5, 3], 2, 1, 16)
    plan = plan_for(whole)
    for count in (2, 1):
        case = first_rows(whole, count)
        plan.schedule(page_table(case))
        plan.run(case.queries, case.k_cache)
        assert len(plan.answer().mean) == count
    capturing[0] = False
    with pytest.raises(OptionError, match=r"steps of 1 rows and graphs of \[1, 2\]"):
        plan.answer()
    assert len(plan.answer(rows=2).mean) == 2
    assert_statistics(plan.answer(rows=1), reference(first_rows(whole, 1)))


# From here on: plans on a device that is not the current one.


def elsewhere(case):
    """The same tensors on the second device."""
    found = {
        name: value.to("cuda:1")
        for name, value in vars(case).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(case, **found)


@pytest.mark.gpu
@needs_two_gpus
def test_decode_plans_run_on_their_own_device_whichever_is_current():
    here = paged_case([700, 64, 1], 8, 2, 64, dtype=torch.bfloat16, value_dim=64, padding_rows=1)
    case = elsewhere(here)
    ring = Ring(64, "cuda:1")
    rows = StepRows(
        position=case.seq_lens - 1,
        handle=torch.arange(case.rows, device="cuda:1"),
        phase=torch.zeros(case.rows, dtype=torch.uint8, device="cuda:1"),
        enabled=torch.ones(case.rows, dtype=torch.uint8, device="cuda:1"),
        num_active=active_rows(case),
    )
    options = {"programs": None, "top_k": 4, "mean_top_k": 4, "layers": 2}
    beside = plan_for(case, **options)
    fused = plan_for(case, FusedDecodePlan, value_dim=64, **options)
    output = torch.full_like(case.queries, torch.nan)
    assert torch.cuda.current_device() == 0
    for plan in (beside, fused):
        plan.schedule(page_table(case), num_active=active_rows(case))
        for _ in range(2):
            if plan is fused:
                plan.decode(case.queries, case.k_cache, case.v_cache, output)
            else:
                plan.run(case.queries, case.k_cache)
        for layer in (0, 1):
            assert_statistics(plan.answer(layer), reference(case))
            assert_top(plan.answer(layer).top, case, k=4, mean_k=4)
        append = AppendPlan(ring, max_rows=case.rows, layers=[0, 1])
        append.run(plan.mean[:, : case.rows], rows)
    assert_outputs(output, exact_outputs(case))
    records = Drain(ring).flush()
    assert records["handle"].tolist() == [0, 1] * 2
    for record in records:
        exact = record_of([case], int(record["handle"]), Layout.LOG16)
        assert_close(record["vector"], exact.vector, **MASSES)
    assert torch.cuda.current_device() == 0
    with pytest.raises(OptionError, match="query is on cuda:0, the plan on cuda:1"):
        beside.schedule(page_table(case), num_active=active_rows(case))
        beside.run(here.queries, here.k_cache)
    with pytest.raises(OptionError, match="kv_slots of the table is on cuda:0"):
        beside.schedule(page_table(here))


@pytest.mark.gpu
@needs_two_gpus
def test_scores_are_written_on_their_own_device_whichever_is_current():
    case = prompt(100, 4, 2, 64)
    plan = ScoresPlan(
        max_rows=100, max_length=100, heads=4, key_heads=2, head_dim=64, scale=0.125,
        device="cuda:1",
    )  # fmt: skip
    out = plan.output(100, 100)
    tensors = (each.to("cuda:1") for each in (case.query, case.keys, case.table))
    plan.run(*tensors, 0, out)
    assert_close(out, truth(case, range(100), scale=0.125), **EXACT)
    assert torch.cuda.current_device() == 0
