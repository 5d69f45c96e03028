"""`PlainScoresPlan`: the kernels' numbers in plain torch, chunk by chunk of a prompt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from paged import DEVICE, as_float64, assert_close  # noqa: E402
from scored import EXACT, FEW, assert_all_written, poisoned, prompt, truth  # noqa: E402

from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.scores import plain  # noqa: E402
from capture_kernels.scores.plain import PlainScoresPlan  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def plan_for(case, **options):
    tokens, heads, head_dim = case.query.shape
    return PlainScoresPlan(
        max_rows=tokens, max_length=tokens, heads=heads, key_heads=case.keys.shape[1],
        head_dim=head_dim, scale=head_dim**-0.5, device=DEVICE, **options,
    )  # fmt: skip


def check(case, bounds, sinks=None, **options):
    """The scores of the queries between some positions are the reference's."""
    tokens, head_dim = len(case.query), case.query.shape[2]
    edges = [0, *bounds, tokens]
    for start, end in pairwise(edges):
        plan = plan_for(case, **options)
        out, whole = poisoned(end - start, len(plan.order), end + 2)
        query = case.query[start:end]
        plan.run(query, case.keys, case.table, start, out, descale=case.descale, sinks=sinks)
        assert_all_written(out, whole)
        expected = truth(case, range(start, end), scale=head_dim**-0.5, sinks=sinks, **options)
        found, expected = as_float64(out)[:, :, :end], expected[:, :, :end]
        assert_close(found, expected, **(EXACT if expected.size > 100 else FEW))
        assert not out[:, :, end:].any()
        assert not found[expected == 0].any()


@given(
    st.integers(1, 60), st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    st.sets(st.integers(1, 59)), st.integers(0, 70), st.integers(0, 70), st.booleans(),
    st.sampled_from([None, 3.0]), st.booleans(),
)  # fmt: skip
def test_chunks_of_a_prompt_agree_with_the_reference(
    tokens, heads, bounds, window, mask_prefix, learned, soft_cap, some
):
    chosen = tuple(range(0, heads[0], 2)) if some else None
    sinks = torch.arange(float(heads[0]), device=DEVICE) - 1 if learned else None
    check(
        prompt(tokens, *heads, 20, size=2.0), sorted(b for b in bounds if b < tokens), sinks,
        window=window, mask_prefix=mask_prefix, soft_cap=soft_cap, chosen=chosen,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_of_queries_and_keys(dtype):
    check(prompt(70, 4, 2, head_dim=48, dtype=dtype, size=4.0), [33])


@pytest.mark.parametrize("descale", [None, 0.25, (0.5, 0.02)])
def test_float8_keys(descale):
    case = prompt(33, 4, 2, dtype=torch.float8_e4m3fn, query_dtype=torch.bfloat16, descale=descale)
    check(case, [20])


def test_prompts_of_more_queries_than_a_block(monkeypatch):
    monkeypatch.setattr(plain, "BLOCK_ROWS", 7)
    check(prompt(50, 2, 1), [10, 24], window=13)


def test_what_does_not_fit_is_refused_as_by_the_kernels():
    case = prompt(6)
    plan = plan_for(case)
    out = plan.output(6, 6)
    with pytest.raises(OptionError, match=r"0\.\.5"):
        plan.run(case.query, case.keys, case.table, 1, plan.output(6, 7))
    with pytest.raises(OptionError, match="or more columns"):
        plan.run(case.query, case.keys, case.table, 0, out[:, :, :5])
    with pytest.raises(OptionError, match="mask_prefix"):
        plan_for(case, mask_prefix=-1)
