"""Capture that costs more than its budget is switched off, once and for good."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.serving.budget import FEWEST, WINDOW, OverheadBudget


@given(percent=st.floats(0.1, 50), share=st.floats(0, 2))
def test_it_is_over_when_the_cost_of_enough_steps_is(percent, share):
    budget = OverheadBudget(percent)
    plain, capture = 0.01, 0.01 * percent / 100 * share
    found = [budget.add(plain + capture, capture) for _ in range(2 * WINDOW)]
    if share < 0.999:
        assert not any(found) and budget.exceeded is None
    if share > 1.001:
        assert found.index(True) == FEWEST - 1 and sum(found) == 1
        assert f"--attention-overhead-budget {percent:g}" in budget.exceeded


def test_a_few_slow_steps_are_not_the_last_word():
    budget = OverheadBudget(5)
    for _ in range(WINDOW):
        assert not budget.add(1.0, 0.01)
    assert not any(budget.add(2.0, 1.0) for _ in range(8))
    assert any(budget.add(2.0, 1.0) for _ in range(WINDOW))


def test_without_a_budget_nothing_is_switched_off():
    budget = OverheadBudget(None)
    assert not any(budget.add(1.0, 0.9) for _ in range(WINDOW))
    assert budget.exceeded is None
