"""The device ring of records: what a step appends, and what reaches the host."""

import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE  # noqa: E402

from capture_kernels.arrays import on_host  # noqa: E402
from capture_kernels.errors import MissingExtraError, OptionError  # noqa: E402
from capture_kernels.fingerprint.vector import Layout, at_depths  # noqa: E402
from capture_kernels.ring import ring as buffers  # noqa: E402
from capture_kernels.ring.append import (  # noqa: E402
    MEAN_LAYER,
    AppendPlan,
    RequestRows,
    StepRows,
)
from capture_kernels.ring.ring import RECORD_DTYPE, Drain, Ring  # noqa: E402

torch.set_num_threads(1)
# Where a device answers these tests are for it; elsewhere kernels are interpreted.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LAYOUTS = list(Layout)
needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device answers")


def make_statistics(layers, rows, seed=0):
    """Statistics that real rows could have, NaN in the unused columns: float32[L, R, 32]."""
    random = np.random.default_rng(seed)
    statistics = np.full((layers, rows, 32), np.nan, np.float32)
    statistics[..., :16] = random.dirichlet(np.full(16, 0.5), (layers, rows))
    statistics[..., 16:24] = random.dirichlet(np.full(8, 0.5), (layers, rows))
    statistics[..., 24:26] = random.dirichlet(np.ones(3), (layers, rows))[..., :2]
    statistics[..., 26:28] = random.random((layers, rows, 2))
    statistics[..., 28] = 1.0
    return statistics


def make_rows(rows, *, first_handle=0, enabled=None, position=None, num_active=None):
    number = torch.arange(rows)
    position = 100 + number if position is None else torch.tensor(position)
    enabled = torch.ones(rows) if enabled is None else torch.tensor(enabled)
    return StepRows(
        position=position.to(DEVICE, torch.int32),
        handle=(first_handle + number).to(DEVICE, torch.int64),
        phase=(number % 3).to(DEVICE, torch.uint8),
        enabled=enabled.to(DEVICE, torch.uint8),
        num_active=torch.tensor(
            [rows if num_active is None else num_active], dtype=torch.int32, device=DEVICE
        ),
    )


def append(ring, statistics, rows, *, layout=Layout.LOG16, per_layer=False, layers=None):
    statistics = torch.as_tensor(statistics).to(DEVICE)
    plan = AppendPlan(
        ring,
        max_rows=max(1, statistics.shape[1]),
        layers=layers or range(statistics.shape[0]),
        layout=layout,
        per_layer=per_layer,
    )
    plan.run(statistics, rows)


def expected_vectors(statistics, layout):
    """The vectors of the means over layers: float64[R, 20]."""
    statistics = statistics.astype(np.float64)
    mean = statistics.mean(axis=0)
    if layout is Layout.LOG16:
        hist = mean[:, :16]
        bands = [hist[:, :3].sum(1), hist[:, 3:8].sum(1), hist[:, 8:].sum(1)]
        return np.column_stack([*bands, mean[:, 27], hist])
    bands = [mean[:, 24], mean[:, 25], 1.0 - mean[:, 24] - mean[:, 25]]
    depths = [at_depths(statistics[:, r, 27]) for r in range(statistics.shape[1])]
    return np.column_stack([*bands, mean[:, 27], mean[:, 16:24], depths])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("layers", "rows"),
    [
        *((1, 1), (3, 17)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 67), (8, 3), (33, 11))),
    ],
)
def test_vectors_are_those_of_the_means_over_layers(layers, rows, layout):
    ring, statistics = Ring(128, DEVICE), make_statistics(layers, rows)
    given = make_rows(rows, first_handle=-(2**40) - 3)
    append(ring, statistics, given, layout=layout)
    records = Drain(ring).flush()
    assert records["seq"].tolist() == list(range(1, rows + 1))
    assert records["handle"].tolist() == given.handle.tolist()
    assert records["position"].tolist() == given.position.tolist()
    assert records["phase"].tolist() == given.phase.tolist()
    assert set(records["layer"]) == {MEAN_LAYER}
    assert set(records["layout"]) == {layout}
    np.testing.assert_allclose(
        records["vector"], expected_vectors(statistics, layout), atol=1e-6, rtol=0
    )
    np.testing.assert_allclose(
        records["sink_mass"], statistics[..., 26].mean(axis=0), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 13])
