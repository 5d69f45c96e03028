# ruff: noqa: N803
"""Statistics beside an engine, against `reference.decode_statistics` in float64."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from paged import DEVICE, HUGE, SLOW, assert_close, cases, paged_case, without_waiting  # noqa: E402

from capture_kernels.decode.key_pass import column_ranges, next_flush  # noqa: E402
from capture_kernels.decode.plan import StatisticsPlan  # noqa: E402
from capture_kernels.decode.step.page_table import PageTable  # noqa: E402
from capture_kernels.decode.tuning import PAIRS, Tuning  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.reference import attention_rows, decode_statistics  # noqa: E402
from capture_kernels.fingerprint.vector import (  # noqa: E402
    Layout,
    Visibility,
    fingerprint,
    log2_bins,
    place_bins,
)
from capture_kernels.launch import LOGSUMEXP, HeadGroups  # noqa: E402

# Where a device answers these tests are for it; elsewhere kernels are interpreted.
ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no CUDA device answers")

# Some five times what float32 gives on a CPU. Tensor cores sum each mass as two bfloat16.
if ON_GPU:
    MASSES = {"largest": 1e-4, "rms": 2e-5}
    NATS = {"largest": 1e-4, "rms": 3e-5, "relative": 1e-5}
else:
    MASSES = {"largest": 4e-6, "rms": 1e-6}
    NATS = {"largest": 3e-6, "rms": 1e-6, "relative": 2e-6}


class Truth(NamedTuple):
    """What `decode_statistics` says of R active rows and the H chosen heads."""

    valid: np.ndarray  # bool[R], whether a row has a visible key
    columns: np.ndarray  # float64[R, H, 29]: columns 0..28 of `per_head`
    logsumexp: np.ndarray  # float64[R, H]
    bands: np.ndarray  # float64[R, H, 6]: those of log16, and of layered

    def of_asked(self, asked):
        """The same where only some rows are asked for, bool[R]: the others say nothing."""
        hidden = ~np.asarray(asked, bool)
        blank = (self.valid.copy(), self.columns.copy(), self.logsumexp.copy(), self.bands.copy())
        for values, nothing in zip(blank, (False, 0.0, -np.inf, 0.0), strict=True):
            values[hidden] = nothing
        return Truth(*blank)


def reference(case, *, scale=None, chosen=None, sinks=None, visibility=None, **options):
    """The truth of a case's active rows."""
    _, heads, depth = case.queries.shape
    order = list(range(heads)) if chosen is None else sorted(chosen)
    learned = None if sinks is None else sinks.double().cpu().numpy()
    columns = np.zeros((case.active, len(order), 29))
    bands = np.zeros((case.active, len(order), 6))
    logsumexp = np.zeros((case.active, len(order)))
    valid = np.zeros(case.active, bool)
    for row, length in enumerate(case.lengths):
        found = decode_statistics(
            case.query_rows[row],
            case.keys[row],
            scale=depth**-0.5 if scale is None else scale,
            position=length - 1,
            visibility=visibility or Visibility(),
            sinks=learned,
            **options,
        )
        near, middle, _ = found.bands_layered[order].T
        shares = [near, middle, found.sink_mass[order], found.entropy[order]]
        shares.append(np.full(len(order), float(found.valid)))
        columns[row] = np.column_stack([found.hist[order], found.places[order], *shares])
        bands[row] = np.column_stack([found.bands_log16[order], found.bands_layered[order]])
        logsumexp[row] = found.logsumexp[order]
        valid[row] = found.valid
    return Truth(valid, columns, logsumexp, bands)


def page_table(case):
    if case.kv_indptr is None:
        return PageTable.of_requests(case.req_to_token, case.req_pool_indices, case.seq_lens)
    return PageTable.of_indptr(case.kv_indptr, case.kv_indices, case.seq_lens)


def active_rows(case):
    return torch.tensor([case.active], dtype=torch.int32, device=case.queries.device)


def plan_for(
    case, plan=StatisticsPlan, *, max_rows=None, max_length=1000, scale=None, programs=3, **options
):
    """A plan for a case's shapes whose buffers are poisoned."""
    rows, heads, depth = case.queries.shape
    made = plan(
        max_rows=max_rows or rows + 1,
        max_length=max_length,
        heads=heads,
        key_heads=case.k_cache.shape[1],
        head_dim=depth,
        scale=depth**-0.5 if scale is None else scale,
        device=case.queries.device,
        programs=programs,
        **options,
    )
    for buffer in (made.partial, made.per_head, made.mean):
        buffer.fill_(torch.nan)
    return made


def measure(case, *, enabled=None, masks=None, sinks=None, **options):
    """The statistics of a case's rows by the kernels."""
    plan = plan_for(case, **options)
    plan.schedule(page_table(case), enabled=enabled, num_active=active_rows(case), masks=masks)
    plan.run(case.queries, case.k_cache, descale=case.descale, sinks=sinks)
    found = plan.answer()
    # No row but those of the step is written.
    assert plan.per_head[:, case.rows :].isnan().all() and plan.mean[:, case.rows :].isnan().all()
    # The next launch counts from 0.
    assert not plan.arrived.any()
    return found


