"""Full attention probabilities, against `reference.attention_rows` in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, as_float64, assert_close, without_waiting  # noqa: E402
from scored import (  # noqa: E402
    EXACT,
    FEW,
    NAN,
    assert_all_written,
    poisoned,
    prompt,
    truth,
)

from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.scores.plan import ScoresPlan, ScoresTuning  # noqa: E402

# Where a device answers these tests are for it; elsewhere kernels are interpreted.
ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no CUDA device answers")


def rarely(*values):
    """Parameters that only make test-all tries."""
    return (pytest.param(value, marks=pytest.mark.slow) for value in values)


# Many edges of tiles in a few keys.
SMALL = ScoresTuning(block_m=64, block_n=32, warps=4, stages=2)
SPLIT = ScoresTuning(block_m=64, block_n=16, warps=4, stages=2, splits=2)
TUNINGS = pytest.mark.parametrize("tuning", [SPLIT, *rarely(SMALL)], ids=["split", "small"])


def plan_for(case, *, scale=None, tuning=SMALL, max_rows=None, **options):
    tokens, heads, head_dim = case.query.shape
    return ScoresPlan(
        max_rows=max_rows or tokens,
        max_length=tokens,
        heads=heads,
        key_heads=case.keys.shape[1],
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        device=DEVICE,
        tuning=tuning,
        **options,
    )


def check(case, *, start=0, rows=None, spare=0, tuning=SMALL, sinks=None, exact=EXACT, **options):
    """The scores of some queries are the reference's; gives them back, float64[R, H, T]."""
    tokens, _, head_dim = case.query.shape
    rows = tokens - start if rows is None else rows
    end = start + rows
    plan = plan_for(case, tuning=tuning, **options)
    out, whole = poisoned(rows, len(plan.order), end + spare)
    query = case.query[start:end]
    plan.run(query, case.keys, case.table, start, out, descale=case.descale, sinks=sinks)
    assert_all_written(out, whole)
    found = as_float64(out)
    options.setdefault("scale", head_dim**-0.5)
    expected = truth(case, range(start, end), sinks=sinks, **options)
    assert_close(found[:, :, :end], expected[:, :, :end], **exact)
    # Where a key is not seen there is 0 and not only little.
    assert not found[:, :, end:].any()
    assert not found[:, :, :end][expected[:, :, :end] == 0].any()
    return found


@pytest.mark.parametrize("shape", [(6, 2), *rarely((1, 1), (3, 1), (4, 4))])
@pytest.mark.parametrize("head_dim", [80, *rarely(20, 32, 96, 160, 256)])
def test_every_shape_agrees_with_the_reference(shape, head_dim):
    check(prompt(47, *shape, head_dim, size=2.0))


@pytest.mark.parametrize("tokens", [1, 33, *rarely(2, 31, 32, 97)])
@pytest.mark.parametrize("tuning", [SPLIT, None], ids=["split", "default"])
def test_any_number_of_tokens(tokens, tuning):
    check(prompt(tokens), tuning=tuning, spare=tokens % 3)


def test_more_query_heads_of_a_key_head_than_a_block_has_lanes():
    check(prompt(3, heads=72))


def test_a_few_queries_after_many_keys_share_their_keys_out():
    case = prompt(601)
    plan = plan_for(case, max_rows=2, tuning=None)
    assert plan.tuning.splits > 1
    out, whole = poisoned(2, 2, 610)
    plan.run(case.query[599:], case.keys, case.table, 599, out)
    assert_all_written(out, whole)
    assert_close(out[:, :, :601], truth(case, [599, 600], scale=32**-0.5), **EXACT)
    assert not out[:, :, 601:].any()


def test_no_rows():
    case = prompt(5)
    plan_for(case).run(case.query[:0], case.keys, case.table, 3, poisoned(0, 2, 5)[0])
    plan_for(case).run(case.query, case.keys, case.table, 0, poisoned(0, 2, 5)[0], last=0)