def test_a_record_for_each_layer(rows, layout):
    ring, statistics = Ring(64, DEVICE), make_statistics(3, rows)
    append(ring, statistics, make_rows(rows), layout=layout, per_layer=True, layers=[0, 7, 31])
    records = Drain(ring).flush()
    assert records["handle"].tolist() == np.repeat(np.arange(rows), 3).tolist()
    assert records["layer"].tolist() == [0, 7, 31] * rows
    each = [expected_vectors(statistics[i : i + 1], layout) for i in range(3)]
    expected = np.stack(each, axis=1).reshape(-1, 20)
    np.testing.assert_allclose(records["vector"], expected, atol=1e-6, rtol=0)
    np.testing.assert_allclose(records["sink_mass"], statistics[..., 26].T.ravel(), atol=1e-6)


@pytest.mark.parametrize("per_layer", [False, True])
def test_rows_that_have_no_record_take_no_slot(per_layer):
    statistics = make_statistics(2, 8)
    statistics[:, 1] = np.nan  # never asked for, and never computed
    statistics[1, 4, 28] = 0.0
    statistics[:, 5, 28] = np.nan
    enabled = [1, 0, 1, 1, 1, 1, 255, 1]
    rows = make_rows(8, enabled=enabled, position=[9, 9, 0, -1, 9, 9, 9, 9], num_active=7)
    ring = Ring(16, DEVICE)
    append(ring, statistics, rows, per_layer=per_layer)
    records = Drain(ring).flush()
    found = list(zip(records["handle"].tolist(), records["layer"].tolist(), strict=True))
    if per_layer:
        assert found == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (6, 0), (6, 1)]
    else:
        assert found == [(0, -1), (2, -1), (6, -1)]
    assert np.isfinite(records["vector"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "per_layer"), [(1, False), (2, True), (20, False)])
