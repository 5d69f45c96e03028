"""Recorders of two ranks: each makes the same sums in a step, whatever only one of them knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from recorder_steps import HEADS, Req, Steps  # noqa: E402

from capture_kernels.errors import OptionError  # noqa: E402
from pipeline.engines.serving.budget import FEWEST  # noqa: E402
from pipeline.engines.serving.steps.ranks import Ranks  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402

TOKEN = SimpleNamespace(output_index=0, token_ids=(5,))


class Group:
    """As far as a rank looks at SGLang's: notes what it is given, and adds as much."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def all_reduce(self, part: Any) -> Any:
        self.shapes.append(tuple(part.shape))
        return 2 * part


class Both:
    """Two ranks that SGLang has run the same steps."""

    def __init__(self, steps: Any, **options: Any) -> None:
        self.groups = [Group(), Group()]
        store = options.pop("store", None)
        self.ranks: list[Steps] = [
            steps(store, Ranks(2, number, group), **options)
            for number, group in enumerate(self.groups)
        ]
        self.reqs: list[list[Req]] = [[], []]

    def request(self, row: int, prompt: int, **wanted: Any) -> int:
        for rank, reqs in zip(self.ranks, self.reqs, strict=True):
            reqs.append(rank.request(row, prompt, **wanted))
        return len(self.reqs[0]) - 1

    def run(self, numbers: list[int], lengths: list[int], prefixes: list[int] | None = None,
            commits: list[Any] | None = None) -> list[tuple[int, ...]]:  # fmt: skip
        """A step; gives what each rank had added up in it, which must be the same."""
        before = [len(group.shapes) for group in self.groups]
        for rank, reqs in zip(self.ranks, self.reqs, strict=True):
            rank.run([reqs[n] for n in numbers], lengths, prefixes)(commits or [TOKEN] * 9)
            for n in numbers:
                reqs[n].output_ids.append(5)
        one, other = (group.shapes[at:] for group, at in zip(self.groups, before, strict=True))
        assert one == other
        return one


def test_steps_that_are_captured_have_the_same_sums_on_each_rank(steps, tmp_path):
    both = Both(steps, store=tmp_path / "records.db")
    asks = both.request(1, 6, mode="raw", prompt_rows=2)
    silent = both.request(2, 5)
    # Two layers, in each the columns of two rows, and a probability of each of their keys.
    assert both.run([asks, silent], [6, 5], [0, 0]) == [(2, 32), (5 + 6,)] * 2
    assert both.run([asks, silent], [7, 6]) == [(2, 32), (7,)] * 2
    assert both.run([silent], [7]) == []
    first, second = both.ranks
    entries, _ = first.said(both.reqs[0][asks])
    assert [entry["decode_step"] for entry in entries] == [-1, -1, 0, 0, 1, 1]
    # SGLang does not send what the other has.
    assert not second.recorder.is_active(None)
    for rank in both.ranks:
        rank.recorder.close()
    with open_store(tmp_path / "records.db") as opened:
        assert sum(len(batch) for batch in opened.scan()) == 3
    assert second.facts == []


def test_rows_that_are_only_recorded_are_so_by_one_rank_and_summed_by_both(steps, tmp_path):
    both = Both(steps, store=tmp_path / "records.db")
    recorded = both.request(1, 6, mode="fingerprint", stream_entries=False)
    both.run([recorded], [6], [0])
    assert both.run([recorded], [7])
    for rank in both.ranks:
        rank.recorder.close()
    with open_store(tmp_path / "records.db") as opened:
        assert sum(len(batch) for batch in opened.scan()) == 1


def test_a_request_that_is_put_back_is_captured_again_by_both_and_taken_once(steps):
    both = Both(steps)
    asks = both.request(1, 6, mode="raw", layers=[1])
    both.run([asks], [6], [0])
    both.run([asks], [7])
    both.run([asks], [8])
    for reqs in both.reqs:
        reqs[asks].kv.req_pool_idx = 3
    assert both.run([asks], [9], [0])
    entries, _ = both.ranks[0].said(both.reqs[0][asks])
    assert [entry["position"] for entry in entries] == [6, 7, 8]


def test_a_budget_that_one_rank_passes_ends_what_is_said_not_the_sums(steps):
    both = Both(steps, overhead_budget=0.01)
    asks = both.request(1, 6, mode="raw", layers=[0], prompt_rows=1)
    both.run([asks], [6], [0])
    for length in range(7, 7 + 2 * FEWEST):
        assert both.run([asks], [length])
    first, second = both.ranks
    assert "--attention-overhead-budget" in first.recorder.off
    assert second.recorder.off is None
    req = both.reqs[0][asks]
    req.is_over = True
    entries, usage = first.said(req)
    assert FEWEST <= len(entries) <= FEWEST + 1
    assert usage[0]["off"] == first.recorder.off


def test_a_fault_in_what_one_rank_answers_ends_what_is_said_not_the_sums(steps, monkeypatch):
    both = Both(steps)
    asks = both.request(1, 6, mode="raw")
    both.run([asks], [6], [0])
    first = both.ranks[0].recorder

    def broken(rows, **asked):
        raise RuntimeError("a fault for the test")

    monkeypatch.setattr(first.capture, "results", broken)
    assert both.run([asks], [7])
    assert first.failed
    assert both.run([asks], [8])
    assert [facts.reasons["capture"] for facts in both.ranks[0].facts] == [first.off]


def test_a_fault_in_a_step_is_raised_as_the_other_rank_would_wait(steps, monkeypatch, caplog):
    both = Both(steps)
    asks = both.request(1, 6, mode="raw", prompt_rows=1)

    def broken(table):
        raise RuntimeError("a fault for the test")

    monkeypatch.setattr(both.ranks[0].recorder.capture, "begin", broken)
    with pytest.raises(RuntimeError, match="a fault for the test"):
        both.run([asks], [6], [0])
    assert "a fault for the test" in caplog.text


def test_rows_without_a_top_k_are_counted(steps, monkeypatch):
    both = Both(steps)
    first = both.ranks[0].recorder
    asks = both.request(1, 6, mode="raw", layers=[0])
    found = first.capture.results

    def without_room(rows, **asked):
        results = found(rows, **asked)
        results.mean_positions.fill_(-1)
        return results

    monkeypatch.setattr(first.capture, "results", without_room)
    both.run([asks], [6], [0])
    both.run([asks], [7])
    req = both.reqs[0][asks]
    req.is_over = True
    entries, usage = both.ranks[0].said(req)
    assert entries == []
    assert usage[0]["rows_without_top_k"] == 1


def test_all_heads_are_named_and_padded_ones_refused(steps):
    both = Both(steps)
    facts = both.ranks[0].recorder.model.facts
    assert facts.heads == 2 * HEADS
    for feature in ("head_filtering", "attention_hubs", "attn_capture"):
        assert "several ranks" in facts.reasons[feature]
    runner = both.ranks[0].runner
    # As SGLang says it on a CPU: with heads of zeros, whose means would be wrong.
    runner.model_config.hf_text_config.original_num_attention_heads = 4
    with pytest.raises(OptionError, match="pads the 4 heads of the model to 8"):
        type(both.ranks[0].recorder)(runner, both.ranks[0].options, print, Ranks(2, 0, Group()))


def test_all_ranks_capture_or_none_does():
    class Gathers(Group):
        def all_gather_object(self, reason):
            return [None, reason, "another"]

    ranks = Ranks(3, 1, Gathers())
    assert ranks.first_reason("this") == "this"
    assert ranks.first_reason(None) == "another"
    assert Ranks().first_reason(None) is None
