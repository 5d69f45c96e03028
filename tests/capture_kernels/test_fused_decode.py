"""Fused decode: attention in float64, and the statistics that the separate pass is held to."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, SLOW, assert_close, cases, paged_case, without_waiting  # noqa: E402
from test_statistics import (  # noqa: E402
    ON_GPU,
    active_rows,
    aligned_keys,
    assert_statistics,
    needs_gpu,
    on_device,
    page_table,
    plan_for,
    put_key,
    random_step,
    reference,
    zeros,
)

from capture_kernels.decode.fused import FusedDecodePlan  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.reference import attention_rows  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_GPU else []
# What memory holds that no kernel may write.
UNTOUCHED = torch.nan


def decode(case, *, statistics=True, enabled=None, sinks=None, output=None, **options):
    """Statistics and output of a case's rows by the kernels."""
    depth = case.v_cache.shape[2]
    plan = plan_for(case, FusedDecodePlan, value_dim=depth, statistics=statistics, **options)
    plan.partial_values.fill_(torch.nan)
    if output is None:
        output = torch.full_like(case.queries[..., :1].expand(-1, -1, depth), UNTOUCHED)
    plan.schedule(page_table(case), enabled=enabled, num_active=active_rows(case))
    plan.decode(
        case.queries,
        case.k_cache,
        case.v_cache,
        output,
        descale=case.descale,
        value_descale=case.descale,
        sinks=sinks,
    )
    if not statistics:
        assert plan.per_head.isnan().all() and plan.mean.isnan().all()
    return plan.answer() if statistics else None, output


def exact_outputs(case, *, scale=None, sinks=None, visibility=None, **options):
    """Attention of all rows in float64, whatever a fingerprint leaves out: [R, H, Dv]; 0 in rows
    that pad the batch or have no keys."""
    _, heads, depth = case.queries.shape
    outputs = np.zeros((case.rows, heads, case.v_cache.shape[2]))
    for row in np.flatnonzero(case.lengths):
        p = attention_rows(
            case.query_rows[row][None],
            case.keys[row],
            scale=depth**-0.5 if scale is None else scale,
            positions=[case.lengths[row] - 1],
            sinks=None if sinks is None else sinks.double().cpu().numpy(),
            **options,
        )[0]
        values = case.values[row][: case.lengths[row]]
        grouped = p.reshape(values.shape[1], -1, len(values))
        outputs[row] = np.einsum("gmt,tgd->gmd", grouped, values).reshape(heads, -1)
    return outputs


def assert_outputs(output, exact):
    """Outputs are rounded once; on a device, weights are rounded to the queries' type as well."""
    rounding = torch.finfo(output.dtype).eps
    if ON_GPU:
        bounds = {"largest": max(2 * rounding, 1e-5), "rms": max(rounding / 2, 1e-5)}
    else:
        # The interpreter cuts a bfloat16 off instead of rounding it to the nearest.
        share = 1.01 if output.dtype == torch.bfloat16 else 0.51
        bounds = {"largest": 5e-6, "rms": 5e-6, "relative": rounding * share}
    assert_close(output, exact, **bounds)


def check(case, *, statistics=True, programs=3, max_length=1000, **options):
    """The kernels' statistics and outputs of a case, once they are the reference's."""
    found, output = decode(
        case, statistics=statistics, programs=programs, max_length=max_length, **options
    )
    assert_outputs(output, exact_outputs(case, **options))
    if statistics:
        assert_statistics(found, reference(case, **options))
    return found, output


