"""Which tokens of captured requests are kept, from vLLM's scheduler to its workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipeline.engines.vllm import scheduling
from pipeline.engines.vllm.plugin import hook
from pipeline.engines.vllm.scheduling import Decided

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."


def request(name: str, tokens: int, extra: dict[str, Any] | None) -> SimpleNamespace:
    """As far as the plug-in looks at vLLM's `Request`."""
    params = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(request_id=name, num_output_tokens=tokens, sampling_params=params)


ASKS = {"attn": "signed"}


def scheduler_of(vllm: SimpleNamespace, *requests: SimpleNamespace) -> Any:
    """vLLM's, hooked as `register` does it."""
    from pipeline.engines.vllm.hooking import after, before

    hook(SCHEDULER + "schedule", after(scheduling.decide))
    hook(SCHEDULER + "_free_request", before(scheduling.note_end))
    scheduler = vllm.Scheduler()
    scheduler.requests |= {one.request_id: one for one in requests}
    return scheduler


def decided(scheduler: Any) -> Decided:
    return scheduler.schedule(throttle_prefills=True).attn_decided


def test_a_step_says_how_many_tokens_its_captured_requests_have(vllm):
    asks, pools = request("a", 3, ASKS), request("p", 0, None)
    pools.sampling_params = None
    others = [request("b", 4, None), request("c", 5, {}), request("d", 6, {"other": "x"}), pools]
    scheduler = scheduler_of(vllm, asks, *others)
    assert decided(scheduler) == Decided({"a": 3}, {})
    asks.num_output_tokens = 4
    assert decided(scheduler) == Decided({"a": 4}, {})


def test_the_next_step_says_once_what_has_ended_and_with_how_many_tokens(vllm):
    ends, other, goes_on = request("a", 7, ASKS), request("b", 4, None), request("c", 1, ASKS)
    scheduler = scheduler_of(vllm, ends, other, goes_on)
    decided(scheduler)
    for one in (ends, other):
        scheduler._free_request(one, delay_free_blocks=False)
    ends.num_output_tokens = 9  # that is no matter now
    assert decided(scheduler) == Decided({"c": 1}, {"a": 7})
    assert decided(scheduler) == Decided({"c": 1}, {})


def test_what_ends_before_any_step_is_said_too_and_a_step_may_be_empty(vllm):
    ends = request("a", 0, ASKS)
    scheduler = scheduler_of(vllm, ends)
    scheduler._free_request(ends)
    assert decided(scheduler) == Decided({}, {"a": 0})
    assert decided(scheduler) == Decided({}, {})


def test_a_request_that_is_gone_when_its_step_is_scheduled_is_left_out(vllm):
    scheduler = scheduler_of(vllm, request("a", 1, ASKS))
    output = SimpleNamespace(num_scheduled_tokens={"a": 1, "gone": 1})
    assert scheduling.decide(output, scheduler).attn_decided == Decided({"a": 1}, {})


def test_schedulers_of_one_process_keep_their_ends_apart(vllm):
    one, other = (scheduler_of(vllm, request(name, 2, ASKS)) for name in "ab")
    one._free_request(one.requests["a"])
    assert decided(other) == Decided({"b": 2}, {})
    assert decided(one) == Decided({}, {"a": 2})


def test_a_fault_is_logged_and_does_not_end_the_engine(vllm, caplog):
    strange = SimpleNamespace(request_id="a")  # of another vLLM
    scheduler = scheduler_of(vllm, strange)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    scheduler._free_request(strange)
    assert scheduler.requests == {}
    assert len(caplog.records) == 2
    assert "what is kept of captured requests is not known" in caplog.text