def assert_statistics(found, truth):
    """The active rows are the truth's, and nothing is said of those that pad the batch."""
    active = len(truth.valid)
    assert found.valid.tolist() == [*truth.valid.tolist(), *[False] * (len(found.mean) - active)]
    assert not found.mean[active:].any() and not found.mean[:, 30:].any()
    with np.errstate(invalid="ignore"):
        logsumexp = truth.logsumexp.mean(axis=1)
    known = np.where(np.isfinite(logsumexp), logsumexp, 0.0)
    assert_close(found.mean[:active, 29], known, **NATS)
    assert (found.logsumexp[active:] == -torch.inf).all()
    assert (
        not found.per_head[active:, :, : LOGSUMEXP.value].any()
        and not found.per_head[..., 30:].any()
    )

    ours = found.per_head[:active].double().cpu().numpy()
    assert_close(ours[..., LOGSUMEXP.value], truth.logsumexp, **NATS)
    assert_close(ours[..., :28], truth.columns[..., :28], **MASSES)
    assert (ours[..., 28] == truth.columns[..., 28]).all()
    assert_close(found.mean[:active, :29], truth.columns.mean(axis=1), **MASSES)
    near, middle = ours[..., 24], ours[..., 25]
    bands = [ours[..., :3].sum(-1), ours[..., 3:8].sum(-1), ours[..., 8:16].sum(-1)]
    bands += [near, middle, ours[..., 28] - near - middle]
    assert_close(np.stack(bands, axis=-1), truth.bands, **MASSES)


def check(case, *, programs=3, max_length=1000, tuning=None, enabled=None, **options):
    """The kernels' statistics of a case, once they are the truth's."""
    plan = {"programs": programs, "max_length": max_length, "tuning": tuning}
    found = measure(case, enabled=enabled, **plan, **options)
    truth = reference(case, **options)
    if enabled is not None:
        truth = truth.of_asked(enabled[: case.active].cpu().numpy() != 0)
    assert_statistics(found, truth)
    return found


