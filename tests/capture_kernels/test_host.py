"""The plan for a CPU gives the kernels' answers, and vectors of columns are the fingerprints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from paged import DEVICE, paged_case  # noqa: E402

from capture_kernels.decode.host import HostStatisticsPlan  # noqa: E402
from capture_kernels.decode.step.page_table import PageTable  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.columns import vectors_of_columns  # noqa: E402
from capture_kernels.fingerprint.reference import attention_rows  # noqa: E402
from capture_kernels.fingerprint.vector import Layout, Visibility, fingerprint  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the plan for a CPU; cases are on the GPU")


def page_table(case):
    if case.kv_indptr is None:
        return PageTable.of_requests(case.req_to_token, case.req_pool_indices, case.seq_lens)
    return PageTable.of_indptr(case.kv_indptr, case.kv_indices, case.seq_lens)


def step_of(plan, case, **options):
    """One step over one layer: its answer."""
    tensors = {name: options.pop(name) for name in ("sinks",) if name in options}
    active = torch.tensor([case.active], dtype=torch.int32)
    plan.schedule(page_table(case), num_active=active, **options)
    plan.run(case.queries, case.k_cache, descale=case.descale, **tensors)
    return plan.answer()


@pytest.mark.parametrize(
    ("case", "plan", "step"),
    [
        ({}, {}, {}),
        ({"form": "kv_indptr"}, {"top_k": 3, "mean_top_k": 5}, {}),
        ({"descale": [0.5, 2.0]}, {"chosen": [1, 3, 2], "mean_top_k": 4}, {}),
        ({"descale": 0.25, "dtype": torch.bfloat16}, {"soft_cap": 2.0, "top_k": 1}, {}),
        pytest.param(
            {},
            {"window": 9, "top_k": 2},
            {"sinks": torch.linspace(-2, 3, 4)},
            marks=pytest.mark.slow,
        ),
        ({}, {"visibility": Visibility(3, 5, 30), "mean_top_k": 7}, {"enabled": "odd"}),
        pytest.param(
            {},
            {"chosen": [2], "mean_top_k": 64},
            {"masks": [0, 4, 200, 1, 17]},
            marks=pytest.mark.slow,
        ),
        ({}, {"mean_top_k": 5}, {"head_masks": [0b1111, 0b0101, 0b1000, -1, 0b0110]}),
        ({}, {"chosen": [1, 3], "top_k": 2}, {"head_masks": [0b1010, 0b0010, 0b1000, -1, 0b1011]}),
    ],
)
def test_answers_are_the_kernels(case, plan, step):
    pytest.importorskip("triton")
    from capture_kernels.decode.plan import StatisticsPlan

    made = paged_case([1, 5, 33, 128, 70], 4, 2, 16, padding_rows=2, seed=3, **case)
    if "enabled" in step:
        step["enabled"] = torch.arange(7) % 2 == 1
    if "masks" in step:
        step["masks"] = torch.tensor([*step["masks"], 0, 0], dtype=torch.int32)
    if "head_masks" in step:
        bits = torch.tensor([*step["head_masks"], -1, -1], dtype=torch.int32)
        step["head_masks"] = bits[:, None]
    shapes = {"max_rows": 8, "max_length": 200, "heads": 4, "key_heads": 2, "head_dim": 16}
    kind = {**shapes, "scale": 0.25, "device": "cpu", **plan}
    expected = step_of(StatisticsPlan(**kind), made, **step)
    found = step_of(HostStatisticsPlan(**kind), made, **step)
    torch.testing.assert_close(found.per_head, expected.per_head, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    assert found.valid.any()
    if found.top is None:
        assert expected.top is None
        return
    for name, one, other in zip(found.top._fields, found.top, expected.top, strict=True):
        if name != "mass" or "top_k" in plan:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)


def test_hubs_add_up_by_position_after_the_mask():
    case = paged_case([40, 3], 4, 2, 16, seed=1)
    plan = HostStatisticsPlan(
        max_rows=2, max_length=64, heads=4, key_heads=2, head_dim=16, scale=0.25, device="cpu",
        layers=2, hubs=True,
    )  # fmt: skip
    hubs = torch.zeros((2, 32))
    masks = torch.tensor([6, 0], dtype=torch.int32)
    plan.schedule(page_table(case), masks=masks, hubs=hubs)
    for _ in range(2):
        plan.run(case.queries, case.k_cache)
    rows = attention_rows(case.query_rows[:1], case.keys[0], scale=0.25, positions=[39])[0]
    real = rows[:, 6:] / rows[:, 6:].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(hubs[0], 2 * real.mean(axis=0)[:32], rtol=1e-5, atol=1e-7)
    assert hubs[1, 3:].eq(0).all() and hubs[1, :3].sum() == pytest.approx(2.0, abs=1e-5)
    with pytest.raises(OptionError, match="layer 3 of a plan for 2"):
        plan.run(case.queries, case.k_cache)


def test_a_key_that_is_not_finite_makes_its_row_invalid_and_no_other():
    case = paged_case([9, 9], 4, 2, 16, seed=1)
    case.k_cache[case.req_to_token[case.req_pool_indices[0], 4].long(), 1] = torch.nan
    plan = HostStatisticsPlan(
        max_rows=2, max_length=64, heads=4, key_heads=2, head_dim=16, scale=0.25, device="cpu"
    )
    found = step_of(plan, case)
    assert found.valid.tolist() == [False, True]
    assert found.mean.isfinite().all()


@given(
    layers=st.integers(1, 9), position=st.integers(0, 400), seed=st.integers(0, 99),
    layout=st.sampled_from(list(Layout)), mask=st.integers(0, 10),
)  # fmt: skip
def test_vectors_of_columns_are_fingerprints(layers, position, seed, layout, mask):
    rng = np.random.default_rng(seed)
    visibility = Visibility(1, mask)
    case = paged_case([position + 1], 4, 2, 8, seed=seed)
    plan = HostStatisticsPlan(
        max_rows=1, max_length=500, heads=4, key_heads=2, head_dim=8, scale=1.0, device="cpu",
        layers=layers, visibility=visibility,
    )  # fmt: skip
    plan.schedule(page_table(case))
    probabilities = []
    for _ in range(layers):
        query = torch.from_numpy(rng.normal(size=(1, 4, 8))).to(case.queries.dtype)
        plan.run(query, case.k_cache)
        rows = query.double().numpy()
        probabilities.append(attention_rows(rows, case.keys[0], scale=1.0, positions=[position])[0])
    columns = np.stack([plan.answer(layer).mean.numpy() for layer in range(layers)])
    found = vectors_of_columns(columns, layout)
    expected = fingerprint(probabilities, position, layout, visibility)
    if expected is None:
        assert not found.valid[0] and not found.vector.any() and found.sink_mass[0] == 0
        return
    np.testing.assert_allclose(found.vector[0], expected.vector, atol=2e-6)
    assert found.sink_mass[0] == pytest.approx(expected.sink_mass, abs=2e-6)
