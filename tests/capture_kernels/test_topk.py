"""The exact top k of heads and of their mean, and hubs, against float64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, SLOW, assert_close, assert_top_k, cases, paged_case  # noqa: E402
from test_statistics import active_rows, on_device, page_table, plan_for  # noqa: E402

from capture_kernels.decode.fused import FusedDecodePlan  # noqa: E402
from capture_kernels.decode.tuning import Tuning  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.reference import decode_statistics  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402

ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
# Logits may be off by this; keys that are nearer to each other may change places.
NATS, MASS = (1e-4, 1e-3) if ON_GPU else (3e-6, 2e-6)
# Scratch for the logits of the first row alone, here of two or three blocks.
SOME_KEPT = 3_500


def find(
    case, *, k, mean_k, hubs=None, enabled=None, masks=None, head_masks=None, sinks=None, **options
):
    """The top k of a case's rows, in buffers that are poisoned before."""
    plan = plan_for(case, top_k=k, mean_top_k=mean_k, hubs=hubs is not None, **options)
    poison(plan)
    asked = {"enabled": enabled, "masks": masks, "head_masks": head_masks, "hubs": hubs}
    plan.schedule(page_table(case), num_active=active_rows(case), **asked)
    plan.run(case.queries, case.k_cache, descale=case.descale, sinks=sinks)
    return plan.answer().top


def poison(plan):
    for buffer in (*plan.top._kept.values(), *plan.top.answers):
        buffer.fill_(torch.nan if buffer.is_floating_point() else -7)


def truth_of(case, row, *, visibility=None, sinks=None, scale=None, top_k=0, **described):
    """`decode_statistics` of one row of a case."""
    return decode_statistics(
        case.query_rows[row],
        case.keys[row],
        scale=case.queries.shape[2] ** -0.5 if scale is None else scale,
        position=case.lengths[row] - 1,
        visibility=visibility or Visibility(),
        sinks=None if sinks is None else sinks.double().cpu().numpy(),
        top_k=top_k,
        **described,
    )


def mean_probabilities(case, row, **described):
    """The mean over the heads by position after the masked prefix: float64[n]."""
    masked = (described.get("visibility") or Visibility()).mask_prefix
    return truth_of(case, row, **described).mean[masked:]


def assert_top(
    top, case, *, k, mean_k, enabled=None, masks=None, head_masks=None, chosen=None,
    visibility=None, **described
):  # fmt: skip
    """The top k of every row is that of the reference; nothing is said of other rows."""
    heads = sorted(chosen) if chosen is not None else list(range(case.queries.shape[1]))
    asked = [True] * case.active if enabled is None else enabled.bool().tolist()
    for row in range(case.rows):
        if row >= case.active or not asked[row]:
            assert (top.positions[row] == -1).all() and (top.logits[row] == -torch.inf).all()
            assert (top.mean_positions[row] == -1).all() and not top.mean_masses[row].any()
            assert k == 0 or not top.mass[row].any()
            continue
        shown = visibility or Visibility()
        if masks is not None:
            shown = replace(shown, mask_prefix=max(int(masks[row]), 0))
        truth = truth_of(case, row, visibility=shown, top_k=k, **described)
        # Positions are counted after the masked prefix; keys that are masked away have none.
        masked = min(shown.mask_prefix, case.lengths[row])
        logits, lse = truth.logits[heads][:, masked:], truth.logsumexp[heads]
        nats = NATS * max(1.0, np.abs(logits[np.isfinite(logits)]).max(initial=0.0) / 10)
        assert_top_k(top.positions[row], top.logits[row], logits, k, nats)
        if k:
            assert_close(top.mass[row], truth.top_mass[heads], largest=50 * nats, rms=10 * nats)
        of_mean = slice(None)
        if head_masks is not None:
            words = head_masks[row].cpu().numpy().view(np.uint8)
            of_mean = np.unpackbits(words, bitorder="little")[heads].astype(bool)
        with np.errstate(invalid="ignore"):
            mean = np.exp(logits - lse[:, None])[of_mean].mean(axis=0)
        mean = np.where(np.isfinite(logits[0]), mean, -np.inf)
        masses = top.mean_masses[row]
        assert_top_k(top.mean_positions[row], masses, mean, mean_k, 50 * nats, missing=0.0)