def on_device(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


# fmt: off
KINDS_OF_ROWS = cases(
    ("odd lengths", [1, 2, 63, 65, 129], (2, 1, 40), {"seq_dtype": torch.int32,
     "padding_rows": 2}, {}),
    ("learned sinks", [65, 5], (8, 2, 16), {"dtype": torch.bfloat16, "size": 2.0},
     {"sinks": on_device(-3.0, 0.0, 1.0, 2.0, 4.0, 9.0, -30.0, 30.0)}),
    ("soft cap", [97, 3], (2, 1, 80), {"size": 10.0}, {"soft_cap": 5.0, "scale": 0.2}),
    ("a wide window over the model's", [1, 50, 51, 91, 130], (2, 1, 32), {}, {"window": 50,
     "visibility": Visibility(1, 0, 90)}),
    ("no sinks", [1, 2, 70], (2, 1, 32), {}, {"visibility": Visibility(0)}),
    ("four sinks", [1, 4, 5, 97], (2, 1, 32), {}, {"visibility": Visibility(4)}),
    ("more sinks than keys", [1, 70], (2, 1, 32), {}, {"visibility": Visibility(100)}),
    ("chosen heads", [33, 9], (12, 3, 16), {}, {"chosen": (11, 4, 0, 3, 5),
     "sinks": on_device(*range(12))}),
    ("one head", [100], (12, 3, 32), {"dtype": torch.float32}, {"chosen": (6,)}),
    ("float8 e4m3", [97, 9], (2, 2, 32), {"dtype": torch.float8_e4m3fn, "descale": [0.25, 2.0]},
     {"soft_cap": 30.0}),
    ("float8 as it is", [70], (2, 1, 32), {"dtype": torch.float8_e4m3fn}, {}),
    ("sinks of the queries' type", [65, 5], (2, 1, 16), {"dtype": torch.bfloat16},
     {"sinks": on_device(-3.0, 2.0, dtype=torch.bfloat16)}),
    slow=[
        ("MQA", [130, 7], (35, 1, 32), {"dtype": torch.bfloat16, "form": "kv_indptr"},
         {"programs": 50}),
        ("a key head each", [66, 2, 129], (3, 3, 96), {"dtype": torch.float32, "size": 3.0,
         "form": "kv_indptr", "padding_rows": 1}, {"programs": 7}),
        ("head_dim 256", [65], (8, 1, 256), {"padding_rows": 1}, {}),
        ("a narrow window under the model's", [2, 64, 65, 101, 140], (2, 1, 32), {}, {"window": 64,
         "visibility": Visibility(4, 2, 20), "programs": 1}),
        ("masked prefix", [11, 12, 14, 15, 74, 75, 200], (2, 1, 32), {"form": "kv_indptr"},
         {"visibility": Visibility(14, 10), "window": 190}),
        ("float8 e5m2", [131, 9], (4, 2, 64), {"dtype": torch.float8_e5m2, "descale": 0.5,
         "query_dtype": torch.bfloat16}, {}),
        ("float8 with float32 queries", [131, 9], (4, 2, 64), {"dtype": torch.float8_e4m3fn,
         "query_dtype": torch.float32, "size": 4.0}, {}),
    ],
)
# fmt: on


@pytest.mark.parametrize(("lengths", "shape", "paged", "options"), KINDS_OF_ROWS)
def test_rows_of_every_kind_agree_with_the_reference(lengths, shape, paged, options):
    check(paged_case(lengths, *shape, **paged), **options)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_descale_may_be_for_all_key_heads(shape):
    case = paged_case([70, 9], 4, 2, 32, dtype=torch.float8_e4m3fn, descale=0.25)
    check(replace(case, descale=case.descale[0].reshape(shape)))


@pytest.mark.parametrize("power", [-60, *(pytest.param(each, marks=SLOW) for each in (-14, 0, 40))])
def test_queries_of_any_size_meet_float8_keys(power):
    # The kernel scales them into float16; the softmax scale makes up for their size.
    case = paged_case(
        [70, 9], 2, 1, 32,
        dtype=torch.float8_e4m3fn, query_dtype=torch.bfloat16, size=2.0 ** (power + 1),
    )  # fmt: skip
    check(case, scale=32**-0.5 * 2.0**-power)


@pytest.mark.parametrize(
    "programs", [2, 50, *(pytest.param(each, marks=SLOW) for each in (1, 3, 7))]
)
def test_a_row_may_be_cut_at_any_block(programs):
    # Fifteen blocks: fewer programs than blocks, rows of many programs, programs without blocks.
    case = paged_case([130, 1, 0, 64, 200], 2, 1, 32, size=2.0)
    check(case, programs=programs)


@pytest.mark.parametrize(
    ("max_length", "block_keys", "programs"),
    [(300_000, 128, 3), pytest.param(600_000, 256, 2, marks=SLOW)],
)
def test_blocks_of_several_tiles(max_length, block_keys, programs):
    case = paged_case([1, 65, 257], 1, 1, 32)
    assert plan_for(case, max_length=max_length).scheduled.block_keys == block_keys
    check(case, max_length=max_length, programs=programs, visibility=Visibility(3, 1))


@pytest.mark.parametrize("programs", [3, pytest.param(1, marks=SLOW), pytest.param(80, marks=SLOW)])
def test_tiles_of_one_set_of_ranges_are_flushed_together(programs):
    # Long enough that no range begins or ends for several tiles; or each of 40 is a split.
    check(paged_case([2500], 2, 1, 16, size=4.0), max_length=3000, programs=programs)


def test_of_huge_logits_the_largest_has_it_all():
    found = check(paged_case([130, 64, 2], 2, 1, 32, size=2e3), scale=1.0, visibility=Visibility(0))
    assert found.logsumexp.max() > 1e4
    assert (found.hist.amax(-1) > 0.999).all() and (found.entropy < 1e-3).all()


def aligned_keys(case, row, nats, scale):
    """Keys whose logits with a row's queries are `nats`: float64[H, D], one key head each."""
    query = case.query_rows[row]
    return query * (nats / (scale * (query**2).sum(axis=1, keepdims=True)))


def put_key(case, row, position, key):
    """Give a row another key, in the cache and in the truth."""
    slot = case.req_to_token[case.req_pool_indices[row], position]
    rounded = torch.tensor(key).to(case.k_cache.dtype)
    case.k_cache[slot] = rounded.to(DEVICE)
    case.keys[row][position] = rounded.double().numpy()


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("first", [0, 64])
def test_visible_keys_far_below_a_sink_are_described_exactly(programs, first):
    visibility = Visibility(first + 1)
    case = paged_case([200, 65 + first], 2, 2, 32, dtype=torch.float32)
    for row in range(case.active):
        put_key(case, row, first, aligned_keys(case, row, 50.0, 32**-0.5))
    found = check(case, programs=programs, visibility=visibility)
    assert (found.sink_mass > 1 - 1e-6).all() and found.valid[:1].all()


@pytest.mark.parametrize("programs", [1, 4])
def test_visible_keys_that_are_lost_beside_a_sink_make_a_row_invalid(programs):
    case = paged_case([200, 65], 2, 2, 32, dtype=torch.float32)
    for row in range(case.active):
        put_key(case, row, 0, aligned_keys(case, row, 300.0, 32**-0.5))
    found = measure(case, programs=programs)
    assert not found.valid.any() and not found.mean[:, :26].any()
    assert found.per_head.isfinite().all() and not found.per_head[..., :26].any()
    assert (found.sink_mass == 1).all()
    assert_close(found.logsumexp, reference(case).logsumexp, **NATS)


@pytest.mark.parametrize(
    ("position", "number"),
    [
        *((0, torch.nan), (40, torch.inf)),
        *(pytest.param(*each, marks=SLOW) for each in ((96, torch.nan), (0, torch.inf))),
    ],
)
def test_a_row_with_a_key_that_is_not_finite_is_invalid_and_its_neighbours_are_exact(
    position, number
):
    case = paged_case([33, 97, 70], 4, 2, 16, padding_rows=1)
    slot = case.req_to_token[case.req_pool_indices[1], position]
    case.queries[1].abs_()
    case.k_cache[slot] = number
    for joined in (1, 2):
        found = measure(case, tuning=PAIRS._replace(key_heads=joined))
        assert found.valid.tolist() == [True, False, True, False]
        # Nothing that is not a number goes on to a record, or to the means of other ranks.
        assert found.mean.isfinite().all() and not found.mean[1].any()
        others = {name: getattr(case, name)[::2] for name in ("lengths", "query_rows", "keys")}
        rows = found._replace(per_head=found.per_head[[0, 2, 3]], mean=found.mean[[0, 2, 3]])
        assert_statistics(rows, reference(replace(case, **others)))


@pytest.mark.parametrize(
    ("flags", "dtype"), [([1, 0, 1, 0], torch.bool), ([0, 0, 0, 0], torch.uint8)]
)
def test_disabled_rows_are_not_read(flags, dtype):
    case = paged_case([70, 130, 64, 5], 2, 1, 32, padding_rows=1)
    for row in np.flatnonzero(np.logical_not(flags)):
        case.req_to_token[case.req_pool_indices[row]] = HUGE
        case.queries[row] = torch.nan
    # Nobody sets the flags of padding rows.
    found = check(case, enabled=on_device(*flags, 1, dtype=dtype))
    assert found.valid[: case.active].tolist() == [bool(flag) for flag in flags]


def test_each_row_may_have_another_masked_prefix():
    case = paged_case([70, 130, 64, 5], 2, 1, 32, padding_rows=1)
    # Less than nothing is nothing; and nobody sets those of padding rows.
    masks = [0, 100, 7, -3, -7]
    found = (
        measure(case, masks=on_device(*masks, dtype=torch.int32), visibility=Visibility(1, 33))
        .per_head.double()
        .cpu()
        .numpy()
    )
    for row, masked in enumerate(masks[: case.active]):
        truth = reference(case, visibility=Visibility(1, max(masked, 0)))
        assert_close(found[row, :, :29], truth.columns[row], **MASSES)
        assert_close(found[row, :, LOGSUMEXP.value], truth.logsumexp[row], **NATS)


@pytest.mark.parametrize("sinks", [None, on_device(1.0, 2.0)])
def test_rows_without_real_keys_are_empty(sinks):
    found = check(
        paged_case([0, 4, 6, 30], 2, 1, 32, padding_rows=1),
        visibility=Visibility(2, 6),
        sinks=sinks,
    )
    assert found.valid.tolist() == [False] * 3 + [True, False]
    assert (found.logsumexp[:3] == -torch.inf).all() and not found.mean[:3].any()


@pytest.mark.parametrize("form", ["req_to_token", "kv_indptr"])
def test_a_step_without_rows_is_answered(form):
    found = measure(paged_case([], 4, 2, 32, form=form))
    assert found.per_head.shape == (0, 4, 32) and found.mean.shape == (0, 32)


def test_a_batch_of_padding_alone_is_empty():
    found = check(paged_case([], 4, 2, 32, padding_rows=3))
    assert not found.valid.any()


def test_a_shorter_step_leaves_nothing_of_the_one_before():
    options = {"max_length": 1000, "programs": 3}
    long = paged_case([3, 97, 33], 1, 1, 16)
    short = paged_case([65, 3], 1, 1, 16, seed=1, form="kv_indptr")
    plan = plan_for(long, **options)
    for case in (long, short, long):
        plan.schedule(page_table(case))
        plan.run(case.queries, case.k_cache)
        assert_statistics(plan.answer(), reference(case))


def strided_queries(case):
    rows, heads, depth = case.queries.shape
    around = torch.full((rows, heads + 3, depth + 5), torch.nan, device=DEVICE)
    around = around.to(case.queries.dtype)
    around[:, 1 : heads + 1, 5:] = case.queries
    return replace(case, queries=around[:, 1 : heads + 1, 5:])


def joint_cache(case):
    both = torch.full_like(case.k_cache, torch.nan).repeat(1, 2, 1).unflatten(1, (2, -1))
    both[:, 1] = case.k_cache
    return replace(case, k_cache=both[:, 1])


def head_major_cache(case):
    return replace(case, k_cache=case.k_cache.transpose(0, 1).contiguous().transpose(0, 1))


def int64_table(case):
    return replace(case, req_to_token=case.req_to_token.long())


def int32_indices(case):
    _, _, depth = case.queries.shape
    whole = paged_case(case.lengths, 4, 2, depth, form="kv_indptr")
    return replace(whole, kv_indices=whole.kv_indices.int())


def int32_pool(case):
    return replace(case, req_pool_indices=case.req_pool_indices.int())


def part_of_a_table(case):
    columns = case.req_to_token.shape[1]
    wide = torch.cat([torch.full_like(case.req_to_token, HUGE), case.req_to_token], dim=1)
    return replace(case, req_to_token=wide[:, columns:])


@pytest.mark.parametrize(
    "lay_out",
    [
        strided_queries,
        joint_cache,
        *(
            pytest.param(each, marks=SLOW)
            for each in (head_major_cache, int64_table, int32_indices, int32_pool, part_of_a_table)
        ),
    ],
)
def test_tensors_may_lie_as_engines_have_them(lay_out):
    check(lay_out(paged_case([65, 3], 4, 2, 24)))


def test_rows_of_the_last_queries_of_a_prompt():
    prompts = [0, 0, 0, 3, 3]
    whole = paged_case([70, 70, 70, 33, 33], 1, 1, 16)
    lengths = (68, 69, 70, 1, 33)
    keys = [whole.keys[prompt][:length] for prompt, length in zip(prompts, lengths, strict=True)]
    requests = whole.req_pool_indices[prompts]
    seq_lens = on_device(*lengths, dtype=torch.int64)
    case = replace(whole, lengths=lengths, seq_lens=seq_lens, req_pool_indices=requests, keys=keys)
    found = check(case)

    # The same rows, each with the index in a flat table where its request begins.
    slots, columns = case.req_to_token.flatten(), case.req_to_token.shape[1]
    plan = plan_for(case)
    plan.schedule(PageTable(slots, requests * columns, seq_lens))
    plan.run(case.queries, case.k_cache)
    assert torch.equal(plan.answer().mean, found.mean)


@pytest.mark.parametrize(
    ("visibility", "window", "sinks"),
    [(None, 0, None), (Visibility(2, 3, 100), 80, on_device(0.0, 2.0, -1.0, 5.0))],
)
def test_the_mean_row_holds_the_fingerprint_of_either_layout(visibility, window, sinks):
    case = paged_case([2, 65, 150], 4, 2, 32, size=2.0)
    found = measure(case, visibility=visibility, window=window, sinks=sinks)
    means = found.mean.double().cpu().numpy()
    for row, length in enumerate(case.lengths):
        t, mean = length - 1, means[row]
        rows = attention_rows(
            case.query_rows[row][None],
            case.keys[row],
            scale=32**-0.5,
            positions=[t],
            window=window,
            sinks=None if sinks is None else sinks.cpu().numpy(),
        )
        seen = [max(0, t - window + 1) if window else 0]
        log16 = fingerprint(rows, t, Layout.LOG16, visibility, seen)
        layered = fingerprint(rows, t, Layout.LAYERED, visibility, seen)
        assert bool(found.valid[row]) == (log16 is not None)
        if log16 is None or layered is None:
            continue
        hist, places, entropy = mean[:16], mean[16:24], mean[27]
        bands = [hist[:3].sum(), hist[3:8].sum(), hist[8:].sum()]
        assert_close([*bands, entropy, *hist], log16.vector, **MASSES)
        bands = [mean[24], mean[25], 1.0 - mean[24] - mean[25]]
        assert_close([*bands, entropy, *places, *[entropy] * 8], layered.vector, **MASSES)
        assert_close([mean[26]], [log16.sink_mass], **MASSES)


def test_rows_may_list_the_keys_of_the_models_window_alone():
    case = paged_case([1, 50, 51, 130], 2, 1, 32, form="kv_indptr", padding_rows=1)
    ends = np.cumsum(case.lengths)
    lists = [
        case.kv_indices[max(end - 50, end - length) : end]
        for end, length in zip(ends, case.lengths, strict=True)
    ]
    indptr = np.cumsum([0, *map(len, lists), HUGE])
    windowed = replace(
        case, kv_indices=torch.cat(lists), kv_indptr=on_device(*indptr, dtype=torch.int32)
    )
    check(windowed, window=50, visibility=Visibility(2, 30))


def test_uniform_attention_within_a_models_window_has_an_entropy_of_one():
    case = paged_case([400, 33], 2, 1, 16, size=0.0)
    found = check(case, window=48)
    assert_close(found.entropy, np.ones((2, 2)), **MASSES)


@SLOW
@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=2),
    shape=st.sampled_from([(1, 1), (2, 1)]),
    visibility=st.builds(
        Visibility,
        sink_tokens=st.integers(0, 5),
        mask_prefix=st.integers(0, 20),
        window=st.one_of(st.just(0), st.integers(1, 140)),
    ),
    window=st.one_of(st.just(0), st.integers(1, 140)),
    size=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 2**31),
    programs=st.lists(st.integers(1, 20), min_size=2, max_size=2, unique=True),
)
@settings(max_examples=6)  # each takes seconds in the interpreter
def test_answers_are_shares_that_depend_neither_on_slots_nor_on_programs(
    lengths, shape, visibility, window, size, seed, programs
):
    case = paged_case(lengths, *shape, 16, seed=seed, size=size)
    slots = len(case.k_cache)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    cache = torch.empty_like(case.k_cache)
    cache[order] = case.k_cache
    used = case.req_to_token < slots
    table = torch.where(used, order[case.req_to_token.clamp(max=slots - 1)].int(), HUGE)
    moved = replace(case, k_cache=cache, req_to_token=table)
    options = {"visibility": visibility, "window": window}
    here, there, elsewhere = (
        measure(case, programs=programs[0], **options),
        measure(moved, programs=programs[0], **options),
        measure(case, programs=programs[1], **options),
    )
    assert torch.equal(here.mean, there.mean)
    assert_close(here.mean, elsewhere.mean, **MASSES)

    per_head = here.per_head.double().cpu().numpy()
    hist, places, near, middle, sink, entropy, valid = np.split(
        per_head[..., :29], [16, 24, 25, 26, 27, 28], axis=-1
    )
    slack = MASSES["largest"]
    assert (per_head[..., :29] >= 0).all() and (per_head[..., :29] <= 1 + slack).all()
    assert (entropy <= 1).all() and (sink <= 1).all()
    assert_close(hist.sum(-1, keepdims=True), valid, **MASSES)
    assert_close(places.sum(-1, keepdims=True), valid, **MASSES)
    # d < 10 and d < 100 lie between d < 8 and 16, and between d < 64 and 128.
    upto = np.cumsum(hist, axis=-1)
    for share, lower, upper in ((near, 2, 3), (near + middle, 5, 6)):
        assert (share[..., 0] >= upto[..., lower] - slack).all()
        assert (share[..., 0] <= upto[..., upper] + slack).all()