def test_records_of_many_rows_are_in_the_order_of_the_rows(layers, per_layer):
    # Enough rows for several programs of one launch, and for several tiles of flags.
    enabled = np.random.default_rng(2).random(301) < 0.4
    rows, statistics = make_rows(301, enabled=enabled), make_statistics(layers, 301)
    ring = Ring(1024, DEVICE)
    append(ring, statistics, rows, per_layer=per_layer)
    asked = np.flatnonzero(enabled)
    records = Drain(ring).flush()
    assert records["handle"].tolist() == np.repeat(asked, layers if per_layer else 1).tolist()
    if not per_layer:
        expected = expected_vectors(statistics[:, asked], Layout.LOG16)
        np.testing.assert_allclose(records["vector"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_rows_by_request_are_recorded_as_rows_of_their_own(rows, per_layer):
    # More rows than requests: the padding rows of a graph are those of request 0, which is nobody.
    random = np.random.default_rng(rows)
    request = np.concatenate([random.permutation(rows) + 1, [0, 0]])
    enabled = random.random(rows + 1) < 0.7
    enabled[0] = False
    handle, phase = random.integers(-(2**40), 2**40, rows + 1), random.integers(0, 3, rows + 1)
    lengths = np.where(request > 0, random.integers(1, 1000, rows + 2), 1)
    statistics = make_statistics(2, rows + 2)

    def tensor(values, dtype):
        return torch.as_tensor(np.asarray(values)).to(DEVICE, dtype)

    by_request = RequestRows(
        tensor(lengths, torch.int32), tensor(request, torch.int64), tensor(handle, torch.int64),
        tensor(phase, torch.uint8), tensor(enabled, torch.bool),
    )  # fmt: skip
    by_row = StepRows(
        tensor(lengths - 1, torch.int32), tensor(handle[request], torch.int64),
        tensor(phase[request], torch.uint8), tensor(enabled[request], torch.bool),
    )  # fmt: skip
    found = []
    for each in (by_request, by_row):
        ring = Ring(256, DEVICE)
        append(ring, statistics, each, per_layer=per_layer)
        found.append(Drain(ring).flush())
    for name in RECORD_DTYPE.names:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)
    assert len(found[0]) == enabled[1:].sum() * (2 if per_layer else 1)


@pytest.mark.parametrize(
    "case",
    [
        {"rows": 0},
        {"rows": 1, "enabled": [0]},
        {"rows": 5, "enabled": [0] * 5},
        {"rows": 5, "num_active": 0},
        {"rows": 5, "position": [-1] * 5},
    ],
)
def test_without_an_enabled_row_nothing_is_written(case):
    ring = Ring(8, DEVICE)
    ring.slots.fill_(0x5A5A5A5A)
    append(ring, np.full((2, case["rows"], 32), np.nan, np.float32), make_rows(**case))
    assert (ring.slots == 0x5A5A5A5A).all()
    assert ring.state.tolist() == [0, 0, 0]
    assert len(Drain(ring).flush()) == 0


@pytest.mark.parametrize("layers", [1, 20])
def test_a_plan_may_have_room_for_far_more_rows_than_a_step_has(layers):
    ring, statistics, rows = Ring(1024, DEVICE), make_statistics(layers, 3), make_rows(3)
    AppendPlan(ring, max_rows=900, layers=range(layers)).run(
        torch.as_tensor(statistics).to(DEVICE), rows
    )
    records = Drain(ring).flush()
    assert records["handle"].tolist() == [0, 1, 2]
    expected = expected_vectors(statistics, Layout.LOG16)
    np.testing.assert_allclose(records["vector"], expected, atol=1e-6, rtol=0)


def test_only_the_slots_of_new_records_are_written():
    ring = Ring(8, DEVICE)
    ring.slots.fill_(0x5A5A5A5A)
    append(ring, make_statistics(1, 6), make_rows(6, enabled=[1, 0, 1, 1, 0, 0]))
    assert (ring.slots[3:] == 0x5A5A5A5A).all()
    padding = ring.slots[:3, [7, 28, 29, 30, 31]]
    assert not padding.any()


def test_rows_of_a_larger_buffer_and_flags_of_either_type():
    whole = torch.as_tensor(make_statistics(3, 12)).to(DEVICE)
    ring = Ring(16, DEVICE)
    plan = AppendPlan(ring, max_rows=12, layers=[1, 2, 3])
    rows = make_rows(5)
    plan.run(
        whole[:, :5], rows._replace(enabled=rows.enabled.bool(), position=rows.position.long())
    )
    records = Drain(ring).flush()
    expected = expected_vectors(whole[:, :5].cpu().numpy(), Layout.LOG16)
    np.testing.assert_allclose(records["vector"], expected, atol=1e-6, rtol=0)


class Writer:
    """Appends records whose handles count up and whose numbers all follow from the handle."""

    def __init__(self, ring, rows=5, layers=1):
        self.ring, self.rows, self.handle, self.kept = ring, rows, 0, []
        self.plan = AppendPlan(ring, max_rows=rows, layers=range(layers))

    def append(self, count):
        count = min(count, self.rows)
        rows = make_rows(count, first_handle=self.handle)
        statistics = torch.zeros((len(self.plan.layers), count, 32), device=DEVICE)
        statistics[..., :16] = (rows.handle[:, None] / 1024).float()
        statistics[..., 28] = 1.0
        self.plan.run(statistics, rows)
        self.handle += count

    def check(self, records):
        """Of all that was appended: in order, each once, and each of one piece."""
        self.kept.extend(records["handle"].tolist())
        self.assert_whole(records)

    def assert_whole(self, records):
        assert records["seq"].tolist() == [handle + 1 for handle in records["handle"].tolist()]
        expected = np.repeat(records["handle"][:, None] / 1024, 16, axis=1)
        np.testing.assert_array_equal(records["vector"][:, 4:], expected.astype(np.float32))

    def check_all(self, drain):
        """Every record was received once, in order, or counted as dropped."""
        assert self.kept == sorted(set(self.kept))
        assert drain.received == len(self.kept)
        assert drain.received + drain.dropped == self.handle
        assert 0 <= drain.torn <= drain.dropped


def test_records_go_round_the_ring():
    writer = Writer(Ring(8, DEVICE))
    drain = Drain(writer.ring)
    for _ in range(7):
        writer.append(5)
        writer.check(drain.flush())
    writer.check_all(drain)
    assert (drain.received, drain.dropped) == (35, 0)


@pytest.mark.parametrize(("steps", "dropped"), [(1, 0), (2, 0), (3, 4), (7, 20)])
def test_overflow_drops_the_oldest_and_counts_them(steps, dropped):
    writer = Writer(Ring(8, DEVICE), rows=4)
    drain = Drain(writer.ring)
    for _ in range(steps):
        writer.append(4)
    writer.check(drain.flush())
    assert writer.kept == list(range(dropped, 4 * steps))
    assert (drain.dropped, drain.torn) == (dropped, 0)
    writer.check_all(drain)


def test_what_is_polled_is_a_copy_and_comes_once():
    writer = Writer(Ring(8, DEVICE))
    drain = Drain(writer.ring)
    writer.append(5)
    first = drain.flush()
    kept = first.copy()
    for _ in range(3):
        writer.append(5)
        drain.flush()
    np.testing.assert_array_equal(first, kept)
    assert len(drain.poll()) == len(drain.flush()) == 0
    assert first.dtype == drain.poll().dtype == RECORD_DTYPE


def test_a_poll_gives_what_was_marked():
    writer = Writer(Ring(8, DEVICE))
    drain = Drain(writer.ring)
    writer.append(2)
    assert len(drain.poll()) == 0
    drain.mark()
    deadline = time.monotonic() + 30
    while drain.received < 2 and time.monotonic() < deadline:
        writer.check(drain.poll())
    writer.check_all(drain)


def test_records_may_be_polled_from_another_thread_while_steps_run():
    writer = Writer(Ring(32, DEVICE))
    drain, parts, over = Drain(writer.ring), [], threading.Event()

    def poll():
        while not over.is_set():
            parts.append(drain.poll())
            time.sleep(1e-4)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(30):
            writer.append(5)
            drain.mark()
        deadline = time.monotonic() + 30
        while not drain.received and time.monotonic() < deadline:
            time.sleep(1e-3)
    finally:
        over.set()
        thread.join()
    polled = drain.received
    writer.check(np.concatenate([*parts, drain.flush()], dtype=RECORD_DTYPE))
    writer.check_all(drain)
    assert polled > 0


def test_two_drains_read_the_same_records():
    writer = Writer(Ring(8, DEVICE))
    one, other = Drain(writer.ring), Drain(writer.ring)
    writer.append(5)
    np.testing.assert_array_equal(one.flush(), other.flush())


@pytest.mark.parametrize("wrong", [0, 1, 11, 2**63])
def test_a_slot_whose_seq_is_not_its_own_is_dropped_as_torn(wrong):
    writer = Writer(Ring(8, DEVICE))
    drain = Drain(writer.ring)
    writer.append(5)
    seq = torch.from_numpy(np.array([wrong], np.uint64).view(np.int32))
    writer.ring.slots[2, :2] = seq.to(DEVICE)
    writer.check(drain.flush())
    assert writer.kept == [0, 1, 3, 4]
    assert (drain.dropped, drain.torn) == (1, 1)
    writer.check_all(drain)


def test_a_slot_that_is_claimed_anew_is_dropped_as_torn_whatever_its_seq():
    writer = Writer(Ring(8, DEVICE))
    drain = Drain(writer.ring)
    writer.append(5)
    # A step that has claimed 6 of the 8 slots and has yet to write any.
    writer.ring.state[1] += 6
    writer.check(drain.flush())
    assert writer.kept == [3, 4]
    assert (drain.dropped, drain.torn) == (3, 3)


@pytest.mark.skipif(DEVICE == "cuda", reason="only an interpreted kernel can be looked at midway")
@pytest.mark.parametrize("capacity", [16, 32])
def test_no_reader_finds_a_torn_record_between_any_two_writes(monkeypatch, capacity):
    from triton.runtime.interpreter import InterpreterBuilder

    # Three programs, each with the means of 16 layers.
    writer = Writer(Ring(capacity, DEVICE), rows=9, layers=16)
    drain, looks = Drain(writer.ring), [0]

    def look_before(name):
        run = getattr(InterpreterBuilder, name)

        def looked(*arguments, **named):
            looks[0] += 1
            drain.mark()
            writer.check(drain.poll())
            # Whatever a reader finds whole by the rules of `ring`, committed or not, is whole.
            records = writer.ring.slots.numpy().view(RECORD_DTYPE)[:, 0]
            numbers = records["seq"].astype(np.int64) - 1
            whole = (numbers >= 0) & (numbers >= int(writer.ring.state[1]) - capacity)
            writer.assert_whole(records[whole])
            return run(*arguments, **named)

        monkeypatch.setattr(InterpreterBuilder, name, looked)

    for name in ("create_atomic_rmw", "create_masked_store", "create_store"):
        look_before(name)
    for count in (9, 3, 9, 9, 1):
        writer.append(count)
    assert writer.ring.state.tolist() == [31, 31, 0]
    assert looks[0] > 50
    writer.check(drain.flush())
    writer.check_all(drain)


class RacingDrain(Drain):
    """A drain with a writer in the middle of its copies: it has half of every slot by then.

    Only where copies are made at once; on a GPU the copy engine and the kernels race by themselves.
    """

    def between(self):
        pass

    def _copy(self, host, device):
        if DEVICE == "cuda" or host.dim() == 1:
            super()._copy(host, device)
            return
        super()._copy(host[:, :16], device[:, :16])
        self.between()
        super()._copy(host[:, 16:], device[:, 16:])


@pytest.mark.skipif(DEVICE == "cuda", reason="the copy is cut in two on the host only")
@pytest.mark.parametrize(("overtaken", "torn"), [(0, 0), (3, 0), (4, 1), (5, 2), (13, 5)])
def test_a_writer_that_overtakes_the_copy_leaves_no_torn_record(overtaken, torn):
    writer = Writer(Ring(8, DEVICE), rows=5)
    drain = RacingDrain(writer.ring)
    writer.append(5)

    def overtake():
        for count in (5, 5, 3):
            left = overtaken - (writer.handle - 5)
            writer.append(min(count, left))

    drain.between = overtake
    drain.mark()
    writer.check(drain.poll())
    assert (drain.received, drain.dropped, drain.torn) == (5 - torn, torn, torn)
    drain.between = lambda: None
    writer.check(drain.flush())
    writer.check_all(drain)


@given(
    capacity=st.sampled_from([8, 16]),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 5)),
            st.tuples(st.just("poll"), st.integers(0, 5)),
            st.tuples(st.just("mark"), st.just(0)),
        ),
        max_size=14,
    ),
)
def test_records_come_in_order_each_once_or_counted_as_dropped(capacity, actions):
    writer = Writer(Ring(capacity, DEVICE))
    drain = RacingDrain(writer.ring)
    for action, count in actions:
        if action == "append":
            writer.append(count)
        elif action == "mark":
            drain.mark()
        else:
            drain.between = lambda count=count: writer.append(count)
            writer.check(drain.poll())
            assert drain.received + drain.dropped <= writer.handle
    drain.between = lambda: None
    writer.check(drain.flush())
    writer.check_all(drain)


