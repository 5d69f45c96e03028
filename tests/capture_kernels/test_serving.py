"""One object between an engine's steps and the kernels: what it captures, of whom, and when."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from paged import DEVICE, assert_close, paged_case, waiting_is_an_error  # noqa: E402

from capture_kernels.decode.step.page_table import PageTable  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.columns import vectors_of_columns  # noqa: E402
from capture_kernels.fingerprint.reference import attention_rows, decode_statistics  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402
from capture_kernels.serving.fused import FusedCapture  # noqa: E402
from capture_kernels.serving.requests import OUTPUT, THINK, RequestTable  # noqa: E402
from capture_kernels.serving.step import LayerKind, StepCapture  # noqa: E402

ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
KERNELS = pytest.param(False, marks=[] if ON_GPU else pytest.mark.slow)
# On a GPU only the kernels are looked at: the plan for a CPU takes tensors of the host.
HOSTS = [KERNELS] if ON_GPU else [True, KERNELS]
LENGTHS = [40, 7, 129, 2]
MASSES = {"largest": 1e-4, "rms": 3e-5}
WINDOW = 9


class Model:
    """Requests over a paged cache, and layers of two kinds: some look at a window alone. With
    `mapped`, these have their keys in a cache of their own, with room for the window; with `paged`,
    each kind has a table of pages."""

    def __init__(self, numbers=(1, 4), windowed=(), heads=4, seed=0, mapped=False, paged=False):
        case = paged_case(LENGTHS, heads, 2, 16, seed=seed, max_context=200)
        # In engines, row 0 belongs to nobody.
        table = torch.cat([case.req_to_token[:1], case.req_to_token])
        indices = case.req_pool_indices + 1
        self.case = replace(case, req_to_token=table, req_pool_indices=indices)
        self.numbers, self.windowed = sorted([*numbers, *windowed]), windowed
        random = torch.Generator().manual_seed(seed)
        shape = self.case.queries.shape
        self.queries = {
            number: torch.randn(shape, generator=random).to(DEVICE, self.case.queries.dtype)
            for number in self.numbers
        }
        kind = {"heads": heads, "key_heads": 2, "head_dim": 16, "scale": 0.3}
        self.kinds = [LayerKind(tuple(numbers), **kind, mapped=paged)] if numbers else []
        if windowed:
            is_mapped = mapped or paged
            self.kinds.append(LayerKind(tuple(windowed), **kind, window=WINDOW, mapped=is_mapped))
        self.caches, self.slot_map = [self.case.k_cache] * 2, None
        self.pages = {}
        if mapped:
            self.use_own_cache(random)
        if paged:
            # Of a cache whose key heads lie between its pages' tokens, and of one with padding.
            for kind, page in zip(self.kinds, ((16, 32), (4, 7)), strict=False):
                self.use_pages(kind, *page, random)

    def use_own_cache(self, random):
        """Keys outside the windows have no slot there: theirs is one that must not be read."""
        pairs = zip(self.case.req_pool_indices, LENGTHS, strict=True)
        newest = [self.case.req_to_token[row, :n][-WINDOW:].long() for row, n in pairs]
        slots = torch.cat(newest).cpu()
        at = torch.randperm(len(slots) + 5, generator=random)[: len(slots)] + 1
        self.slot_map = torch.zeros(len(self.case.k_cache), dtype=torch.int64)
        self.slot_map[slots] = at
        cache = torch.full((len(slots) + 6, *self.case.k_cache.shape[1:]), torch.nan)
        own_cache = cache.to(self.case.k_cache)
        own_cache[at.to(DEVICE)] = self.case.k_cache[slots.to(DEVICE)]
        self.caches[1], self.slot_map = own_cache, self.slot_map.to(DEVICE)

    def use_pages(self, kind, page, page_slots, random):
        """What belongs to no key that is read is NaN, and page 0 is nobody's."""
        most = sum(-(-length // page) for length in LENGTHS) + 3
        free = (torch.randperm(most, generator=random) + 1).tolist()
        table = torch.zeros((len(self.case.req_to_token), 200 // page + 1), dtype=torch.int32)
        shape = ((most + 1) * page_slots, *self.case.k_cache.shape[1:])
        cache = torch.full(shape, torch.nan).to(self.case.k_cache)
        for row, length in zip(self.case.req_pool_indices.tolist(), LENGTHS, strict=True):
            for key in range(max(0, length - kind.window) if kind.window else 0, length):
                if not table[row, key // page]:
                    table[row, key // page] = free.pop()
                slot = int(table[row, key // page]) * page_slots + key % page
                cache[slot] = self.case.k_cache[self.case.req_to_token[row, key]]
        self.caches[bool(kind.window)] = cache
        self.pages[kind] = (table.to(DEVICE), {"page": page, "page_slots": page_slots})

    def capture(self, kind=StepCapture, **options):
        given = {"max_rows": 8, "max_length": 300, "num_requests": len(self.case.req_to_token)}
        return kind(self.kinds, device=DEVICE, slot_map=self.slot_map, **given | options)

    def tables(self, rows=None):
        case, rows = self.case, slice(rows)
        own = (case.req_pool_indices[rows], case.seq_lens[rows])
        if not self.pages:
            return [PageTable.of_requests(case.req_to_token, *own)]
        return [PageTable.of_pages(table, *own, **page) for table, page in self.pages.values()]

    def step(self, capture, rows=None, skip=()):
        capture.begin(*self.tables(rows))
        for number in self.numbers:
            if number not in skip:
                keys = self.caches[number in self.windowed]
                capture.layer(number, self.queries[number][:rows], keys)
        capture.end()

    def row(self, index):
        """The request row of the case's row `index`."""
        return int(self.case.req_pool_indices[index])

    def truth(self, number, row, visibility=None, keys=None, **asked):
        return decode_statistics(
            self.queries[number][row].double().cpu().numpy(),
            self.case.keys[row] if keys is None else keys,
            scale=0.3,
            position=LENGTHS[row] - 1,
            visibility=visibility or Visibility(),
            window=WINDOW if number in self.windowed else 0,
            **asked,
        )


@pytest.mark.parametrize("on_host", HOSTS)
@pytest.mark.parametrize(
    "given",
    [
        {}, {"windowed": (0, 3)}, {"windowed": (0, 3), "mapped": True}, {"paged": True},
        {"windowed": (0, 3), "paged": True},
    ],
    ids=["one kind", "windows", "windows in a pool of their own", "pages", "pages of two tables"],
)  # fmt: skip
def test_rows_that_are_enabled_are_described_and_others_are_not(given, on_host):
    model = Model(**given)
    capture = model.capture(on_host=on_host, mean_top_k=3, top_k=2)
    assert capture.layers == tuple(model.numbers)
    capture.requests.enable(model.row(0))
    capture.requests.enable(model.row(2), mask=5)
    capture.requests.copy()
    model.step(capture)
    found = capture.results(4, heads=True)
    assert found.mean.shape == (len(model.numbers), 4, 32)
    assert found.mean[:, :, 28].tolist() == [[1, 0, 1, 0]] * len(model.numbers)
    for index, number in enumerate(model.numbers):
        for row, mask in ((0, 0), (2, 5)):
            seen = Visibility(1, mask)
            truth = model.truth(number, row, seen, top_k=2, mean_top_k=3)
            mean = found.mean[index, row].cpu().numpy()
            assert_close(mean[:16], truth.hist.mean(0), **MASSES)
            assert_close(mean[29], truth.logsumexp.mean(), largest=1e-3, rms=1e-3)
            positions = found.mean_positions[index, row].tolist()
            assert positions == truth.mean_top_positions.tolist()
            assert_close(found.mean_masses[index, row], truth.mean_top_mass, **MASSES)
            assert found.positions[index, row].tolist() == truth.top_positions.tolist()
            assert_close(found.per_head[index, row, :, 27], truth.entropy, **MASSES)
    vectors = vectors_of_columns(found.mean.cpu().numpy())
    assert vectors.valid.tolist() == [True, False, True, False]


@pytest.mark.skipif(not ON_GPU, reason="waits for a GPU")
@pytest.mark.parametrize("windowed", [(), (0, 3)], ids=["one kind", "windows"])
def test_results_are_copied_without_waiting_for_the_step(windowed):
    model = Model(windowed=windowed)
    capture = model.capture(mean_top_k=3, top_k=2, hub_slots=2)
    capture.requests.enable(model.row(1), hub=0)
    capture.requests.copy()
    model.step(capture)
    expected = capture.results(4, heads=True, hubs=[(0, 5)])
    with waiting_is_an_error():
        found = capture.results(4, heads=True, hubs=[(0, 5)])
    for name, copied, before in zip(found._fields, found, expected, strict=True):
        assert copied.equal(before), name
    assert found.mean[:, 1, 28].all()


@pytest.mark.parametrize("on_host", HOSTS)
@pytest.mark.parametrize("heads", [4, 36])
def test_means_of_a_row_are_of_the_heads_that_its_request_chose(heads, on_host):
    model = Model(heads=heads)
    capture = model.capture(on_host=on_host, mean_top_k=3)
    chosen = {0: [1, heads - 1], 1: None, 2: [0], 3: list(range(heads))}
    for row, own in chosen.items():
        capture.requests.enable(model.row(row), heads=own)
    capture.requests.copy()
    model.step(capture)
    found = capture.results(4)
    for index, number in enumerate(model.numbers):
        for row, own in chosen.items():
            truth = model.truth(number, row, mean_top_k=3, mean_heads=own)
            of_mean = slice(None) if own is None else own
            mean = found.mean[index, row].cpu().numpy()
            assert_close(mean[:16], truth.hist[of_mean].mean(0), **MASSES)
            assert_close(mean[27], truth.entropy[of_mean].mean(), **MASSES)
            assert_close(mean[29], truth.logsumexp[of_mean].mean(), largest=1e-3, rms=1e-3)
            assert mean[28] == 1
            positions = found.mean_positions[index, row].tolist()
            assert positions == truth.mean_top_positions.tolist()
            assert_close(found.mean_masses[index, row], truth.mean_top_mass, **MASSES)
    for wrong in ([], [heads], [-1]):
        with pytest.raises(OptionError, match="heads"):
            capture.requests.enable(model.row(0), heads=wrong)


@pytest.mark.parametrize("on_host", HOSTS)
@pytest.mark.parametrize("windowed", [(), (0,)])
def test_slots_add_up_what_their_requests_attended_to(windowed, on_host):
    model = Model(windowed=windowed)
    capture = model.capture(on_host=on_host, hub_slots=3)
    # Two rows of one request, one without a slot, one with a hidden prefix and a head of its own.
    model.case.req_pool_indices[1] = model.case.req_pool_indices[0]
    capture.requests.enable(model.row(0), hub=2)
    capture.requests.enable(model.row(2), hub=0, mask=20, heads=[1])
    capture.requests.enable(model.row(3))
    capture.requests.copy()
    for _ in range(2):
        model.step(capture)
    expected = np.zeros((3, 300))
    for number in model.numbers:
        for row, slot, mask, heads in ((0, 2, 0, None), (1, 2, 0, None), (2, 0, 20, [1])):
            keys = model.case.keys[0 if row == 1 else row][: LENGTHS[row]]
            truth = model.truth(number, row, Visibility(1, mask), keys=keys, mean_heads=heads)
            expected[slot, : LENGTHS[row] - mask] += 2 * truth.mean[mask:]
    assert_close(capture.hubs, expected, **MASSES)
    found = capture.results(4, hubs=[(0, 109), (2, 40)]).hubs
    assert_close(found, np.concatenate([expected[0, :109], expected[2, :40]]), **MASSES)


@pytest.mark.parametrize("on_host", HOSTS)
def test_a_step_in_which_a_layer_did_not_run_says_nothing(on_host):
    model = Model()
    capture = model.capture(on_host=on_host)
    capture.requests.enable(model.row(1))
    capture.requests.copy()
    model.step(capture)
    assert capture.results(4).mean[:, 1, 28].tolist() == [1, 1]
    model.step(capture, skip={4})
    assert not capture.results(4).mean.any()
    model.step(capture)
    assert capture.results(4).mean[:, 1, 28].tolist() == [1, 1]


@pytest.mark.parametrize("on_host", [KERNELS])
@pytest.mark.parametrize(
    "given", [{}, {"windowed": (0, 3), "paged": True}], ids=["one kind", "pages of two tables"]
)
def test_a_fused_step_computes_every_rows_attention_and_describes_those_that_are_enabled(
    given, on_host
):
    """Its requests are those of the capture of other steps. Values are the keys, turned around."""
    model = Model(**given)
    beside = model.capture(on_host=on_host, mean_top_k=3)
    fused = model.capture(kind=FusedCapture, on_host=on_host, mean_top_k=3, beside=beside)
    assert fused.requests is beside.requests
    beside.requests.enable(model.row(0))
    beside.requests.enable(model.row(2), mask=5)
    beside.requests.copy()
    fused.begin(*model.tables())
    outputs = {}
    for number in model.numbers:
        keys, query = model.caches[number in model.windowed], model.queries[number]
        outputs[number] = torch.full_like(query, torch.nan)
        assert fused.decode(number, query, keys, keys.flip(-1), outputs[number])
    assert not fused.decode(9, query, keys, keys, query)  # none of those captured
    fused.end()
    found = fused.results(4)
    assert found.mean[:, :, 28].tolist() == [[1, 0, 1, 0]] * len(model.numbers)
    for index, number in enumerate(model.numbers):
        window = WINDOW if number in model.windowed else 0
        for row, length in enumerate(LENGTHS):
            keys = model.case.keys[row][:length]
            query = model.queries[number][row].double().cpu().numpy()
            p = attention_rows(
                query[None], keys, scale=0.3, positions=[length - 1], window=window
            )[0]  # fmt: skip
            values = keys[..., ::-1]
            exact = np.einsum("gmt,tgd->gmd", p.reshape(2, -1, length), values).reshape(query.shape)
            assert_close(outputs[number][row].float(), exact, largest=2e-2, rms=5e-3)
        for row, mask in ((0, 0), (2, 5)):
            truth = model.truth(number, row, Visibility(1, mask), mean_top_k=3)
            assert_close(found.mean[index, row, :16], truth.hist.mean(0), **MASSES)
            positions = found.mean_positions[index, row].tolist()
            assert positions == truth.mean_top_positions.tolist()


@pytest.mark.parametrize("on_host", [KERNELS])
def test_a_fused_layer_out_of_turn_is_left_to_the_engine(on_host):
    model = Model()
    beside = model.capture(on_host=on_host)
    fused = model.capture(kind=FusedCapture, on_host=on_host, beside=beside)
    fused.requests.enable(model.row(0))
    fused.requests.copy()
    fused.begin(*model.tables())
    output = torch.full_like(model.queries[4], torch.nan)
    keys = model.caches[0]
    assert fused.decode(1, model.queries[1], keys, keys, torch.empty_like(output))
    assert not fused.decode(1, model.queries[4], keys, keys, output)
    assert output.isnan().all()
    fused.end()
    assert not fused.results(4).mean.any()


@pytest.mark.parametrize("on_host", [KERNELS])
@pytest.mark.parametrize("mean_top_k", [0, 32])
def test_a_fused_capture_takes_the_large_buffers_of_that_of_other_steps(on_host, mean_top_k):
    """Logits of 3,000 rows of 512 keys, and lists of as many KV slots."""
    model = Model(paged=True)
    size = {"max_rows": 3000, "max_length": 512, "num_requests": 3000, "mean_top_k": mean_top_k}
    beside = model.capture(on_host=on_host, **size)
    fused = model.capture(kind=FusedCapture, on_host=on_host, beside=beside, **size)
    shared = 0
    for mine, theirs in zip(fused._plans, beside._plans, strict=True):
        pairs = [(mine.scheduled.mapped_slots, theirs.scheduled.mapped_slots)]
        pairs += [(mine.top._kept["logits"], theirs.top._kept["logits"])] * bool(mean_top_k)
        for one, other in pairs:
            assert one.nbytes and one.data_ptr() == other.data_ptr()
            shared += one.nbytes
    assert 0 < fused.bytes < beside.bytes - 0.9 * shared


def test_fused_steps_need_a_gpu():
    model = Model()
    with pytest.raises(OptionError, match="fused decode needs a GPU"):
        model.capture(kind=FusedCapture, on_host=True, beside=model.capture(on_host=True))


def test_calls_out_of_turn_and_other_tables_are_refused():
    model = Model()
    capture = model.capture(on_host=not ON_GPU)
    query, keys = model.queries[1], model.case.k_cache
    with pytest.raises(OptionError, match="layer 1 of no step"):
        capture.layer(1, query, keys)
    with pytest.raises(OptionError, match="no step has begun"):
        capture.end()
    table = model.tables()[0]
    with pytest.raises(OptionError, match="the table must have"):
        capture.begin(replace(table, kv_slots=table.kv_slots.repeat(2, 1)))


@pytest.mark.parametrize(
    ("turns", "complete"),
    [((1, 4), True), ((0, 1, 2, 4, 5), True), ((4, 1), False), ((1, 1, 4), False),
     ((1, 4, 4), False), ((1, 4, 1), False), ((), False)],
)  # fmt: skip
def test_layers_that_do_not_run_once_in_turn_make_a_step_incomplete(turns, complete):
    model = Model()
    capture = model.capture(on_host=not ON_GPU)
    capture.requests.enable(model.row(0))
    capture.requests.copy()
    capture.begin(*model.tables())
    for number in turns:
        capture.layer(number, model.queries[1], model.case.k_cache)
    capture.end()
    assert capture.results(4).mean[:, 0, 28].tolist() == [float(complete)] * 2
    assert capture.incomplete_steps == (not complete)


@pytest.mark.parametrize("kinds", [[], [(1, 1)], [(1,), (2, 1)], [(-1,)]])
def test_layers_that_are_no_set_of_layers_are_refused(kinds):
    kind = {"heads": 2, "key_heads": 1, "head_dim": 16, "scale": 1.0}
    with pytest.raises(OptionError, match="captured layers must be different numbers"):
        StepCapture(
            [LayerKind(each, **kind) for each in kinds],
            max_rows=1, max_length=1, num_requests=2, device=DEVICE,
        )  # fmt: skip


@pytest.mark.parametrize("on_host", HOSTS)
@pytest.mark.parametrize(
    ("window", "slots"),
    [(9, None), (0, torch.zeros(9, dtype=torch.int64)), (9, torch.zeros(9))],
)
def test_mapped_layers_have_a_window_and_a_map_of_slots(window, slots, on_host):
    kind = LayerKind((0,), heads=4, key_heads=2, head_dim=16, scale=0.3, window=window, mapped=True)
    model = Model()
    model.kinds, model.slot_map = [kind], None if slots is None else slots.to(DEVICE)
    with pytest.raises(OptionError, match="slot_map"):
        model.capture(on_host=on_host).begin(*model.tables())


@pytest.mark.parametrize("on_host", HOSTS)
def test_pages_are_for_mapped_layers_and_do_not_overlap(on_host):
    model = Model(paged=True)
    kind, (table, _) = next(iter(model.pages.items()))
    model.kinds = [replace(kind, mapped=False)]
    with pytest.raises(OptionError, match="a table of pages is for mapped layers"):
        model.capture(on_host=on_host).begin(*model.tables())
    with pytest.raises(OptionError, match="pages of 16 keys cannot be 15 KV slots apart"):
        PageTable.of_pages(table, model.case.req_pool_indices, model.case.seq_lens, page=16,
                           page_slots=15)  # fmt: skip


def test_kinds_of_layers_have_one_table_or_one_each():
    model = Model(windowed=(0, 3), paged=True)
    with pytest.raises(OptionError, match="3 tables for 2 kinds of layers"):
        model.capture().begin(*model.tables(), model.tables()[0])


def test_the_first_row_of_a_table_may_be_a_requests():
    table = RequestTable(1, DEVICE, first=0)
    table.enable(0)
    table.copy()
    assert table.enabled.tolist() == [1]


def test_layers_that_take_turns_have_no_ring():
    model = Model(numbers=(0, 2), windowed=(1,))
    with pytest.raises(OptionError, match="layers of several kinds take turns"):
        model.capture(ring=object())


@pytest.mark.parametrize("on_host", [KERNELS])
def test_records_go_to_the_ring_under_the_requests_handles(on_host):
    pytest.importorskip("triton")
    from capture_kernels.ring.ring import Drain, Ring

    model = Model()
    ring = Ring(64, DEVICE)
    capture = model.capture(on_host=on_host, ring=ring)
    capture.requests.enable(model.row(3), handle=-7, phase=THINK)
    capture.requests.enable(model.row(0), handle=1 << 40)
    capture.requests.copy()
    model.step(capture)
    model.step(capture, skip={1})  # not even what the step before left
    capture.requests.disable(model.row(0))
    capture.requests.copy()
    model.step(capture, rows=2)
    records = Drain(ring).flush()
    assert records["handle"].tolist() == [1 << 40, -7]
    assert records["position"].tolist() == [39, 1]
    assert records["phase"].tolist() == [OUTPUT, THINK]
    expected = vectors_of_columns(capture_columns(model, 0)).vector[0]
    assert_close(records["vector"][0], expected, **MASSES)


def capture_columns(model, row):
    """The columns of one row by the reference: float32[L, 1, 32]."""
    columns = np.zeros((len(model.numbers), 1, 32), np.float32)
    for index, number in enumerate(model.numbers):
        truth = model.truth(number, row)
        columns[index, 0, :16] = truth.hist.mean(0)
        columns[index, 0, 27], columns[index, 0, 28] = truth.entropy.mean(), 1
    return columns


@pytest.mark.skipif(not ON_GPU, reason="no CUDA device answers")
@pytest.mark.parametrize("mean_top_k", [0, 4])
@pytest.mark.parametrize("form", ["", "mapped", "paged"])
def test_graphs_of_several_batch_sizes_share_a_capture(mean_top_k, form):
    from capture_kernels.ring.ring import Drain, Ring

    windows = {"numbers": (), "windowed": (0, 1, 2)}
    numbers = windows if form == "mapped" else {"numbers": (0, 1, 2)}
    model = Model(heads=8, **numbers, **({form: True} if form else {}))
    ring = Ring(256, DEVICE)
    # As a server plans: far more than its steps need.
    capture = model.capture(ring=ring, mean_top_k=mean_top_k, max_rows=256, max_length=131_072)
    graphs = {}
    side = torch.cuda.Stream()
    for rows in (4, 1, 2):
        with torch.cuda.stream(side):
            model.step(capture, rows)
        torch.cuda.synchronize()
        graphs[rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rows]):
            model.step(capture, rows)
    Drain(ring).flush()
    taken = torch.cuda.memory_allocated()
    drain = Drain(ring)
    for turn, rows in enumerate([1, 4, 2, 4, 1, 2, 2, 4]):
        asked = [row for row in range(4) if (turn + row) % 3]
        for row in range(4):
            if row in asked:
                capture.requests.enable(model.row(row), handle=100 * turn + row)
            else:
                capture.requests.disable(model.row(row))
        capture.requests.copy()
        graphs[rows].replay()
        found = capture.results(rows)
        valid = [float(row in asked) for row in range(rows)]
        assert found.mean[:, :, 28].tolist() == [valid] * 3
        records = drain.flush()
        here = [100 * turn + row for row in asked if row < rows]
        assert records["handle"].tolist()[-len(here) or len(records) :] == here
        for row in asked:
            if row < rows:
                for index, number in enumerate(model.numbers):
                    truth = model.truth(number, row, mean_top_k=mean_top_k)
                    mean = found.mean[index, row].cpu().numpy()
                    assert_close(mean[:16], truth.hist.mean(0), **MASSES)
                    positions = found.mean_positions[index, row].tolist()
                    assert positions == truth.mean_top_positions.tolist()
    assert torch.cuda.memory_allocated() - taken < 1 << 20


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.booleans(), st.integers(0, 2**31 - 1),
                  st.integers(-(2**63), 2**63 - 1), st.integers(0, 2)),
        max_size=40,
    )
)  # fmt: skip
def test_flags_of_requests_are_what_was_set_last(changes):
    table, expected = RequestTable(31, DEVICE), {}
    for index, enabled, mask, handle, phase in changes:
        if enabled:
            table.enable(index, handle=handle, mask=mask, phase=phase)
            expected[index] = (1, mask, handle, phase)
        else:
            table.disable(index)
            expected.pop(index, None)
        if index % 3 == 0:
            table.copy()
    table.copy()
    fields = (table.enabled, table.mask, table.handle, table.phase)
    for index in range(31):
        found = tuple(field[index].item() for field in fields)
        assert found == expected.get(index, (0, 0, 0, 0))


def test_flags_that_stay_as_they_are_are_not_copied_again():
    table = RequestTable(31, DEVICE)
    table.enable(3, mask=5, heads=None)
    table.copy()
    table.mask[3] = 7  # a copy would put 5 there
    table.enable(3, mask=5, heads=None)
    table.disable(4)
    table.copy()
    assert table.mask[3].item() == 7
    table.disable(3)
    table.copy()
    assert (table.mask[3].item(), table.enabled[3].item()) == (0, 0)


@pytest.mark.parametrize(
    ("index", "given"), [(0, {}), (31, {}), (-1, {}), (1, {"mask": -1}), (1, {"phase": 3}),
                         (1, {"mask": 2**31}), (1, {"handle": 2**63})],
)  # fmt: skip
def test_flags_that_no_request_can_have_are_refused(index, given):
    with pytest.raises(OptionError):
        RequestTable(31, DEVICE).enable(index, **given)


def tensors_of(held, seen):
    """Every tensor that an object holds, however deep, by its storage."""
    if isinstance(held, torch.Tensor):
        seen[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    elif isinstance(held, dict):
        for value in held.values():
            tensors_of(value, seen)
    elif isinstance(held, list | tuple):
        for value in held:
            tensors_of(value, seen)
    elif hasattr(held, "__dict__") and type(held).__module__.startswith("capture_kernels"):
        tensors_of(vars(held), seen)
    return seen


@pytest.mark.parametrize(
    "given", [{}, {"mean_top_k": 5, "hub_slots": 2}, {"top_k": 3, "scratch_bytes": 0}]
)
def test_bytes_are_those_of_all_buffers(given):
    model = Model(numbers=(0, 1, 4), windowed=(2,), mapped=True)
    capture = model.capture(on_host=False, **given)
    capture.slot_map = None  # the engine's
    assert capture.bytes == sum(tensors_of(capture, {}).values())


def test_a_smaller_scratch_takes_less_memory_for_many_layers_and_long_contexts():
    sizes = [
        Model(numbers=range(6)).capture(on_host=False, mean_top_k=4, **given).bytes
        for given in ({}, {"scratch_bytes": 200_000}, {"scratch_bytes": 0})
    ]
    assert sizes[0] > sizes[1] > sizes[2]