@triton.jit
def _ranges_and_due(row, tiles, count_tiles, ranges, due, TILE_KEYS: tl.constexpr):
    visible, real = tl.load(row), tl.load(row + 1)
    c = tl.arange(0, 32)
    first, after = column_ranges(c, visible, real, tl.load(row + 2))
    tl.store(ranges + c, first)
    tl.store(ranges + 32 + c, after)
    for i in range(0, count_tiles):
        tl.store(due + i, next_flush(tl.load(tiles + i), first, after, TILE_KEYS))


@given(
    length=st.one_of(st.integers(1, 300), st.integers(1, 200_000)),
    hidden=st.one_of(st.just(0), st.integers(0, 200_000)),
    sinks=st.integers(0, 70),
    masked=st.one_of(st.just(0), st.integers(0, 300)),
    window=st.one_of(st.just(0), st.integers(1, 100_000)),
    tile=st.sampled_from([32, 64]),
)
@settings(max_examples=25)  # each takes seconds in the interpreter
def test_columns_are_the_ranges_of_their_bins_and_are_flushed_in_time(
    length, hidden, sinks, masked, window, tile
):
    in_model = min(length, window) if window else length
    first_real = max(masked, hidden)
    real = min(max(length - first_real, 0), in_model)
    visible, seen = min(max(length - max(first_real, sinks), 0), in_model), in_model
    last = max(seen - 1, 0) // tile
    begins = sorted({0, last // 3, last // 2, max(last - 1, 0), last})
    ranges = torch.full((2, 32), -7, dtype=torch.int32, device=DEVICE)
    due = torch.full((len(begins),), -7, dtype=torch.int32, device=DEVICE)
    row = on_device(visible, real, seen, dtype=torch.int32)
    tiles = on_device(*begins, dtype=torch.int32)
    _ranges_and_due[(1,)](row, tiles, len(begins), ranges, due, TILE_KEYS=tile)

    d = np.arange((last + 1) * tile)
    shown = d[:visible]
    expected = np.zeros((len(d), 32), bool)
    expected[shown, log2_bins(shown)] = True
    if visible:
        expected[shown, 16 + place_bins(visible)[::-1]] = True
    expected[:visible, 24], expected[:visible, 25] = shown < 10, (shown >= 10) & (shown < 100)
    expected[visible:real, 26], expected[real:seen, 27] = True, True
    first, after = ranges.cpu().numpy().astype(np.int64)
    inside = (d[:, None] >= first) & (d[:, None] < after)
    np.testing.assert_array_equal(inside, expected)

    # Keys of tiles that are summed together have the same columns, lane by lane.
    by_tile = inside.reshape(last + 1, tile, 32)
    for begin, until in zip(begins, due.tolist(), strict=True):
        assert until >= begin
        assert (by_tile[begin : until + 1] == by_tile[begin]).all()


PLAN = {
    "max_rows": 3, "max_length": 100, "heads": 4, "key_heads": 2, "head_dim": 16, "scale": 0.25,
    "device": DEVICE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 576}, r"head_dim 576 .*MLA"),
        ({"head_dim": 257}, r"head_dim 257"),
        ({"head_dim": 0}, r"1 or more"),
        ({"max_rows": 0}, r"1 or more"),
        ({"max_length": 0}, r"1 or more"),
        ({"heads": 5}, r"5 query heads over 2"),
        ({"key_heads": 0}, r"4 query heads over 0"),
        ({"chosen": ()}, r"different numbers in 0\.\.3"),
        ({"chosen": (1, 1)}, r"different numbers in 0\.\.3"),
        ({"chosen": (4,)}, r"different numbers in 0\.\.3"),
        ({"chosen": (-1,)}, r"different numbers in 0\.\.3"),
        ({"max_rows": 1 << 20, "max_length": 1 << 20}, r"too many"),
        ({"soft_cap": 0.0}, r"soft_cap"),
        ({"soft_cap": -1.0}, r"soft_cap"),
        ({"scale": float("nan")}, r"scale"),
        ({"window": -1}, r"window"),
        ({"programs": -1}, r"programs"),
    ],
)
def test_plans_that_cannot_be_made_are_refused(change, message):
    with pytest.raises(OptionError, match=message) as refused:
        StatisticsPlan(**PLAN | change)
    assert "\n" not in str(refused.value)


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(
    "change",
    [
        {"query": zeros(2, 4, 16)},
        {"query": zeros(3, 2, 16)},
        {"query": zeros(3, 4, 32)},
        {"query": zeros(3, 64)},
        {"query": zeros(3, 4, 16, dtype=torch.bfloat16)},
        {"query": zeros(3, 4, 16, dtype=torch.int16), "keys": zeros(9, 2, 16, dtype=torch.int16)},
        {"query": zeros(3, 4, 32)[..., ::2]},
        {"query": zeros(3, 4, 16, dtype=torch.float64), "keys": zeros(9, 2, 16, dtype=torch.uint8)},
        {
            "query": zeros(3, 4, 16, dtype=torch.float64),
            "keys": zeros(9, 2, 16, dtype=torch.float8_e5m2),
        },
        {"keys": zeros(9, 1, 16)},
        {"keys": zeros(9, 2, 8)},
        {"keys": zeros(9, 32)},
        {"keys": zeros(9, 2, 32)[..., ::2]},
        {"keys": zeros(9, 2, 16, dtype=torch.float64)},
        {"descale": zeros(3, dtype=torch.float32)},
        {"descale": zeros(2, dtype=torch.float16)},
        {"descale": zeros(1, dtype=torch.float16)},
        {"query": torch.zeros(3, 4, 16, dtype=torch.float16, device="meta")},
        {"keys": torch.zeros(9, 2, 16, dtype=torch.float16, device="meta")},
        {"keys": zeros()},
        {"sinks": zeros(2, dtype=torch.float32)},
        {"sinks": zeros(4, dtype=torch.int32)},
        {"sinks": zeros(8, dtype=torch.float32)[::2]},
    ],
    ids=[
        "rows", "heads", "head_dim", "flat queries", "other type", "whole numbers",
        "strided queries", "8 bits that are no float", "float64 queries", "key heads", "key dims",
        "flat keys", "strided keys", "float64 keys", "long descale", "float16 descale",
        "float16 descale of one", "queries elsewhere", "keys elsewhere", "keys without axes",
        "few sinks", "whole sinks", "strided sinks",
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_a_plan_are_refused(change):
    case = paged_case([1, 2, 3], 4, 2, 16)
    plan = StatisticsPlan(**PLAN)
    plan.schedule(page_table(case))
    with pytest.raises(OptionError) as refused:
        plan.run(**{"query": case.queries, "keys": case.k_cache} | change)
    assert "\n" not in str(refused.value)


# fmt: off
JOINED_HEADS = cases(
    ("some heads", (16, 4, 24), {}, {"chosen": [1, 4, 6, 7, 8, 13]}),
    slow=[
        ("float8", (8, 4, 64), {"dtype": torch.float8_e4m3fn, "descale": [0.5, 2.0, 1.0, 3.0]},
         {"sinks": torch.arange(8.0, device=DEVICE)}),
        ("a key head each", (8, 8, 40), {"padding_rows": 1}, {}),
        ("no power of two", (6, 6, 33), {}, {"window": 50}),
        ("float8 with bfloat16 queries", (8, 4, 64), {"dtype": torch.float8_e4m3fn,
         "query_dtype": torch.bfloat16}, {}),
    ],
)
# fmt: on


@pytest.mark.parametrize("joined", [2, pytest.param(1, marks=SLOW), pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize(("shape", "paged", "options"), JOINED_HEADS)
def test_key_heads_may_be_joined(joined, shape, paged, options):
    case = paged_case([1, 70, 0, 130], *shape, **paged)
    tuning = PAIRS._replace(key_heads=joined)
    # Six are an odd number of pairs.
    most = 2 if shape[1] == 6 else 4
    chosen = options.get("chosen")
    assert plan_for(case, tuning=tuning, chosen=chosen).joined == min(joined, most)
    check(case, tuning=tuning, **options)


@SLOW
def test_joined_key_heads_may_lie_anywhere():
    case = paged_case([90, 5], 4, 4, 16)
    wide = torch.full((len(case.k_cache), 4, 40), torch.nan, dtype=torch.float16, device=DEVICE)
    wide[..., 8:24] = case.k_cache
    for keys in (wide[..., 8:24], case.k_cache.transpose(0, 1).contiguous().transpose(0, 1)):
        check(replace(case, k_cache=keys), tuning=PAIRS)


@pytest.mark.parametrize(
    ("heads", "key_heads", "chosen", "most", "together", "table"),
    [
        (8, 4, None, 2, 2, [[0, 0, 0, 1, 2, 3], [2, 4, 4, 5, 6, 7]]),
        (8, 4, None, 3, 2, [[0, 0, 0, 1, 2, 3], [2, 4, 4, 5, 6, 7]]),
        (4, 4, None, 8, 4, [[0, 0, 0, 1, 2, 3]]),
        # Three key heads are no pairs; 16 query heads fill a group.
        (12, 3, None, 2, 1, [[0, 0, 0, 1, 2, 3], [1, 4, 4, 5, 6, 7], [2, 8, 8, 9, 10, 11]]),
        (32, 2, None, 2, 1, [[0, 0, *range(16)], [1, 16, *range(16, 32)]]),
        # No chosen head reads key head 1.
        (8, 4, [0, 1, 4, 7], 2, 1, [[0, 0, 0, 1], [2, 2, 4], [3, 3, 7]]),
        (8, 4, [0, 4], 2, 1, [[0, 0, 0], [2, 1, 4]]),
        (8, 4, [1, 2, 4, 7], 2, 2, [[0, 0, 1, 2], [2, 2, 4, 7]]),
    ],
)
def test_neighbouring_key_heads_are_joined_where_all_are_chosen_and_have_room(
    heads, key_heads, chosen, most, together, table
):
    groups = HeadGroups(heads, key_heads, chosen, torch.device(DEVICE))
    found, joined = groups.joined(most)
    width = 2 + groups.block
    assert found == together
    assert joined.tolist() == [[*line, *[-1] * (width - len(line))] for line in table]


def test_a_finished_layer_does_not_need_its_inputs():
    case = paged_case([90, 5], 4, 2, 16)
    plan = plan_for(case, layers=2)
    plan.schedule(page_table(case))
    inputs = [case.queries.clone(), case.k_cache.clone()]
    plan.run(*inputs)
    plan.finish()
    for each in inputs:
        each.fill_(torch.nan)
    plan.run(case.queries, case.k_cache)
    for layer in (0, 1):
        assert_statistics(plan.answer(layer), reference(case))


# From here on: what only a device can show.


def random_step(case, random, seq_lens):
    """A case of the same requests, some keys shorter; its lengths are written to `seq_lens`."""
    lengths = [int(random.integers(0, longest + 1)) for longest in case.lengths]
    seq_lens[: case.active].copy_(torch.tensor(lengths, device=DEVICE))
    keys = [keys[:length] for keys, length in zip(case.keys, lengths, strict=True)]
    return replace(case, lengths=tuple(lengths), keys=keys)


@pytest.mark.gpu
@needs_gpu
def test_a_run_neither_waits_nor_allocates():
    case = paged_case([700, 64, 2000, 1], 8, 2, 128, dtype=torch.bfloat16, padding_rows=2)
    plan = plan_for(case, programs=None, max_length=4000, visibility=Visibility(1, 3))
    table, active = page_table(case), active_rows(case)
    enabled = on_device(*[1] * case.rows, dtype=torch.uint8)
    sinks = on_device(*[0.5] * 8)

    def step():
        plan.schedule(table, enabled=enabled, num_active=active)
        plan.run(case.queries, case.k_cache, sinks=sinks)
        return plan.answer()

    found = without_waiting(step)
    assert_statistics(found, reference(case, visibility=Visibility(1, 3), sinks=sinks))


@pytest.mark.gpu
@needs_gpu
def test_a_graph_follows_the_lengths_of_each_step():
    case = paged_case([1500, 64, 700, 2000, 1, 90], 8, 2, 64, dtype=torch.bfloat16, padding_rows=2)
    table, active = page_table(case), active_rows(case)
    enabled = on_device(*[1] * case.rows, dtype=torch.uint8)
    captured = plan_for(case, programs=None, max_length=2000)
    eager = plan_for(case, programs=None, max_length=2000)

    def step(plan):
        plan.schedule(table, enabled=enabled, num_active=active)
        plan.run(case.queries, case.k_cache)
        return plan.answer()

    # Compiled and loaded before a capture begins.
    step(captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured)
    random = np.random.default_rng(0)
    before = torch.cuda.memory_allocated()
    for replay in range(50):
        now = random_step(case, random, case.seq_lens)
        flags = random.integers(0, 2, case.active)
        count = int(random.integers(0, case.active + 1))
        enabled[: case.active].copy_(torch.tensor(flags, device=DEVICE))
        active.fill_(count)
        graph.replay()
        again = step(eager)
        assert torch.equal(found.mean, again.mean)
        assert torch.equal(found.per_head, again.per_head)
        if replay % 10 == 9:
            asked = (flags != 0) & (np.arange(case.active) < count)
            assert_statistics(found, reference(now).of_asked(asked))
    del again
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
@needs_gpu
def test_layers_of_a_step_read_what_was_written_right_before():
    case = paged_case([700, 64, 2000, 1] * 8, 8, 2, 128, dtype=torch.bfloat16)
    layers, options = 6, {"programs": None, "max_length": 2000, "top_k": 16}
    plan, alone = plan_for(case, layers=layers, **options), plan_for(case, **options)
    made = [case.queries.clone() for _ in range(layers)]
    sources = [case.k_cache.roll(layer, -1) for layer in range(layers)]
    inputs = [(torch.empty_like(case.queries), torch.empty_like(case.k_cache)) for _ in made]

    def step():
        plan.schedule(page_table(case))
        for layer, (query, keys) in enumerate(inputs):
            keys.copy_(sources[layer])
            query.copy_(made[layer])
            plan.run(query, keys)
        found = [plan.answer(layer) for layer in range(layers)]
        # What comes after a step may write over its inputs.
        for each in inputs:
            each[0].fill_(torch.nan)
            each[1].fill_(torch.nan)
        return found

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for once in (step, graph.replay) * 5:
        for each in made:
            each.normal_()
        torch.cuda.synchronize()
        # Long before it is over, all launches of the step are queued.
        torch.cuda._sleep(5_000_000)
        once()
        for layer, answer in enumerate(found):
            alone.schedule(page_table(case))
            alone.run(made[layer], sources[layer])
            expected = alone.answer()
            assert torch.equal(answer.per_head, expected.per_head)
            assert torch.equal(answer.top.positions, expected.top.positions)
            assert torch.equal(answer.top.logits, expected.top.logits)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("lengths", "shape", "dtype", "descale"),
    [
        ([8192, 8192, 4097, 33], (32, 8, 128), torch.bfloat16, None),
        ([8192, 100], (32, 8, 128), torch.float16, None),
        ([8192, 100], (32, 8, 128), torch.float8_e4m3fn, 0.5),
        ([8192, 100], (32, 8, 80), torch.bfloat16, None),
        ([100_000], (8, 2, 128), torch.bfloat16, None),
    ],
    ids=["bf16", "fp16", "fp8", "pairs", "100K"],
)
def test_long_rows_agree_with_the_reference(lengths, shape, dtype, descale):
    case = paged_case(lengths, *shape, dtype=dtype, size=3.0, descale=descale)
    check(case, programs=None, max_length=max(lengths))


@pytest.mark.gpu
@needs_gpu
def test_key_heads_far_apart_are_addressed_in_64_bits():
    # One key head after another, 2**27 elements apart: the last ones lie past 2**31.
    key_heads, slots, depth = 18, 1 << 20, 128
    memory = torch.empty(key_heads, slots, depth, dtype=torch.float16, device=DEVICE)
    case = paged_case([9, 3], key_heads, key_heads, depth)
    memory[:, : len(case.k_cache)] = case.k_cache.transpose(0, 1)
    for tuning in (None, PAIRS):
        check(replace(case, k_cache=memory.transpose(0, 1)), tuning=tuning)


def test_a_row_longer_than_planned_is_left_out_and_its_neighbours_are_not():
    case = paged_case([50, 90, 60], 4, 2, 32)
    found = measure(case, max_length=64)
    truth = reference(case)
    assert_statistics(found, truth.of_asked([True, False, True]))


@pytest.mark.parametrize("change", [{"tile": 48}, {"tile": 8}, {"tile": 16}])
def test_tiles_that_no_kernel_can_take_are_refused(change):
    with pytest.raises(OptionError, match="power of two"):
        plan_for(paged_case([5], 2, 1, 16), tuning=Tuning(**change), top_k=17)