# What the reference is told as well as the plan.
DESCRIBED = (
    "visibility", "soft_cap", "window", "scale", "chosen", "sinks", "enabled", "masks",
    "head_masks",
)  # fmt: skip


def check(case, *, k=2, mean_k=2, scratch=64 << 20, **options):
    top = find(case, k=k, mean_k=mean_k, scratch_bytes=scratch, **options)
    described = {name: options[name] for name in DESCRIBED if name in options}
    assert_top(top, case, k=k, mean_k=mean_k, **described)
    return top


KEPT_OR_NOT = pytest.mark.parametrize("scratch", [64 << 20, 0], ids=["kept", "read again"])
FLOAT8 = {"dtype": torch.float8_e4m3fn}
MASKS = on_device(0, 5, 3, 89, 100, 7, dtype=torch.int32)
# Of 33 heads: the first and the last, a word's last, all, and of a row that pads the batch.
HEAD_MASKS = on_device(1, 1, -(2**31), 0, -1, -1, 0, 0, dtype=torch.int32).view(4, 2)


# fmt: off
KINDS_OF_TOPS = cases(
    ("lengths", [0, 1, 33, 97], (2, 1, 16), {}, {"tuning": Tuning(tile=32)}),
    ("caps, sinks, windows and a mask", [70, 3], (2, 1, 16), {"dtype": torch.bfloat16},
     {"soft_cap": 3.0, "sinks": on_device(4.0, -3.0), "window": 60, "visibility": Visibility(2, 5,
     66)}),
    slow=[
        ("head masks by row", [140, 7, 90], (33, 1, 16), {}, {"head_masks": HEAD_MASKS}),
        ("more lengths", [2, 63, 64, 65, 129, 307], (2, 1, 40), {}, {"k": 5}),
        ("one", [130, 5], (4, 4, 32), {"form": "kv_indptr"}, {"k": 1, "mean_k": 1}),
        ("most", [150, 3], (1, 1, 32), {}, {"k": 64, "mean_k": 64}),
        ("mean alone", [200], (2, 1, 16), {}, {"k": 0, "mean_k": 7}),
        ("heads alone", [200], (2, 1, 16), {}, {"k": 17, "mean_k": 0}),
        ("many heads on one key head", [70], (33, 1, 16), {}, {"k": 2}),
        ("chosen heads", [90, 40], (12, 3, 32), {}, {"chosen": (11, 0, 4, 5)}),
        ("masked prefixes by row", [140, 7, 3, 90, 64], (4, 2, 32), {}, {"masks": MASKS,
         "visibility": Visibility(2, 70), "k": 9}),
        ("float8", [150, 9], (4, 2, 64), {**FLOAT8, "descale": [0.25, 2.0]}, {}),
        ("float8 with bfloat16 queries", [150, 9], (4, 2, 64), {**FLOAT8,
         "query_dtype": torch.bfloat16}, {}),
        ("many splits", [3_000, 5], (2, 1, 16), {}, {"programs": 50, "mean_k": 0,
         "max_length": 3_000}),
        ("many splits and a larger k", [3_000], (2, 1, 16), {}, {"programs": 50, "k": 30,
         "max_length": 3_000}),
        ("several splits", [3_000, 700, 40, 1], (1, 1, 16), {}, {"programs": 29, "k": 16,
         "max_length": 3_000}),
        ("huge logits", [150, 9], (4, 2, 32), {"size": 300.0}, {}),
        ("joined key heads", [300, 5], (8, 4, 40), {}, {"k": 16, "mean_k": 0}),
        ("large blocks", [260, 600], (1, 1, 16), {}, {"max_length": 600_000}),
    ],
)
# fmt: on


@KEPT_OR_NOT
@pytest.mark.parametrize(("lengths", "shape", "paged", "options"), KINDS_OF_TOPS)
def test_the_top_k_is_exact(lengths, shape, paged, options, scratch):
    check(paged_case(lengths, *shape, padding_rows=1, **paged), scratch=scratch, **options)


SCRATCHES = pytest.mark.parametrize(
    "scratch",
    [SOME_KEPT, pytest.param(64 << 20, marks=SLOW), pytest.param(0, marks=SLOW)],
)