def test_views_share_the_memory_of_the_ring():
    if DEVICE == "cuda":
        pytest.importorskip("cupy")
    ring = Ring(16, DEVICE)
    views = ring.views()
    append(ring, make_statistics(2, 7), make_rows(7), per_layer=True, layers=[3, 9])
    records = Drain(ring).flush()
    assert (int(views.committed[0]), int(views.claimed[0])) == (14, 14)
    for name in RECORD_DTYPE.names:
        view = on_host(getattr(views, name))
        assert view.dtype == records[name].dtype
        np.testing.assert_array_equal(view[:14], records[name])
    views.sink_mass[3] = 0.125
    assert ring.slots.view(torch.float32)[3, 6] == 0.125


@pytest.mark.gpu
def test_cudf_takes_the_fields_of_the_views():
    cudf = pytest.importorskip("cudf")
    ring = Ring(16, DEVICE)
    append(ring, make_statistics(2, 7), make_rows(7), per_layer=True, layers=[3, 9])
    views, records = ring.views(), Drain(ring).flush()
    names = ("seq", "handle", "position", "layer", "sink_mass")
    frame = cudf.DataFrame({name: getattr(views, name)[:14] for name in names})
    for name in names:
        np.testing.assert_array_equal(frame[name].to_numpy(), records[name])