# fmt: off
KINDS_OF_ROWS = cases(
    ("odd lengths and a masked prefix", [1, 0, 7, 8, 65], (2, 1, 40), {"value_dim": 24,
     "padding_rows": 2}, {"visibility": Visibility(7, 5)}),
    ("windows", [49, 51, 140], (4, 2, 32), {"value_dim": 32, "seq_dtype": torch.int32},
     {"window": 50, "visibility": Visibility(1, 0, 20)}),
    ("soft cap", [129, 3], (6, 2, 80), {"value_dim": 80, "size": 10.0, "form": "kv_indptr"},
     {"soft_cap": 5.0, "scale": 0.2, "visibility": Visibility(0)}),
    ("values", [65], (2, 1, 16), {"value_dim": 1, "dtype": torch.float32}, {}),
    ("float8 e4m3", [131, 9], (4, 2, 64), {"value_dim": 32, "dtype": torch.float8_e4m3fn,
     "descale": [0.25, 2.0]}, {"visibility": Visibility(1, 4)}),
    slow=[
        ("MQA", [130, 7], (35, 1, 32), {"value_dim": 48, "dtype": torch.bfloat16,
         "form": "kv_indptr", "padding_rows": 1}, {"programs": 50}),
        ("learned sinks", [66, 129], (3, 3, 96), {"value_dim": 8, "dtype": torch.float32,
         "size": 3.0}, {"programs": 7, "sinks": on_device(-3.0, 2.0, 9.0)}),
        ("a mask past the window", [49, 51, 140], (2, 1, 32), {"value_dim": 16}, {"window": 50,
         "visibility": Visibility(3, 100, 70), "programs": 1}),
        ("head_dim 256", [65], (8, 1, 256), {"value_dim": 256}, {}),
        ("float8 e5m2 as it is", [70], (4, 2, 32), {"value_dim": 32, "dtype": torch.float8_e5m2,
         "query_dtype": torch.bfloat16}, {}),
    ],
)
# fmt: on


@pytest.mark.parametrize("statistics", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize(("lengths", "shape", "paged", "options"), KINDS_OF_ROWS)
def test_outputs_and_statistics_agree_with_the_reference(
    lengths, shape, paged, options, statistics
):
    check(paged_case(lengths, *shape, **paged), statistics=statistics, **options)


@pytest.mark.parametrize(
    ("programs", "statistics"),
    [
        (7, False),
        *(pytest.param(*each, marks=SLOW) for each in ((1, True), (2, False), (50, True))),
    ],
)
def test_a_row_may_be_cut_at_any_block(programs, statistics):
    case = paged_case([130, 1, 0, 64, 200], 2, 1, 32, value_dim=32, size=2.0)
    check(case, statistics=statistics, programs=programs, visibility=Visibility(1, 70))


@SLOW
def test_blocks_of_several_tiles():
    case = paged_case([1, 129, 257, 390], 2, 1, 32, value_dim=32)
    check(case, max_length=600_000, programs=2, visibility=Visibility(3, 1, 200))


@SLOW
def test_tiles_of_one_set_of_ranges_are_flushed_together():
    case = paged_case([2500], 2, 1, 16, value_dim=16, size=4.0)
    check(case, max_length=3000, programs=2, visibility=Visibility(1, 900))


@pytest.mark.parametrize("sinks", [None, on_device(0.0, 3.0)])
def test_disabled_rows_still_have_outputs(sinks):
    case = paged_case([70, 130, 64, 5], 2, 1, 32, value_dim=32, padding_rows=1)
    flags = [1, 0, 0, 1]
    found, output = decode(case, enabled=on_device(*flags, 1, dtype=torch.uint8), sinks=sinks)
    assert_outputs(output, exact_outputs(case, sinks=sinks))
    assert_statistics(found, reference(case, sinks=sinks).of_asked(flags))


def test_outputs_of_a_batch_in_which_nobody_asked():
    case = paged_case([70, 5], 2, 1, 32, value_dim=32)
    found, output = decode(case, enabled=on_device(0, 0, dtype=torch.bool))
    assert_outputs(output, exact_outputs(case))
    assert_statistics(found, reference(case).of_asked([0, 0]))


@pytest.mark.parametrize("sinks", [None, on_device(1.0, 2.0)])
def test_wholly_masked_rows_have_outputs_and_no_statistics(sinks):
    case = paged_case([0, 4, 70], 2, 1, 32, value_dim=32)
    found, _ = check(case, visibility=Visibility(1, 90), sinks=sinks)
    assert not found.valid.any() and (found.logsumexp == -torch.inf).all()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_outputs_of_padding_rows_and_of_rows_without_keys_are_0(lengths):
    case = paged_case(lengths, 2, 1, 32, value_dim=32, padding_rows=2)
    found, output = decode(case)
    assert (output == 0).all() and not found.valid.any()


@pytest.mark.parametrize("programs", [1, 4])
def test_masked_keys_far_above_the_visible_ones_leave_statistics_exact(programs):
    case = paged_case([200, 70], 2, 2, 32, value_dim=16, dtype=torch.float32)
    for row in range(case.active):
        put_key(case, row, 2, aligned_keys(case, row, 50.0, 32**-0.5))
    found, output = check(case, programs=programs, visibility=Visibility(1, 3))
    # The output is the masked key's value.
    exact = np.stack([values[2] for values in case.values])
    assert_close(output, exact, largest=1e-5, rms=1e-5)
    assert found.logsumexp.max() < 20


def test_of_huge_logits_the_largest_has_it_all():
    case = paged_case([130, 64, 2], 2, 1, 32, value_dim=32, size=2e3)
    check(case, scale=1.0, visibility=Visibility(0))


def test_a_learned_sink_far_above_all_keys_takes_everything():
    case = paged_case([130, 3], 2, 1, 32, value_dim=32, dtype=torch.float32)
    _, output = check(case, sinks=on_device(300.0, -300.0))
    assert not output[:, 0].any() and output[:, 1].any()


def test_a_head_without_a_learned_sink_may_have_minus_infinity():
    case = paged_case([70, 3], 2, 1, 32, value_dim=32)
    check(case, sinks=on_device(-torch.inf, 1.0))


def test_caches_and_outputs_may_lie_as_engines_have_them():
    case = paged_case([33, 3], 4, 2, 32, value_dim=32, padding_rows=1)
    joint = torch.stack([case.k_cache, case.v_cache], dim=1)
    assert joint.shape[1:] == (2, 2, 32)
    around = torch.full((5, 6, 40), UNTOUCHED, dtype=torch.float16, device=DEVICE)
    output = around[1:4, 2:, 8:]
    apart = replace(case, k_cache=joint[:, 0], v_cache=joint[:, 1])
    found, _ = decode(apart, output=output)
    assert_outputs(output, exact_outputs(case))
    assert_statistics(found, reference(case))
    outside = torch.ones_like(around, dtype=torch.bool)
    outside[1:4, 2:, 8:] = False
    assert around[outside].isnan().all()


def test_an_axis_of_one_number_may_have_any_stride():
    case = paged_case([33, 1, 5], 4, 2, 1, value_dim=1, padding_rows=1)

    def strided(tensor):
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]

    names = ("queries", "k_cache", "v_cache")
    apart = replace(case, **{name: strided(getattr(case, name)) for name in names})
    assert {getattr(apart, name).stride(-1) for name in names} == {2}
    output = strided(torch.full_like(case.queries, UNTOUCHED))
    found, _ = decode(apart, output=output)
    assert_outputs(output, exact_outputs(case))
    assert_statistics(found, reference(case))