@SCRATCHES
def test_disabled_rows_have_no_top_k(scratch):
    enabled = on_device(1, 0, 1, 0, dtype=torch.uint8)
    check(paged_case([70, 80, 140], 2, 1, 16, padding_rows=1), enabled=enabled, scratch=scratch)


def make_keys_equal(case, length):
    """All keys of the first row become what its first one is."""
    slots = case.req_to_token[case.req_pool_indices[0], :length].long()
    if not ON_GPU:
        # A host's product of matrices may add up equal rows in different orders, so that they are
        # equal only where nothing is rounded.
        for numbers in (case.queries, case.k_cache):
            numbers.mul_(4).round_().div_(4)
    case.k_cache[slots] = case.k_cache[slots[0]].clone()


@KEPT_OR_NOT
@pytest.mark.parametrize("length", [3, pytest.param(1000, marks=SLOW)])
def test_of_equal_keys_the_first_positions_are_taken(length, scratch):
    case = paged_case([length], 2, 1, 16)
    make_keys_equal(case, length)
    top = find(case, k=4, mean_k=3, scratch_bytes=scratch)
    for positions, count in ((top.positions[0, 0], 4), (top.mean_positions[0], 3)):
        expected = list(range(min(length, count)))
        assert positions.tolist() == expected + [-1] * (count - len(expected))
    assert top.mass[0].tolist() == pytest.approx([min(1.0, 4 / length)] * 2, rel=1e-5)


@SLOW
@pytest.mark.parametrize("depth", [16, 80, 128])
def test_equal_keys_stay_equal_when_some_are_rescanned(depth):
    case = paged_case([1000], 4, 2, depth, dtype=torch.bfloat16)
    make_keys_equal(case, 1000)
    # Two lanes share a bucket: of each, two of the first 16 are kept.
    plan = plan_for(case, top_k=16, tuning=Tuning(), programs=8)
    plan.schedule(page_table(case))
    plan.run(case.queries, case.k_cache)
    positions = plan.answer().top.positions
    assert plan.top._kept["rescan_queue"][0] == 4
    assert positions.tolist() == [[list(range(16))] * 4]


@SLOW
def test_large_keys_may_be_next_to_each_other():
    # The newest keys are the largest by far, so the k-th block has a small maximum.
    case = paged_case([1000], 1, 1, 16)
    slots = case.req_to_token[case.req_pool_indices[0], :1000].long()
    near = torch.arange(1000) >= 800
    case.k_cache[slots[near.to(DEVICE)]] += 4 * case.queries[0]
    case.keys[0][near.numpy()] = case.k_cache[slots].double().cpu().numpy()[near.numpy()]
    check(case, k=12, mean_k=12)


def large_keys(case, which, row=0):
    """A row's keys of these distances become the largest by far, of its first head."""
    length = case.lengths[row]
    slots = case.req_to_token[case.req_pool_indices[row], :length].long()
    large = (length - 1 - torch.arange(length))[:, None].eq(torch.tensor(which)).any(1)
    numbers = case.k_cache[slots].float()
    factor = 1.0 if case.descale is None else case.descale[:, None]
    numbers[large.to(DEVICE)] += 4 * case.queries[row, 0].float() / factor
    case.k_cache[slots] = numbers.to(case.k_cache.dtype)
    case.keys[row][:] = (case.k_cache[slots].double() * factor).cpu().numpy()


# fmt: off
KINDS_OF_KEYS = cases(
    ("float16", (1, 1, 16), {}, {}),
    slow=[
        ("soft cap", (2, 2, 80), {"dtype": torch.bfloat16}, {"soft_cap": 5.0}),
        ("float8", (1, 1, 160), {**FLOAT8, "descale": [0.5]}, {}),
    ],
)
# fmt: on


@pytest.mark.parametrize(
    ("k", "programs"), [(3, 1), *(pytest.param(*each, marks=SLOW) for each in ((64, 1), (16, 60)))]
)
@pytest.mark.parametrize("shape, paged, options", KINDS_OF_KEYS)
def test_large_keys_may_all_be_of_one_bucket(k, programs, shape, paged, options):
    # Every 64th, so that they are in one lane of every tile: more than the two that are kept.
    case = paged_case([500, 30], *shape, **paged)
    large_keys(case, range(7, 500, 64))
    options = {**options, "programs": programs}
    for mean_k in (0, 3):
        # With a mean all logits are kept, and are read instead of keys.
        check(case, k=k, mean_k=mean_k, **options)
    plan = plan_for(case, top_k=k, **options)
    plan.schedule(page_table(case))
    plan.run(case.queries, case.k_cache, descale=case.descale)
    plan.finish()
    queue = plan.top._kept["rescan_queue"].tolist()
    heads = queue[1 : 1 + queue[0]]
    assert len({*heads}) == len(heads)
    # Each split keeps two.
    assert 0 in heads or k <= 2 * programs