@pytest.mark.parametrize("window", [1, 17, *rarely(2, 15, 16, 47, 500)])
@TUNINGS
def test_windows(window, tuning):
    check(prompt(70), window=window, tuning=tuning)


@pytest.mark.parametrize("mask_prefix", [40, 70, *rarely(1, 31, 32, 69, 500)])
@pytest.mark.parametrize("window", [0, 25])
def test_masked_positions_are_removed_and_the_rest_renormalised(mask_prefix, window):
    found = check(prompt(70), mask_prefix=mask_prefix, window=window, tuning=SPLIT)
    sums = found.sum(axis=2)
    np.testing.assert_allclose(sums[mask_prefix:], 1.0, atol=2e-3)
    assert not sums[:mask_prefix].any()


@TUNINGS
@pytest.mark.parametrize(
    "options", [{"mask_prefix": 9}, *rarely({}, {"window": 20}, {"soft_cap": 2.0})]
)
def test_learned_sinks_are_in_the_denominator_only(options, tuning):
    sinks = torch.tensor([-3.0, 0.0, 2.0, 60.0], device=DEVICE)
    found = check(prompt(40, heads=4), sinks=sinks, tuning=tuning, **options)
    assert (found.sum(axis=2)[:, 2] < 0.99).all()
    assert not found[:, 3].any()


@pytest.mark.parametrize("soft_cap", [5.0, *rarely(1.0, 50.0)])
def test_soft_caps(soft_cap):
    check(prompt(70, size=10.0), soft_cap=soft_cap)


@pytest.mark.parametrize(
    "chosen", [(5,), (0, 2, 3), *rarely((0,), (2, 1), (1, 2, 3), (4, 5, 0, 1))]
)
def test_chosen_heads_come_in_ascending_order(chosen):
    sinks = torch.arange(6.0, device=DEVICE) - 3
    check(prompt(31, heads=6, key_heads=2), chosen=chosen, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_of_queries_and_keys(dtype):
    check(prompt(70, head_dim=48, dtype=dtype, size=4.0))


def test_float32_tiles():
    check(prompt(40, dtype=torch.float32), tuning=None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, *rarely(torch.float8_e5m2)])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, *rarely(torch.float16, torch.float32)])
@pytest.mark.parametrize("descale", [None, (0.5, 0.02)])
def test_float8_keys(dtype, query_dtype, descale):
    check(prompt(33, 2, 2, dtype=dtype, query_dtype=query_dtype, descale=descale))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_one_descale_for_all_key_heads(shape, soft_cap):
    case = prompt(33, 2, 2, dtype=torch.float8_e4m3fn, descale=0.25)
    one = torch.full(shape, 0.25, dtype=torch.float32, device=DEVICE)
    check(case._replace(descale=one), soft_cap=soft_cap)