def test_views_on_a_gpu_say_when_cupy_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'attn\[gpu\]'"):
        Ring(4, DEVICE).views() if DEVICE == "cuda" else buffers._import_cupy()


@pytest.mark.parametrize("capacity", [0, -4, 3, 48])
def test_a_capacity_is_a_power_of_two(capacity):
    with pytest.raises(OptionError, match="power of two"):
        Ring(capacity, DEVICE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_rows": 9}, "ring holds 8"),
        ({"max_rows": 5, "layers": [0, 1], "per_layer": True}, "10 records"),
        ({"max_rows": 0}, "1 or more"),
        ({"layers": []}, "layer"),
        ({"layers": [-1]}, r"0\.\.32767"),
        ({"layers": [1 << 15]}, r"0\.\.32767"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(change, message):
    with pytest.raises(OptionError, match=message):
        AppendPlan(Ring(8, DEVICE), **{"max_rows": 4, "layers": [0], **change})


@pytest.mark.parametrize(
    ("shape", "rows", "message"),
    [
        ((1, 5, 32), 5, "raise max_rows"),
        ((2, 3, 32), 3, "statistics has the shape"),
        ((1, 2, 32), 3, "statistics has the shape"),
        ((1, 3, 31), 3, "statistics has the shape"),
    ],
)
def test_statistics_that_do_not_fit_the_plan_are_refused(shape, rows, message):
    plan = AppendPlan(Ring(8, DEVICE), max_rows=4, layers=[0])
    with pytest.raises(OptionError, match=message):
        plan.run(torch.zeros(shape, device=DEVICE), make_rows(rows))


def test_tensors_that_do_not_fit_together_are_refused():
    plan = AppendPlan(Ring(8, DEVICE), max_rows=4, layers=[0])
    statistics, rows = torch.zeros((1, 3, 32), device=DEVICE), make_rows(3)
    with pytest.raises(OptionError, match="handle has the shape"):
        plan.run(statistics, rows._replace(handle=rows.handle[:2]))
    with pytest.raises(OptionError, match="int64"):
        plan.run(statistics, rows._replace(handle=rows.handle.int()))
    with pytest.raises(OptionError, match="enabled is"):
        plan.run(statistics, rows._replace(enabled=rows.enabled.int()))
    with pytest.raises(OptionError, match="contiguous"):
        plan.run(statistics, rows._replace(position=rows.position.repeat(2)[::2]))
    with pytest.raises(OptionError, match="num_active is"):
        plan.run(statistics, rows._replace(num_active=rows.num_active.long()))
    with pytest.raises(OptionError, match="float32"):
        plan.run(statistics.half(), rows)
    with pytest.raises(OptionError, match="num_active has the shape"):
        plan.run(statistics, rows._replace(num_active=rows.num_active[:0]))
    with pytest.raises(OptionError, match="position has the shape"):
        plan.run(statistics, rows._replace(position=rows.position[0]))
    with pytest.raises(OptionError, match="phase is on meta"):
        plan.run(statistics, rows._replace(phase=rows.phase.to("meta")))
    with pytest.raises(OptionError, match="right after"):
        plan.run(torch.zeros((1, 6, 32), device=DEVICE)[:, ::2], rows)


class DeviceSteps:
    """Steps whose every tensor is made on the device, as those of a CUDA graph must be: row r of
    step s has position s and handle r, and the number s / 2**20 in all bins."""

    def __init__(self, capacity, rows=5):
        self.rows = make_rows(rows)
        self.rows.position.fill_(-1)
        self.statistics = torch.zeros((1, rows, 32), device="cuda")
        self.statistics[..., 28] = 1.0
        self.ring = Ring(capacity, "cuda")
        self.plan = AppendPlan(self.ring, max_rows=rows, layers=[0])
        self.drain = Drain(self.ring)

    def run(self):
        self.rows.position.add_(1)
        self.statistics[0, :, :16].copy_(self.rows.position[:, None])
        self.statistics[0, :, :16].mul_(2.0**-20)
        self.plan.run(self.statistics, self.rows)

    def capture(self):
        """The step as a CUDA graph; what warming up appended is not drained."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def check(self, records):
        """In order, without a gap between the rows of one record, each of one piece."""
        number = records["seq"].astype(np.int64) - 1
        assert (np.diff(number) > 0).all()
        rows = len(self.rows.position)
        np.testing.assert_array_equal(records["handle"], number % rows)
        np.testing.assert_array_equal(records["position"], number // rows)
        expected = np.repeat((records["position"] * 2.0**-20)[:, None], 16, axis=1)
        np.testing.assert_array_equal(records["vector"][:, 4:], expected.astype(np.float32))


@pytest.mark.gpu
@needs_gpu
def test_a_step_neither_synchronises_nor_allocates():
    steps = DeviceSteps(4096)
    for _ in range(3):
        steps.run()
        steps.drain.mark()
        steps.drain.poll()
    steps.drain.flush()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            steps.plan.run(steps.statistics, steps.rows)
            steps.drain.mark()
            steps.drain.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    steps.drain.flush()
    assert (steps.drain.received, steps.drain.dropped) == (203 * 5, 0)


@pytest.mark.gpu
@needs_gpu
def test_a_poll_waits_for_no_step():
    steps = DeviceSteps(4096)
    steps.run()
    steps.check(steps.drain.flush())
    torch.cuda._sleep(2_000_000_000)
    steps.run()
    begin = time.perf_counter()
    steps.drain.mark()
    arrived = steps.drain.poll()
    waited = time.perf_counter() - begin
    busy = not torch.cuda.current_stream().query()
    assert busy and len(arrived) == 0 and waited < 0.2
    assert len(steps.drain.flush()) == 5


@pytest.mark.gpu
@needs_gpu
def test_a_graph_replayed_many_times_leaves_every_record_once():
    replays = 10_000
    steps = DeviceSteps(1 << 16)
    graph = steps.capture()
    before = torch.cuda.memory_allocated()
    parts = []
    for i in range(replays):
        graph.replay()
        if i % 7 == 0:
            steps.drain.mark()
        if i % 3 == 0:
            parts.append(steps.drain.poll())
    parts.append(steps.drain.flush())
    records = np.concatenate(parts)
    steps.check(records)
    assert len(records) == 5 * (replays + 1)
    assert (steps.drain.dropped, steps.drain.torn) == (0, 0)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("capacity", "rows", "replays"), [(8, 5, 10_000), (1024, 600, 3_000)])
def test_a_ring_that_overflows_while_it_is_read_gives_no_torn_record(capacity, rows, replays):
    # More than half of the slots are written by each step: nearly every copy is overtaken. The
    # records of 600 rows are written by ten programs.
    steps = DeviceSteps(capacity, rows)
    graph = steps.capture()
    parts = []
    for _ in range(replays):
        graph.replay()
        steps.drain.mark()
        parts.append(steps.drain.poll())
    parts.append(steps.drain.flush())
    steps.check(np.concatenate(parts))
    assert steps.drain.received + steps.drain.dropped == rows * (replays + 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("capacity", [64, 1 << 16])
def test_another_thread_polls_while_a_graph_is_replayed(capacity):
    replays, over, parts = 5_000, threading.Event(), []
    steps = DeviceSteps(capacity)
    graph = steps.capture()

    def poll():
        while not over.is_set():
            parts.append(steps.drain.poll())

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(replays):
            graph.replay()
            steps.drain.mark()
    finally:
        over.set()
        thread.join()
    polled = steps.drain.received
    parts.append(steps.drain.flush())
    steps.check(np.concatenate(parts))
    assert polled > 0
    assert steps.drain.received + steps.drain.dropped == 5 * (replays + 1)
    assert capacity == 64 or steps.drain.dropped == 0


@pytest.mark.gpu
@needs_gpu
def test_a_step_is_not_marked_inside_a_graph():
    steps = DeviceSteps(64)
    steps.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps.run()
        with pytest.raises(OptionError, match="not inside it"):
            steps.drain.mark()