@SLOW
@given(
    length=st.integers(1, 300),
    k=st.integers(1, 6),
    largest=st.integers(1, 6),
    again=st.booleans(),
    programs=st.sampled_from([1, 20]),
    seed=st.integers(0, 999),
)
@settings(max_examples=12)  # each takes seconds in the interpreter
def test_ties_are_broken_by_the_lower_position(length, k, largest, again, programs, seed):
    # Logits are small whole numbers, exact in every arithmetic.
    case = paged_case([length], 1, 1, 16, seed=seed)
    whole = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-largest, largest + 1, (length,), generator=whole)
    slots = case.req_to_token[case.req_pool_indices[0], :length].long()
    case.k_cache[slots] = 0.0
    case.k_cache[slots, 0, 0] = numbers.to(DEVICE, case.k_cache.dtype)
    case.queries[:] = 0.0
    case.queries[:, :, 0] = 1.0
    scratch = 0 if again else 64 << 20
    top = find(case, k=k, mean_k=k, scale=1.0, scratch_bytes=scratch, programs=programs)
    order = np.lexsort((np.arange(length), -numbers.numpy()))[:k].tolist()
    expected = order + [-1] * (k - len(order))
    assert top.positions[0].tolist() == [expected]
    assert top.mean_positions[0].tolist() == expected


@pytest.mark.parametrize("masked", [[30, 4, 0, 2, 1], pytest.param(None, marks=SLOW)])
@SCRATCHES
def test_hubs_add_up_the_mean_probability_of_every_position(scratch, masked):
    case = paged_case([150, 0, 70, 20], 4, 2, 32, padding_rows=1)
    masks = None if masked is None else on_device(*masked, dtype=torch.int32)
    enabled = on_device(1, 1, 1, 0, 1, dtype=torch.uint8)
    hubs = torch.zeros(case.rows, 100, device=DEVICE)
    for _ in range(2):
        asked = {"hubs": hubs, "enabled": enabled, "masks": masks, "scratch_bytes": scratch}
        find(case, k=0, mean_k=0, **asked)
    expected = np.zeros((case.rows, 100))
    for row in (0, 2):
        shown = Visibility(mask_prefix=masked[row] if masked else 0)
        mean = mean_probabilities(case, row, visibility=shown)[:100]
        expected[row, : len(mean)] = 2 * mean
    assert_close(hubs, expected, largest=MASS, rms=MASS)


def decode(case, *, k, mean_k, stale_logits=torch.nan, **options):
    """The top k that fused decode finds, in buffers that are poisoned before."""
    asked = {"top_k": k, "mean_top_k": mean_k, **options}
    plan = plan_for(case, FusedDecodePlan, value_dim=case.v_cache.shape[2], **asked)
    poison(plan)
    plan.top._kept["logits"].fill_(stale_logits)
    plan.schedule(page_table(case), num_active=active_rows(case))
    output = torch.zeros_like(case.queries[..., : case.v_cache.shape[2]])
    plan.decode(case.queries, case.k_cache, case.v_cache, output)
    return plan.answer().top


def test_the_top_k_of_fused_decode_is_exact():
    case = paged_case([97, 33], 2, 1, 16, value_dim=16, padding_rows=1)
    shown = Visibility(1, 20)
    top = decode(case, k=3, mean_k=2, visibility=shown)
    assert_top(top, case, k=3, mean_k=2, visibility=shown)


def rows_alone(top, case, rows, **asked):
    """The top k of some rows is exact, whatever is said of the others."""
    for row in rows:
        alone = replace(
            case,
            queries=case.queries[row : row + 1],
            lengths=case.lengths[row : row + 1],
            query_rows=case.query_rows[row : row + 1],
            keys=case.keys[row : row + 1],
        )
        assert_top(type(top)(*(each[row : row + 1] for each in top)), alone, **asked)


