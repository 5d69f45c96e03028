"""Latent keys (MLA): one key head of 512 + 64 numbers that many query heads share."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import test_statistics as statistics  # noqa: E402
import test_topk as tops  # noqa: E402
from paged import DEVICE, SLOW, assert_close, cases, paged_case, without_waiting  # noqa: E402
from scored import EXACT, prompt, truth  # noqa: E402
from test_statistics import active_rows, needs_gpu, page_table, plan_for  # noqa: E402

from capture_kernels.decode import plan as plans  # noqa: E402
from capture_kernels.decode.plan import StatisticsPlan  # noqa: E402
from capture_kernels.decode.tuning import Tuning  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402
from capture_kernels.scores.plan import ScoresPlan  # noqa: E402

ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
LATENT = 576
BFLOAT16 = {"dtype": torch.bfloat16}
FLOAT8 = {"dtype": torch.float8_e4m3fn, "query_dtype": torch.bfloat16, "descale": 0.5}

# fmt: off
KINDS = cases(
    ("16 heads", [1, 2, 63, 131], (16, 1, LATENT), BFLOAT16, {}),
    ("128 heads", [1, 97, 307], (128, 1, LATENT), BFLOAT16, {"programs": 2}),
    ("heads of an ordinary key", [1, 64, 211], (32, 1, 128), BFLOAT16, {"programs": 5}),
    slow=[
        ("128 heads of float8 keys", [70, 3], (128, 1, LATENT), FLOAT8, {}),
        ("16 heads of float8 keys", [70, 3], (16, 1, LATENT), FLOAT8, {}),
        ("64 heads in float16", [129, 5], (64, 1, LATENT), {"padding_rows": 2}, {}),
        ("few and many of 100 heads", [65], (100, 1, LATENT), BFLOAT16, {}),
        ("chosen heads", [65, 9], (128, 1, LATENT), BFLOAT16, {"chosen": (127, 3, 90, 5, *range(
         20, 80))}),
        ("one chosen head", [65], (128, 1, LATENT), BFLOAT16, {"chosen": (77,)}),
        ("a masked prefix, a window and a cap", [1, 11, 75, 200], (32, 1, LATENT), BFLOAT16,
         {"visibility": Visibility(14, 10), "window": 190, "soft_cap": 5.0}),
        ("no sinks", [1, 2, 70], (128, 1, LATENT), BFLOAT16, {"visibility": Visibility(0)}),
        ("several key heads", [150, 33], (64, 2, 80), BFLOAT16, {}),
        # Where `latent_pass` runs: in one tile and many, with edges in and between tiles.
        ("128 heads, all lengths of a tile", [*range(1, 70), 127, 128, 129], (128, 1, LATENT),
         BFLOAT16, {"programs": 7}),
        ("128 heads in float16, long", [1_025, 4_099], (128, 1, LATENT), {"padding_rows": 3},
         {"programs": 13, "max_length": 5_000}),
        ("128 heads, a masked prefix, a window and a cap", [1, 11, 75, 400], (128, 1, LATENT),
         BFLOAT16, {"visibility": Visibility(14, 10), "window": 390, "soft_cap": 5.0}),
        ("128 heads, more sinks than a tile", [300, 65, 64], (128, 1, LATENT), BFLOAT16,
         {"visibility": Visibility(130)}),
        ("100 chosen of 128 heads", [65, 700], (128, 1, LATENT), BFLOAT16,
         {"chosen": (*range(0, 50), *range(70, 120))}),
        ("learned sinks of 128 heads", [65, 700], (128, 1, LATENT), BFLOAT16,
         {"sinks": torch.linspace(-9, 9, 128, device=DEVICE)}),
    ],
)
# fmt: on


@pytest.mark.parametrize(("lengths", "shape", "paged", "options"), KINDS)
def test_statistics_of_many_heads_on_one_key(lengths, shape, paged, options):
    statistics.check(paged_case(lengths, *shape, **paged), **options)


@pytest.mark.parametrize("programs", [2, pytest.param(40, marks=SLOW)])
def test_blocks_without_keys_that_rows_begin_with_change_nothing(monkeypatch, programs):
    """Where layers do not suit `latent_pass`, `head_pass` has its blocks."""
    monkeypatch.setattr(plans, "has_latent_pass", lambda head_dim, heads: True)
    monkeypatch.setattr(plans, "suits_latent_pass", lambda query, keys: False)
    case = paged_case([1, 0, 130, 65], 40, 1, LATENT, padding_rows=1, **BFLOAT16)
    enabled = torch.tensor([1, 1, 1, 0, 1], dtype=torch.uint8, device=DEVICE)
    statistics.check(case, programs=programs, enabled=enabled)
    for scratch in (64 << 20, 0):
        tops.check(case, k=0, mean_k=5, programs=programs, enabled=enabled, scratch=scratch)


def test_layers_that_share_room_have_some_for_blocks_without_keys(monkeypatch):
    monkeypatch.setattr(plans, "has_latent_pass", lambda head_dim, heads: True)
    rows, block_bytes = 4, 64 * (128 + 1) * 4
    plan = StatisticsPlan(
        layers=8, max_rows=rows, max_length=40_000, heads=128, key_heads=1, head_dim=LATENT,
        scale=1.0, mean_top_k=4, device="cpu", scratch_bytes=1_560 * block_bytes,
    )  # fmt: skip
    # Of 8,192 keys a row, and of what its start counts.
    wanted = rows * (8_192 // 64 + plan.scheduled.no_keys)
    assert plan.scheduled.no_keys and plan.top.layers_together(rows) == 1_560 // wanted == 2
    assert plan.top._logits_of(rows)["logit_blocks"] >= wanted


@pytest.mark.parametrize(
    ("width", "dtype", "suits"),
    [(LATENT, torch.bfloat16, True), (592, torch.float16, True), (584, torch.bfloat16, False),
     (LATENT, torch.float32, False), (LATENT, torch.float8_e4m3fn, False)],
)  # fmt: skip
def test_what_latent_pass_can_copy_and_multiply(width, dtype, suits):
    """Padded to 584, a row of a query does not begin where Triton sees that 16 bytes are aligned;
    one of keys does, as its stride is a constant of the kernel."""
    query = torch.zeros(2, 128, width, dtype=dtype)[..., :LATENT]
    keys = torch.zeros(3, 1, LATENT, dtype=dtype)
    assert plans.suits_latent_pass(query, keys) == suits
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    assert not plans.suits_latent_pass(query, keys.to(other))
    assert not plans.suits_latent_pass(query[:, :, 1:], keys[:, :, 1:])


@needs_gpu
def test_a_latent_key_that_is_not_finite_spoils_its_row_alone():
    case = paged_case([150, 200, 90], 128, 1, LATENT, **BFLOAT16)
    exact = statistics.reference(case)
    # The oldest of the second row: a sink, which the visible keys do not have.
    slot = case.req_to_token[case.req_pool_indices[1], 0].long()
    case.k_cache[slot] = torch.nan
    found = statistics.measure(case)
    assert found.valid.tolist() == [True, False, True]
    assert found.mean.isfinite().all() and not found.mean[1].any()
    others = [0, 2]
    assert_close(found.per_head[others, :, :26], exact.columns[others, :, :26], **statistics.MASSES)


# fmt: off
KINDS_OF_LATENT_PASS = [
    ([*range(1, 70), 127, 128, 129], BFLOAT16, {"programs": 7}),
    ([1_025, 4_099], {"padding_rows": 3}, {"programs": 13, "max_length": 5_000}),
    ([1, 11, 75, 400], BFLOAT16, {"visibility": Visibility(14, 10), "window": 390,
     "soft_cap": 5.0}),
]
# fmt: on


ALL_HEADS = pytest.mark.parametrize("heads", [17, 32, 50, 64, 100, 128])


@needs_gpu
@ALL_HEADS
def test_logits_that_grow_far_beyond_those_of_the_first_tile(heads):
    case = paged_case([900, 300, 66], heads, 1, LATENT, size=100.0, **BFLOAT16)
    statistics.check(case, visibility=Visibility(0))


@needs_gpu
@ALL_HEADS
@pytest.mark.parametrize(("lengths", "paged", "options"), KINDS_OF_LATENT_PASS)
def test_latent_pass_of_any_number_of_heads(heads, lengths, paged, options):
    case = paged_case(lengths, heads, 1, LATENT, **paged)
    assert plan_for(case, **options)._latent
    statistics.check(case, **options)
    for scratch, mean_k in ((64 << 20, 64), (tops.SOME_KEPT, 5)):
        tops.check(case, k=0, mean_k=mean_k, scratch=scratch, **options)


@needs_gpu
def test_latent_pass_leaves_out_heads_that_are_not_chosen():
    case = paged_case([65, 700], 128, 1, LATENT, **BFLOAT16)
    chosen = (*range(0, 50), *range(70, 120))
    tops.check(case, k=0, mean_k=16, chosen=chosen)


@needs_gpu
def test_hubs_of_128_heads_on_one_key():
    case = paged_case([150, 3, 700], 128, 1, LATENT, padding_rows=1, **BFLOAT16)
    hubs = torch.zeros(case.rows, 600, device=DEVICE)
    for _ in range(2):
        tops.find(case, k=0, mean_k=0, hubs=hubs)
    for row in range(case.active):
        mean = 2 * tops.mean_probabilities(case, row)[:600]
        assert_close(hubs[row, : len(mean)], mean, largest=tops.MASS, rms=tops.MASS)
        assert not hubs[row, len(mean) :].any()


@needs_gpu
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("mean_k", [0, 16])
def test_latent_layers_in_a_graph_without_a_top_k_of_heads(layers, mean_k):
    case = paged_case([3_000, 1, 977], 128, 1, LATENT, padding_rows=2, **BFLOAT16)
    plan = plan_for(case, programs=None, max_length=3_000, layers=layers, mean_top_k=mean_k)

    def step():
        plan.schedule(page_table(case), num_active=active)
        for _ in range(layers):
            plan.run(case.queries, case.k_cache)
        return plan.answer(layers - 1)

    active = active_rows(case)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for buffer in (plan.partial, plan.per_head, plan.mean):
        buffer.fill_(torch.nan)
    tops.poison(plan)
    graph.replay()
    statistics.assert_statistics(replayed, statistics.reference(case))
    if mean_k:
        tops.assert_top(replayed.top, case, k=0, mean_k=mean_k)


# Heads of a product, keys of a tile, warps.
TUNINGS = [
    (128, 32, 8),
    *(
        pytest.param(*each, marks=SLOW)
        for each in ((64, 64, 4), (64, 32, 4), (64, 64, 8), (32, 64, 2), (16, 64, 4), (16, 32, 1))
    ),
]


@pytest.mark.parametrize(("heads", "tile", "warps"), TUNINGS)
@pytest.mark.parametrize("programs", [3, pytest.param(40, marks=SLOW)])
def test_however_the_heads_are_cut(heads, tile, warps, programs):
    tuning = Tuning(tile=tile, warps=warps, stages=2, heads=heads)
    case = paged_case([1, 130, 0], 20, 1, 80, size=3.0, **BFLOAT16)
    statistics.check(case, tuning=tuning, programs=programs)
    tops.check(case, tuning=tuning, programs=programs, k=16, mean_k=3)


@tops.KEPT_OR_NOT
@pytest.mark.parametrize(
    ("lengths", "heads", "paged", "options"),
    cases(
        ("16 heads", [1, 150], 16, BFLOAT16, {"k": 5}),
        slow=[
            ("40 heads", [97], 40, BFLOAT16, {"k": 3}),
            ("128 heads", [97, 2], 128, BFLOAT16, {"k": 16}),
            ("34 heads, a large k", [130], 34, BFLOAT16, {"k": 64, "mean_k": 64}),
            ("many heads, float8 keys", [150, 9], 128, FLOAT8, {"k": 4, "mean_k": 5}),
            ("of heads alone", [200], 128, BFLOAT16, {"k": 7, "mean_k": 0}),
            ("of the mean alone", [200, 31], 128, BFLOAT16, {"k": 0, "mean_k": 16}),
            ("of the mean alone, many", [63, 131], 24, BFLOAT16, {"k": 0, "mean_k": 64}),
            ("several splits", [1_500, 40], 34, BFLOAT16, {"k": 3, "programs": 9,
             "max_length": 1_500}),
        ],
    ),
)  # fmt: skip
def test_the_top_k_of_many_heads_on_one_key(lengths, heads, paged, options, scratch):
    case = paged_case(lengths, heads, 1, LATENT, padding_rows=1, **paged)
    tops.check(case, scratch=scratch, **options)


@pytest.mark.parametrize(
    ("tokens", "heads", "cache"),
    cases(
        ("16 heads", 37, 16, BFLOAT16),
        slow=[("128 heads", 70, 128, BFLOAT16), ("one token", 1, 128, BFLOAT16),
              ("float8 keys", 33, 32, FLOAT8)],
    ),
)  # fmt: skip
def test_full_scores_over_latent_keys(tokens, heads, cache):
    case = prompt(tokens, heads, 1, LATENT, **cache)
    start = tokens // 3
    plan = ScoresPlan(
        max_rows=tokens, max_length=tokens, heads=heads, key_heads=1, head_dim=LATENT,
        scale=LATENT**-0.5, device=case.query.device,
    )  # fmt: skip
    out = plan.output(tokens - start, tokens)
    plan.run(case.query[start:], case.keys, case.table, start, out, descale=case.descale)
    exact = truth(case, range(start, tokens), scale=LATENT**-0.5)
    assert_close(out, exact, **EXACT)


@needs_gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_of_several_layers_neither_waits_nor_allocates(heads):
    case = paged_case([3_000, 1, 977], heads, 1, LATENT, padding_rows=2, **BFLOAT16)
    asked = {"max_length": 3_000, "top_k": 16, "mean_top_k": 16, "layers": 2}
    two = [plan_for(case, programs=None, **asked) for _ in range(2)]

    def step(plan):
        plan.schedule(page_table(case), num_active=active)
        for _ in range(plan.layers):
            plan.run(case.queries, case.k_cache)
        return plan.answer(1)

    active = active_rows(case)
    eager = without_waiting(lambda: step(two[0]))
    step(two[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(two[1])
    for buffer in (two[1].per_head, two[1].mean):
        buffer.fill_(torch.nan)
    tops.poison(two[1])
    graph.replay()
    for ours, same in zip((*eager[:2], *eager[2]), (*replayed[:2], *replayed[2]), strict=True):
        assert torch.equal(ours, same)
    statistics.assert_statistics(replayed, statistics.reference(case))
    tops.assert_top(replayed.top, case, k=16, mean_k=16)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"key_heads": 2, "head_dim": 576}, "head_dim 576 .* single key head"),
        ({"key_heads": 1, "head_dim": 577}, "head_dim 577 .* 576 of a single key head"),
    ],
)
def test_wider_keys_are_refused(shape, said):
    options = {"max_rows": 1, "max_length": 8, "heads": 4, "scale": 1.0, "device": DEVICE}
    with pytest.raises(OptionError, match=said):
        StatisticsPlan(**options, **shape)