PLAN = {
    "value_dim": 8, "max_rows": 3, "max_length": 100, "heads": 4, "key_heads": 2, "head_dim": 16,
    "scale": 0.25, "device": DEVICE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_dim": 512}, r"value_dim 512 .*MLA"),
        ({"value_dim": 0}, r"value_dim 0"),
        ({"head_dim": 576}, r"head_dim 576 .*MLA"),
        ({"chosen": (1, 2)}, r"leave `chosen` out"),
        ({"heads": 5}, r"5 query heads over 2"),
    ],
)
def test_plans_that_cannot_be_made_are_refused(change, message):
    with pytest.raises(OptionError, match=message) as refused:
        FusedDecodePlan(**PLAN | change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"values": zeros(9, 1, 8)},
        {"values": zeros(9, 2, 16)},
        {"values": zeros(9, 16)},
        {"values": zeros(9, 2, 8, dtype=torch.float32)},
        {"values": zeros(9, 2, 16)[..., ::2]},
        {"output": zeros(2, 4, 8)},
        {"output": zeros(3, 4, 16)},
        {"output": zeros(3, 4, 8, dtype=torch.float32)},
        {"output": zeros(3, 4, 16)[..., ::2]},
        {"query": zeros(3, 4, 8)},
        {"keys": zeros(9, 2, 16, dtype=torch.bfloat16)},
        {"value_descale": zeros(4, dtype=torch.float32)},
        {"value_descale": zeros(2)},
        {"values": zeros()},
        {"values": torch.zeros(9, 2, 8, dtype=torch.float16, device="meta")},
        {"sinks": zeros(2, dtype=torch.float32)},
        {"descale": zeros(3, dtype=torch.float32)},
    ],
    ids=[
        "value heads", "value dims", "flat values", "other values", "strided values",
        "output rows", "output dims", "other output", "strided output", "query dims", "other keys",
        "long value_descale", "float16 value_descale", "values without axes", "values elsewhere",
        "few sinks", "long descale",
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_a_plan_are_refused_before_anything_is_written(change):
    case = paged_case([1, 2, 3], 4, 2, 16, value_dim=8)
    plan = FusedDecodePlan(**PLAN)
    plan.partial.fill_(torch.nan)
    plan.schedule(page_table(case))
    tensors = {
        "query": case.queries,
        "keys": case.k_cache,
        "values": case.v_cache,
        "output": zeros(3, 4, 8),
    }
    tensors |= change
    tensors["output"].fill_(UNTOUCHED)
    with pytest.raises(OptionError) as refused:
        plan.decode(**tensors)
    assert "\n" not in str(refused.value)
    assert tensors["output"].isnan().all() and plan.partial.isnan().all()


# From here on: what only a device can show.


@pytest.mark.gpu
@needs_gpu
def test_a_run_neither_waits_nor_allocates():
    case = paged_case(
        [700, 64, 2000, 1], 8, 2, 128, dtype=torch.bfloat16, value_dim=128, padding_rows=2
    )
    plan = plan_for(case, FusedDecodePlan, value_dim=128, programs=None, max_length=4000)
    table, active = page_table(case), active_rows(case)
    enabled = on_device(*[1] * case.rows, dtype=torch.uint8)
    output = torch.full_like(case.queries, UNTOUCHED)

    def step():
        plan.schedule(table, enabled=enabled, num_active=active)
        plan.decode(case.queries, case.k_cache, case.v_cache, output)
        return plan.answer()

    found = without_waiting(step)
    assert_statistics(found, reference(case))
    assert_outputs(output, exact_outputs(case))


@pytest.mark.gpu
@needs_gpu
def test_a_graph_follows_the_lengths_of_each_step():
    case = paged_case(
        [1500, 64, 700, 2000, 1], 8, 2, 64, dtype=torch.float16, value_dim=64, padding_rows=2
    )
    table, active = page_table(case), active_rows(case)
    enabled = on_device(*[1] * case.rows, dtype=torch.uint8)
    captured, eager = (
        plan_for(case, FusedDecodePlan, value_dim=64, programs=None, max_length=2000)
        for _ in range(2)
    )
    outputs = torch.zeros(2, *case.queries.shape, dtype=torch.float16, device=DEVICE)

    def step(plan, output):
        plan.schedule(table, enabled=enabled, num_active=active)
        plan.decode(case.queries, case.k_cache, case.v_cache, output)
        return plan.answer()

    # Compiled and loaded before a capture begins.
    step(captured, outputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured, outputs[0])
    random = np.random.default_rng(0)
    for replay in range(50):
        now = random_step(case, random, case.seq_lens)
        flags = random.integers(0, 2, case.active)
        enabled[: case.active].copy_(torch.tensor(flags, device=DEVICE))
        outputs.fill_(UNTOUCHED)
        graph.replay()
        again = step(eager, outputs[1])
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(found.mean, again.mean) and torch.equal(found.per_head, again.per_head)
        if replay % 10 == 9:
            assert_outputs(outputs[0], exact_outputs(now))
            assert_statistics(found, reference(now).of_asked(flags))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("lengths", "shape", "dtype", "descale"),
    [
        ([8192, 4097, 33], (32, 8, 128), torch.bfloat16, None),
        ([8192], (32, 8, 128), torch.float8_e4m3fn, 0.5),
        ([100_000], (8, 2, 128), torch.float16, None),
    ],
    ids=["bf16", "fp8", "100K"],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_long_rows_agree_with_the_reference(lengths, shape, dtype, descale, statistics):
    case = paged_case(lengths, *shape, dtype=dtype, size=3.0, value_dim=shape[2], descale=descale)
    check(case, statistics=statistics, programs=None, max_length=max(lengths))


@pytest.mark.parametrize("asked", [{"top_k": 1}, {"mean_top_k": 2}, {"hubs": True}])
def test_a_top_k_without_statistics_is_refused(asked):
    case = paged_case([3], 2, 1, 16, value_dim=16)
    with pytest.raises(OptionError, match="need statistics"):
        plan_for(case, FusedDecodePlan, value_dim=16, statistics=False, **asked)