@SLOW
def test_a_row_longer_than_planned_takes_no_keys_from_its_neighbours():
    # Fused decode reads it all the same; the row behind it has no room in the scratch.
    case = paged_case([50, 300, 60], 2, 1, 16, value_dim=16)
    top = decode(case, k=3, mean_k=3, max_length=64)
    rows_alone(top, case, [0], k=3, mean_k=3)
    without_mean = {name: getattr(top, name)[:, :0] for name in ("mean_positions", "mean_masses")}
    rows_alone(top._replace(**without_mean), case, [2], k=3, mean_k=0)
    assert (top.positions[1] == -1).all() and (top.mean_positions[1:] == -1).all()


@SLOW
def test_no_top_k_is_reported_that_logits_without_room_would_decide():
    case = paged_case([50, 900, 300], 2, 1, 16, value_dim=16)
    large_keys(case, range(7, 300, 64), row=2)
    top = decode(case, k=5, mean_k=3, stale_logits=9.0, max_length=300, programs=1)
    assert (top.positions[2, 0] == -1).all() and not top.mass[2, 0]
    rows_alone(top, case, [0], k=5, mean_k=3)


def test_a_plan_for_a_million_keys_takes_less_than_a_megabyte():
    case = paged_case([5], 32, 8, 128)
    options = {"max_length": 1 << 20, "programs": 33, "scratch_bytes": 0}
    plan = plan_for(case, top_k=16, mean_top_k=16, **options)
    buffers = (plan.partial, plan.per_head, plan.mean)
    # The plan has room for two rows.
    assert (plan.top.bytes + sum(each.nbytes for each in buffers)) / 2 < 1_000_000


@pytest.mark.parametrize(
    "options", [{"top_k": 65}, {"top_k": -1}, {"mean_top_k": 65}], ids=["65", "-1", "mean 65"]
)
def test_a_top_k_that_is_too_large_is_refused(options):
    with pytest.raises(OptionError, match="0 to 64"):
        plan_for(paged_case([5], 2, 1, 16), **options)


def test_a_top_k_of_rows_of_many_millions_of_keys_is_refused():
    with pytest.raises(OptionError, match="too long for a top_k"):
        plan_for(paged_case([5], 2, 1, 16), top_k=1, max_length=1 << 23, programs=1)


def test_hubs_need_a_plan_with_hubs():
    case = paged_case([5], 2, 1, 16)
    with pytest.raises(OptionError, match="without hubs"):
        plan_for(case).schedule(page_table(case), hubs=torch.zeros(1, 9, device=DEVICE))


def test_hubs_of_one_dimension_are_refused():
    case = paged_case([5, 6], 2, 1, 16)
    with pytest.raises(OptionError, match=r"hubs has the shape \[2\]"):
        plan_for(case, hubs=True).schedule(page_table(case), hubs=torch.zeros(2, device=DEVICE))


def test_hubs_whose_rows_share_memory_are_refused():
    case = paged_case([5, 6], 2, 1, 16)
    plan = plan_for(case, hubs=True)
    with pytest.raises(OptionError, match="must not share memory"):
        plan.schedule(page_table(case), hubs=torch.zeros(9, device=DEVICE).expand(2, 9))


def test_masked_keys_that_dwarf_all_others_leave_finite_numbers():
    # Fused decode reads them, and takes its maximum over them too.
    case = paged_case([150], 2, 1, 16, value_dim=16)
    slots = case.req_to_token[case.req_pool_indices[0], :150].long()
    case.queries[:] = 1.0
    case.k_cache[slots[:3]] = 30.0
    options = {"top_k": 4, "mean_top_k": 4, "hubs": True, "visibility": Visibility(1, 3)}
    plan = plan_for(case, FusedDecodePlan, value_dim=16, scale=1.0, **options)
    output, hubs = torch.zeros_like(case.queries), torch.zeros(1, 150, device=DEVICE)
    plan.schedule(page_table(case), hubs=hubs)
    plan.decode(case.queries, case.k_cache, case.v_cache, output)
    found = plan.answer()
    assert not found.valid[0]
    for numbers in (found.mean, found.top.mass, found.top.mean_masses, hubs, output):
        assert torch.isfinite(numbers).all()
