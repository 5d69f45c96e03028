"""Recorders of two ranks: each makes the same sums in a step, whatever only one of them knows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_steps import HEADS, DraftSteps, Req, Steps, steps_of  # noqa: E402

from pipeline.engines.serving.budget import FEWEST  # noqa: E402
from pipeline.engines.serving.steps.ranks import Ranks  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402


class Group:
    """As far as a rank looks at vLLM's: notes what it is given, and adds as much."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def all_reduce(self, part: Any) -> Any:
        self.shapes.append(tuple(part.shape))
        return 2 * part


class Both:
    """Two ranks that run the same steps. Only the first one's tokens are read, as in vLLM."""

    def __init__(self, steps: Any, **options: Any) -> None:
        self.groups = [Group(), Group()]
        store = options.pop("store", None)
        self.ranks: list[Steps] = [
            steps(store, Ranks(2, number, group), **options)
            for number, group in enumerate(self.groups)
        ]
        self.reqs: list[list[Req]] = [[], []]

    def request(self, name: str, prompt: int, **wanted: Any) -> int:
        for rank, reqs in zip(self.ranks, self.reqs, strict=True):
            reqs.append(rank.request(name, prompt, **wanted))
        return len(self.reqs[0]) - 1

    def run(self, *parts: tuple[int, int], accepted: int | None = None) -> list[tuple[int, ...]]:
        """A step; gives what each rank had added up in it, which must be the same.

        Args:
            accepted: how many drafts, if all tokens of each request but one are such.
        """
        before = [len(group.shapes) for group in self.groups]
        for rank, reqs in zip(self.ranks, self.reqs, strict=True):
            drafts = {reqs[n]: (count - 1, accepted) for n, count in parts}
            given = {} if accepted is None else {"drafts": drafts}
            rank.run(*[(reqs[n], count) for n, count in parts], **given)()
        one, other = (group.shapes[at:] for group, at in zip(self.groups, before, strict=True))
        assert one == other
        return one

    def each(self, name: str, number: int) -> None:
        for rank, reqs in zip(self.ranks, self.reqs, strict=True):
            getattr(rank, name)(reqs[number])

    def said(self, number: int) -> Any:
        assert self.ranks[1].said(self.reqs[1][number]) == ([], None)
        return self.ranks[0].said(self.reqs[0][number])


def broken(*given, **named):
    raise RuntimeError("a fault for the test")


def test_steps_that_are_captured_have_the_same_sums_on_each_rank(steps, tmp_path):
    both = Both(steps, store=tmp_path / "records.db")
    asks = both.request("asks", 6, prompt_rows=2)
    silent = both.request("silent", 5)
    # Two layers, in each the columns of two rows, and a probability of each of their keys.
    assert both.run((asks, 6), (silent, 5)) == [(2, 32), (5 + 6,)] * 2
    assert both.run((asks, 1), (silent, 1)) == [(2, 32), (7,)] * 2
    assert both.run((silent, 1)) == []
    both.run((asks, 1))
    both.each("end", asks)
    both.run()
    entries, usage = both.said(asks)
    assert steps_of(entries) == [-1, -1, 0, 0, 1, 1, 2, 2]
    assert usage["rows"] == 4
    for rank in both.ranks:
        rank.recorder.close()
    with open_store(tmp_path / "records.db") as opened:
        assert sum(len(batch) for batch in opened.scan()) == 4
    assert both.ranks[1].facts == []


def test_a_request_that_is_put_back_is_captured_again_by_both_and_taken_once(steps):
    both = Both(steps)
    asks = both.request("asks", 6, layers=[1], prompt_rows=1)
    both.run((asks, 6))
    both.run((asks, 1))
    both.run((asks, 1))
    both.each("put_back", asks)
    # All of its rows: what was taken only one of them knows.
    sums = both.run((asks, 9))
    assert sums == [(4, 32), (6 + 7 + 8 + 9,)] * 2
    both.run((asks, 1))
    both.each("end", asks)
    both.run()
    assert [entry["position"] for entry in both.said(asks)[0]] == [5, 6, 7, 8, 9]