def test_huge_logits():
    # Logits of some 10,000, which float32 holds to 1e-3, as a softmax of them then has it.
    case = prompt(70, size=1e4, dtype=torch.float32)
    found = check(case)
    assert found.max() == 1.0
    # And two keys in the lead by turns, with the same huge logit.
    keys = torch.zeros(40, 1, 32, device=DEVICE)
    keys[::3] = 25.0
    query = torch.full((40, 1, 32), 12.5, device=DEVICE)
    plan = ScoresPlan(
        max_rows=40,
        max_length=40,
        heads=1,
        key_heads=1,
        head_dim=32,
        scale=1.0,
        device=DEVICE,
        tuning=SPLIT,
    )
    out, _ = poisoned(40, 1, 40)
    plan.run(query, keys, torch.arange(40, device=DEVICE), 0, out)
    for t in range(40):
        expected = np.zeros(40)
        expected[: t + 1 : 3] = 1 / (t // 3 + 1)
        assert_close(out[t, 0], expected, **EXACT)


@pytest.mark.parametrize("sizes", [(1, 40, 26, 33), (99, 1)])
@pytest.mark.parametrize("options", [{}, {"window": 37, "mask_prefix": 11}])
def test_chunks_of_a_prompt_make_the_whole(sizes, options):
    case = prompt(100)
    plan = plan_for(case, max_rows=max(sizes), **options)
    out, whole = poisoned(100, 2, 100)
    start = 0
    for size in sizes:
        end = start + size
        plan.run(case.query[start:end], case.keys, case.table[:end], start, out[start:end])
        start = end
    assert_all_written(out, whole)
    expected = truth(case, range(100), scale=32**-0.5, **options)
    assert_close(out, expected, **EXACT)
    at_once, _ = poisoned(100, 2, 100)
    plan_for(case, **options).run(case.query, case.keys, case.table, 0, at_once)
    # The same but for the last place of a float16, if at all.
    assert_close(out, at_once, largest=5e-4, rms=1e-5)


@pytest.mark.parametrize("last", [33, *rarely(1, 40, 90)])
def test_the_last_queries_of_a_chunk(last):
    case = prompt(80)
    rows = min(last, 40)
    out, whole = poisoned(rows, 2, 81)
    plan_for(case).run(case.query[40:], case.keys, case.table, 40, out, last=last)
    assert_all_written(out, whole)
    expected = truth(case, range(80 - rows, 80), scale=32**-0.5)
    assert_close(out[:, :, :80], expected, **EXACT)
    assert not out[:, :, 80].any()


def test_keys_that_no_query_sees_are_not_read():
    # An engine may have given away slots that lie behind the window, or never had the masked ones.
    case = prompt(90)
    table = case.table.clone()
    table[:33] = 2**30
    for options in ({"window": 18}, {"mask_prefix": 33}):
        check(case._replace(table=table), start=50, tuning=SPLIT, **options)


def test_tables_and_tensors_of_any_type_and_strides():
    case = prompt(40, 4, 2)
    wide = torch.full((40, 6, 64), NAN, dtype=case.query.dtype, device=DEVICE)
    wide[:, 1:5, :32] = case.query
    keys = torch.full((2, len(case.keys), 40), NAN, dtype=case.keys.dtype, device=DEVICE)
    keys[:, :, :32] = case.keys.transpose(0, 1)
    table = torch.stack([case.table.long(), case.table.long() + 2**40], dim=1)[:, 0]
    assert table.stride(0) == 2 and table.dtype == torch.int64
    moved = case._replace(
        query=wide[:, 1:5, :32], keys=keys.transpose(0, 1)[:, :, :32], table=table
    )
    check(moved)


@pytest.mark.parametrize("order", [(2, 0, 1), *rarely((0, 1, 2), (1, 2, 0), (2, 1, 0))])
def test_outputs_of_any_strides(order):
    case = prompt(45)
    shape = [45, 2, 48]
    memory = torch.full([shape[i] for i in order], NAN, dtype=torch.float16, device=DEVICE)
    out = memory.permute(*np.argsort(order).tolist())
    assert list(out.shape) == shape
    plan_for(case).run(case.query, case.keys, case.table, 0, out)
    assert_close(out[:, :, :45], truth(case, range(45), scale=32**-0.5), **EXACT)
    assert not out[:, :, 45:].any()


@pytest.mark.parametrize("columns", [64, 45])
def test_the_output_of_a_plan_begins_its_rows_at_lines_of_memory(columns):
    case = prompt(45, 4, 2)
    plan = plan_for(case, chosen=(1, 3))
    out = plan.output(45, columns)
    assert out.shape == (45, 2, columns) and out.dtype == torch.float16
    assert [stride * 2 % 128 for stride in out.stride()[:2]] == [0, 0]
    assert out.is_contiguous() == (columns == 64)
    out.fill_(NAN)
    plan.run(case.query, case.keys, case.table, 0, out)
    expected = truth(case, range(45), scale=32**-0.5, chosen=(1, 3))
    assert_close(out[:, :, :45], expected, **EXACT)
    assert not out[:, :, 45:].any()


@given(
    tokens=st.integers(1, 50),
    shape=st.sampled_from([(1, 1), (4, 2), (3, 1), (5, 5)]),
    window=st.one_of(st.just(0), st.integers(1, 100)),
    mask_prefix=st.one_of(st.just(0), st.integers(1, 100)),
    soft_cap=st.sampled_from([None, 4.0]),
    with_sinks=st.booleans(),
    size=st.sampled_from([0.1, 1.0, 8.0]),
    tuning=st.sampled_from([SMALL, SPLIT, None]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_prompt_agrees_with_the_reference(
    tokens, shape, window, mask_prefix, soft_cap, with_sinks, size, tuning, seed, data
):
    start = data.draw(st.integers(0, tokens - 1))
    rows = data.draw(st.integers(1, tokens - start))
    heads = data.draw(st.sets(st.integers(0, shape[0] - 1), min_size=1))
    learned = data.draw(st.lists(st.floats(-5, 5), min_size=shape[0], max_size=shape[0]))
    check(
        prompt(tokens, *shape, size=size, seed=seed),
        start=start,
        rows=rows,
        spare=data.draw(st.integers(0, 70)),
        sinks=torch.tensor(learned, device=DEVICE) if with_sinks else None,
        exact=FEW,
        tuning=tuning,
        window=window,
        mask_prefix=mask_prefix,
        soft_cap=soft_cap,
        chosen=sorted(heads),
    )


def test_scratch_memory_does_not_grow_with_the_keys():
    shape = {"heads": 32, "key_heads": 8, "head_dim": 128, "scale": 1.0, "device": DEVICE}
    for length in (1 << 12, 1 << 20):
        many = ScoresPlan(max_rows=4096, max_length=length, **shape)
        assert many.scratch_bytes == 4096 * 32 * 8 + 32 * 4
        few = ScoresPlan(max_rows=4, max_length=length, **shape)
        assert few.scratch_bytes < 1 << 20


@pytest.mark.gpu
@needs_gpu
def test_a_run_neither_waits_nor_allocates():
    case = prompt(700, 8, 2, 128, dtype=torch.bfloat16)
    plan = plan_for(case, tuning=None, window=300)
    sinks = torch.zeros(8, device=DEVICE)
    out = plan.output(700, 700)

    def run():
        plan.run(case.query, case.keys, case.table, 0, out, sinks=sinks)

    without_waiting(run)
    expected = truth(case, range(700), scale=128**-0.5, window=300, sinks=sinks)
    assert_close(out, expected, **EXACT)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_gives_the_same_scores():
    case = prompt(500, 8, 2, 128, dtype=torch.bfloat16)
    plan = plan_for(case, tuning=None)
    out, eager = plan.output(500, 500), plan.output(500, 500)
    plan.run(case.query, case.keys, case.table, 0, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(case.query, case.keys, case.table, 0, out)
    for _ in range(20):
        case.query.normal_()
        out.fill_(NAN)
        graph.replay()
        plan.run(case.query, case.keys, case.table, 0, eager)
        assert torch.equal(out, eager)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "options"),
    [
        (torch.bfloat16, 128, {}),
        (torch.float16, 64, {"window": 1024}),
        (torch.bfloat16, 80, {"soft_cap": 30.0}),
        (torch.float16, 256, {"mask_prefix": 700}),
        (torch.float8_e4m3fn, 128, {}),
        (torch.float8_e5m2, 160, {}),
        (torch.float32, 96, {}),
    ],
    ids=["bf16", "fp16 window", "80 capped", "256 masked", "e4m3", "160 e5m2", "fp32"],
)
def test_long_prompts_agree_with_the_reference(dtype, head_dim, options):
    case = prompt(2037, 8, 2, head_dim, dtype=dtype, size=3.0)
    check(case, tuning=None, **options)


@pytest.mark.gpu
@needs_gpu
def test_outputs_and_caches_are_addressed_in_64_bits():
    # The two rows of the output, and most slots of the cache, are past 2**31 elements.
    case = prompt(70, 2, 2, 128)
    keys = torch.empty(len(case.keys) << 25, dtype=torch.float16, device=DEVICE)
    keys = keys.as_strided(case.keys.shape, (1 << 25, 1 << 24, 1)).copy_(case.keys)
    out = torch.empty((1 << 31) + 512, dtype=torch.float16, device=DEVICE)
    out = out.as_strided((2, 2, 128), ((1 << 31) + 64, 128, 1)).fill_(NAN)
    plan_for(case, tuning=None).run(case.query[68:], keys, case.table, 68, out)
    assert_close(out[:, :, :70], truth(case, [68, 69], scale=128**-0.5), **EXACT)
    assert not out[:, :, 70:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 577, "key_heads": 1}, "MLA"),
        ({"key_heads": 3}, "4 query heads over 3"),
        ({"chosen": (4,)}, r"0\.\.3"),
        ({"scale": NAN}, "above 0"),
        ({"window": -1}, "0 or more"),
        ({"mask_prefix": -1}, "0 or more"),
    ],
)
def test_plans_that_cannot_be_are_refused(change, message):
    options = {
        "max_rows": 4,
        "max_length": 4,
        "heads": 4,
        "key_heads": 2,
        "head_dim": 32,
        "scale": 1.0,
        **change,
    }
    with pytest.raises(OptionError, match=message):
        ScoresPlan(device=DEVICE, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 4, 16)}, "query has the shape"),
        ({"query": torch.zeros(5, 4, 32)}, "raise max_rows"),
        ({"query": torch.zeros(3, 4, 32, dtype=torch.float64)}, "query is torch.float64"),
        ({"query": torch.zeros(3, 4, 32, dtype=torch.float16)}, "keys is torch.float32"),
        ({"query": torch.zeros(3, 4, 64, device=DEVICE)[:, :, ::2]}, "contiguous"),
        ({"keys": torch.zeros(9, 4, 32)}, "keys has the shape"),
        ({"keys": torch.zeros(9, 2, 32, dtype=torch.uint8)}, "keys is torch.uint8"),
        ({"table": torch.zeros(6, dtype=torch.int64)}, r"\[7 or more\]"),
        ({"table": torch.zeros(7)}, "int32 or int64"),
        ({"table": torch.zeros(1, 7, dtype=torch.int32)}, "one request"),
        ({"start": -1}, r"0\.\.7"),
        ({"start": 6}, r"6\.\.8"),
        ({"out": torch.zeros(3, 4, 6, dtype=torch.float16)}, "or more columns"),
        ({"out": torch.zeros(3, 2, 7, dtype=torch.float16)}, "or more columns"),
        ({"out": torch.zeros(2, 4, 7, dtype=torch.float16)}, "or more columns"),
        ({"out": torch.zeros(3, 4, 7)}, "out is torch.float32"),
        ({"last": 2}, "or more columns"),
        ({"last": -1}, "last must be 0"),
        ({"descale": torch.ones(4)}, "descale has the shape"),
        ({"descale": torch.ones(2, dtype=torch.float16)}, "descale is torch.float16"),
        ({"sinks": torch.zeros(2)}, "sinks has the shape"),
    ],
)
def test_tensors_that_do_not_fit_the_plan_are_refused(change, message):
    plan = ScoresPlan(
        max_rows=4, max_length=8, heads=4, key_heads=2, head_dim=32, scale=1.0, device=DEVICE
    )
    arguments = {
        "query": torch.zeros(3, 4, 32),
        "keys": torch.zeros(9, 2, 32),
        "table": torch.zeros(8, dtype=torch.int32),
        "start": 4,
        "out": torch.full((3, 4, 7), NAN, dtype=torch.float16),
        **change,
    }
    arguments = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with pytest.raises(OptionError, match=message):
        plan.run(**arguments)
    if "out" not in change:
        assert arguments["out"].isnan().all()


def test_tensors_of_another_device_are_refused():
    case = prompt(4)
    plan = plan_for(case)
    out = torch.zeros(4, 2, 4, dtype=torch.float16, device="meta")
    with pytest.raises(OptionError, match="out is on meta"):
        plan.run(case.query, case.keys, case.table, 0, out)
