"""What a step's rows read, against `Visibility` and plain Python."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, HUGE, HUGE_REQUEST, paged_case  # noqa: E402

from capture_kernels.decode.step.page_table import PageTable  # noqa: E402
from capture_kernels.decode.step.schedule import ROW_FIELDS, Schedule  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402

# Where a device answers these tests are for it; elsewhere kernels are interpreted.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
FORMS = ["req_to_token", "kv_indptr"]


def numbers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def page_table(case):
    if case.kv_indptr is None:
        return PageTable.of_requests(case.req_to_token, case.req_pool_indices, case.seq_lens)
    return PageTable.of_indptr(case.kv_indptr, case.kv_indices, case.seq_lens)


def lists_of(lengths, held=None):
    """Rows of these lengths, each of which lists its newest `held` keys, or all of them."""
    indptr = numbers([0, *np.cumsum(lengths if held is None else held)])
    return PageTable.of_indptr(indptr, numbers([0]), numbers(lengths))


def make(max_rows, block_keys=64, visibility=None, **options):
    """A schedule that has never run, so that nothing in it is right by chance."""
    visibility = visibility or Visibility()
    options = {"max_length": 1 << 20, "programs": 5, **options}
    steps = Schedule(max_rows, block_keys, DEVICE, visibility=visibility, **options)
    for tensor in (steps.block_ptr, steps.program_ptr, steps.row_table, steps.base):
        tensor.fill_(-77)
    return steps


def row_fields(length, visibility, window, *, asked=True, active=True, all_keys=False):
    """Position, seen, real and visible of a row of `length` keys, one key after another."""
    if not active:
        return [-1, 0, 0, 0]
    t = length - 1
    in_model = [j for j in range(length) if not window or j > t - window]
    real = [j for j in in_model if j >= visibility.first_real(t) and asked]
    visible = [j for j in in_model if j >= visibility.start(t) and asked]
    return [t, len(in_model if all_keys else real), len(real), len(visible)]


def assert_rows(steps, fields):
    """The schedule holds these fields of its rows, and blocks enough for the keys it reads."""
    rows = len(fields)
    assert steps.num_rows == rows
    found = steps.row_table[: ROW_FIELDS * rows].view(ROW_FIELDS, rows).T
    assert found[:, :4].tolist() == fields
    blocks = [-(-seen // steps.block_keys) for _, seen, *_ in fields]
    assert steps.block_ptr[: rows + 1].tolist() == [0, *np.cumsum(blocks, dtype=int).tolist()]
    assert_shares(steps, blocks, found[:, 4:6].tolist())
    # What has no row keeps what it held.
    assert (steps.block_ptr[rows + 1 :] == -77).all() and (steps.base[rows:] == -77).all()
    assert (steps.row_table[ROW_FIELDS * rows :] == -77).all()


def assert_shares(steps, blocks, first_and_last):
    """All blocks are shared out, in order, to programs that have as much to do; and each row knows
    its first and last program."""
    starts = steps.program_ptr.tolist()
    assert starts[0] == 0 and starts[-1] == sum(blocks) and starts == sorted(starts)
    owner = np.repeat(np.arange(steps.programs), np.diff(starts))
    ends = np.cumsum(blocks, dtype=int)
    for row, (count, end) in enumerate(zip(blocks, ends, strict=True)):
        first, last = first_and_last[row]
        if count:
            assert (first, last) == (owner[end - count], owner[end - 1])
        else:
            assert last < first
    assert np.ptp(np.diff(starts)) <= 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding_rows", [0, 3])
def test_keys_of_a_row_lie_where_its_page_table_says(form, padding_rows):
    lengths = [1, 300, 0, 63, 64, 65, 129]
    case = paged_case(lengths, 1, 1, 16, form=form, padding_rows=padding_rows)
    steps = make(12)
    steps.run(page_table(case), num_active=numbers([case.active]))
    active = [row_fields(length, Visibility(), 0) for length in lengths]
    assert_rows(steps, active + [[-1, 0, 0, 0]] * padding_rows)
    assert (steps.base[case.active : case.rows] == 0).all()
    slots = steps.kv_slots.flatten()
    for row, length in enumerate(lengths):
        begin = int(steps.base[row])
        keys = case.k_cache[slots[begin : begin + length].long()]
        np.testing.assert_array_equal(keys.double().cpu().numpy(), case.keys[row])


@pytest.mark.parametrize("seq_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pool_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length", [0, 1, 64, 65])
def test_one_row(length, seq_dtype, pool_dtype):
    table = numbers([[7] * 80, [8] * 80])
    steps = make(1)
    one = PageTable.of_requests(table, numbers([1], pool_dtype), numbers([length], seq_dtype))
    steps.run(one)
    assert_rows(steps, [row_fields(length, Visibility(), 0)])
    assert steps.base.tolist() == [80]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("active", [None, 0, 5])
def test_a_step_without_rows_has_no_blocks(form, active):
    steps = make(4)
    steps.run(
        page_table(paged_case([], 1, 1, 16, form=form)),
        enabled=numbers([], torch.uint8),
        num_active=None if active is None else numbers([active]),
    )
    assert_rows(steps, [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("all_keys", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("asked", [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
def test_rows_that_are_not_asked_for_are_read_only_for_the_output(form, all_keys, dtype, asked):
    lengths = [70, 300, 64, 2]
    visibility = Visibility(2, 5)
    case = paged_case(lengths, 1, 1, 16, form=form, padding_rows=2)
    # Nobody sets the flags of padding rows.
    enabled = numbers([*asked, 1, 1], torch.uint8).to(dtype)
    steps = make(6, visibility=visibility, all_keys=all_keys)
    steps.run(page_table(case), enabled=enabled, num_active=numbers([case.active]))
    fields = [
        row_fields(length, visibility, 0, asked=bool(flag), all_keys=all_keys)
        for length, flag in zip(lengths, asked, strict=True)
    ]
    assert_rows(steps, fields + [[-1, 0, 0, 0]] * 2)


@pytest.mark.parametrize("active", [0, 1, 3])
def test_padding_rows_are_not_read(active):
    # Addresses that no process has: a read of them is a fault, not a wrong number.
    lengths = numbers([5] * 3 + [HUGE] * 2, torch.int64)
    pool = numbers([0] * 3 + [HUGE_REQUEST] * 2, torch.int64)
    steps = make(5)
    steps.run(
        PageTable.of_requests(numbers([[0] * 5]), pool, lengths), num_active=numbers([active])
    )
    assert_rows(steps, [row_fields(5, Visibility(), 0, active=row < active) for row in range(5)])
    assert not steps.base[:5].any()


def test_rows_of_one_request_may_end_at_different_keys():
    slots, visibility = numbers([3] * 200), Visibility(1, 2)
    begins, lengths = [100, 100, 0, 100], [68, 69, 90, 70]
    steps = make(4, visibility=visibility)
    steps.run(PageTable(slots, numbers(begins), numbers(lengths)))
    assert_rows(steps, [row_fields(length, visibility, 0) for length in lengths])
    assert steps.base.tolist() == begins


@pytest.mark.parametrize("all_keys", [False, True])
@pytest.mark.parametrize("window", [0, 1, 64, 90])
@pytest.mark.parametrize(
    "visibility",
    [
        Visibility(0),
        Visibility(4),
        Visibility(2000),
        Visibility(2, 70),
        Visibility(70, 2),
        Visibility(1, 0, 1),
        Visibility(3, 1, 65),
        Visibility(3, 100, 200),
    ],
)
def test_windows_masks_and_sinks_bound_the_ranges_of_a_row(visibility, window, all_keys):
    lengths = [0, 1, 2, 4, 5, 64, 65, 69, 70, 71, 90, 91, 100, 101, 300, 1000]
    table = lists_of(lengths)
    steps = make(16, 64, visibility, window=window, all_keys=all_keys)
    steps.run(table)
    assert_rows(steps, [row_fields(n, visibility, window, all_keys=all_keys) for n in lengths])


@pytest.mark.parametrize("all_keys", [False, True])
def test_lists_of_the_newest_keys_have_logical_positions(all_keys):
    # Windows of 50 keys: whole lists, lists of the window, and of a few more than it.
    lengths, held = [1, 49, 50, 51, 300, 300, 300], [1, 49, 50, 50, 50, 66, 300]
    steps = make(8, 64, Visibility(2, 260), window=50, all_keys=all_keys)
    steps.run(lists_of(lengths, held))
    assert_rows(steps, [row_fields(n, Visibility(2, 260), 50, all_keys=all_keys) for n in lengths])
    # Key j is at base + j, so the newest is the last of its list.
    ends = np.cumsum(held)
    assert steps.base[:7].tolist() == [end - n for end, n in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize(
    ("window", "length", "held"),
    [(0, 300, 50), (0, 300, 19), (0, 30, 31), (50, 300, 49), (50, 20, 19), (50, 300, 301)],
)
def test_lists_without_a_slot_for_each_token_are_refused(window, length, held):
    right, wrong = lists_of([5, 5]), lists_of([5, length], [5, held])
    with pytest.raises(OptionError, match=f"row 1 of kv_indptr lists {held} KV slots"):
        make(3, window=window).run(wrong)
    # Padding rows are not looked at.
    make(3, window=window).run(wrong, num_active=numbers([1]))
    # Past the first step nothing waits for the device: such a row has no answer.
    for all_keys in (False, True):
        steps = make(3, window=window, all_keys=all_keys)
        steps.run(right)
        steps.run(wrong)
        seen = min(held, window or length) if all_keys else 0
        assert_rows(
            steps,
            [row_fields(5, Visibility(), window, all_keys=all_keys), [length - 1, seen, 0, 0]],
        )


@given(
    # Sizes of which each is compiled once on a device.
    lengths=st.sampled_from([1, 3, 16]).flatmap(
        lambda rows: st.lists(
            st.one_of(st.integers(0, 6), st.integers(0, 1000)), min_size=rows, max_size=rows
        )
    ),
    visibility=st.builds(
        Visibility,
        sink_tokens=st.one_of(st.integers(0, 5), st.just(2000)),
        mask_prefix=st.integers(0, 60),
        window=st.one_of(st.just(0), st.integers(1, 300)),
    ),
    window=st.one_of(st.just(0), st.integers(1, 300)),
    block_keys=st.sampled_from([64, 128, 1024]),
    all_keys=st.booleans(),
    programs=st.sampled_from([1, 2, 32, 66]),
    form=st.sampled_from(FORMS),
    active=st.integers(0, 16),
    flags=st.lists(st.booleans(), min_size=16, max_size=16),
    masks=st.none() | st.lists(st.integers(-2, 60), min_size=16, max_size=16),
)
def test_any_rows_agree_with_a_walk_over_their_keys(
    lengths, visibility, window, block_keys, all_keys, programs, form, active, flags, masks
):
    rows = len(lengths)
    indptr = np.cumsum([0, *lengths])
    if form == "kv_indptr":
        table = lists_of(lengths)
    else:
        places = numbers(list(range(rows)), torch.int64)
        table = PageTable.of_requests(numbers([[0] * 9] * rows), places, numbers(lengths))
    options = {"window": window, "all_keys": all_keys, "programs": programs}
    steps = make(17, block_keys, visibility, **options)
    own = None if masks is None else numbers(masks[:rows])
    enabled = numbers(flags[:rows], torch.bool)
    steps.run(table, enabled=enabled, num_active=numbers([active]), masks=own)
    # Less than nothing is nothing.
    seen = [visibility] * rows
    if masks is not None:
        seen = [replace(visibility, mask_prefix=max(masked, 0)) for masked in masks[:rows]]
    fields = [
        row_fields(length, each, window, asked=asked, active=row < active, all_keys=all_keys)
        for row, (length, each, asked) in enumerate(zip(lengths, seen, flags[:rows], strict=True))
    ]
    assert_rows(steps, fields)
    masked = steps.row_table[6 * rows : 7 * rows].tolist()
    assert masked[:active] == [each.mask_prefix for each in seen[:active]]
    begins = indptr[:-1] if form == "kv_indptr" else np.arange(rows) * 9
    expected = [int(begin) if row < active else 0 for row, begin in enumerate(begins)]
    assert steps.base[:rows].tolist() == expected


def test_a_step_leaves_nothing_of_a_longer_one_before_it():
    steps, table = make(40), numbers([[0] * 200])
    for lengths in ([150] * 40, [3, 130], [], [7] * 5):
        pool = numbers([0] * len(lengths), torch.int64)
        for tensor, rows in (
            (steps.block_ptr, len(lengths) + 1),
            (steps.row_table, ROW_FIELDS * len(lengths)),
            (steps.base, len(lengths)),
        ):
            tensor[rows:] = -77
        steps.run(PageTable.of_requests(table, pool, numbers(lengths, torch.int64)))
        assert_rows(steps, [row_fields(length, Visibility(), 0) for length in lengths])


def test_a_sequence_of_a_million_keys():
    length = 1 << 20
    table = lists_of([length, 9])
    steps = make(2, 256)
    steps.run(table)
    whole = [length - 1, length, length, length - 1]
    assert_rows(steps, [whole, row_fields(9, Visibility(), 0)])


def test_slots_far_into_a_pool_are_addressed_in_64_bits():
    # Rows of 2**20 entries each, of which request 5,000 begins past 2**32. Nothing reads there.
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE).expand(1 << 20)
    table = torch.as_strided(slots, (1, 1), (1 << 20, 1))
    steps = make(1)
    steps.run(PageTable.of_requests(table, numbers([5000]), numbers([3])))
    assert steps.base.tolist() == [5000 << 20]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("window", [1, 63, 1_500])
def test_keys_in_a_pool_of_their_own_are_listed_by_their_distance(form, dtype, window):
    lengths = [1, 0, 62, 63, 64, 1_499, 1_500, 1_501, 2_900]
    case = paged_case(lengths, 1, 1, 16, form=form, padding_rows=2)
    steps = make(12, window=window, max_length=2_000, mapped=True)
    steps.mapped_slots.fill_(-77)
    slot_map = torch.arange(len(case.k_cache), device=DEVICE).flip(0) * 3
    table, active = page_table(case), numbers([case.active])
    steps.run(table, num_active=active, slot_map=slot_map.to(dtype))
    slots, base = steps.arguments["kv_slots"].flatten(), steps.arguments["base"]
    written = torch.full_like(slots, -77)
    for row, length in enumerate(lengths):
        read = range(max(0, length - window), length) if length <= 2_000 else []
        own = table.kv_slots.flatten()[[int(steps.base[row]) + key for key in read]].long()
        at = [int(base[row]) + key for key in read]
        assert (slots[at] == slot_map[own]).all()
        written[at] = slots[at]
    assert (slots == written).all()  # of nothing else


def test_more_rows_than_a_plan_has_room_for_are_refused():
    table = PageTable.of_requests(numbers([[0] * 4]), numbers([0] * 5), numbers([1] * 5))
    with pytest.raises(OptionError, match=r"5 rows in a plan for 4: raise max_rows"):
        make(4).run(table)


def test_tables_of_another_device_are_refused():
    lengths = torch.ones(1, dtype=torch.int32, device="meta")
    table = PageTable.of_requests(numbers([[0] * 4]), numbers([0]), lengths)
    with pytest.raises(OptionError, match="seq_lens of the table is on meta"):
        make(4).run(table)


ZERO = numbers([0])


@pytest.mark.parametrize(
    "build",
    [
        lambda: PageTable.of_requests(numbers([0, 1]), ZERO, ZERO),
        lambda: PageTable.of_requests(numbers([[0, 1], [2, 3]]).T, ZERO, ZERO),
        lambda: PageTable.of_requests(numbers([[0, 1]]), ZERO, numbers([1, 2])),
        lambda: PageTable.of_requests(numbers(0), ZERO, ZERO),
        lambda: PageTable.of_indptr(numbers([[0, 1]]), ZERO, ZERO),
        lambda: PageTable.of_indptr(numbers(0), ZERO, ZERO),
        lambda: PageTable.of_indptr(numbers([0, 1]), numbers([[0]]), ZERO),
        lambda: PageTable.of_indptr(numbers([0, 1]), ZERO, numbers([1, 1])),
        # A kernel would read what lies between, and answer for other requests.
        lambda: PageTable.of_indptr(numbers([0, 2]), numbers([5, 0, 6, 0])[::2], ZERO),
        lambda: PageTable.of_indptr(numbers([0, 9, 2, 9])[::2], numbers([5, 6]), ZERO),
        lambda: PageTable.of_requests(
            numbers([[0, 1]]), numbers([0, 1, 0, 1])[::2], numbers([1, 1])
        ),
        lambda: PageTable.of_requests(
            numbers([[0, 1]]), numbers([0, 0]), numbers([1, 9, 1, 9])[::2]
        ),
        # Lengths of a float type would be rounded, slots of one are no addresses.
        lambda: PageTable.of_requests(numbers([[0, 1]], torch.float32), ZERO, ZERO),
        lambda: PageTable.of_requests(numbers([[0, 1]]), ZERO, numbers([1], torch.float32)),
    ],
    ids=[
        "flat table",
        "transposed table",
        "other lengths",
        "table without axes",
        "square indptr",
        "indptr without axes",
        "square indices",
        "lengths of other rows",
        "strided indices",
        "strided indptr",
        "strided pool indices",
        "strided lengths",
        "float table",
        "float lengths",
    ],
)
def test_page_tables_that_would_be_misread_are_refused(build):
    with pytest.raises(OptionError) as refused:
        build()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"enabled": numbers([1, 1, 1])},
        {"enabled": numbers([1, 1], torch.uint8)},
        {"enabled": numbers([1] * 6, torch.uint8)[::2]},
        {"num_active": numbers([3], torch.int64)},
        {"num_active": numbers([3, 3])},
        {"num_active": numbers(3)},
        {"enabled": torch.ones(3, dtype=torch.bool, device="meta")},
        {"masks": numbers([1, 1])},
        {"masks": numbers([1, 1, 1], torch.int64)},
        {"masks": numbers([1] * 6)[::2]},
    ],
    ids=[
        "int32",
        "too few",
        "strided",
        "int64 num_active",
        "two num_active",
        "num_active without axes",
        "flags elsewhere",
        "too few masks",
        "int64 masks",
        "strided masks",
    ],
)
def test_flags_that_would_be_misread_are_refused(options):
    table = PageTable.of_requests(numbers([[0] * 4]), numbers([0] * 3), numbers([1] * 3))
    with pytest.raises(OptionError) as refused:
        make(4).run(table, **options)
    assert "\n" not in str(refused.value)