def test_drafts_are_rows_of_both_ranks_whatever_is_accepted(steps):
    both = Both(steps, kind=DraftSteps)
    asks = both.request("asks", 6, layers=[1])
    silent = both.request("silent", 5)
    both.run((asks, 6), (silent, 5))
    sums = both.run((asks, 4), (silent, 4), accepted=1)
    assert sums == [(8, 32), (7 + 8 + 9 + 10,)] * 2
    assert both.run((asks, 4), accepted=3) == [(4, 32), (9 + 10 + 11 + 12,)] * 2
    both.each("end", asks)
    both.run()
    entries, usage = both.said(asks)
    assert [entry["position"] for entry in entries] == [6, 7, 8, 9, 10, 11]
    assert usage["rows"] == 6


def test_a_request_that_ended_is_captured_by_neither(steps):
    both = Both(steps)
    asks = both.request("asks", 6)
    both.run((asks, 6))
    both.run((asks, 1))
    both.each("end", asks)
    both.run()
    # As in a step that was under way.
    assert both.run((asks, 1)) == []
    assert not any(rank.recorder._states for rank in both.ranks)


def test_a_budget_that_one_rank_passes_does_not_end_the_sums(steps):
    both = Both(steps, overhead_budget=0.01)
    asks = both.request("asks", 6, layers=[0])
    both.run((asks, 6))
    for _ in range(2 * FEWEST):
        assert both.run((asks, 1))
    first, second = (rank.recorder for rank in both.ranks)
    assert "--attention-overhead-budget" in first.off
    assert second.off is None
    assert [facts.reasons["capture"] for facts in both.ranks[0].facts] == [first.off]
    assert both.ranks[1].facts == []
    both.each("end", asks)
    both.run()
    assert both.said(asks)[1]["off"] == first.off


def test_a_budget_that_one_rank_passes_ends_what_is_said(steps):
    """As with SGLang's plug-in, and as on one rank."""
    both = Both(steps, overhead_budget=0.01)
    asks = both.request("asks", 6, layers=[0])
    both.run((asks, 6))
    for _ in range(2 * FEWEST):
        both.run((asks, 1))
    both.each("end", asks)
    both.run()
    assert FEWEST <= len(both.said(asks)[0]) <= FEWEST + 1


def test_a_fault_in_what_one_rank_answers_ends_what_is_said(steps, monkeypatch):
    both = Both(steps)
    asks = both.request("asks", 6, layers=[0])
    both.run((asks, 6))
    both.run((asks, 1))
    first = both.ranks[0].recorder
    monkeypatch.setattr(first.capture, "results", broken)
    assert both.run((asks, 1))
    assert first.failed and not both.ranks[1].recorder.failed
    entries, usage = both.said(asks)
    assert steps_of(entries) == [1]
    assert usage["off"] == first.off
    assert [facts.reasons["capture"] for facts in both.ranks[0].facts] == [first.off]


@pytest.mark.parametrize("prompt", [False, True])
def test_a_fault_in_what_one_rank_answers_does_not_end_the_sums(steps, monkeypatch, prompt):
    both = Both(steps)
    asks = both.request("asks", 20, layers=[0], prompt_rows=9)
    both.run((asks, 15))
    monkeypatch.setattr(both.ranks[0].recorder.capture, "results", broken)
    assert both.run((asks, 2))
    assert both.run((asks, 3 if prompt else 1))


@pytest.mark.parametrize("name", ["results", "_settle"])
def test_an_end_after_such_a_fault_is_said_once_and_the_other_rank_goes_on(
    steps, monkeypatch, name
):
    both = Both(steps)
    asks = both.request("asks", 6, layers=[0])
    both.run((asks, 6))
    both.run((asks, 1))
    first = both.ranks[0].recorder
    owner = first.capture if name == "results" else first
    monkeypatch.setattr(owner, name, broken)
    assert both.run((asks, 1))
    assert both.run((asks, 1))
    both.each("end", asks)
    both.run()
    _, usage = both.said(asks)
    assert usage["off"] == first.off
    assert not any(rank.recorder._states for rank in both.ranks)


def test_a_fault_in_a_step_is_raised_as_the_other_rank_would_wait(steps, monkeypatch, caplog):
    both = Both(steps)
    asks = both.request("asks", 6, prompt_rows=1)
    monkeypatch.setattr(both.ranks[0].recorder.capture, "begin", broken)
    with pytest.raises(RuntimeError, match="a fault for the test"):
        both.run((asks, 6))
    assert "a fault for the test" in caplog.text


def test_heads_of_all_ranks_are_named_and_cannot_be_chosen(steps):
    facts = Both(steps).ranks[0].recorder.model.facts
    assert facts.heads == 2 * HEADS
    assert "several ranks" in facts.reasons["head_filtering"]
